"""Trains a candidate and reports what its patch did, in the calling process.

A foreign patch may change anything. So it is imported and called in a separate process, never in the process of truth
and baseline. A :class:`Candidate` comes back, which is plain data.
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
from convergence.arms.trajectory import CannotApply, Run, Trajectory, patched_by
from convergence.named import NotNamed, load


class PatchError(ValueError):
    """``--patch`` does not name a function that can be imported."""


@dataclass
class Candidate:
    """The result of a candidate. It is sent from process to process.

    Attributes:
        trajectory: the observations, without the model; None if the candidate did not finish.
        failure: why the candidate did not finish, and a message. The reason is ``CANNOT_RUN`` (the patch raised before
            training), ``RAISED`` (the patched model raised) or ``DIED`` (the process died).
        details: the traceback, or the end of the output of a process that died.
        report: the report of our own patch; None for a foreign patch.
        census: by class, the number of modules with another class or another forward than before.
        launches: how often each kernel of this package was launched.
        changed: changes that affect the whole process: upstream symbols, or results of an unpatched model.
        layout: the differences between the model's ``state_dict`` and an unpatched model's, and when each appeared.
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
        PatchError: the name has another form, cannot be imported, or is not callable.
    """
    try:
        return load(name, "--patch", "with a model")
    except NotNamed as error:
        raise PatchError(str(error)) from error


def check_patch(name: str) -> None:
    """Raise :class:`PatchError` if :func:`load_patch` does. It can run in another process, so that nothing is imported
    here."""
    load_patch(name)


def train_candidate(
    run: Run, changes: Callable[[], list[str]], train: Callable[[Run], Trajectory] = train
) -> Candidate:
    """Train ``run``, which has a patch. ``changes`` lists what changed in the process since before the patch's
    import."""
    result = Candidate()
    before = ours.launches()
    try:
        trajectory = train(_laid_out(run, result.layout))
    except CannotApply as error:
        result.failure = Finding.CANNOT_RUN, str(error)
        result.details = "".join(traceback.format_exception(error.__cause__))
    except Exception as error:  # a crash of the patched model is a verdict
        result.failure = Finding.RAISED, f"{type(error).__name__}: {error}"
        result.details = traceback.format_exc()
    else:
        result.report = ours.status(trajectory.model)
        result.census = census_of(trajectory.unpatched or run.template, trajectory.model)
        if trajectory.unpatched is None and not result.layout:  # a set-up may have split the state_dict
            result.layout += _differences(_layout(run.template, run.dtype), _layout(trajectory.model), "after training")
        trajectory.model = trajectory.unpatched = None
        result.trajectory = trajectory
    result.launches = ours.launched_since(before)
    result.changed = changes()
    return result


def _laid_out(run: Run, found: list[str]) -> Run:
    """``run``, changed so that ``found`` gets the patch's changes of the ``state_dict`` before training."""
    patch, construct = run.patch, run.construct

    def patched(model: nn.Module) -> Any:
        if type(model) is not type(run.template):  # the model is wrapped, and its weights may be split
            return patch(model)  # type: ignore[misc]
        before = _layout(model)
        result = patch(model)  # type: ignore[misc]
        found[:] = _differences(before, _layout(patched_by(model, result)), "before training")
        return result

    def constructed() -> nn.Module:
        model = construct()  # type: ignore[misc]
        found[:] = _differences(_layout(run.template), _layout(model), "before training")
        return model

    return replace(run, patch=patched) if construct is None else replace(run, construct=constructed)


Layout = dict[str, tuple[Any, ...]]


def _layout(model: nn.Module, dtype: torch.dtype | None = None) -> Layout:
    """For every entry of the ``state_dict``: its shape, its dtype, and the first entry in the same memory. ``dtype``,
    if given, replaces the parameters' dtypes."""
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
    """A key that is equal for two tensors in the same memory. A subclass may have no memory itself."""
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


def census_of(template: nn.Module, model: nn.Module) -> dict[str, int]:
    """By class, the number of modules of ``model`` with another class or another forward than in ``template``."""
    before = dict(template.named_modules())
    census: Counter[str] = Counter()
    for path, module in model.named_modules():
        own = before.get(path)
        if type(module) is not type(own) or ("forward" in vars(module)) != ("forward" in vars(own)):
            census[type(module).__name__] += 1
    return dict(census)
