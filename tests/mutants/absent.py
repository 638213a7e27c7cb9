"""Faults that happened and that cannot be injected here."""

from __future__ import annotations

# Rows of the corpus that nothing here can be made to show, by the reason why.
ABSENT = {
    "there is no such kernel here, and such modules are left alone": {
        "T3": "preference losses",
        "T4": "preference losses",
        "T6": "preference losses",
        "T7": "preference losses",
    },
    "nothing here reads or shards it: tensor and pipeline parallelism stay upstream's": {
        "N16": "norms of DTensors",
        "A4": "a pipeline's scaled hidden states",
        "P20": "products of tensors and DTensors",
    },
    "upstream's own code computes it, unpatched, and the patched model calls it": {
        "C23": "label smoothing by the trainer, over logits that it reads",
        "A5": "the division by num_items_in_batch",
        "P14": "token accuracy of trl's own forward",
    },
    "our patch keeps no table of classes and copies no forward": {
        "G3": "an attribute of experts that was looked for on their block",
        "G4": "the path to one family's gated MLPs",
        "P16": "an auto class that looks up families",
    },
    "its cause is not known": {"P24": "an open report about downstream quality"},
}
