"""A projection of a gated MLP or of attention as values: what an op multiplies by itself, in place of a module.

A module is taken so only where calling it is F.linear of its weight, plus its adapters, and nothing else. A weight that
bitsandbytes keeps in four bits is made dense by its own function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_kernels.ops import Projection
from liger_kernels.ops.lora.projection import as_it_is, runs_as_one
from liger_kernels.patching.lora.adapters import Adapter, adapters_of, foreseen_adapters
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.swap import mark_run


class Held(NamedTuple):
    """A :class:`liger_kernels.ops.Projection` that is known to fit."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    adapters: Sequence[Adapter]
    dense: Callable[[torch.Tensor], torch.Tensor]


def has_adapters(module: Any) -> bool:
    """Whether ``module`` is a LoRA layer that follows our recipe."""
    recipe = getattr(type(module), "_liger_kernels_recipe", None)
    return recipe is not None and recipe.kernel == "lora_linear"


def adapted(modules: Sequence[Any], x: torch.Tensor, inner: int | None = None) -> list[Held] | None:
    """:func:`as_projections`; None where none of ``modules`` has adapters."""
    return as_projections(modules, x, inner) if any(map(has_adapters, modules)) else None


def as_projections(modules: Sequence[Any], x: torch.Tensor, inner: int | None = None) -> list[Held] | None:
    """``modules`` as projections of x, with ``inner`` but for the last one, which has as many features; None where one
    of them has to be called. They count as run."""
    if probe.has_global_hooks() or not x.dim():
        return None
    found = []
    last = len(modules) - 1
    for i, module in enumerate(modules):
        one = _held(module, x, x.shape[-1] if inner is None or i < last else inner)
        if one is None:
            return None
        found.append(one)
    if not all(runs_as_one(x, group) for group in ((found,) if inner is None else (found[:-1], found[-1:]))):
        return None
    for module in modules:
        if has_adapters(module):
            mark_run(module)
    return found


def foreseen_projection(module: Any, step: Any) -> Projection:
    """``module`` as a projection without memory, whatever its base is."""
    adapters = foreseen_adapters(module, step) if has_adapters(module) else []
    weight = step.tensor(module.out_features, module.in_features, grad=False)
    return Projection(weight, None, adapters)


def _held(module: Any, x: torch.Tensor, features: int) -> Held | None:
    base: Any = module
    adapters: list[Adapter] = []
    if has_adapters(module):
        layer = adapters_of(module, x.device, x.dtype, features)
        if layer is None:
            return None
        base, adapters = layer
    weights = weights_of(base, x)
    if weights is None:
        return None
    weight, bias, dense, shape = weights
    if len(shape) != 2 or shape[1] != features or any(one.b.shape[0] != shape[0] for one in adapters):
        return None
    return Held(weight, bias, adapters, dense)


_Weights = tuple[torch.Tensor, torch.Tensor | None, Callable[[torch.Tensor], torch.Tensor], Sequence[int]]


def weights_of(base: Any, x: torch.Tensor, kind: type | None = None) -> _Weights | None:
    """Weight, bias, what makes the weight dense, and its shape then, where calling ``base`` is F.linear of these.
    ``kind`` is its class, if that is not what it was before a patch."""
    kind = type(base) if kind is None else kind
    if probe.has_hooks(base):
        return None
    parameters = base._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if bias is not None and (type(bias) not in PLAIN or bias.device != x.device):
        return None
    if kind is nn.Linear:
        if type(weight) not in PLAIN or weight.device != x.device or weight.dtype not in PROBED:
            return None
        if bias is not None and bias.dtype != weight.dtype:
            return None
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            return None
        return weight, bias, as_it_is, weight.shape
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None or kind is not bitsandbytes.nn.Linear4bit:
        return None
    state = getattr(weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False) or weight.device != x.device:
        return None
    if base.compute_type_is_set and base.compute_dtype not in (None, x.dtype):
        return None  # it casts x, and what comes of it back
    if bias is not None and bias.dtype != x.dtype:
        return None
    return weight, bias, partial(bitsandbytes.functional.dequantize_4bit, quant_state=state), state.shape
