"""Proves one case: trains its arms, judges the candidate, and checks that neither arm is what it should not be."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from convergence import bitwise, tolerance
from convergence.compare import Pair, Verdict, compare
from convergence.data import IGNORE, Batch, Step, evaluation_batch, steps
from convergence.models import MODELS, MiniModel
from convergence.pristine import Fingerprint
from convergence.records import Record, Statistic, versions
from convergence.train import Run, Trajectory, status, train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Above this probability a prediction counts as confident, and the hard profile asks for it.
CONFIDENT = 0.99
_fingerprint: Fingerprint | None = None


class PatchError(ValueError):
    """``--patch`` does not name a function that can be imported."""


@dataclass(frozen=True)
class Case:
    """One row of the proof: a mini model, a dtype, a patch (``module:function``), on inputs and a device."""

    model: str
    dtype: str
    patch: str
    profile: str = "hard"
    device: str = "cpu"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.model}/{self.dtype}/{self.patch.rpartition(':')[2]}"


def load_patch(name: str) -> Callable[[nn.Module], Any]:
    """The function that ``module:function`` names.

    Raises:
        PatchError: it has another form, or cannot be imported, or is not callable.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise PatchError(f"--patch {name!r} is not of the form package.module:function")
    try:
        patch = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PatchError(f"--patch {name!r} cannot be imported: {error}; it takes package.module:function") from error
    if not callable(patch):
        raise PatchError(
            f"--patch {name!r} is a {type(patch).__name__}; it takes a function that is called with a model"
        )
    return patch


def remember_upstream(models: Iterable[MiniModel]) -> None:
    """Take the fingerprint of everything unpatched, once per process, before any patch is imported."""
    global _fingerprint
    if _fingerprint is None:
        _fingerprint = Fingerprint(model.model_class() for model in models if model.is_available())


@dataclass
class References:
    """What every candidate of one model and dtype is judged against."""

    template: nn.Module
    steps: list[Step]
    evaluation: Batch
    pairs: list[Pair]

    def run(self, dtype: torch.dtype, device: torch.device, **other: Any) -> Run:
        return Run(self.template, self.steps, self.evaluation, dtype, device, **other)


@functools.lru_cache(maxsize=1)
def references(model: str, dtype: str, profile: str, device: str, seed: int) -> References:
    """Template, inputs, and (truth, baseline) of the initial weights and of every replica."""
    template = MODELS[model].build(seed)
    inputs = steps(profile, seed, DTYPES[dtype])
    if profile == "hard":
        _ask_for_confident_predictions(template, inputs)
    result = References(template, inputs, evaluation_batch(seed), [])
    where, judged = torch.device(device), DTYPES[dtype]
    for nudge in (None, *range(tolerance.REPLICAS)):
        truth = train(result.run(torch.float64, where, rounded_to=judged, nudge=nudge))
        result.pairs.append((truth, train(result.run(judged, where, nudge=nudge))))
    return result


