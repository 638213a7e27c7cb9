"""Faults that the proof must see, each a patch: ``pytest convergence --patch tests.mutants:n1a_norm_without_offset``.

``MUTANTS`` has all of them by name; every name is an attribute of this package.
"""

from __future__ import annotations

from tests.mutants import (
    checks,
    contract,
    dora,
    experts,
    glu,
    heads,
    invariant,
    lora,
    lora_experts,
    lora_head,
    loss,
    norms,
    offload,
    packing,
    proof,
    recognise,
    recompute,
    rope,
    scale,
    setups,
)
from tests.mutants.absent import ABSENT
from tests.mutants.mutant import Mutant, restore

__all__ = ["ABSENT", "GROUPS", "MUTANTS", "restore"]

# By the name of their page in docs/evidence: what they are faults of.
GROUPS: dict[str, tuple[str, tuple[Mutant, ...]]] = {
    "norms": ("norms", norms.MUTANTS),
    "rope": ("rotary embeddings", rope.MUTANTS),
    "glu": ("gated MLPs", glu.MUTANTS),
    "experts": ("experts", experts.MUTANTS),
    "lora": ("LoRA layers", lora.MUTANTS),
    "lora-experts": ("LoRA of experts", lora_experts.MUTANTS),
    "lora-head": ("heads with adapters", lora_head.MUTANTS),
    "dora": ("DoRA layers", dora.MUTANTS),
    "loss": ("cross entropy", loss.MUTANTS),
    "offload": ("layer inputs on the host", offload.MUTANTS),
    "packing": ("packed samples", packing.MUTANTS),
    "recompute": ("gated MLPs in tiles", recompute.MUTANTS),
    "contract": ("the patch", contract.MUTANTS),
    "recognise": ("recognisers", recognise.MUTANTS),
    "setups": ("set-ups", setups.MUTANTS),
    "scale": ("one dtype, mode, pass or size alone", scale.MUTANTS),
    "heads": ("chosen classes and divergences", heads.MUTANTS),
    "invariant": ("rows in any batch", invariant.MUTANTS),
    "proof": ("the proof", proof.MUTANTS),
    "checks": ("what no training shows", checks.MUTANTS),
}
_ALL = [mutant for _, group in GROUPS.values() for mutant in group]
MUTANTS = {mutant.name: mutant for mutant in _ALL}
assert len(MUTANTS) == len(_ALL), "two mutants have one name"


def __getattr__(name: str) -> Mutant:
    if name in MUTANTS:
        return MUTANTS[name]
    raise AttributeError(f"there is no mutant {name!r}")
