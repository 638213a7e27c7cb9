"""Save first, compute last: what keeps an op's last product out of the recomputation of activation checkpointing.

Non-reentrant checkpointing runs a layer again up to the last tensor that the layer saved. torch's own product saves its
inputs before it runs. An ``autograd.Function`` saves after its forward has run, so that a product in it runs again, and
nobody reads its result. An op that ends in a product is therefore two nodes of the graph:

    anchor, (x, weight) = anchored(x, weight)       saves x and weight, and returns aliases of them
    y = ProductFunction.apply(x, weight, anchor)    computes and saves nothing

The gradients that the second node returns pass through the first. Its backward reads the anchor's tensors
(:func:`saved_by`), once: checkpointing makes them again for one reading in each pass. The second node refers to the
first, as the graph itself does, and never the other way round: what the graph holds is freed with it.

A tensor that is computed on the way, without gradients, is saved with the others. Where nobody recomputes, one node is
enough: a node costs the host about 9 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Checkpointing is a pair of hooks on saved tensors. Where torch does not say whether there are any, there may be.
_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


class Anchor(torch.autograd.Function):
    """Saves its tensors and returns aliases of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple([None if t is None else t.detach() for t in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


def saves_first() -> bool:
    """Whether an op saves before its last product: where hooks of a checkpoint or others get what is saved.

    In a traced program none does: its compiler decides what is computed again."""
    return not torch.compiler.is_compiling() and _hooks(True) is not None and torch.is_grad_enabled()


def anchored(first: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, tuple[Any, ...]]:
    """The node that has saved these tensors, and aliases of them; or None and the tensors themselves, where the op does
    not save first. The node is None, too, where no tensor requires a gradient. ``first`` is floating point."""
    if not saves_first():
        return None, (first, *others)
    aliases = Anchor.apply(first, *others)
    return aliases[0].grad_fn, aliases


def save(ctx: Any, anchor: Any, *tensors: torch.Tensor | None) -> None:
    """In the forward of the second node: save ``tensors`` where there is no ``anchor`` that has done so."""
    ctx.anchor = anchor
    if anchor is None:
        ctx.save_for_backward(*tensors)


def saved_by(ctx: Any) -> Any:
    """In the backward of the second node: whose ``saved_tensors`` and ``needs_input_grad`` hold."""
    return ctx if ctx.anchor is None else ctx.anchor
