"""The base class of set-ups. A set-up says how a model is wrapped, run and sharded. The folder setups has all
set-ups."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from convergence.models.data import Step

BOTH = ("float32", "bfloat16")


class Setup:
    """One process with an unwrapped model; the base of all other set-ups.

    Attributes:
        does: one line for the documentation.
        ranks: the number of processes that train together.
        gpus: the number of GPUs that a run on GPUs needs.
        needs: packages that must be installed.
        dtypes: the dtypes of parameters that the set-up supports.
        orders: whether the patch can come "before" the model is wrapped, "after", or both. The first entry is the
            default.
        same_batch: whether all ranks get the same rows.
        sums: whether the loss is the sum over the ranks, and not their mean.
        without: the steps that the set-up cannot run.
        sharded: whether weights are split. Other weights then need a newly wrapped model.
        kernels: the kernels that the set-up can use in addition to the model's.
    """

    name = "plain"
    does = "one process, nothing around the model"
    ranks = 1
    gpus = 1
    needs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = BOTH
    orders: tuple[str, ...] = ("before",)
    same_batch = False
    sums = False
    without: tuple[str, ...] = ()
    sharded = False
    kernels: tuple[str, ...] = ()

    def absent(self, model: nn.Module | None, dtype: str, device: str) -> str:
        """Why the set-up cannot run here with this model; empty if it can."""
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                return f"the set-up {self.name} needs {package}, which is not installed"
        if dtype not in self.dtypes:
            return f"the set-up {self.name} is for parameters in {' or '.join(self.dtypes)}"
        gpus = max(self.ranks, self.gpus)
        if device == "cuda" and torch.cuda.device_count() < gpus:
            return f"the set-up {self.name} needs {gpus} GPUs; this machine has {torch.cuda.device_count()}"
        return ""

    def template(self, model: nn.Module) -> nn.Module:
        """The model that every arm copies, including the truth."""
        return model

    def truth(self) -> Setup:
        """The set-up of the truth: one process with an unwrapped model."""
        return Setup()

    def loaded(self, model: Any, dtype: torch.dtype) -> Any:
        """The model that an arm trains in place of ``model``. The weights of ``model`` were rounded to ``dtype`` and
        are on the arm's device."""
        return model

    def cast(self, model: Any) -> None:
        """Change the dtype of some parameters, in every arm but the truth."""

    def wrap(self, model: Any, device: torch.device) -> Any:
        """The object to call in place of ``model``. ``model`` already has its weights, and ranks have their process
        group."""
        return model

    def fitted(self, step: Step) -> Step:
        """The step that all arms, including the truth, run in place of ``step``."""
        return step

    def inputs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments that this rank passes to its model in place of ``kwargs``."""
        return kwargs

    def environment(self, folder: str) -> dict[str, str]:
        """Environment variables of each process. ``folder`` is used by this case alone."""
        return {}

    def running(self, device: torch.device) -> Any:
        """The context of a forward."""
        return contextlib.nullcontext()

    def backward(self, wrapped: Any, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self, model: nn.Module) -> None:
        """Reduce gradients, between the last backward of a step and the optimizer, if nothing else does."""

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks' rows."""
        return logits

    def optimizer(self, wrapped: Any, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
        return make(wrapped.parameters())

    def named(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter with its name in ``model``."""
        return model.named_parameters()

    def gathered(self, model: nn.Module, wrapped: Any) -> Any:
        """The context in which parameters are whole."""
        return contextlib.nullcontext()

    def gradients(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's whole gradient."""
        for name, parameter in self.named(model, wrapped):
            if parameter.grad is not None:
                yield name, _whole(parameter.grad)

    def weights(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        with self.gathered(model, wrapped):
            for name, parameter in self.named(model, wrapped):
                yield name, _whole(parameter)


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
