"""What a LoRA layer of PEFT computes at the moment: its active adapters, read at each call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from liger_kernels.ops import LoraAdapter
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.watch import unchanged

CONTAINERS = ("lora_A", "lora_B", "lora_dropout")


class Adapter(NamedTuple):
    """A :class:`LoraAdapter` that is known to fit; ``dropped`` may still be the dropout that makes it."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    bias: torch.Tensor | None
    dropped: Any


def active_names(module: Any) -> list[str]:
    """The names of the active adapters that this layer has, in PEFT's order."""
    known = module._modules["lora_A"]._modules
    active = module.__dict__.get("_active_adapter")  # what the property returns, without its calls
    if active is None:
        active = module.active_adapters
    return [name for name in ((active,) if isinstance(active, str) else active) if name in known]


def is_variant(module: Any, name: str) -> bool:
    """Whether PEFT computes this adapter in another way than the others."""
    state = module.__dict__
    return name in state.get("lora_variant", ()) or bool(state.get("use_dora", {}).get(name))


def known_adapters(
    module: Any,
    names: list[str],
    device: torch.device,
    dtype: torch.dtype,
    features: int | None,
    variants: bool = False,
) -> list[Adapter] | str | None:
    """What the op takes of the adapters ``names``; or why PEFT computes them, or None where it casts or raises.
    ``variants`` says that the caller knows what the variants among them compute."""
    if probe.has_global_hooks():
        return "all modules have hooks"
    state = module.__dict__
    modules = state["_modules"]
    of_a, of_b, of_dropout = (modules[kind]._modules for kind in CONTAINERS)
    adapters = []
    for name in names:
        if not variants and is_variant(module, name):
            return "a variant of LoRA is active"
        first, second, dropout, scale = of_a[name], of_b.get(name), of_dropout.get(name), state["scaling"].get(name)
        if type(first) is not nn.Linear or type(second) is not nn.Linear:
            return "lora_A or lora_B is no plain linear layer"
        if probe.has_hooks(first) or probe.has_hooks(second):
            return "lora_A or lora_B has hooks, or a forward of its own"
        of_first: Any = first._parameters
        of_second: Any = second._parameters  # FSDP1 keeps views of its own elsewhere
        a, b, bias = of_first.get("weight"), of_second.get("weight"), of_second.get("bias")
        if of_first.get("bias") is not None or type(scale) not in (float, int):
            return "lora_A has a bias, or the scaling is no number"
        if type(a) not in PLAIN or type(b) not in PLAIN or not (bias is None or type(bias) in PLAIN):
            return "a weight of it is no plain tensor"
        if a.device != device or b.device != device or not (bias is None or bias.device == device):
            return "a weight of it is on another device than x"
        shape, shape_of_b, own_dtype = a.shape, b.shape, a.dtype
        if len(shape) != 2 or len(shape_of_b) != 2 or 0 in shape or 0 in shape_of_b:
            return "a weight of it is sharded"
        if own_dtype not in PROBED or b.dtype is not own_dtype or not (bias is None or bias.dtype is own_dtype):
            return None
        if own_dtype is not dtype and not state.get("cast_input_dtype_enabled", True):
            return None
        (rank, inputs), (outputs, ranks) = shape, shape_of_b
        if inputs != features or rank != ranks or not (bias is None or bias.shape == (outputs,)):
            return None
        adapters.append(Adapter(a, b, scale, bias, None if _is_idle(dropout) else dropout))
    return adapters


def adapters_of(
    module: Any, device: torch.device, dtype: torch.dtype, features: int
) -> tuple[nn.Module, list[Adapter]] | None:
    """The base of a patched LoRA layer and its active adapters, where the layer is these and nothing else: nobody
    watches it, and nothing is dropped. Else it has to be called."""
    state = module.__dict__
    if state.get("_disable_adapters") or state.get("merged_adapters") or probe.has_hooks(module):
        return None
    names = active_names(module)
    if not names or not unchanged(module):
        return None
    adapters = known_adapters(module, names, device, dtype, features)
    if not isinstance(adapters, list) or any(one.dropped is not None for one in adapters):
        return None
    return state["_modules"]["base_layer"], adapters


def foreseen_adapters(module: Any, step: Any) -> list[LoraAdapter]:
    """The active adapters of a LoRA layer, without memory; none where they will not run as one op."""
    if module.disable_adapters or module.merged:
        return []
    modules = module._modules
    adapters = []
    for name in active_names(module):
        a, b = modules["lora_A"][name], modules["lora_B"][name]
        bias = step.like(b, "bias")
        adapters.append(LoraAdapter(step.like(a, "weight"), step.like(b, "weight"), module.scaling[name], bias))
    return adapters


def drop(adapters: list[Adapter], x: torch.Tensor) -> list[Adapter] | str:
    """``adapters`` with what their dropouts make of x, which are called as PEFT calls them."""
    found = []
    for one in adapters:
        if one.dropped is not None:
            dropped = one.dropped(x if x.dtype == one.a.dtype else x.to(one.a.dtype))
            if type(dropped) not in PLAIN or dropped.shape != x.shape or dropped.dtype not in PROBED:
                return "its dropout returns another shape or dtype"
            one = one._replace(dropped=dropped)
        found.append(one)
    return found


def _is_idle(dropout: Any) -> bool:
    """Whether calling ``dropout`` returns what it is given, and nobody watches that."""
    kind = type(dropout)
    idle = kind is nn.Identity or (kind is nn.Dropout and (not dropout.training or dropout.p == 0.0))
    return idle and not probe.has_hooks(dropout)
