"""Proves one case in a trainer: the third maker of arms, next to a plain run and a set-up.

Judge, outcome and record are those of every other case. What only a trainer shows is checked here: what it logs, who
computed the loss, and which kernels ran.
"""

from __future__ import annotations

import functools
import re
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from convergence import ours
from convergence.arms import isolate
from convergence.arms.candidate import Candidate, PatchError, load_patch
from convergence.arms.quantities import GRADIENT_NORM, LOGGED, Failure, Finding, Quantity
from convergence.arms.trajectory import CannotApply, apply
from convergence.judge import bitwise, tolerance
from convergence.judge.arms import Arms, judge, shown
from convergence.judge.compare import Pair
from convergence.judge.verdict import Evidence
from convergence.models.models import DTYPES
from convergence.report.records import Case, Outcome, outcome
from convergence.trainers.observe import Arm, InTrainer, Seen, run

# Kernels that a trainer may leave alone: the loss where it has its own, and adapters, which may need matmuls only.
_MAY_REST = re.compile("cross_entropy|lora|dora")


def prove_in_trainer(case: Case, how: InTrainer, arm: Arm | None = None, timeout: float = isolate.TIMEOUT) -> Outcome:
    """Train and judge ``case`` in a trainer; the outcome says whether the candidate is the same mathematics, and why
    not.

    Args:
        how: how the model and its trainer are made.
        arm: how the candidate is patched, by this package and in this process. Without it, the case's patch is somebody
            else's, and the candidate trains in a process of its own.
        timeout: the seconds that this process may take.
    """
    began = time.perf_counter()
    dtype = DTYPES[case.dtype]
    baseline = honest(how, dtype, None)[1]
    found = _candidate(case, how, timeout) if arm is None else run(how, arm)
    if isinstance(found, Candidate):
        arms = Arms([], found)
        verdict = judge(case, arms, ())
    else:
        arms = _arms(how, dtype, baseline, found, arm)
        verdict = judge(case, arms, _checks(how, baseline, found, arm))
    about = shown(case, arms, lambda report: _is_fused(arms.candidate))
    replicas = max(len(arms.pairs) - 1, 0)
    return outcome(verdict, replicas=replicas, seconds=round(time.perf_counter() - began, 2), **about)


@functools.cache
def honest(how: InTrainer, dtype: torch.dtype, nudge: int | None) -> tuple[Seen, Seen]:
    """Truth and baseline of the initial weights, or of those that ``nudge`` has moved by a unit in the last place."""
    truth = Arm(torch.float64, nudge, options=how.options_of_truth)
    return run(how, truth), run(how, Arm(dtype, nudge))


def _arms(how: InTrainer, dtype: torch.dtype, baseline: Seen, seen: Seen, arm: Arm | None) -> Arms:
    """The arms of a candidate that came to its end."""
    left = _not_logged(baseline, seen, arm)

    def pairs(nudges: Any) -> list[Pair]:
        found = [honest(how, dtype, nudge) for nudge in nudges]
        return [(truth.trajectory.without(left), arm.trajectory.without(left)) for truth, arm in found]

    faults = []
    if baseline.launches:
        what = f"it launched {sorted(baseline.launches)}"
        faults.append(Failure("baseline", "", Finding.NOT_PRISTINE, what))
    candidate = Candidate(seen.trajectory, report=seen.report, launches=seen.launches, census=seen.census)
    more = functools.partial(pairs, range(tolerance.REPLICAS, tolerance.MANY_REPLICAS))
    return Arms(pairs((None, *range(tolerance.REPLICAS))), candidate, faults=faults, zero=how.zero, more=more)


def _candidate(case: Case, how: InTrainer, timeout: float) -> Seen | Candidate:
    """What the arm of a patch that is not ours showed in a process of its own, or why it came to no end."""
    try:
        return Seen(*isolate.call(_run_foreign, how, case.patch, case.scope, timeout=timeout))
    except isolate.ProcessDied as death:
        return Candidate.died(str(death), death.output)
    except (PatchError, CannotApply) as error:
        return Candidate(failure=(Finding.CANNOT_RUN, str(error)), details=traceback.format_exc())
    except Exception as error:  # a trainer that crashes on a patched model is a verdict like any other
        what = f"{type(error).__name__}: {error}"
        return Candidate(failure=(Finding.RAISED, what), details=traceback.format_exc())


def patched_model(how: InTrainer, patch: Callable[..., Any]) -> Any:
    """A new model, patched.

    Raises:
        CannotApply: the patch raised.
    """
    return apply(patch, how.model())


