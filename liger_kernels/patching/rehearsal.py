"""What the first step of a patched model will launch, foreseen from its recipes, so that threads compile it together.

A guess that is wrong costs the threads their time, and the step compiles what it needs at its launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from liger_kernels.ops.runtime.ahead import compile_ahead, wake
from liger_kernels.ops.runtime.dispatch import keeps_programs
from liger_kernels.patching.recipes.probe import probing
from liger_kernels.patching.swap import recipe_of


@dataclass(frozen=True)
class ForeseenStep:
    """What is known of a step before it begins.

    Attributes:
        batch, length: of the token ids.
        stream: the dtype between the layers, that of the embeddings.
        linear: the dtype that linear layers return.
    """

    batch: int
    length: int
    stream: torch.dtype
    linear: torch.dtype

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = True) -> torch.Tensor:
        """Without memory; in the dtype of linear layers, unless another is given."""
        dtype = self.linear if dtype is None else dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)

    def like(self, module: torch.nn.Module, name: str, dtype: torch.dtype | None = None) -> Any:
        """A parameter of ``module`` without memory, in its own dtype or another; None where it is None.

        Raises:
            KeyError: it is none that the module holds. A parametrisation computes at each read, and may change."""
        parameter = module._parameters[name]
        if parameter is None:
            return None
        wanted = parameter.dtype if dtype is None else dtype
        return self.tensor(*parameter.shape, dtype=wanted, grad=parameter.requires_grad)


def wake_compiler(model: torch.nn.Module) -> None:
    """Begin what the first compilation waits for, where ``model`` is on a GPU; returns at once."""
    first = next(model.parameters(), None)
    if first is not None and first.device.type == "cuda" and keeps_programs():
        wake(first.device)


def rehearse(model: Any, inputs: Any) -> None:
    """Begin to compile what a training step of ``model`` launches; returns at once.

    Args:
        model: a patched model, about to run.
        inputs: its token ids [batch, length] or their embeddings [batch, length, hidden], on a GPU. For anything else
            there is nothing to foresee.
    """
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2 or inputs.device.type != "cuda":
        return
    if not keeps_programs() or not torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
        return
    weight = model.get_input_embeddings()._parameters.get("weight")
    if weight is None:  # computed at each read
        return
    stream = weight.dtype
    linear = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else stream
    batch, length = inputs.shape[:2]
    with probing():
        compile_ahead(foreseen(model, ForeseenStep(batch, length, stream, linear)), inputs.device)


def foreseen(model: torch.nn.Module, step: ForeseenStep) -> list[Callable[[], Any]]:
    """The calls of ops in ``step``, forward and backward, on tensors without memory; each different one once."""
    found: dict[Any, Callable[[], Any]] = {}
    for module in model.modules():
        recipe = recipe_of(module)
        with contextlib.suppress(Exception):  # a module may lack whatever a recipe reads to foresee
            for call in recipe.foreseen(module, step) if recipe is not None else ():
                found.setdefault(_key(call), partial(_there_and_back, call))
    return list(found.values())


def _key(call: partial[Any]) -> Any:
    """What tells calls apart that launch different programs."""

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        return repr(value)

    return call.func, *map(described, call.args), *((name, described(v)) for name, v in call.keywords.items())


def _there_and_back(call: partial[Any]) -> None:
    result = call()
    results = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None and y.requires_grad]
    torch.autograd.backward(results, [torch.empty_like(y) for y in results])