def _ask_for_confident_predictions(template: nn.Module, inputs: list[Step]) -> None:
    """Where the model is confident, make its prediction the label: the gradient at the target is then p - 1 with
    p -> 1, which cancels catastrophically in a kernel that rounds too early."""
    with torch.no_grad():
        for batch in (batch for step in inputs for batch in step.batches):
            probability = template(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.softmax(-1)
            confidence, prediction = probability[:, :-1].max(-1)
            labels = batch.labels[:, 1:]
            batch.labels[:, 1:] = torch.where((confidence > CONFIDENT) & (labels != IGNORE), prediction, labels)


def prove(case: Case) -> Record:
    """Train and judge ``case``; the record says whether the candidate is the same mathematics, and why not."""
    began = time.perf_counter()
    record = Record(**dataclasses.asdict(case), versions=versions(case.device), replicas=tolerance.REPLICAS)
    remember_upstream(MODELS.values())
    assert _fingerprint is not None
    record.symbols = len(_fingerprint)
    verdict = Verdict()
    changed = _fingerprint.changes()
    if changed:
        verdict.fail("baseline", "before training", "not pristine", ", ".join(changed))
    else:
        verdict = _judge(case, record)
    record.failures = verdict.failures
    record.notes = verdict.notes
    record.statistics = [cast(Statistic, dataclasses.asdict(statistic)) for statistic in verdict.statistics]
    if not verdict.passed:
        record.verdict = "different"
        record.reason = " ".join(part for part in verdict.failures[0] if part)
    record.seconds = round(time.perf_counter() - began, 2)
    return record


def _judge(case: Case, record: Record) -> Verdict:
    from liger_kernels.ops import launches

    assert _fingerprint is not None
    verdict = Verdict()
    before = launches()
    reference = references(case.model, case.dtype, case.profile, case.device, case.seed)
    if launches() != before:
        verdict.fail("baseline", "", "not pristine", "it launched kernels of this package")
    patch = load_patch(case.patch)
    before = launches()
    try:
        candidate = train(reference.run(DTYPES[case.dtype], torch.device(case.device), patch=patch))
    except Exception as error:  # a patched model that crashes is a verdict like any other
        verdict.fail("candidate", "", "raised", f"{type(error).__name__}: {error}")
        verdict.notes.append(traceback.format_exc())
        return verdict
    report = status(candidate.model)
    if not verdict.failures:
        verdict = compare(reference.pairs, candidate, DTYPES[case.dtype], foreign=report is None)
    record.launches = {name: n - before.get(name, 0) for name, n in launches().items() if n > before.get(name, 0)}
    record.losses = {
        arm: {step: float(value) for step, value in trajectory.values["loss"].items()}
        for arm, trajectory in zip(("truth", "baseline", "candidate"), (*reference.pairs[0], candidate), strict=True)
    }
    record.digests = {"baseline": bitwise.digest(reference.pairs[0][1]), "candidate": bitwise.digest(candidate)}
    leaked = _fingerprint.changes()
    if leaked:
        verdict.fail("other models", "", "patched too", ", ".join(leaked))
    if report is None:
        _check_foreign(reference, candidate, leaked, record, verdict)
    else:
        _check_ours(MODELS[case.model], report, record, verdict)
    return verdict


def _check_ours(model: MiniModel, report: Any, record: Record, verdict: Verdict) -> None:
    """Every kernel that this architecture has a place for must have been put there, and must have run."""
    record.census, record.fallbacks = report.counts(), dict(report.fallbacks)
    loss = "linear_cross_entropy" if "linear_cross_entropy" in report.kernels else "cross_entropy"
    for kernel in (*(k for k in model.kernels if k in report.kernels), loss):
        if not record.census.get(kernel):
            why = "; ".join(f"{left.path}: {left.reason}" for left in report.left) or "no candidate was found"
            verdict.fail("candidate", "", "not patched", f"{kernel} replaced nothing: {why}", "at least 1")
        elif not any(_KERNEL_NAMES[kernel] in name for name in record.launches):
            verdict.fail("candidate", "", "not launched", f"{kernel} was never launched", "at least 1")


_KERNEL_NAMES = {
    "rms_norm": "rms_norm",
    "rope": "rope",
    "swiglu": "glu",
    "geglu": "glu",
    "cross_entropy": "cross_entropy",
    "linear_cross_entropy": "cross_entropy",
}


def _check_foreign(
    reference: References, candidate: Trajectory, leaked: list[str], record: Record, verdict: Verdict
) -> None:
    """A patch of somebody else must have changed a class or a forward, or at least one bit of what was observed."""
    before = dict(reference.template.named_modules())
    for path, module in candidate.model.named_modules():
        own = before.get(path)
        if type(module) is not type(own) or ("forward" in vars(module)) != ("forward" in vars(own)):
            name = type(module).__name__
            record.census[name] = record.census.get(name, 0) + 1
    baseline = reference.pairs[0][1]
    same = all(
        torch.equal(value, candidate.values.get(quantity, {}).get(step, value.new_empty(0)))
        for quantity, values in baseline.values.items()
        for step, value in values.items()
    )
    if not record.census and not leaked and same:
        verdict.fail("candidate", "", "not patched", "no module changed and every bit is the baseline's")
