"""Models of the user's own as models of the proof: any architecture, any inputs, any loss.

A user describes each with a :class:`Model`. ``--models-from`` names the function that returns the descriptions.
:class:`Own` is a row like those in ``models.py``; its name says where the description is found.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from convergence.arms.tasks.own import OwnBatch, OwnTask
from convergence.models.data import Batch, Step, seed_generators
from convergence.models.models import Row
from convergence.named import load

OPTION = "--models-from"
PROFILE = "own"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Model:
    """A model that a patch is judged on.

    Args:
        name: letters, digits, and any of "_.-".
        build: ``build()`` makes the unpatched model, in float32 on the CPU. Generators are seeded before. The model
            must compute the same in two calls: no dropout, or a rate of 0.
        batches: ``batches()`` makes at least two batches, on the CPU: tensors in tuples, lists and dicts, as deep as
            it takes. Floating-point tensors are converted to the dtype that the model trains in.
        loss: ``loss(model, batch)`` calls the model and returns the loss: a tensor of one element, with a gradient.
    """

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[], Sequence[Any]]
    loss: Callable[[nn.Module, Any], torch.Tensor]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"the name of a Model is a {type(self.name).__name__}, {self.name!r}; it takes text")
        for what in ("build", "batches", "loss"):
            if not callable(function := getattr(self, what)):
                raise TypeError(
                    f"{what} of the Model {self.name!r} is a {type(function).__name__}; it takes a function"
                )


@dataclass(frozen=True)
class Own(Row):
    """The row of ``model``, which the function ``source`` ("package.module:function") returned."""

    source: str
    model: Model

    kernels = ()

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.source}/{self.model.name}"

    @property
    def task(self) -> OwnTask:  # type: ignore[override]
        return OwnTask(_LossOf(self.name))

    def model_class(self) -> Any:
        return type(_built(self))

    def classes(self) -> list[type]:
        return list({type(module): None for module in _built(self).modules()})

    def build(self, seed: int) -> nn.Module:
        """The unpatched model in float32 on the CPU.

        Raises:
            TypeError, ValueError: ``build`` raised, or returned something else.
        """
        seed_generators(seed)
        model = self._called(f"build() of {self.name}", self.model.build)
        if not isinstance(model, nn.Module):
            raise TypeError(f"build() of {self.name} returned a {type(model).__name__}; it makes a torch.nn.Module")
        for name, parameter in model.named_parameters():
            if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
                raise ValueError(
                    f"build() of {self.name}: {name} is in {parameter.dtype} on {parameter.device.type}; "
                    "every parameter is float32 on the CPU"
                )
        return model.train()

    def data(self, profile: str, seed: int, dtype: torch.dtype) -> tuple[list[Step], Any]:
        """A step of each batch, one that accumulates the first two, and the first batch for evaluation.

        Raises:
            TypeError, ValueError: ``batches`` raised, or returned something else.
        """
        seed_generators(seed)
        given = self._called(f"batches() of {self.name}", self.model.batches)
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) < 2:
            count = f" of {len(given)}" if isinstance(given, Sequence) else ""
            raise ValueError(
                f"batches() of {self.name} returned a {type(given).__name__}{count}; it makes a list of at least two"
            )
        for number, batch in enumerate(given, 1):
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(batch)):
                raise TypeError(
                    f"batch {number} of {self.name} holds no tensor; a batch is tensors in tuples, lists, dicts"
                )
        batches: Any = [OwnBatch(batch).rounded(dtype) for batch in given]
        steps = [Step(f"batch {number}", [batch], trains=True) for number, batch in enumerate(batches, 1)]
        return [*steps, Step("accumulated", batches[:2], trains=True)], batches[0]

    def prompted(self, seed: int) -> Batch:
        raise ValueError("--profile consistency is for causal language models")

    def check(self) -> None:
        """Train nothing, but see that the model can be trained.

        Raises:
            TypeError, ValueError: a part of the description is not what it should be, in words for its author.
        """
        model = self.build(0)
        batch = self.data(PROFILE, 0, torch.float32)[0][0].batches[0]
        losses = [self._called(f"loss(model, batch) of {self.name}", self.task.loss, model, batch) for _ in range(2)]
        for loss in losses:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                what = type(loss).__name__
                if isinstance(loss, torch.Tensor):
                    gradient = "with" if loss.requires_grad else "without"
                    what = f"tensor of shape {tuple(loss.shape)} {gradient} a gradient"
                raise TypeError(
                    f"loss(model, batch) of {self.name} returned a {what}; "
                    "it returns a tensor of one element with a gradient"
                )
        if not torch.equal(*(loss.detach() for loss in losses)):
            raise ValueError(f"loss(model, batch) of {self.name} differs between two calls; set dropout to 0")

    def _called(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """
        Raises:
            ValueError: the user's function raised, with what it raised.
        """
        try:
            return function(*arguments)
        except Exception as error:
            raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _LossOf:
    """The loss of the row ``name``. It is found by name in another process, which the user's function may not reach."""

    name: str

    def __call__(self, model: nn.Module, values: Any) -> torch.Tensor:
        row = find(self.name)
        assert row is not None
        return row.model.loss(model, values)


@functools.lru_cache(maxsize=4)
def _built(row: Own) -> nn.Module:
    return row.build(0)


@functools.cache
def rows(source: str) -> tuple[Own, ...]:
    """The rows of every model that the function ``source`` returns.

    Raises:
        ValueError: it cannot be imported or called, or returned something else.
    """
    given = load(source, OPTION, "without arguments")
    try:
        models = given()
    except Exception as error:
        raise ValueError(f"{source} raised {type(error).__name__}: {error}") from error
    if not isinstance(models, Sequence) or not models or not all(isinstance(model, Model) for model in models):
        raise ValueError(f"{source} returned {_shown(models)}; it returns a list of convergence.Model")
    names = [model.name for model in models]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{source}: a model is called {name!r}; allowed are letters, digits and _.-")
        if names.count(name) > 1:
            raise ValueError(f"{source}: {names.count(name)} models are called {name!r}; each needs a name of its own")
    return tuple(Own(source, model) for model in models)


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return f"a {type(value).__name__}"


def select(source: str, names: str) -> list[Own]:
    """The models of ``source`` that ``--models`` names; all where it names none.

    Raises:
        ValueError: there is no such model, with the allowed names.
    """
    known = {row.model.name: row for row in rows(source)}
    wanted = [name.strip() for name in names.split(",")]
    if wanted == ["all"]:
        return list(known.values())
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown model {name!r}; allowed are all, {', '.join(known)}")
    return [row for name, row in known.items() if name in wanted]


def find(name: str) -> Own | None:
    """The row of that name; None where it is no model of the user's own."""
    source, slash, model = name.rpartition("/")
    if not slash or ":" not in source or "?" in name:  # the name of a checkpoint has a "?"
        return None
    return {row.model.name: row for row in rows(source)}.get(model)