def _run_foreign(how: InTrainer, patch: str, scope: str) -> tuple[Any, ...]:
    """Train a model of ``patch``, which is not ours, in this process; returns the fields of :class:`Seen`.

    With the scope "class" the patch sees a model of that class, and the one that trains is made afterwards. What it
    replaces stays replaced, so nothing else may train in this process.

    Raises:
        PatchError: the patch cannot be imported.
        CannotApply: it raised. Whatever the trainer raises comes as it is.
    """
    patched = load_patch(patch)

    def load() -> Any:
        model = patched_model(how, patched)
        return how.model() if scope == "class" else model

    return tuple(run(how, Arm(load=load, ours=False)))


def _checks(how: InTrainer, baseline: Seen, seen: Seen, arm: Arm | None) -> Iterator[Evidence]:
    if arm is not None:
        yield from _check_ours(how, seen)
    elif not (seen.launches or seen.census) and bitwise.is_same(baseline.trajectory, seen.trajectory):
        yield Failure("candidate", "", Finding.NOT_PATCHED, "no module changed and every bit is the baseline's")
    norms = [float(value) for value in baseline.trajectory.values[GRADIENT_NORM].values()]
    if len(set(norms)) < 2:  # not the losses: GRPO's is 0 by construction, as long as it is on policy
        yield Failure("baseline", "", Finding.DID_NOT_TRAIN, f"its gradient norms are {norms}")
    yield from _check_rounded_logs(baseline, seen)
    yield from (f"{quantity}: not logged" for quantity in _not_logged(baseline, seen, arm))


def _not_logged(baseline: Seen, seen: Seen, arm: Arm | None) -> list[Quantity]:
    """What the trainer of the patched arm chose not to log."""
    if arm is None or not arm.logs_less:
        return []
    return [q for q in baseline.trajectory.values if q.kind == LOGGED and q not in seen.trajectory.values]


def _check_ours(how: InTrainer, seen: Seen) -> Iterator[Evidence]:
    """The patched arm ran every kernel that its report names."""
    report = seen.report
    if report is None:
        yield Failure("candidate", "", Finding.NOT_PATCHED, "the trained model has no report")
        return
    census = report.counts()
    for kernel in census:
        if not _MAY_REST.search(kernel) and not ours.is_launched(kernel, seen.launches):
            yield Failure("candidate", "", Finding.NOT_LAUNCHED, kernel)
    for name in how.launches:
        if not any(name in launched for launched in seen.launches):
            yield Failure("candidate", "", Finding.NOT_LAUNCHED, name)
    if not {"rms_norm", "rope"} <= census.keys() or not {"swiglu", "geglu"} & census.keys():
        left = [str(one) for one in report.left]
        yield Failure("candidate", "", Finding.NOT_PATCHED, f"only {census}; {left}")
    for difference in ours.trls_head_differences():
        yield Failure("candidate", "", Finding.HEAD_NOT_REPLACED, difference)
    yield f"the loss: {_head(seen, report)}"


def _fused_losses(launches: dict[str, int]) -> int:
    return sum(count for name, count in launches.items() if "cross_entropy" in name)


def _is_fused(candidate: Candidate) -> bool:
    """Whether the trainer asked the patched model for its loss, and never got real logits."""
    return bool(_fused_losses(candidate.launches)) and not candidate.report.fallbacks


def _head(seen: Seen, report: Any) -> str:
    """Who computed the loss: our fused head, real logits, or the trainer without asking the model's head."""
    if seen.trls_head:
        return f"trl's own head, on our kernels {seen.trls_head} x"
    fused = _fused_losses(seen.launches)
    if report.fallbacks:
        return f"fused {fused} x, real logits {sum(report.fallbacks.values())} x"
    if fused:
        return f"fused {fused} x"
    if seen.head_calls:
        return f"the trainer computes its loss itself, from real logits without labels {seen.head_calls} x"
    return "the trainer computes its loss by a head of its own and never calls the model's"


def _check_rounded_logs(baseline: Seen, seen: Seen) -> Iterator[Failure]:
    """The loss that a Trainer logs is rounded to four decimals; it may be off by one in the last of them."""
    ours, theirs = ([row["loss"] for row in arm.logged if "loss" in row] for arm in (seen, baseline))
    near = len(ours) == len(theirs) and all(abs(a - b) <= 1.01e-4 for a, b in zip(ours, theirs, strict=True))
    if not near or not theirs:
        yield Failure("logged loss", "every step", Finding.ROUNDED_VALUE, str(ours), str(theirs))
