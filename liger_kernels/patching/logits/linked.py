"""The gradient of a model's own loss with respect to its logits, for whoever asks for it.

The fused loss is a function of hidden states and weight, so the logits that a user reads are no part of its graph. A
node behind the loss (:func:`linked`) makes them one. It leads to the loss and to the logits, and usually sends the
whole gradient to the loss. When the gradient of the logits is wanted, it sends the gradient by way of the logits
instead, which have a value then: the same number, on another path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from liger_kernels.ops import cross_entropy
from liger_kernels.ops.runtime.kept import keeps_graph
from liger_kernels.patching.logits.lazy import LazyTensor, Place

Step = tuple[str, tuple[Any, ...]]  # a method of a tensor, and its arguments

COUNTED = "the gradient of outputs.logits was asked for"
_COMPILED = (
    "the gradient of the loss with respect to outputs.logits was asked for, and this loss was computed in a compiled "
    "forward, whose graph has no logits. Run this step uncompiled, or compute the loss from outputs.logits."
)
_CHANGED = (
    "the gradient of the loss with respect to outputs.logits was asked for, and they have been changed in place since "
    "they were read: change a copy"
)
# A leaf that nobody differentiates with respect to. Its node runs in `backward`, and in no `grad` of chosen tensors.
_NOBODYS = torch.zeros((), requires_grad=True, device="cpu")


def replayed(trail: Sequence[Step], real: torch.Tensor) -> torch.Tensor:
    """``real`` after these steps."""
    for name, args in trail:
        real = getattr(real, name)(*args)
    return real


class _Gate:
    """What stands behind a fused loss in its graph: it lets no gradient through in a pass that goes by the logits."""

    def __init__(self) -> None:
        self.closed_in: int | None = None  # the pass

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        closed = self.closed_in is not None and self.closed_in == torch._C._current_graph_task_id()
        return torch.zeros_like(grad) if closed else None


@dataclass(eq=False)
class FusedLoss:
    """A cross entropy that was computed without its logits.

    Attributes:
        loss: the result.
        trail: what the model did to the head's product on the way to this loss.
        targets, options: of the cross entropy of the logits after that trail.
        of_logits: whether it was computed from the head's own logits, which stand before it in the graph then.
    """

    loss: torch.Tensor
    trail: tuple[Step, ...]
    targets: torch.Tensor
    options: dict[str, Any]
    of_logits: bool
    gate: _Gate = field(default_factory=_Gate)

    def __post_init__(self) -> None:
        self.loss.register_hook(self.gate)  # not a method of self, which holds the loss

    def comes_from(self, trail: tuple[Step, ...]) -> bool:
        """Whether this loss was computed from the logits of ``trail``, and the graph does not say so already."""
        begins = len(trail) <= len(self.trail) and all(a is b for a, b in zip(trail, self.trail, strict=False))
        return begins and not (self.of_logits and not trail)

    def again(self, logits: torch.Tensor, done: int) -> Any:
        """The same loss from ``logits``, which have the first ``done`` steps behind them."""
        return cross_entropy(replayed(self.trail[done:], logits), self.targets, **self.options)


@dataclass(eq=False)
class _Link:
    total: torch.Tensor  # the loss of the model
    losses: list[FusedLoss]  # what of it was computed without these logits
    done: int  # how many steps of their trails the logits have behind them
    place: Place
    fallbacks: Counter[str]

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the logits, and a closed gate behind every fused loss."""
        if not self.losses:
            raise RuntimeError(_COMPILED)
        logits = self.place.tensor
        assert logits is not None
        if logits._version != self.place.version:
            raise RuntimeError(_CHANGED)
        self.fallbacks[COUNTED] += 1
        again = {"create_graph": torch.is_grad_enabled()}
        wanted = [fused.loss for fused in self.losses]
        upstream = torch.autograd.grad(self.total, wanted, grad, retain_graph=True, allow_unused=True, **again)
        total = torch.zeros_like(logits)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            for fused, of_loss in zip(self.losses, upstream, strict=True):
                fused.gate.closed_in = torch._C._current_graph_task_id()
                if of_loss is not None:
                    (found,) = torch.autograd.grad(fused.again(leaf, self.done), leaf, of_loss, **again)
                    total = total + found
        return total


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, loss: torch.Tensor, logits: torch.Tensor, nobodys: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.link = link
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        link = ctx.link
        if not keeps_graph():
            ctx.link = None
        logits = link.place.tensor if link is not None else None
        if grad is None or logits is None:  # nobody has read them
            return None, grad, None, None
        chosen = not torch._C._will_engine_execute_node(ctx.next_functions[-1][0])
        asked = logits._backward_hooks or logits.retains_grad or chosen  # among the chosen may be these logits
        return None, grad, link.gradient(grad) if asked else None, None


def linked(
    loss: torch.Tensor, logits: torch.Tensor, trail: tuple[Step, ...], losses: list[FusedLoss] | None, fallbacks: Any
) -> Any:
    """``loss`` of a model, from which the gradient of its ``logits`` can be had.

    Args:
        loss: what the model returns as its loss.
        logits: what it returns as its logits, which have ``trail`` behind them.
        losses: what was computed without logits; None where a compiled forward did that, which has no record.
        fallbacks: of the model's report.
    """
    found = [fused for fused in losses or () if fused.comes_from(trail)]
    if (losses is not None and not found) or not (loss.requires_grad and logits.requires_grad):
        return loss
    lazy = isinstance(logits, LazyTensor)
    tensor, place = logits.reserved() if lazy else (logits, Place(logits, logits._version))  # type: ignore[attr-defined]
    return _Linked.apply(_Link(loss, found, len(trail), place, fallbacks), loss, tensor, _NOBODYS)
