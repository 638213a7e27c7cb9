"""The row of a case's model, of whichever kind: a mini model, a shape of real size, a checkpoint, or the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from convergence.models import own, scale
from convergence.models.checkpoint import Checkpoint
from convergence.models.models import MODELS, Row
from convergence.report.records import Case


def find(name: str) -> Row:
    """The row of that name, of whichever kind."""
    return MODELS.get(name) or scale.find(name) or own.find(name) or Checkpoint.parse(name)


def construct(case: Case) -> Callable[[], nn.Module] | None:
    """What makes the model of ``case`` where its patch is one of classes."""
    return functools.partial(find(case.model).build, case.seed) if case.scope == "class" else None
