"""The judge of arms, whoever has trained them: a plain run, a set-up or a trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from convergence.arms.candidate import Candidate
from convergence.arms.quantities import CONSISTENCY, LOSS, Failure, Finding, Quantity
from convergence.arms.trajectory import Trajectory
from convergence.consistency import judge as consistency
from convergence.judge import bitwise, long_run, tolerance
from convergence.judge.compare import Pair, compare
from convergence.judge.verdict import Evidence, Verdict, judged
from convergence.models.models import DTYPES
from convergence.report.records import Case

P = TypeVar("P")

# What may be left, for each unit of their size, of numbers that cancel.
_ROUNDING = tolerance.FLOOR_ROUNDOFFS * tolerance.unit_roundoff(torch.float32)


@dataclass
class Arms:
    """What was trained.

    Attributes:
        pairs: truth and baseline of the initial weights and of each replica. Of a rank, the truths are those that are
            its own.
        candidate: what the patched arm showed.
        reads: how often the caller read the logits in training.
        faults: what shows that truth and baseline were not unpatched.
        zero: quantities that are 0 by construction, and the size of the numbers that cancel in them.
        more: trains more replicas, to judge once more a number that is beyond its bound.
        near: they are trained only if no number is more than this many times its bound.
    """

    pairs: list[tuple[Any, Trajectory]]
    candidate: Candidate
    reads: int = 0
    faults: list[Failure] = field(default_factory=list)
    zero: Mapping[Quantity, float] = field(default_factory=dict)
    more: Callable[[], list[Pair]] | None = None
    near: float = math.inf


def judge(case: Case, arms: Arms, checks: Iterable[Evidence]) -> Verdict:
    """What is wrong with the arms, or else what a comparison of them shows; then what else speaks against the
    candidate.

    Args:
        checks: what the maker of the arms checks of a candidate that came to its end, besides.
    """
    candidate, verdict = arms.candidate, Verdict(failures=arms.faults)
    if candidate.trajectory is None:
        assert candidate.failure is not None
        return verdict + Verdict(failures=[Failure("candidate", "", *candidate.failure)], notes=[candidate.details])
    if verdict.passed:
        trajectory = candidate.trajectory
        verdict = by_more(arms.pairs, arms.more, lambda pairs: _compared(case, arms, pairs, trajectory), arms.near)
        verdict += Verdict(failures=arms.faults)  # of the replicas that were trained now
    return verdict + Verdict.of(_check_changes(case, arms, candidate.trajectory)) + Verdict.of(checks)


def by_more(
    pairs: list[P],
    more: Callable[[], list[P]] | None,
    compared: Callable[[list[P]], Verdict],
    near: float = math.inf,
) -> Verdict:
    """The verdict ``compared`` of ``pairs``. If only numbers are beyond their bounds, it is taken once more with those
    that ``more`` makes, if anything does. It is not if a number is beyond ``near`` times its bound. A few steps and a
    few replicas know the noise of one number badly. What is wrong stays wrong, by a noise that is better known."""
    verdict = compared(pairs)
    if more is None or not verdict.misses_by(near):
        return verdict
    pairs += more()
    return compared(pairs)


def _compared(case: Case, arms: Arms, pairs: list[tuple[Any, Trajectory]], candidate: Trajectory) -> Verdict:
    dtype = DTYPES[case.dtype]
    if case.profile == CONSISTENCY:
        return consistency.judge(pairs, candidate, dtype)
    if not arms.zero:
        return compare(pairs, candidate, dtype, foreign=arms.candidate.report is None)
    pairs = [(truth.without(arms.zero), arm.without(arms.zero)) for truth, arm in pairs]
    verdict = compare(pairs, candidate.without(arms.zero), dtype, foreign=arms.candidate.report is None)
    return verdict + Verdict.of(_check_zeros(arms.zero, candidate))


def _check_zeros(zero: Mapping[Quantity, float], candidate: Trajectory) -> Iterator[Evidence]:
    for quantity, cancelled in zero.items():
        for step, value in candidate.values.get(quantity, {}).items():
            size, bound, shown = float(value.abs()), cancelled * _ROUNDING, f"{float(value):.3g}"
            yield from judged(quantity, step, "size", size, bound, shown, Finding.NOT_ZERO_BY_ROUNDING)


def _check_changes(case: Case, arms: Arms, trajectory: Trajectory) -> Iterator[Evidence]:
    """What the patch changed that is not the candidate's own, and whether the candidate is an arm of its own."""
    candidate = arms.candidate
    for difference in candidate.layout:
        yield Failure("state_dict", "", Finding.CHANGED, difference)
    if candidate.changed and case.scope == "instance":
        yield Failure("other models", "", Finding.PATCHED_TOO, ", ".join(candidate.changed))
    elif candidate.changed and case.setup == "plain":
        yield "changed for the whole process: " + ", ".join(candidate.changed)
    yield from _check_own(case, arms.pairs, trajectory, candidate.launches)


