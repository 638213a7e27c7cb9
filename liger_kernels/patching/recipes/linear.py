"""``patch(invariant=True)``: plain linear layers, whose products then have a fixed number of rows."""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops._row_blocks import invariant_linear
from liger_kernels.patching.reads import names_in
from liger_kernels.patching.recipes.probe import PLAIN
from liger_kernels.patching.recipes.recogniser import Recogniser
from liger_kernels.patching.recipes.rotary import RopeRecipe
from liger_kernels.patching.report import Left
from liger_kernels.patching.swap import Recipe, mark_run, recipe_of

KERNEL = "invariant_linear"


@dataclass(frozen=True)
class LinearRecipe(Recipe):
    """torch's own linear layer, in blocks of rows."""

    live = None  # all that upstream's forward reads is weight and bias

    @property
    def kernel(self) -> str:
        return KERNEL

    @property
    def detail(self) -> str:
        return "x W^T + b in blocks of rows"

    def namespace(self, base: Any) -> dict[str, Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            y = product(self, *args, **kwargs)
            if y is None:
                return base.forward(self, *args, **kwargs)
            mark_run(self)
            return y

        return {"forward": forward}


def product(linear: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """What ``linear`` makes of its arguments, in blocks of rows; None where it has to compute that itself."""
    given = (*args, *kwargs.values())
    if len(given) != 1 or not _multiplies(linear, *given):
        return None
    return invariant_linear(*given, linear.weight, linear.bias)


def _multiplies(linear: Any, x: Any) -> bool:
    """Whether ``linear`` of ``x`` is a product that blocks of rows compute; else torch is to raise, or to dispatch."""
    weight, bias = linear.weight, linear.bias
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        all(type(t) in PLAIN and t.device == x.device for t in tensors)
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and (all(t.dtype == x.dtype for t in tensors) or torch.is_autocast_enabled(x.device.type))
    )


LINEARS = Recogniser((KERNEL,), lambda module: type(module) is nn.Linear, lambda module: LinearRecipe())

# What a forward calls that multiplies rows by one another, or by a matrix of its own.
_PRODUCTS = {
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear", "conv1d", "conv2d", "_grouped_mm", "grouped_mm"),
    *("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS", "attention_interface"),
}


def not_invariant(model: nn.Module) -> list[Left]:
    """What multiplies in ``model`` and is neither ours nor a linear layer in blocks: attention, for one."""
    found = []
    for path, module in model.named_modules():
        recipe = recipe_of(module)
        if recipe is not None and not isinstance(recipe, RopeRecipe):  # which is in attention, and no product
            continue
        if isinstance(module, nn.Linear):
            found.append(Left(path, type(module).__name__, "a linear layer of a class of its own, or not patched"))
        elif names := _products(getattr(type(module), "_liger_kernels_base", type(module))):
            found.append(Left(path, type(module).__name__, f"its own forward multiplies ({', '.join(names)})"))
    return found


def _products(cls: type) -> list[str]:
    """What of :data:`_PRODUCTS` the forward of ``cls`` names itself."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)  # type: ignore[attr-defined]
    if code is None:
        return []
    operators = {one.argrepr for one in dis.get_instructions(code)}
    return sorted((names_in(code) & _PRODUCTS) | ({"@"} & operators))
