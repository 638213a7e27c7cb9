"""What is held for and against a candidate: every judged number with its bound, and every failure in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from convergence.arms.quantities import STATISTICS, Failure, Finding, Moment, Quantity, Statistic

Evidence = Failure | Statistic | str  # what a check finds; text is a note, which speaks neither for nor against


@dataclass(frozen=True)
class Verdict:
    """All statistics, the failures in words, and notes, each in the order in which they were found."""

    statistics: list[Statistic] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, evidence: Iterable[Evidence]) -> Verdict:
        """The verdict on all that checks have found."""
        found = list(evidence)
        return cls(
            [one for one in found if isinstance(one, Statistic)],
            [one for one in found if isinstance(one, Failure)],
            [one for one in found if isinstance(one, str)],
        )

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(self.statistics + other.statistics, self.failures + other.failures, self.notes + other.notes)

    @property
    def passed(self) -> bool:
        return not self.failures

    def misses_by(self, factor: float) -> bool:
        """Whether it fails by numbers alone, and no number is more than ``factor`` times its bound."""
        by_numbers = not self.passed and all(failure.finding in STATISTICS for failure in self.failures)
        return by_numbers and (math.isinf(factor) or all(one.value <= factor * one.bound for one in self.statistics))


def judged(
    quantity: Quantity,
    step: Moment,
    statistic: str,
    value: float,
    bound: float,
    shown: str = "",
    finding: Finding | None = None,
    limit: float = math.inf,
) -> Iterator[Statistic | Failure]:
    """A statistic. Beyond its bound it fails: as ``finding``, by default the statistic, with the value as it is
    ``shown``. A bound beyond its own ``limit`` fails, too: no honest arm comes near it, so it says nothing."""
    if not bound <= limit:
        reason = f"the bound on the {statistic} is {bound:.3g}, and no honest arm comes near it"
        yield Failure.of(quantity, step, Finding.CANNOT_JUDGE, reason, f"{limit:.3g}")
    found = Statistic(str(quantity), str(step), statistic, value, bound)
    yield found
    if not found.passed:
        yield Failure.of(quantity, step, finding or Finding(statistic), shown or f"{value:.3g}", f"{bound:.3g}")
