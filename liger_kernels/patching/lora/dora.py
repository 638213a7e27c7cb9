"""Recognise PEFT's DoRA layers by what they compute, and run them as one op (ops/lora/dora_linear.py).

Such a layer scales each output of its base and its adapter to a learned magnitude. PEFT makes B A, which is as large as
the weight, in every forward; the op does not. One adapter runs so, without dropout, on a base whose weight is known.
State is read at each call; where a call is anything else, PEFT's own forward runs, and the report counts why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from liger_kernels.ops import LoraAdapter, dora_linear, dora_linear_ref, dora_norm, dora_norm_ref
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.lora.adapters import CONTAINERS, active_names, foreseen_adapters, known_adapters
from liger_kernels.patching.lora.layer import (
    PROBED_OUT,
    STATE,
    UNREAD,
    VARIANTS,
    is_lora_layer,
    key_of_layer,
    peft_computes,
    same_in_bfloat16,
    same_in_float64,
    small_copy,
)
from liger_kernels.patching.lora.projection import weights_of
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict
from liger_kernels.patching.swap import Calls, Recipe, mark_run
from liger_kernels.patching.watch import unchanged

_MAGNITUDES = "lora_magnitude_vector"
_FORMULA = "m / |W + scale * B A| * (x W^T + scale * B(A(x))) + bias"


@dataclass(frozen=True)
class DoraRecipe(Recipe):
    """A layer whose forward scales each output of base and adapter to a magnitude."""

    kernel = "dora_linear"
    detail = _FORMULA
    live = ("base_layer", _MAGNITUDES, *CONTAINERS, *STATE, *VARIANTS, *UNREAD)

    def foreseen(self, module: Any, step: Any) -> Calls:
        adapters = foreseen_adapters(module, step)
        if len(adapters) != 1:
            return ()
        (name,) = active_names(module)
        x = step.tensor(step.batch, step.length, module.in_features)
        weight = step.tensor(module.out_features, module.in_features, grad=False)
        bias = step.like(module.base_layer, "bias")
        magnitude = step.like(module._modules[_MAGNITUDES][name], "weight")
        return (partial(_foreseen, x, weight, adapters[0], magnitude, bias),)

    def namespace(self, base: Any) -> dict[str, Any]:
        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if type(x) not in PLAIN or x.dtype not in PROBED or left_to_inductor("lora_linear", x):
                return base.forward(self, x, *args, **kwargs)
            state = self.__dict__
            layer = state["_modules"].get("base_layer")
            if state.get("_disable_adapters") or state.get("merged_adapters") or layer is None or not unchanged(self):
                return base.forward(self, x, *args, **kwargs)
            if args or kwargs:
                return peft_computes(base, self, "the call has more arguments than x", x, *args, **kwargs)
            known = _known(self, layer, x)
            if isinstance(known, str):
                return peft_computes(base, self, known, x)
            if known is None:
                return base.forward(self, x)
            mark_run(self)
            weight, dense, adapter, magnitude, bias = known
            return dora_linear(x, layer, adapter, magnitude, _length(self, weight, dense, adapter), bias)

        return {"forward": forward}


def _foreseen(
    x: torch.Tensor,
    weight: torch.Tensor,
    adapter: LoraAdapter,
    magnitude: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    base = partial(F.linear, weight=weight, bias=bias)
    return dora_linear(x, base, adapter, magnitude, dora_norm(weight, adapter), bias)


class _Length(NamedTuple):
    """The length of the rows of a layer in its last forward, and what it was computed from."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]  # A, B and the weight, which this does not keep alive
    state: tuple[Any, ...]
    norm: torch.Tensor

    def is_of(self, tensors: tuple[torch.Tensor, ...], state: tuple[Any, ...]) -> bool:
        return self.state == state and all(ref() is t for ref, t in zip(self.tensors, tensors, strict=True))


_lengths: weakref.WeakKeyDictionary[nn.Module, _Length] = weakref.WeakKeyDictionary()


def _length(
    module: nn.Module,
    weight: torch.Tensor,
    dense: Callable[[torch.Tensor], torch.Tensor],
    adapter: LoraAdapter,
) -> torch.Tensor:
    """:func:`dora_norm` of the layer. A forward that checkpointing runs again in the backward has the length that it
    had. A forward outside a backward computes it: weights may have changed behind autograd's back, as merging does."""
    tensors = adapter.a, adapter.b, weight
    state = (*[t._version for t in tensors], adapter.scale)
    before = _lengths.get(module)
    if torch._C._current_graph_task_id() != -1 and before is not None and before.is_of(tensors, state):
        return before.norm
    norm = dora_norm(dense(weight.detach()), adapter)
    _lengths[module] = _Length(tuple(map(weakref.ref, tensors)), state, norm)
    return norm


