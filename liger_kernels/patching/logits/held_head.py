"""A head that is no plain linear layer, but a weight and adapters that are known: what the fused loss takes of it.

The weight may be that of a layer with PEFT's adapters around it, and bitsandbytes may keep it in four bits. Everything
is read at each call. A head that is anything else at the moment computes its logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernels.ops import LoraAdapter, lora_linear
from liger_kernels.ops.lora.projection import as_it_is
from liger_kernels.patching.lora.adapters import active_names, known_adapters
from liger_kernels.patching.lora.layer import LoraRecipe, is_lora_layer, recognise_lora
from liger_kernels.patching.lora.projection import weights_of
from liger_kernels.patching.swap import recipe_of
from liger_kernels.patching.watch import unchanged


class HeldHead(NamedTuple):
    """A head as values: logits = hidden W^T + bias + what ``adapters`` add, where W is ``dense(weight)``."""

    weight: Tensor
    bias: Tensor | None
    adapters: Sequence[LoraAdapter] = ()
    dense: Callable[[Tensor], Tensor] = as_it_is

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order of :meth:`of_tensors`."""
        return self.weight, self.bias, *[t for one in self.adapters for t in (one.a, one.b, one.bias)]

    @classmethod
    def of_tensors(cls, scales: Sequence[float], dense: Any, weight: Any, bias: Any, *others: Any) -> HeldHead:
        """From :meth:`tensors` of another head and the scales of its adapters."""
        of_each = zip(others[::3], others[1::3], scales, others[2::3], strict=True)
        return cls(weight, bias, [LoraAdapter(*one) for one in of_each], dense)

    def logits(self, hidden: Tensor) -> Tensor:
        def base(x: Tensor) -> Tensor:
            weight = self.weight if self.dense is as_it_is else self.dense(self.weight).to(x.dtype)
            return F.linear(x, weight, self.bias)

        return lora_linear(hidden, base, self.adapters)

    def narrowed(self, classes: int | None) -> HeldHead:
        """The head of the first ``classes``."""
        if classes is None:
            return self
        bias = None if self.bias is None else self.bias[:classes]
        adapters = [
            LoraAdapter(one.a, one.b[:classes], one.scale, None if one.bias is None else one.bias[:classes])
            for one in self.adapters
        ]
        if self.dense is as_it_is:
            return HeldHead(self.weight[:classes], bias, adapters)
        dense = self.dense
        return HeldHead(self.weight, bias, adapters, lambda weight: dense(weight)[:classes])


def held_head(head: Any, hidden: Tensor) -> HeldHead | str:
    """What ``head`` computes of ``hidden`` as values, or why it has to compute its logits itself."""
    base, adapters = head, []
    if is_lora_layer(head):
        state = head.__dict__
        base = state["_modules"]["base_layer"]
        off, merged = state.get("_disable_adapters"), state.get("merged_adapters")
        if not unchanged(head):
            return "the head's adapters are not what was recognised"
        if off and merged:
            return "PEFT unmerges the head's adapters"
        if not off and not merged and (names := active_names(head)):
            found = known_adapters(head, names, hidden.device, hidden.dtype, hidden.shape[-1])
            if not isinstance(found, list):
                return f"PEFT computed the head's adapters: {found or 'it casts the hidden states, or raises'}"
            if any(one.dropped is not None for one in found):
                return "PEFT computed the head's adapters: their dropout is active"
            adapters = [LoraAdapter(one.a, one.b, float(one.scale), one.bias) for one in found]
    weights = weights_of(base, hidden, _class_before_patch(base))
    if weights is None:
        return "the head's base layer is more than a weight that is known, or somebody watches it"
    weight, bias, dense, shape = weights
    if len(shape) != 2 or shape[1] != hidden.shape[-1] or any(len(one.b) != shape[0] for one in adapters):
        return "the head's weight has another shape than its hidden states and adapters want"
    if dense is not as_it_is and torch.is_autocast_enabled(hidden.device.type):
        return "autocast is on, and bitsandbytes casts around the head"
    return HeldHead(weight, bias, adapters, dense)


def is_held(head: Any) -> bool:
    """Whether :func:`held_head` may know ``head``: PEFT's LoRA layer around a linear layer, or one of four bits."""
    if is_lora_layer(head):
        known = isinstance(recipe_of(head), LoraRecipe) or isinstance(recognise_lora(head), LoraRecipe)
        return known and _is_weight(head.base_layer)
    return is_four_bit(head)


def is_four_bit(module: Any) -> bool:
    """Whether ``module`` is bitsandbytes' linear layer with a weight of four bits."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    return bitsandbytes is not None and _class_before_patch(module) is bitsandbytes.nn.Linear4bit


def _is_weight(base: nn.Module) -> bool:
    return _class_before_patch(base) is nn.Linear or is_four_bit(base)


def _class_before_patch(module: Any) -> type:
    return getattr(type(module), "_liger_kernels_base", type(module))
