"""Faults that the proof must see, each a patch: ``pytest convergence --patch tests.mutants:n1a_norm_without_offset``.

``MUTANTS`` has all of them by name; every name is an attribute of this package.
"""

from __future__ import annotations

from tests.mutants import checks, contract, experts, glu, loss, norms, packing, recognise, rope, scale, setups
from tests.mutants.checks import ABSENT
from tests.mutants.mutant import Mutant, restore

__all__ = ["ABSENT", "MUTANTS", "restore"]

MUTANTS: dict[str, Mutant] = {
    mutant.name: mutant
    for group in (norms, rope, glu, experts, loss, packing, contract, checks, recognise, setups, scale)
    for mutant in group.MUTANTS
}


def __getattr__(name: str) -> Mutant:
    if name in MUTANTS:
        return MUTANTS[name]
    raise AttributeError(f"there is no mutant {name!r}")
