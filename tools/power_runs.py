"""One run that the pages of power count: an honest candidate, or a mutant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Simulation:
    """One honest candidate or one mutant, in one dtype.

    Attributes:
        shares: by statistic, the largest value / bound of any quantity; above 1 it failed.
        failures: everything that the proof held against it: quantity, step, statistic, value, bound.
    """

    name: str
    model: str
    dtype: str
    shares: dict[str, float]
    failures: list[Sequence[Any]]
    environment: str
    seed: int = 0
    verdict: str = "different"

    @property
    def largest(self) -> float:
        return max(self.shares.values(), default=0.0)

    @property
    def statistic(self) -> str:
        """The one that is nearest to its bound, or farthest beyond."""
        return max(self.shares, key=lambda name: self.shares[name], default="")

    @property
    def failed(self) -> bool:
        return bool(self.failures) or self.largest > 1

    @property
    def dies(self) -> str:
        """What becomes of a mutant: it dies "by a number", "otherwise", or "not"."""
        if self.largest > 1:
            return "by a number"
        return "otherwise" if self.verdict == "different" else "not"

    @property
    def findings(self) -> set[str]:
        return {str(failure[2]) for failure in self.failures}
