"""Recognise PEFT's LoRA layers by what they compute, and run their adapters as one op.

A layer is one whose forward is base(x) + the sum of scale * B(A(dropout(x))). Where its base is a weight and nothing
else, the op multiplies by it (projection.py); any other base is called as the module that it is. Which adapters are
active, their scales, weights and dropout are read at each call. Where a call is anything else, PEFT's own forward runs,
and the report counts why.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import LoraAdapter, adapted_linears, lora_linear_ref
from liger_kernels.ops.lora.lora_linear import cast_as_base, lora_linear_of_checked
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.lora_adapters import (
    CONTAINERS,
    active_names,
    drop,
    is_variant,
    known_adapters,
)
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.recipes.projection import foreseen_projection
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.recipes.shared_input import own_product
from liger_kernels.patching.report import REPORT
from liger_kernels.patching.swap import Calls, Recipe, mark_run
from liger_kernels.patching.watch import unchanged

_LORA = "peft.tuners.lora"
# What says which adapters run, and how; their variants (weights decomposed, and so on) are by name in the last two.
_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "cast_input_dtype_enabled")
_VARIANTS = ("lora_variant", "use_dora")
# What only merging and adding an adapter read.
_UNREAD = ("fan_in_fan_out", "lora_bias", "lora_alpha", "r", "use_rslora")


@dataclass(frozen=True)
class LoraRecipe(Recipe):
    """A layer whose forward is base(x) + the sum of scale * B(A(dropout(x))) over its active adapters."""

    kernel = "lora_linear"
    detail = "base(x) + sum of scale * B(A(dropout(x)))"
    live = ("base_layer", *CONTAINERS, *_STATE, *_VARIANTS, *_UNREAD)

    def foreseen(self, module: Any, step: Any) -> Calls:
        one = foreseen_projection(module, step)
        if not one.adapters:
            return ()
        x = step.tensor(step.batch, step.length, module.in_features)
        return (partial(adapted_linears, x, (one,)),)

    def namespace(self, base: Any) -> dict[str, Any]:
        kernel = self.kernel

        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if type(x) not in PLAIN or x.dtype not in PROBED or left_to_inductor("lora_linear", x):
                return base.forward(self, x, *args, **kwargs)
            if not args and not kwargs and (result := own_product(self, x)) is not None:
                return result
            state = self.__dict__
            layer = state["_modules"].get("base_layer")
            if state.get("_disable_adapters") or state.get("merged_adapters") or layer is None or not unchanged(self):
                return base.forward(self, x, *args, **kwargs)
            inner = getattr(type(layer), "_liger_kernels_recipe", None)
            if inner is not None and inner.kernel != kernel:
                return _own(base, self, "its base is a head that was patched before", x, *args, **kwargs)
            if args or kwargs:
                return _own(base, self, "the call has more arguments than x", x, *args, **kwargs)
            names = active_names(self)
            if not names:
                return base.forward(self, x)
            adapters = known_adapters(self, names, x.device, x.dtype, x.shape[-1] if x.dim() else None)
            if isinstance(adapters, str):
                return _own(base, self, adapters, x)
            if adapters is None:
                return base.forward(self, x)
            if any(one.dropped is not None for one in adapters):
                adapters = drop(adapters, x)
                if isinstance(adapters, str):
                    return _own(base, self, adapters, x)
            mark_run(self)
            if type(layer) is nn.Linear and not probe.has_hooks(layer):
                x = cast_as_base(x)
            return lora_linear_of_checked(x, layer, adapters)

        return {"forward": forward}


def _own(base: Any, module: Any, reason: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result of PEFT's own forward, which is counted."""
    report = module.__dict__.get(REPORT)
    if report is not None:
        report.fallbacks[f"PEFT computed an adapter: {reason}"] += 1
    result: torch.Tensor = base.forward(module, *args, **kwargs)
    return result


def is_lora_layer(module: nn.Module) -> bool:
    """One of PEFT's LoRA layers that keeps its adapters as linear layers."""
    cls = getattr(sys.modules.get(_LORA), "LoraLayer", None)
    if cls is None or not isinstance(module, cls) or adapts_experts(module):
        return False
    containers: list[Any] = [module._modules.get(kind) for kind in CONTAINERS]
    return all(type(container) is nn.ModuleDict for container in containers) and len(containers[0]) > 0


def adapts_experts(module: nn.Module) -> bool:
    """One of PEFT's LoRA layers around a parameter that packs several experts."""
    cls = getattr(sys.modules.get(_LORA), "ParamWrapper", None)
    return cls is not None and isinstance(module, cls) and getattr(module, "num_experts", 1) > 1


