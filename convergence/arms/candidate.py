"""Trains a candidate and says what its patch did, in whichever process this is called.

A patch of somebody else may change anything. It is neither imported nor called in the process of truth and baseline,
but in one of its own, and what comes back is a :class:`Candidate`: plain data.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from convergence import ours
from convergence.arms.quantities import Finding
from convergence.arms.train import train
from convergence.arms.trajectory import CannotApply, Run, Trajectory
from convergence.named import NotNamed, load


class PatchError(ValueError):
    """``--patch`` does not name a function that can be imported."""


@dataclass
class Candidate:
    """What is left of a candidate; it travels from process to process.

    Attributes:
        trajectory: what it showed, without the model; None where it did not come to its end.
        failure: why it did not, and what was raised: ``CANNOT_RUN`` (the patch itself raised, so nothing was trained),
            ``RAISED`` (the patched model did) or ``DIED`` (the process did).
        details: the traceback, or the end of what the process wrote before it died.
        report: our own patch's report; None for a patch that is not ours.
        census: how many modules of each class have another class, or another forward, than before.
        launches: how often each kernel of this package was launched.
        changed: what the patch changed for the whole process: upstream symbols, or what an unpatched model computes.
        layout: what of the model's ``state_dict`` is another than an unpatched model's, and when.
    """

    trajectory: Trajectory | None = None
    failure: tuple[Finding, str] | None = None
    details: str = ""
    report: Any = None
    census: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    layout: list[str] = field(default_factory=list)

    @classmethod
    def died(cls, how: str, output: str) -> Candidate:
        return cls(failure=(Finding.DIED, how), details=output)


def load_patch(name: str) -> Callable[[nn.Module], Any]:
    """The function that ``module:function`` names.

    Raises:
        PatchError: it has another form, or cannot be imported, or is not callable.
    """
    try:
        return load(name, "--patch", "with a model")
    except NotNamed as error:
        raise PatchError(str(error)) from error


def check_patch(name: str) -> None:
    """Raise :class:`PatchError` where :func:`load_patch` does; called in another process, it imports nothing here."""
    load_patch(name)


def train_candidate(
    run: Run, changes: Callable[[], list[str]], train: Callable[[Run], Trajectory] = train
) -> Candidate:
    """Train ``run``, which has a patch; ``changes`` says what is no longer as it was before that patch was imported."""
    result = Candidate()
    before = ours.launches()
    try:
        trajectory = train(_laid_out(run, result.layout))
    except CannotApply as error:
        result.failure = Finding.CANNOT_RUN, str(error)
        result.details = "".join(traceback.format_exception(error.__cause__))
    except Exception as error:  # a patched model that crashes is a verdict like any other
        result.failure = Finding.RAISED, f"{type(error).__name__}: {error}"
        result.details = traceback.format_exc()
    else:
        result.report = ours.status(trajectory.model)
        result.census = _census(trajectory.unpatched or run.template, trajectory.model)
        if trajectory.unpatched is None and not result.layout:  # a set-up may have split it
            result.layout += _differences(_layout(run.template, run.dtype), _layout(trajectory.model), "after training")
        trajectory.model = trajectory.unpatched = None
        result.trajectory = trajectory
    result.launches = ours.launched_since(before)
    result.changed = changes()
    return result


def _laid_out(run: Run, found: list[str]) -> Run:
    """``run``, and in ``found`` what its patch changes in the ``state_dict`` of a model, before anything trains."""
    patch, construct = run.patch, run.construct

    def patched(model: nn.Module) -> Any:
        if type(model) is not type(run.template):  # it is wrapped, and its weights may be split
            return patch(model)  # type: ignore[misc]
        before = _layout(model)
        result = patch(model)  # type: ignore[misc]
        found[:] = _differences(before, _layout(model), "before training")
        return result

    def constructed() -> nn.Module:
        model = construct()  # type: ignore[misc]
        found[:] = _differences(_layout(run.template), _layout(model), "before training")
        return model

    return replace(run, patch=patched) if construct is None else replace(run, construct=constructed)


Layout = dict[str, tuple[Any, ...]]


def _layout(model: nn.Module, dtype: torch.dtype | None = None) -> Layout:
    """Of every entry of the ``state_dict`` its shape, its dtype, and the first entry that has the same memory. With a
    ``dtype``, that is what parameters have."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first: dict[Any, str] = {}
    found: Layout = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            found[name] = (type(value).__name__,)
            continue
        kind = dtype if dtype is not None and name in parameters else value.dtype
        found[name] = tuple(value.shape), kind, first.setdefault(_memory(value), name)
    return found


def _memory(value: torch.Tensor) -> Any:
    """What is the same of two tensors that have their memory in common. A subclass may have none of its own."""
    try:
        return value.data_ptr() or id(value)
    except RuntimeError:
        return id(value)


def _differences(before: Layout, now: Layout, when: str) -> list[str]:
    if before == now:
        same = list(before) == list(now)
        return [] if same else [f"{when}: the keys are in another order"]
    found = [f"{when}: {name} is missing" for name in before if name not in now]
    found += [f"{when}: {name} is new" for name in now if name not in before]
    for name, (*kind, shared) in before.items():
        if (other := now.get(name)) is not None and other != before[name]:
            is_kind = list(other[:-1]) == kind
            shown = (f"memory of {shared}", f"memory of {other[-1]}") if is_kind else (before[name][:-1], other[:-1])
            found.append(f"{when}: {name} has {' instead of '.join(map(_shown, reversed(shown)))}")
    return found


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else " ".join(map(str, kind))


def _census(template: nn.Module, model: nn.Module) -> dict[str, int]:
    """How many modules of ``model``, by class, are of another class or have another forward than in
    ``template``."""
    before = dict(template.named_modules())
    census: Counter[str] = Counter()
    for path, module in model.named_modules():
        own = before.get(path)
        if type(module) is not type(own) or ("forward" in vars(module)) != ("forward" in vars(own)):
            census[type(module).__name__] += 1
    return dict(census)
