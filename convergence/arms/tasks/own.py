"""A model of the user's own: its loss is the user's, and its outputs are whatever its forward returns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from convergence.arms.hooks import kept_activations, observed_hidden_states
from convergence.arms.lifetimes import Lifetimes
from convergence.arms.quantities import (
    EVALUATION,
    INITIAL,
    LOSS,
    OUTPUT,
    OUTPUT_GRADIENT,
    WITHOUT_GRADIENTS,
    Moment,
    Quantity,
)
from convergence.arms.tasks.task import Task
from convergence.arms.trajectory import Trajectory
from convergence.models.data import Step


@dataclass
class OwnBatch:
    """Tensors in tuples, lists and dicts."""

    values: Any

    def to(self, device: torch.device) -> OwnBatch:
        return OwnBatch(
            tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, self.values)
        )

    def rounded(self, dtype: torch.dtype) -> OwnBatch:
        """The same with what ``dtype`` holds of its floating-point tensors: every arm has the same inputs."""
        return OwnBatch(tree_map(functools.partial(_cast, dtype=dtype), self.values))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@dataclass(frozen=True)
class OwnTask(Task):
    """Its batches are :class:`OwnBatch`, and ``of_batch(model, values)`` is the loss."""

    of_batch: Callable[[nn.Module, Any], torch.Tensor]
    casts_buffers: ClassVar[bool] = True  # as ``model.to(dtype)`` does

    def loss(self, model: Any, batch: OwnBatch) -> torch.Tensor:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return self.of_batch(model, batch.rounded(dtype).values)

    def train_batch(
        self, model: Any, step: Step, batch: OwnBatch, result: Trajectory, at: Moment, lifetimes: Lifetimes
    ) -> None:
        with contextlib.ExitStack() as stack:
            if at.phase == INITIAL:
                stack.enter_context(kept_activations(model, (), result, at))
                stack.enter_context(observed_hidden_states(model, result, at, lifetimes))
                stack.enter_context(observed_outputs(model, result, at, lifetimes))
            loss = self.loss(model, batch)
            lifetimes.watch("the loss", loss)
            lifetimes.watch_graph(loss)
            (loss / len(step.batches)).backward()
        result.record(LOSS, at, loss)

    def evaluate(self, model: Any, batch: OwnBatch, result: Trajectory, at: Moment, device: torch.device) -> None:
        for name in (EVALUATION,) if at.phase == INITIAL else (WITHOUT_GRADIENTS, EVALUATION):
            at = at._replace(step=name)
            model.train(name == WITHOUT_GRADIENTS)
            with torch.no_grad(), contextlib.ExitStack() as stack:
                if at.phase == INITIAL:
                    stack.enter_context(observed_hidden_states(model, result, at))
                if name == EVALUATION:
                    stack.enter_context(observed_outputs(model, result, at))
                result.record(LOSS, at, self.loss(model, batch.to(device)))
        model.train()

    def computed(self, model: Any, batch: OwnBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.loss(model, batch), []


@contextlib.contextmanager
def observed_outputs(
    model: nn.Module, result: Trajectory, at: Moment, lifetimes: Lifetimes | None = None
) -> Iterator[None]:
    """Inside, the floating-point tensors that the model returns are observed: without gradients their values, else what
    arrives there in the backward pass. Of several forwards, it is the last one's."""

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        for path, value in tree_flatten_with_path(output)[0]:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 1:
                continue  # the loss is observed by itself
            name = keystr(path).strip(".[]'") or "0"
            if lifetimes is not None:
                lifetimes.watch(f"the output {name}", value)
            if value.requires_grad:
                gradient = Quantity(OUTPUT_GRADIENT, name)
                value.register_hook(functools.partial(record, gradient))
            elif not torch.is_grad_enabled():
                result.record(Quantity(OUTPUT, name), at, value)

    def record(gradient: Quantity, value: torch.Tensor) -> None:
        result.record(gradient, at, value)

    hook = model.register_forward_hook(returned)
    try:
        yield
    finally:
        hook.remove()
