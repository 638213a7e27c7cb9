"""Save first, compute last: what keeps an op's last product out of the recomputation of activation checkpointing.

Non-reentrant checkpointing runs a layer again up to the last tensor that the layer saved. torch's own product saves its
inputs before it runs. An ``autograd.Function`` saves after its forward has run, so that a product in it runs again, and
nobody reads its result. An op that ends in a product is therefore two nodes of the graph:

    anchor = ProductFunction.apply(x, weight)               saves x and weight, and returns an anchor
    y = Computed.apply(lambda: x @ weight.t(), anchor)      computes and saves nothing

An anchor has the result's shape and dtype and no memory, so that its gradient is the result's: ``Computed`` hands it
over, and ``ProductFunction`` goes backward as if the product were its own. Where nobody recomputes, one node is enough
(:func:`saves_first`), because a node costs the host about 9 us.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Checkpointing is a pair of hooks on saved tensors. Where torch does not say whether there are any, there may be.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True
)


class _Anchors(threading.local):
    only = False


_anchors = _Anchors()


@contextlib.contextmanager
def anchors_only(only: bool = True) -> Iterator[None]:
    """Inside, an op's result stays its anchor: of what is computed again only to go backward, nobody reads it."""
    before, _anchors.only = _anchors.only, only
    try:
        yield
    finally:
        _anchors.only = before


def saves_first() -> bool:
    """Whether an op saves before its last product: where hooks of a checkpoint or others get what is saved.

    In a traced program none does: its compiler decides what is computed again."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return _anchors.only or saved_tensors_hooks(True) is not None


def anchor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What stands for a result of that shape in the graph until it is computed: one number, which nobody reads."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


class Computed(torch.autograd.Function):
    """The result that anchors stand for, which ``compute`` returns, without gradients. Where it is a sum with other
    tensors, these are given, too: the gradient of each is the result's."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], torch.Tensor], *like: torch.Tensor) -> torch.Tensor:
        return anchor(like[0].shape, like[0].dtype, like[0].device) if _anchors.only else compute()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, *needs = ctx.needs_input_grad
        return None, *[grad if needed else None for needed in needs]
