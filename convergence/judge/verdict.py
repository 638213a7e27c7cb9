"""What is held for and against a candidate: every judged number with its bound, and every failure in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from convergence.arms.quantities import Moment, Quantity
from convergence.report.records import Statistic


@dataclass
class Verdict:
    """All statistics, and the failures in words (quantity, step, statistic, value, bound)."""

    statistics: list[Statistic] = field(default_factory=list)
    failures: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def fail(self, quantity: Quantity | str, step: Moment | str, statistic: str, value: str, bound: str = "") -> None:
        self.failures.append((str(quantity), str(step), statistic, value, bound))

    def judge(
        self,
        quantity: Quantity,
        step: Moment,
        statistic: str,
        value: float,
        bound: float,
        shown: str = "",
        finding: str = "",
    ) -> None:
        """Keep a statistic. Beyond its bound it fails: as ``finding``, by default the statistic, with the value as it
        is ``shown``."""
        self.statistics.append(Statistic(str(quantity), str(step), statistic, value, bound))
        if not self.statistics[-1].passed:
            self.fail(quantity, step, finding or statistic, shown or f"{value:.3g}", f"{bound:.3g}")
