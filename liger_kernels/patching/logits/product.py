"""The product of hidden states and an LM head, and what the head computes in its place: the fused loss, for example.

What a model did to its logits before the loss (``deferred.py``) arrives here as a :class:`Request`.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import CountedTargets, cross_entropy, linear_cross_entropy
from liger_kernels.ops.lora.projection import as_it_is
from liger_kernels.ops.loss.vocab_parallel import logits_of_all
from liger_kernels.patching.logits.held_head import HeldHead
from liger_kernels.patching.logits.lazy import Computation, Unchanged, defer
from liger_kernels.patching.logits.linked import FusedLoss
from liger_kernels.patching.logits.running import Forward, call_head
from liger_kernels.patching.logits.split_head import SplitHead, narrowed
from liger_kernels.patching.swap import mark_run


@dataclass
class Product:
    """The product of hidden states and an LM head, made when somebody needs it; shared by all views of it.

    ``outer`` is what the model calls as its head: ``head``, or what wraps it. Every call of the head goes through it,
    so that whatever gathers sharded weights does so around the product and around the fused loss.
    """

    hidden: torch.Tensor
    head: nn.Module
    outer: nn.Module
    forward: Forward  # of the model, which it belongs to
    memory: str | None = None  # the schedule that the fused loss is to run
    invariant: bool = False  # whether the bits of a row depend on this row alone
    logits: Any = None
    lazy: Any = None  # the logits as a tensor without a value, made inside the head's call
    token_accuracy: torch.Tensor | None = None  # what the pass of the loss found
    losses: list[FusedLoss] | None = field(default_factory=list)  # None: a compiled forward computed one
    split: SplitHead | None = None  # this rank's part of a head whose classes a plan splits over ranks
    held: tuple[torch.Tensor, HeldHead] | None = None  # hidden states and weights, as they were in the head's call

    def __post_init__(self) -> None:
        self.device = self.hidden.device
        kind = self.device.type
        self.autocast: torch.dtype | None = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.grad = torch.is_grad_enabled()

    def compute(self, reason: str | None) -> torch.Tensor:
        """The real logits, by the head's own ``__call__``, under the modes of the forward that they belong to."""
        if self.logits is None:
            if reason is not None:
                count(self.forward.fallbacks, reason)
            with torch.set_grad_enabled(self.grad), autocast(self.hidden.device, self.autocast):
                self.logits = call_head(self.outer, self.hidden)
        return self.logits

    def ask(self, request: Request) -> Any:
        """What ``request`` asks for, from inside the head's call; None where its weight is not one tensor there, and it
        has computed its logits."""
        if self.split is not None:
            mark_run(self.head)
            answer = request.answer(self.hidden, HeldHead(self.split.weight, self.split.bias))
        else:
            answer = call_head(self.outer, self.hidden, request)
        if not request.answered:
            self.logits = answer
            return None
        loss = answer
        if request.wants_lazy:
            loss, self.lazy = answer
        self.token_accuracy = request.token_accuracy
        return loss

    def tensor(self) -> torch.Tensor:
        """The logits as a tensor that leaves the forward: computed, if they are, else lazy."""
        if self.logits is None and self.lazy is None:
            with torch.set_grad_enabled(self.grad), autocast(self.hidden.device, self.autocast):
                self.ask(Request(self, targets=None))
        return self.lazy if self.logits is None else self.logits


def autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def count(fallbacks: Counter[str], reason: str) -> None:
    if not torch.compiler.is_compiling():
        fallbacks[reason] += 1