def _check_own(case: Case, pairs: list[Pair], candidate: Trajectory, launches: dict[str, int]) -> Iterator[Failure]:
    """A truth has another dtype, and a replica began at other weights: no candidate is one of them to the last bit. It
    may be the baseline, where nothing was replaced, or only what has one way to be rounded: a rotation, an activation,
    a copy. Where a kernel summed, it did so in an order of its own."""
    summed = _summed(case, launches)
    if summed and bitwise.is_same(candidate, pairs[0][1]):
        yield Failure("candidate", "", Finding.NOT_ITS_OWN, f"every bit is the baseline's, though it launched {summed}")
    others = {f"replica {number}": arm for number, (_, arm) in enumerate(pairs) if number}
    others |= {f"truth {number}": truth for number, (truth, _) in enumerate(pairs)}
    for which, other in others.items():
        if bitwise.is_same(candidate, other):
            yield Failure("candidate", "", Finding.NOT_ITS_OWN, f"every bit is that of {which}")


def _summed(case: Case, launches: dict[str, int]) -> str:
    """Kernels whose sums show in bits that are observed: the loss is held in float32 in every case, and what a norm
    returns in the case's dtype. In 16 bits, rounding could hide an order."""
    shows = ("cross_entropy", *(("norm",) if (case.dtype, case.setup) == ("float32", "plain") else ()))
    return ", ".join(name for name in launches if any(part in name for part in shows))


def shown(case: Case, arms: Arms, fused: Callable[[Any], bool]) -> dict[str, Any]:
    """What an outcome holds of the arms besides their verdict; ``fused(report)`` says whether the loss was."""
    candidate = arms.candidate
    trajectory, report = candidate.trajectory, candidate.report
    found: dict[str, Any] = {"launches": candidate.launches}
    if trajectory is None:
        return found
    if case.profile == CONSISTENCY:
        truth, baseline = arms.pairs[0]
        found["differences"] = consistency.described(truth, {"unpatched": baseline, "patched": trajectory})
    observed = dict(zip(("truth", "baseline", "candidate"), (*arms.pairs[0], trajectory), strict=True))
    losses = {
        arm: {str(step): float(value) for step, value in one.values[LOSS].items()} for arm, one in observed.items()
    }
    if trajectory.curve is not None:
        curves = [arm.curve for _, arm in arms.pairs if arm.curve is not None]
        for arm, of_blocks in long_run.curves(curves, trajectory.curve).items():
            losses[arm] = {**losses.get(arm, {}), **of_blocks}
    found |= {"losses": losses, "costs": {arm: one.costs for arm, one in observed.items()}}
    found["digests"] = {arm: bitwise.digest(observed[arm]) for arm in ("baseline", "candidate")}
    if report is None:
        return found | {"census": candidate.census}
    said = "yes" if fused(report) else "no"
    return found | {"census": report.counts(), "fallbacks": dict(report.fallbacks), "fused": said}
