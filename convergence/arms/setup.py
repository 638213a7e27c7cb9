"""What a set-up is: how a model is wrapped, run and sharded. The set-ups are in setups.py."""

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
    """One process, nothing around the model; the base of all others.

    Attributes:
        does: one line for the documentation.
        ranks: how many processes train together.
        gpus: how many GPUs it needs where it trains on GPUs.
        needs: packages that must be installed.
        dtypes: of the parameters, in which it makes sense.
        orders: whether the patch can come "before" the model is wrapped, "after", or both; the first is the default.
        same_batch: whether all ranks are given the same rows.
        sums: whether the loss is the sum over the ranks, and not their mean.
        without: the steps that it does not know.
        sharded: whether weights are split, so that other ones need a model that is wrapped anew.
        kernels: those that it has places for, in addition to the model's own.
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
        """Why it cannot be had here, for this model; empty where it can."""
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
        """What every arm is a copy of, the truth included."""
        return model

    def truth(self) -> Setup:
        """What the truth trains in: one process, nothing around the model."""
        return Setup()

    def loaded(self, model: Any, dtype: torch.dtype) -> Any:
        """What an arm trains in place of ``model``, which has its weights. They were rounded to ``dtype``, and lie on
        the arm's device."""
        return model

    def cast(self, model: Any) -> None:
        """Give parameters of a model that is not the truth's another dtype than the model has."""

    def wrap(self, model: Any, device: torch.device) -> Any:
        """What is called in place of ``model``, which has its weights, and on ranks its process group."""
        return model

    def fitted(self, step: Step) -> Step:
        """What all arms, the truth included, get in place of ``step``."""
        return step

    def inputs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What this rank gives its model in place of ``kwargs``."""
        return kwargs

    def environment(self, folder: str) -> dict[str, str]:
        """Variables that each of its processes gets, and a folder that only this case uses."""
        return {}

    def running(self, device: torch.device) -> Any:
        """The context of a forward."""
        return contextlib.nullcontext()

    def backward(self, wrapped: Any, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self, model: nn.Module) -> None:
        """Between the last backward of a step and its optimizer: what nothing else does for the gradients."""

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks' rows."""
        return logits

    def optimizer(self, wrapped: Any, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
        return make(wrapped.parameters())

    def named(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter, under the name that it has in ``model``."""
        return model.named_parameters()

    def gathered(self, model: nn.Module, wrapped: Any) -> Any:
        """The context in which parameters are whole."""
        return contextlib.nullcontext()

    def gradients(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's gradient, whole."""
        for name, parameter in self.named(model, wrapped):
            if parameter.grad is not None:
                yield name, _whole(parameter.grad)

    def weights(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        with self.gathered(model, wrapped):
            for name, parameter in self.named(model, wrapped):
                yield name, _whole(parameter)


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
