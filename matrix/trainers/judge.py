"""Judges patched arms of a trainer's case against unpatched ones, with the statistics of the proof, and records it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from convergence import files, ours
from convergence.arms import isolate
from convergence.arms.candidate import PatchError
from convergence.arms.quantities import GRADIENT_NORM, LOGGED, STATISTICS, Failure, Finding, Quantity, Statistic
from convergence.arms.trajectory import CannotApply, Trajectory
from convergence.judge import bitwise, tolerance
from convergence.judge.compare import compare
from convergence.judge.verdict import Evidence, Verdict, judged
from liger_kernels import trl_head
from matrix.trainers.cases import CASES
from matrix.trainers.observe import Arm, Seen, run, run_foreign

MANY_REPLICAS = 4 * tolerance.REPLICAS
ROUNDING = tolerance.FLOOR_ROUNDOFFS * tolerance.unit_roundoff(torch.float32)
# Kernels that a trainer may leave alone: the loss where it has its own, and adapters, which may need matmuls only.
_MAY_REST = re.compile("cross_entropy|lora|dora")
# The truth keeps its activations: what is computed again in the backward pass is out of float64's reach.
TRUTH = (("gradient_checkpointing", False),)


def versions() -> dict[str, str]:
    return files.versions(("torch", "triton", "transformers", "trl", "accelerate", "datasets"), missing="none")


@dataclass
class TrainerRecord:
    """What one trainer did with one way of patching."""

    case: str
    family: str
    way: str
    verdict: str = "same"
    reason: str = ""
    unpatched: list[dict[str, float]] = field(default_factory=list)
    patched: list[dict[str, float]] = field(default_factory=list)
    replicas: int = 0
    statistics: list[Statistic] = field(default_factory=list)
    failures: Sequence[Failure] = field(default_factory=list)
    census: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    head: str = ""
    fallbacks: dict[str, int] = field(default_factory=dict)
    not_logged: list[str] = field(default_factory=list)  # by the trainer's own choice, under its flag
    versions: dict[str, str] = field(default_factory=versions)

    def write(self, folder: str | None) -> None:
        if folder:
            files.write_json(asdict(self), Path(folder) / f"trainers-{self.case}-{self.family}-{self.way}.json")

    def check(self, folder: str | None) -> None:
        """Write it, and fail unless it is the same mathematics."""
        self.write(folder)
        assert self.verdict == "same", "\n".join(" | ".join(failure) for failure in self.failures)


def skip_if_missing(case: str, family: str, way: str, folder: str | None) -> None:
    """Skip a case that the installed version does not have, and record that."""
    if missing := CASES[case].missing():
        TrainerRecord(case, family, way, "absent", f"this version has {missing}").write(folder)
        pytest.skip(f"this version has {missing}")


@functools.cache
def honest(case: str, folder: Path, nudge: int | None, reference_is_another: bool = True) -> tuple[Seen, Seen]:
    """Truth and baseline of the initial weights, or of those that ``nudge`` has moved by a unit in the last place."""
    make = functools.partial(CASES[case].make, folder, folder / "output")
    arms = Arm(torch.float64, nudge, options=TRUTH), Arm(torch.float32, nudge)
    truth, baseline = (run(make, arm, folder, reference_is_another) for arm in arms)
    return truth, baseline


def _compare(case: str, folder: Path, seen: Seen, replicas: int, record: TrainerRecord) -> Verdict:
    record.replicas = replicas
    arms = [honest(case, folder, nudge) for nudge in (None, *range(replicas))]
    pairs = [(truth.trajectory, baseline.trajectory) for truth, baseline in arms]
    left: list[Quantity] = []
    if record.way == "flag":
        left = [q for q in pairs[0][1].values if q.kind == LOGGED and q not in seen.trajectory.values]
    record.not_logged = list(map(str, left))
    zero = CASES[case].zero
    pairs = [(without(truth, zero, left), without(arm, zero, left)) for truth, arm in pairs]
    verdict = compare(pairs, without(seen.trajectory, zero), torch.float32, foreign=seen.report is None)
    return verdict + Verdict.of(_check_zeros(zero, seen.trajectory))


def _check_zeros(zero: Iterable[Quantity], candidate: Trajectory) -> Iterator[Evidence]:
    """Sums of terms that cancel are 0 but for rounding. The terms are of the size of 1."""
    for quantity in zero:
        for step, value in candidate.values.get(quantity, {}).items():
            size, shown = float(value.abs()), f"{float(value):.3g}"
            yield from judged(quantity, step, "size", size, ROUNDING, shown, Finding.NOT_ZERO_BY_ROUNDING)


def _compared(case: str, folder: Path, seen: Seen, record: TrainerRecord) -> Verdict:
    verdict = _compare(case, folder, seen, tolerance.REPLICAS, record)
    if verdict.failures and all(failure.finding in STATISTICS for failure in verdict.failures):
        # A few steps and a few replicas know the noise of one number badly. What is beyond it is judged once more by
        # many: what is wrong stays wrong, and by the same factor of a noise that is better known.
        verdict = _compare(case, folder, seen, MANY_REPLICAS, record)
    record.statistics = verdict.statistics
    return verdict


def judge_foreign(case: str, family: str, folder: Path, patch: str, scope: str, timeout: float) -> TrainerRecord:
    """As :func:`judge`, of a ``patch`` that is not ours (``module:function``), in a process of its own."""
    record = TrainerRecord(case, family, f"{patch.partition(':')[2]}-{scope}")
    _, baseline = honest(case, folder, None)
    try:
        seen = Seen(*isolate.call(run_foreign, case, folder, patch, scope, timeout=timeout))
    except isolate.ProcessDied as death:
        return _failed(record, Finding.DIED, str(death))
    except (PatchError, CannotApply) as error:
        return _failed(record, Finding.CANNOT_RUN, str(error))
    except Exception as error:  # a trainer that crashes on a patched model is a verdict like any other
        return _failed(record, Finding.RAISED, f"{type(error).__name__}: {error}")
    verdict = _compared(case, folder, seen, record)
    record.unpatched, record.patched = baseline.logged, seen.logged
    return _decided(record, verdict + Verdict.of(_check_foreign(baseline, seen)))


def _failed(record: TrainerRecord, finding: Finding, value: str) -> TrainerRecord:
    return _decided(record, Verdict(failures=[Failure("candidate", "", finding, value)]))


def _check_foreign(baseline: Seen, seen: Seen) -> Iterator[Failure]:
    if not seen.launches and bitwise.is_same(baseline.trajectory, seen.trajectory):
        yield Failure("candidate", "", Finding.NOT_PATCHED, "every bit is the baseline's")
    yield from _check_trained(baseline)
    yield from _check_rounded_logs(baseline, seen)


def judge(case: str, family: str, folder: Path, way: str, arm: Arm) -> TrainerRecord:
    """Train the case's arms and ``arm``, patched in some ``way``, and say whether it is the same mathematics.

    By way of a "flag" the trainer knows that the model is patched, and may choose not to log some metrics.
    """
    record = TrainerRecord(case, family, way)
    _, baseline = honest(case, folder, None)
    seen = run(functools.partial(CASES[case].make, folder, folder / "output"), arm, folder)
    verdict = _compared(case, folder, seen, record)
    verdict += Verdict.of([*_check_what_ran(baseline, seen, record), *_check_rounded_logs(baseline, seen)])
    record.unpatched, record.patched = baseline.logged, seen.logged
    return _decided(record, verdict)


def _decided(record: TrainerRecord, verdict: Verdict) -> TrainerRecord:
    record.failures = verdict.failures
    if not verdict.passed:
        record.verdict, record.reason = "different", "; ".join(map(str, verdict.failures[:5]))
    return record


def without(arm: Trajectory, *quantities: Iterable[Quantity]) -> Trajectory:
    dropped = {name for names in quantities for name in names}
    return replace(arm, values={quantity: steps for quantity, steps in arm.values.items() if quantity not in dropped})


def _check_what_ran(baseline: Seen, seen: Seen, record: TrainerRecord) -> Iterator[Failure]:
    """The baseline ran none of our kernels, the patched arm ran every one that its report names, and both trained."""
    record.launches = seen.launches
    if baseline.launches:
        yield Failure("baseline", "", Finding.NOT_PRISTINE, f"it launched {sorted(baseline.launches)}")
    report = seen.report
    if report is None:
        yield Failure("candidate", "", Finding.NOT_PATCHED, "the trained model has no report")
        return
    record.census, record.fallbacks = report.counts(), dict(report.fallbacks)
    for kernel in record.census:
        if not _MAY_REST.search(kernel) and not ours.is_launched(kernel, seen.launches):
            yield Failure("candidate", "", Finding.NOT_LAUNCHED, kernel)
    for name in CASES[record.case].launches:
        if not any(name in launched for launched in seen.launches):
            yield Failure("candidate", "", Finding.NOT_LAUNCHED, name)
    if not {"rms_norm", "rope"} <= record.census.keys() or not {"swiglu", "geglu"} & record.census.keys():
        yield Failure(
            "candidate", "", Finding.NOT_PATCHED, f"only {record.census}; {[str(left) for left in report.left]}"
        )
    record.head = _head(seen, report)
    for module in (trl_head.LOG_PROBS, trl_head.DIVERGENCE):
        if (replaced := trl_head.current(module)) is not None and replaced.difference:
            yield Failure("candidate", "", Finding.HEAD_NOT_REPLACED, replaced.difference)
    yield from _check_trained(baseline)


def _check_trained(baseline: Seen) -> Iterator[Failure]:
    norms = [float(value) for value in baseline.trajectory.values[GRADIENT_NORM].values()]
    if len(set(norms)) < 2:  # not the losses: GRPO's is 0 by construction, as long as it is on policy
        yield Failure("baseline", "", Finding.DID_NOT_TRAIN, f"its gradient norms are {norms}")


def _head(seen: Seen, report: Any) -> str:
    """Who computed the loss: our fused head, real logits, or the trainer without asking the model's head."""
    if seen.trls_head:
        return f"trl's own head, on our kernels {seen.trls_head} x"
    fused = sum(count for name, count in seen.launches.items() if "cross_entropy" in name)
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
