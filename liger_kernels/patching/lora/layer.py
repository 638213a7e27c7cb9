"""Recognise PEFT's LoRA layers by what they compute, and run their adapters as one op.

A layer is one whose forward is base(x) + the sum of scale * B(A(dropout(x))). Where its base is a weight and nothing
else, the op multiplies by it (projection.py); any other base is called as the module that it is. Which adapters are
active, their scales, weights and dropout are read at each call. Where a call is anything else, PEFT's own forward runs,
and the report counts why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import LoraAdapter, adapted_linears, lora_linear_ref
from liger_kernels.ops.lora.lora_linear import cast_as_base, lora_linear_of_checked
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.lora.adapters import (
    CONTAINERS,
    active_names,
    drop,
    is_variant,
    known_adapters,
)
from liger_kernels.patching.lora.projection import foreseen_projection
from liger_kernels.patching.lora.shared_input import own_product
from liger_kernels.patching.reads import reads_of
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.report import REPORT
from liger_kernels.patching.swap import Calls, Recipe, mark_run
from liger_kernels.patching.watch import unchanged

_LORA = "peft.tuners.lora"
# What says which adapters run, and how; their variants (weights decomposed, and so on) are by name in the last two.
STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "cast_input_dtype_enabled")
VARIANTS = ("lora_variant", "use_dora")
# What only merging and adding an adapter read.
UNREAD = ("fan_in_fan_out", "lora_bias", "lora_alpha", "r", "use_rslora")
# What PEFT made the layer with, its path in the model for one.
_MADE_WITH = "kwargs"


@dataclass(frozen=True)
class LoraRecipe(Recipe):
    """A layer whose forward is base(x) + the sum of scale * B(A(dropout(x))) over its active adapters."""

    kernel = "lora_linear"
    detail = "base(x) + sum of scale * B(A(dropout(x)))"
    live = ("base_layer", *CONTAINERS, *STATE, *VARIANTS, *UNREAD)

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
                return peft_computes(base, self, "its base is a head that was patched before", x, *args, **kwargs)
            if args or kwargs:
                return peft_computes(base, self, "the call has more arguments than x", x, *args, **kwargs)
            names = active_names(self)
            if not names:
                return base.forward(self, x)
            adapters = known_adapters(self, names, x.device, x.dtype, x.shape[-1] if x.dim() else None)
            if isinstance(adapters, str):
                return peft_computes(base, self, adapters, x)
            if adapters is None:
                return base.forward(self, x)
            if any(one.dropped is not None for one in adapters):
                adapters = drop(adapters, x)
                if isinstance(adapters, str):
                    return peft_computes(base, self, adapters, x)
            mark_run(self)
            if type(layer) is nn.Linear and not probe.has_hooks(layer):
                x = cast_as_base(x)
            return lora_linear_of_checked(x, layer, adapters)

        return {"forward": forward}


def peft_computes(base: Any, module: Any, reason: str, *args: Any, **kwargs: Any) -> torch.Tensor:
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
            reference = partial(_reference, names)
            for masks in (False, True):
                if not same_in_float64(module, small_copy(module, names, masks), names, reference):
                    return (probe.with_origin("it is not base(x) + sum of scale * B(A(dropout(x)))", type(module)),)
            if not same_in_bfloat16(module, small_copy(module, names, masks=False), reference):
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


PROBED_IN, PROBED_OUT = 6, 10


def small_copy(module: Any, names: list[str], masks: bool) -> Any:
    """A copy of ``module`` with a small base and small adapters ``names``, all of them active."""
    a = {name: probe.random_linear(PROBED_IN, 2 + i) for i, name in enumerate(names)}
    b = {name: probe.random_linear(2 + i, PROBED_OUT) for i, name in enumerate(names)}
    for name, linear in b.items():
        if module._modules["lora_B"][name]._parameters.get("bias") is not None:
            linear._parameters["bias"] = nn.Parameter(probe.randn(PROBED_OUT, dtype=torch.float64))
    drop = {name: _Mask(2 + i) if masks else nn.Identity() for i, name in enumerate(names)}
    members: list[dict[str, Any]] = [a, b, drop]
    kinds = {kind: probe.bare_copy(module._modules[kind], **m) for kind, m in zip(CONTAINERS, members, strict=True)}
    clone: Any = probe.bare_copy(module, base_layer=probe.random_linear(PROBED_IN, PROBED_OUT), **kinds)
    clone.__dict__.update(_active_adapter=names, _disable_adapters=False, merged_adapters=[])
    return clone


def _reference(names: list[str], clone: Any, x: torch.Tensor) -> torch.Tensor:
    adapters = []
    for name in names:
        a, b, dropout = (clone._modules[kind][name] for kind in CONTAINERS)
        adapters.append(LoraAdapter(a.weight, b.weight, clone.scaling[name], b.bias, dropout(x)))
    return lora_linear_ref(x, clone.base_layer, adapters)


Reference = Callable[[Any, torch.Tensor], torch.Tensor]  # of a small copy and its x


def same_in_float64(module: Any, clone: Any, names: list[str], reference: Reference, *kinds: str) -> bool:
    """Whether values and gradients are those of the formula. ``kinds`` hold what the adapters have besides A and B."""
    x = probe.randn(2, 3, PROBED_IN, dtype=torch.float64).requires_grad_()
    layers = [clone._modules[kind][name] for name in names for kind in ("lora_A", "lora_B", *kinds)]
    leaves = [x, *[p for layer in (clone.base_layer, *layers) for p in layer._parameters.values() if p is not None]]
    upstream = probe.randn(2, 3, PROBED_OUT, dtype=torch.float64)
    results = [type(module).forward(clone, x), reference(clone, x)]
    if probe.relative_difference(results[0], results[1]) >= probe.SAME_FORMULA:
        return False
    slopes = [torch.autograd.grad(y, leaves, upstream) for y in results]
    pairs = zip(*slopes, strict=True)
    return all(probe.relative_difference(ours, theirs) < probe.SAME_FORMULA for ours, theirs in pairs)


def same_in_bfloat16(module: Any, clone: Any, reference: Reference) -> bool:
    """Whether float32 adapters on a bfloat16 base give bfloat16, but for a few roundings."""
    clone.to(torch.float32)
    clone.base_layer.to(torch.bfloat16)
    x = probe.randn(2, 3, PROBED_IN).to(torch.bfloat16)
    with torch.no_grad():
        y, expected = type(module).forward(clone, x), reference(clone, x)
    return y.dtype == torch.bfloat16 and probe.relative_difference(y, expected) <= 4 * torch.finfo(y.dtype).eps


def key_of_layer(module: Any, *replaced: str) -> Hashable:
    """What the verdict depends on: the class, its settings, and of each adapter the name, scale and kind. A probe puts
    its own in place of what ``replaced`` names. What the layer was made with counts where its forward may read it."""
    modules = module._modules
    reads = reads_of([type(module).forward], type(module))
    if not reads.all and _MADE_WITH not in reads.names:
        replaced = *replaced, _MADE_WITH
    names = [*modules["lora_A"]]
    of_adapters = tuple((n, is_variant(module, n), modules["lora_B"][n].bias is not None) for n in names)
    counted = ("base_layer", "in_features", "out_features", *CONTAINERS, *STATE, *VARIANTS, *UNREAD, *replaced)
    scaling = tuple(map(repr, module.scaling.values()))
    return fingerprint(module, replaced={**dict.fromkeys(counted, 0), "lora_A": of_adapters, "scaling": scaling})


LORA = Recogniser(("lora_linear",), is_lora_layer, recognise_lora, key=key_of_layer)