def recognise_lora(module: Any) -> Verdict:
    """The recipe for ``module``, or why PEFT goes on computing its adapters."""
    names = [name for name in module._modules["lora_A"] if not is_variant(module, name)]
    if not names:
        return ("its adapters are variants of LoRA: PEFT computes them",)
    if any(type(module._modules["lora_A"][name]) is not nn.Linear for name in names):
        return ("its adapters are no linear layers: PEFT computes them",)
    try:
        with probe.probing():
            for masks in (False, True):
                if not _same_in_float64(module, names, masks):
                    return (probe.with_origin("it is not base(x) + sum of scale * B(A(dropout(x)))", type(module)),)
            if not _same_in_bfloat16(module, names):
                return ("it rounds in another place than base(x) + sum of scale * B(A(dropout(x)))",)
    except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
        return (probe.with_origin(f"its adapters cannot be probed ({probe.describe(error)})", type(module)),)
    return LoraRecipe()


class _Mask(nn.Module):
    """A dropout that drops the same elements at every call."""

    def __init__(self, period: int):
        super().__init__()
        self.period = period

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(x.numel(), device="cpu") % self.period > 0
        return x * kept.view(x.shape) * 1.5


_IN, _OUT = 6, 10


def _small_copy(module: Any, names: list[str], masks: bool) -> Any:
    """A copy of ``module`` with a small base and small adapters ``names``, all of them active."""
    a = {name: probe.random_linear(_IN, 2 + i) for i, name in enumerate(names)}
    b = {name: probe.random_linear(2 + i, _OUT) for i, name in enumerate(names)}
    for name, linear in b.items():
        if module._modules["lora_B"][name]._parameters.get("bias") is not None:
            linear._parameters["bias"] = nn.Parameter(probe.randn(_OUT, dtype=torch.float64))
    drop = {name: _Mask(2 + i) if masks else nn.Identity() for i, name in enumerate(names)}
    members: list[dict[str, Any]] = [a, b, drop]
    kinds = {kind: probe.bare_copy(module._modules[kind], **m) for kind, m in zip(CONTAINERS, members, strict=True)}
    clone: Any = probe.bare_copy(module, base_layer=probe.random_linear(_IN, _OUT), **kinds)
    clone.__dict__.update(_active_adapter=names, _disable_adapters=False, merged_adapters=[])
    return clone


def _reference(clone: Any, names: list[str], x: torch.Tensor) -> torch.Tensor:
    adapters = []
    for name in names:
        a, b, dropout = (clone._modules[kind][name] for kind in CONTAINERS)
        adapters.append(LoraAdapter(a.weight, b.weight, clone.scaling[name], b.bias, dropout(x)))
    return lora_linear_ref(x, clone.base_layer, adapters)


def _same_in_float64(module: Any, names: list[str], masks: bool) -> bool:
    """Whether values and gradients are those of the formula."""
    clone = _small_copy(module, names, masks)
    x = probe.randn(2, 3, _IN, dtype=torch.float64).requires_grad_()
    leaves = [x, clone.base_layer.weight]
    for name in names:
        a, b, _ = (clone._modules[kind][name] for kind in CONTAINERS)
        leaves += [p for p in (a.weight, b.weight, b.bias) if p is not None]
    upstream = probe.randn(2, 3, _OUT, dtype=torch.float64)
    results = [type(module).forward(clone, x), _reference(clone, names, x)]
    if probe.relative_difference(results[0], results[1]) >= probe.SAME_FORMULA:
        return False
    slopes = [torch.autograd.grad(y, leaves, upstream) for y in results]
    pairs = zip(*slopes, strict=True)
    return all(probe.relative_difference(ours, theirs) < probe.SAME_FORMULA for ours, theirs in pairs)


def _same_in_bfloat16(module: Any, names: list[str]) -> bool:
    """Whether float32 adapters on a bfloat16 base give bfloat16, but for a few roundings."""
    clone = _small_copy(module, names, masks=False)
    clone.to(torch.float32)
    clone.base_layer.to(torch.bfloat16)
    x = probe.randn(2, 3, _IN).to(torch.bfloat16)
    with torch.no_grad():
        y, expected = type(module).forward(clone, x), _reference(clone, names, x)
    return y.dtype == torch.bfloat16 and probe.relative_difference(y, expected) <= 4 * torch.finfo(y.dtype).eps


def _key(module: Any) -> Hashable:
    """What the verdict depends on: the class, its settings, and of each adapter the name, scale and kind."""
    modules = module._modules
    names = [*modules["lora_A"]]
    of_adapters = tuple((n, is_variant(module, n), modules["lora_B"][n].bias is not None) for n in names)
    counted = ("base_layer", "in_features", "out_features", *CONTAINERS, *_STATE, *_VARIANTS, *_UNREAD)
    scaling = tuple(map(repr, module.scaling.values()))
    return fingerprint(module, replaced={**dict.fromkeys(counted, 0), "lora_A": of_adapters, "scaling": scaling})


LORA = Recogniser(("lora_linear",), is_lora_layer, recognise_lora, key=_key)