@dataclass
class Request:
    """What the head's own forward is to compute in place of its logits: the fused loss, and the logits as a tensor that
    has no value yet."""

    product: Product
    targets: Any  # a tensor; None: no loss
    views: tuple[tuple[Any, ...], ...] = ()  # how the rows are taken from the hidden states
    vocabulary: int | None = None  # only so many classes from the first
    bias: torch.Tensor | None = None  # [classes], added to what the head computes
    options: dict[str, Any] = field(default_factory=dict)
    wants_lazy: bool = True  # a compiled program cannot make one
    answered: bool = False
    token_accuracy: torch.Tensor | None = None

    def answer(self, hidden: torch.Tensor, weights: HeldHead) -> Any:
        """Loss and lazy logits, for the weights as they are inside the head's call."""
        self.answered = True
        loss = self._loss(hidden, weights) if self.targets is not None else None
        return (loss, self._lazy(hidden, weights)) if self.wants_lazy else loss

    def _loss(self, hidden: torch.Tensor, weights: HeldHead) -> Any:
        hidden, weight, bias, how = self.operands(hidden, weights)
        how["counted"] = self._counted()
        return self._noted(linear_cross_entropy(hidden, weight, self.targets, bias, **how, **self.options))

    def operands(self, hidden: torch.Tensor, weights: HeldHead) -> tuple[Any, Any, Any, dict[str, Any]]:
        """The rows, the weight and the bias that a fused op takes, and how it is to run."""
        group, split = None, self.product.split
        if split is not None:
            weight, bias, group = narrowed(split, self.vocabulary)
            weights = HeldHead(weight, bias)
        else:
            weights = weights.narrowed(self.vocabulary)
        weight, bias, adapters, dense = weights
        if self.bias is not None:
            added = self.bias.to(weight.dtype if dense is as_it_is else hidden.dtype)[: self.vocabulary]
            bias = added if bias is None else bias + added
        how: dict[str, Any] = {"memory": self.product.memory, "group": group, "adapters": adapters, "dense": dense}
        how["invariant"] = self.product.invariant
        return rows(hidden, self.views), weight, bias, how

    def _counted(self) -> CountedTargets | None:
        """At most how many targets count. No model makes targets of more labels than it got, or of ignored ones."""
        counted = self.product.forward.counted
        if counted is None or counted.of < self.targets.numel():
            return None
        return counted if counted.ignore_index == self.options["ignore_index"] else None

    def loss_of_logits(self, logits: torch.Tensor) -> Any:
        logits = rows(logits, self.views)[..., : self.vocabulary]
        if self.bias is not None:
            logits = logits + self.bias[: self.vocabulary]
        return self._noted(cross_entropy(logits, self.targets, **self.options))

    def _noted(self, result: Any) -> Any:
        if not self.options["extras"]:
            return result
        self.token_accuracy = result.token_accuracy
        return result.loss

    def _lazy(self, hidden: torch.Tensor, weights: HeldHead) -> Any:
        # What the functions below close over must not hold the product, which holds the lazy tensor: memory in a circle
        # is not freed before Python's collector comes by.
        product, dtype, inputs = self.product, weights.weight.dtype, weights.tensors()
        product.held = hidden, weights
        cast, outer, invariant = product.autocast, product.outer, product.invariant
        head: Any = product.head
        shard = None if product.split is None else product.split.shard
        plain = weights.dense is as_it_is and "weight" in head._parameters
        scales, dense = [one.scale for one in weights.adapters], weights.dense

        def compute(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any) -> Any:
            with autocast(hidden.device, cast):
                if plain:
                    return logits_of_all(hidden, weight, bias, shard, invariant)
                return HeldHead.of_tensors(scales, dense, weight, bias, *others).logits(hidden)

        def gathered() -> torch.Tensor:
            sharded: dict[str, Any] = dict(head.named_parameters())
            if any(hasattr(p, "full_tensor") for p in sharded.values()):  # FSDP2 gathers around another module's call
                if not plain:
                    whole = {name: getattr(p, "full_tensor", p.detach)() for name, p in sharded.items()}
                    return call_head(functools.partial(torch.func.functional_call, head, whole), hidden)  # type: ignore[arg-type]
                full = {name: parameter.full_tensor().to(dtype) for name, parameter in sharded.items()}
                return compute(hidden, full["weight"], full.get("bias"))
            with autocast(hidden.device, cast):
                logits: torch.Tensor = call_head(outer, hidden)
            return logits

        shape = (*hidden.shape[:-1], head.out_features)
        check = Unchanged(hidden, *inputs)
        out = cast if cast is not None else hidden.dtype
        note = functools.partial(count, product.forward.fallbacks, "outputs.logits was read")
        return defer(Computation(shape, out, hidden.device, compute, (hidden, *inputs), gathered, check, note))


def rows(x: torch.Tensor, views: tuple[tuple[Any, ...], ...]) -> torch.Tensor:
    """``x`` [..., features] after the recorded slices of its leading dimensions (``()`` flattens them)."""
    for view in views:
        x = x[view] if view else x.reshape(-1, x.shape[-1])
    return x
