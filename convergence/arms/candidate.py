"""Trains a candidate and says what its patch did, in whichever process this is called.

A patch of somebody else may change anything. It is neither imported nor called in the process of truth and baseline,
but in one of its own, and what comes back is a :class:`Candidate`: plain data.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from convergence import ours
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
        failure: why it did not, and what was raised: "cannot run" (the patch itself raised, so nothing was trained),
            "raised" (the patched model did) or "died" (the process did).
        details: the traceback, or the end of what the process wrote before it died.
        report: our own patch's report; None for a patch that is not ours.
        census: how many modules of each class have another class, or another forward, than before.
        launches: how often each kernel of this package was launched.
        changed: what the patch changed for the whole process: upstream symbols, or what an unpatched model computes.
    """

    trajectory: Trajectory | None = None
    failure: tuple[str, str] | None = None
    details: str = ""
    report: Any = None
    census: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    @classmethod
    def died(cls, how: str, output: str) -> Candidate:
        return cls(failure=("died", how), details=output)


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
        trajectory = train(run)
    except CannotApply as error:
        result.failure = "cannot run", str(error)
        result.details = "".join(traceback.format_exception(error.__cause__))
    except Exception as error:  # a patched model that crashes is a verdict like any other
        result.failure, result.details = ("raised", f"{type(error).__name__}: {error}"), traceback.format_exc()
    else:
        result.report = ours.status(trajectory.model)
        result.census = _census(trajectory.unpatched or run.template, trajectory.model)
        trajectory.model = trajectory.unpatched = None
        result.trajectory = trajectory
    result.launches = {name: n - before.get(name, 0) for name, n in ours.launches().items() if n > before.get(name, 0)}
    result.changed = changes()
    return result


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
