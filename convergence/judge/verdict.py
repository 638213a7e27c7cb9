"""What is held for and against a candidate: every judged number with its bound, and every failure in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from convergence.arms.quantities import Failure, Moment, Quantity, Statistic


@dataclass
class Verdict:
    """All statistics, and the failures in words."""

    statistics: list[Statistic] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def fail(self, quantity: Quantity | str, step: Moment | str, statistic: str, value: str, bound: str = "") -> None:
        self.failures.append(Failure(str(quantity), str(step), statistic, value, bound))

    def judge(
        self,
        quantity: Quantity,
        step: Moment,
        statistic: str,
        value: float,
        bound: float,
        shown: str = "",
        finding: str = "",
        limit: float = math.inf,
    ) -> None:
        """Keep a statistic. Beyond its bound it fails: as ``finding``, by default the statistic, with the value as it
        is ``shown``. A bound beyond its own ``limit`` fails, too: no honest arm comes near it, so it says nothing."""
        if not bound <= limit:
            reason = f"the bound on the {statistic} is {bound:.3g}, and no honest arm comes near it"
            self.fail(quantity, step, "cannot judge", reason, f"{limit:.3g}")
        self.statistics.append(Statistic(str(quantity), str(step), statistic, value, bound))
        if not self.statistics[-1].passed:
            self.fail(quantity, step, finding or statistic, shown or f"{value:.3g}", f"{bound:.3g}")