_Known = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], LoraAdapter, torch.Tensor, torch.Tensor | None]


def _known(module: Any, layer: Any, x: torch.Tensor) -> _Known | str | None:
    """What the op takes: weight, what makes it dense, adapter, magnitude, bias; or why PEFT computes, or None where it
    casts or raises."""
    names = active_names(module)
    if not names:
        return None
    if len(names) > 1:
        return "several adapters are active, one of which scales to a magnitude"
    magnitudes = module._modules.get(_MAGNITUDES)
    magnitude_of = None if magnitudes is None else magnitudes._modules.get(names[0])
    if magnitude_of is None:
        return "an adapter without a magnitude is active"
    adapters = known_adapters(module, names, x.device, x.dtype, x.shape[-1] if x.dim() else None, variants=True)
    if not isinstance(adapters, list):
        return adapters
    (one,) = adapters
    if one.dropped is not None:
        return "an adapter that scales to a magnitude has an active dropout"
    magnitude = magnitude_of._parameters.get("weight")
    if type(magnitude) not in PLAIN or probe.has_hooks(magnitude_of):
        return "its magnitude is no plain tensor, or somebody watches it"
    weights = weights_of(layer, x)
    if weights is None:
        return "the weight that an adapter with a magnitude changes is not known"
    weight, bias, dense, shape = weights
    outputs = one.b.shape[:1]
    if one.bias is not None or [*shape] != [*outputs, x.shape[-1]] or not (bias is None or bias.shape == outputs):
        return None
    if magnitude.shape != outputs or magnitude.device != x.device or magnitude.dtype not in PROBED:
        return None
    return weight, dense, LoraAdapter(one.a, one.b, float(one.scale)), magnitude, bias


def is_dora_layer(module: nn.Module) -> bool:
    """One of PEFT's LoRA layers each of whose adapters has a magnitude."""
    if not is_lora_layer(module):
        return False
    magnitudes: Any = module._modules.get(_MAGNITUDES)
    adapters: Any = module._modules["lora_A"]
    return type(magnitudes) is nn.ModuleDict and set(magnitudes) == set(adapters)


def recognise_dora(module: Any) -> Verdict:
    """The recipe for ``module``, or why PEFT goes on computing it."""
    if any(type(linear) is not nn.Linear for linear in module._modules["lora_A"].values()):
        return ()  # said by the recogniser of LoRA
    try:
        with probe.probing():
            for name in module._modules["lora_A"]:
                reference = partial(_reference, name)
                for has_bias in (False, True):
                    clone = _small_copy(module, name, has_bias)
                    if not same_in_float64(module, clone, [name], reference, _MAGNITUDES):
                        return (probe.with_origin(f"it is not {_FORMULA}", type(module)),)
                if not same_in_bfloat16(module, _small_copy(module, name, has_bias=True), reference):
                    return (f"it rounds in another place than {_FORMULA}",)
    except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
        return (probe.with_origin(f"its magnitudes cannot be probed ({probe.describe(error)})", type(module)),)
    return DoraRecipe()


def _small_copy(module: Any, name: str, has_bias: bool) -> Any:
    """A copy with a small base, a small adapter ``name`` and a magnitude that is not the length of the rows."""
    clone = small_copy(module, [name], masks=False)
    if has_bias:
        clone.base_layer._parameters["bias"] = nn.Parameter(probe.randn(PROBED_OUT, dtype=torch.float64))
    magnitude = nn.Parameter(2 + probe.randn(PROBED_OUT, dtype=torch.float64).abs())
    scaled: dict[str, Any] = {name: probe.bare_copy(module._modules[_MAGNITUDES][name], weight=magnitude)}
    clone._modules[_MAGNITUDES] = probe.bare_copy(module._modules[_MAGNITUDES], **scaled)
    return clone


def _reference(name: str, clone: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = (clone._modules[kind][name].weight for kind in ("lora_A", "lora_B"))
    adapter = LoraAdapter(a, b, float(clone.scaling[name]))
    layer = clone.base_layer
    norm = dora_norm_ref(layer.weight.detach(), adapter)
    return dora_linear_ref(x, layer, adapter, clone._modules[_MAGNITUDES][name].weight, norm, layer.bias)


def _key(module: Any) -> Hashable:
    """As of any LoRA layer; a probe puts its own in place of the magnitudes."""
    return key_of_layer(module, _MAGNITUDES)


DORA = Recogniser(("dora_linear",), is_dora_layer, recognise_dora, key=_key)
