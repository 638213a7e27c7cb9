"""A template on its way to a process of other versions, which build the model themselves and get its weights.

The other transformers may draw other initial weights, and its classes may have other attributes. So neither a pickled
module nor a seed is sent. All arms of a case start from the same weights, wherever they train.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from convergence.arms.trajectory import CannotApply
from convergence.models.rows import find
from convergence.report.records import Case


class Portable:
    """The template of ``case``. Unpickled, it is the model that the versions there build, with these weights."""

    def __init__(self, template: nn.Module, case: Case) -> None:
        self.template, self.case = template, case

    def __reduce__(self) -> Any:
        # A checkpoint reads its weights from the same files in every process.
        weights = None if find(self.case.model).is_long else self.template.state_dict()
        return _built, (self.case.model, self.case.seed, weights)


def _built(model: str, seed: int, weights: dict[str, torch.Tensor] | None) -> nn.Module:
    """Raises CannotApply: the versions here build a model with other parameters."""
    template = find(model).build(seed)
    if weights is not None:
        try:
            template.load_state_dict(weights)
        except RuntimeError as error:
            raise CannotApply(f"the transformers there builds {model} with other parameters: {error}") from error
    return template


def inputs_digest(given: Any) -> str:
    """What tells the inputs ``given`` to an arm (:class:`convergence.case.Inputs`) from any others: initial weights,
    steps, evaluation, optimizers and long run."""
    found = hashlib.sha256()
    _add(found, [given.template.state_dict(), given.steps, given.evaluation, given.phases, given.curve])
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif dataclasses.is_dataclass(value):
        _add(found, vars(value))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            found.update(f"{name}: ".encode())
            _add(found, item)
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)} of ".encode())
        for item in value:
            _add(found, item)
    else:
        found.update(f"{value!r} ".encode())
