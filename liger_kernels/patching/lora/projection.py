"""A projection of a gated MLP or of attention as values: what an op multiplies by itself, in place of a module.

A module is taken so only where calling it is F.linear of its weight, plus its adapters, and nothing else. A weight that
bitsandbytes keeps in NF4 is made dense by a kernel, one of another four bits by bitsandbytes' own function.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_kernels.ops import Projection
from liger_kernels.ops.lora.nf4 import NestedScales, PackedNf4
from liger_kernels.ops.lora.projection import as_it_is, runs_as_one
from liger_kernels.ops.runtime.dispatch import use_triton
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
    if state is None or getattr(state, "packing_format_for_cpu", False) or state.absmax.device != x.device:
        return None
    if base.compute_type_is_set and base.compute_dtype not in (None, x.dtype):
        return None  # it casts x, and what comes of it back
    if bias is not None and bias.dtype != x.dtype:
        return None
    return weight, bias, _dense_of(weight, state, bitsandbytes), state.shape


class _Read(NamedTuple):
    """A state of bitsandbytes as it was read. Neither the state nor its weight is held, or both would stay forever."""

    state: Callable[[], Any]
    tensors: tuple[Any, ...]
    nf4: PackedNf4 | None


_read: dict[tuple[int, int], _Read] = {}  # by the ids of a state that is alive and of its weight


def _dense_of(weight: torch.Tensor, state: Any, bitsandbytes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes ``weight`` dense: the kernel, or bitsandbytes where it does not run. A state is read once, and again
    where one of its tensors is another one."""
    inner, key = state.state2, (id(state), id(weight))
    tensors = (
        state.absmax,
        state.code,
        state.offset,
        inner and inner.absmax,
        inner and inner.code,
        state.dtype,
    )
    known = _read.get(key)
    if known is None or known.state() is not state or not all(map(operator.is_, known.tensors, tensors)):
        with torch._C.DisableTorchFunctionSubclass():  # bitsandbytes' class of parameters takes long to say what it is
            nf4 = _nf4(weight, state)
        known = _read[key] = _Read(weakref.ref(state, lambda _: _read.pop(key, None)), tensors, nf4)
    if known.nf4 is None or not use_triton(state.code):
        return partial(bitsandbytes.functional.dequantize_4bit, quant_state=state)
    return known.nf4


def _nf4(weight: torch.Tensor, state: Any) -> PackedNf4 | None:
    """How bitsandbytes keeps ``weight`` in NF4; None where it is kept in another way."""
    nested, n_numbers = None, weight.numel() * 2
    if (
        state.quant_type != "nf4"
        or weight.dtype is not torch.uint8
        or weight.shape != (weight.numel(), 1)
        or not weight.is_contiguous()
        or weight.device != state.absmax.device
        or math.prod(state.shape) != n_numbers
        or state.dtype not in PROBED
        or not _is_vector(state.code, 16, torch.float32)
    ):
        return None
    n_scales = -(-n_numbers // state.blocksize)
    if inner := state.state2:
        if (
            inner.state2
            or not _is_vector(inner.code, 256, torch.float32)
            or not _is_vector(inner.absmax, -(-n_scales // inner.blocksize), torch.float32)
            or not _is_vector(state.offset, 1, torch.float32)
        ):
            return None
        nested = NestedScales(inner.code, inner.absmax, inner.blocksize, state.offset)
    if not _is_vector(state.absmax, n_scales, torch.uint8 if inner else torch.float32):
        return None
    return PackedNf4(state.code, state.absmax, state.blocksize, state.shape, state.dtype, nested)


def _is_vector(t: Any, size: int, dtype: torch.dtype) -> bool:
    return type(t) in PLAIN and t.dtype is dtype and t.numel() == size and t.is_contiguous()
