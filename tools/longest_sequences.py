"""Calculates the longest sequence that trains on a GPU: ``python -m tools.longest_sequences`` prints a Markdown table.

Nothing is measured: :mod:`liger_kernels.fitting` counts a step on the meta device. One sequence at a time, bfloat16,
with checkpointing and ``memory="small"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from convergence.tables import markdown
from liger_kernels.fitting import GIB, RESERVE
from liger_kernels.fitting.longest import longest
from liger_kernels.fitting.step import MetaStep
from liger_kernels.fitting.training import Training

LLAMA_3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 2**24,  # no length is beyond it
    "tie_word_embeddings": False,
}
CARDS = {"24 GiB": 24, "80 GiB": 80, "one H200 (140 GiB)": 140}
WAYS = {
    "QLoRA, rank 16": Training(rank=16, quantised=True, memory="small"),
    "LoRA, rank 16": Training(rank=16, memory="small"),
    "full, AdamW": Training(memory="small"),
}
LESS: dict[str, dict[str, Any]] = {
    ', `offload="layers"`': {"offload": "layers"},
    ', `offload="layers"`, `recompute="mlp"`': {"offload": "layers", "recompute": "mlp"},
}


def ways() -> dict[str, Training]:
    """Each of :data:`WAYS` by name, and the same with what takes :data:`LESS` memory."""
    found = {}
    for name, setup in WAYS.items():
        found[name] = setup
        for words, options in LESS.items():
            found[name + words] = replace(setup, **options)
    return found


def peak_of(setup: Training) -> Callable[[int], int]:
    """Bytes at the peak of a step of the Llama-3 8B shape, of a number of tokens."""
    from transformers import LlamaConfig

    step = MetaStep(LlamaConfig(**LLAMA_3_8B), setup)
    return lambda tokens: step.count(tokens).peak


def capacity(gib: int) -> int:
    """Bytes that a step may hold."""
    return gib * GIB - RESERVE


def table() -> list[str]:
    """A row for each way of training, a column for each card."""
    rows: list[tuple[Any, ...]] = []
    for name, setup in ways().items():
        peak = peak_of(setup)
        cells = [longest(peak, capacity(gib)) for gib in CARDS.values()]
        rows.append((name, *(f"{cell:,}" if cell else "-" for cell in cells)))
    return markdown(("Llama-3 8B", *CARDS), rows)


if __name__ == "__main__":
    print("\n".join(table()))
