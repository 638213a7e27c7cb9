"""Linear cross entropy in slabs of the vocabulary; which schedule is for what stands in linear_cross_entropy.py.

The forward goes through the logits of all tokens, some classes at a time, and keeps of them what the loss needs of each
row. The backward knows the upstream gradient and the denominator: it overwrites each slab's logits by their gradient,
rounded once, and finishes the slab's rows of d weight by one GEMM straight into its dtype; d hidden is summed over the
slabs in float32.

The logits of the first slab lie in the memory of d weight, behind the rows that are its own, from the forward to the
backward, which needs that memory anyway and finds them computed. What becomes of the others makes two schedules:

- "fast" keeps them, too, in one buffer of their own, and computes nothing twice. d weight is written last, so that its
  first rows are free for the sum of d hidden. Where the first slab would be too small to be worth it, and for label
  smoothing, which adds up the distance of every logit to the target's, which an early slab does not know, all classes
  are one slab in that buffer. Each gradient is one GEMM then.
- "small" takes them slab by slab in memory that the next one overwrites: in the forward the first rows of d weight, in
  the backward, which computes them again, those that are not finished yet. Not for label smoothing.

A second backward pass (``retain_graph``) computes the logits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._cross_entropy_rows import Slab, backward_rows, forward_rows
from liger_kernels.ops._linear import (
    ARGUMENTS,
    TENSORS,
    Call,
    add_product,
    add_to_halves,
    beside,
    current_observer,
    fake_gradients,
    fake_rows,
    halves,
    logits_buffer,
    logits_of,
    over_first_half,
    padded,
    present,
    round_halves,
    rounded,
)
from liger_kernels.ops._mean import mean
from liger_kernels.ops._operator import operator

# Widths are multiples of it: a product then fills whole waves of an H200's multiprocessors, or nearly so.
STEP = 1024
# 8192 x 2048 x 262144 on an H200, with 1, 2, 4, 8: 58.4, 54.8, 54.9, 54.5 ms.
WIDE = 8  # times as many classes, where their logits cost no memory
# Bytes that a second slab has to spare "fast", whose time is what it is chosen for. On an H200, bfloat16, one slab and
# two: 8192 x 4096 x 128256 38.5, 39.1 ms (656 MiB spared), 8192 x 2048 x 262144 41.7, 41.4 (816), 8192 x 2048 x 128256
# 20.2, 20.7 (400), 2048 x 4096 x 128256 9.9, 10.7 (332), 512 x 2048 x 128256 2.0, 2.5 (100).
WORTH = 2**29


class SlabPlan(NamedTuple):
    """How the vocabulary is cut into slabs: the last arguments of the operators, in the order of :data:`PLAN`.

    Attributes:
        kept_classes: those of the first slab, whose logits stay in the memory of d weight until the backward; or 0.
        slab: how many classes a later slab has whose logits need memory of their own; 0: the later classes are one
            slab, and its logits are kept.
        backward_slab: the same in the backward, beside d weight.
    """

    kept_classes: int
    slab: int = 0
    backward_slab: int = 0

    @property
    def whole(self) -> bool:
        """Whether one slab has all classes."""
        return not self.kept_classes and not self.slab


Upstream = tuple[Tensor, Tensor, Tensor]  # the gradient of the loss, the divisor, and the forward's stats
PLAN = "int kept_classes, int slab, int backward_slab"


def _parsed(arguments: tuple[Any, ...]) -> tuple[Call, SlabPlan]:
    n = len(SlabPlan._fields)
    return Call(*arguments[:-n]), SlabPlan(*arguments[-n:])


def _step(columns: int) -> int:
    return padded(min(columns, STEP))


def _fit(tokens: int, hidden_size: int, classes: int, step: int) -> int:
    """How many of the last ``classes`` can have their logits in d weight, behind their own rows."""
    return max(0, (classes * hidden_size - step) // (tokens + hidden_size) // step * step)


def kept_by_fast(tokens: int, hidden_size: int, vocab: int, itemsize: int, slab: int | None) -> int:
    """The first slab of "fast", whose rows of d weight hold the float32 sum of d hidden; 0 where it is not worth it.
    With ``slab`` it has to be wider than that instead, by whatever number of aligned columns."""
    size = _fit(tokens, hidden_size, vocab, STEP if slab is None else padded(1))
    worth = tokens * size * itemsize >= WORTH if slab is None else size > slab
    return size if worth and size * itemsize >= 4 * tokens else 0


def kept_by_small(tokens: int, hidden_size: int, vocab: int, narrow: int) -> int:
    """The first slab of "small": as wide as it can be, because it is not computed twice."""
    size = _fit(tokens, hidden_size, vocab, _step(narrow))
    return size if size > narrow else 0


def _logits(call: Call, first: int, stop: int, buffer: Tensor) -> Tensor:
    bias = None if call.bias is None else call.bias[first:stop]
    return logits_of(call.hidden, call.weight[first:stop], bias, buffer)


def _behind(call: Call, d_weight: Tensor, stop: int, size: int) -> Tensor:
    """Room for the logits of ``size`` classes behind the rows of those before ``stop``, at an aligned address."""
    tokens, hidden_size = call.hidden.shape
    begin = padded(stop * hidden_size)
    return d_weight.view(-1)[begin : begin + tokens * size].view(tokens, size)


def _new(call: Call, needed: bool, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape if needed else (0,), dtype=dtype or call.hidden.dtype, device=call.hidden.device)


def _kept_memory(call: Call, plan: SlabPlan) -> tuple[Tensor, Tensor]:
    """What lies between forward and backward: d weight, with the first slab's logits, and the buffer of the others'."""
    d_weight = _new(call, bool(plan.kept_classes), call.weight.shape)
    if plan.slab:
        return d_weight, _new(call, False, ())
    return d_weight, logits_buffer(call.hidden, call.weight[plan.kept_classes :], len(call.hidden))


def _kept_slabs(call: Call, plan: SlabPlan, d_weight: Tensor, rest: Tensor) -> list[tuple[int, int, Tensor]]:
    """Those of "fast": first and last + 1 class, and the memory of their logits."""
    vocab = len(call.weight)
    kept = plan.kept_classes
    first = [(0, kept, _behind(call, d_weight, kept, kept))] if kept else []
    return [*first, (kept, vocab, rest[:, : vocab - kept])]


def _forward_slabs(call: Call, plan: SlabPlan, d_weight: Tensor, rest: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The first class of each slab, and its logits, which the next one overwrites, but for those that are kept."""
    (tokens, hidden_size), vocab, kept = call.hidden.shape, len(call.weight), plan.kept_classes
    if not plan.slab:
        for first, stop, buffer in _kept_slabs(call, plan, d_weight, rest):
            yield first, _logits(call, first, stop, buffer)
        return
    if kept:
        yield 0, _logits(call, 0, kept, _behind(call, d_weight, kept, kept))
    columns = 2 * plan.slab  # little else is held yet
    free = d_weight.view(-1)[: kept * hidden_size]  # these rows are written by the backward
    fit = min(WIDE * columns, len(free) // max(tokens, 1)) // _step(columns) * _step(columns)
    if fit > columns:
        buffer = free[: tokens * fit].view(tokens, fit)
    else:
        buffer = logits_buffer(call.hidden, call.weight[:columns], tokens)
    width = max(fit, columns)
    for first in range(kept, vocab, width):
        yield first, _logits(call, first, min(first + width, vocab), buffer)


def _slabs_again(call: Call, plan: SlabPlan, d_weight: Tensor, kept: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Those of "small" in the backward: first and last + 1 class, and their logits, which the next one overwrites.

    Every slab finishes its rows of d weight, where that is needed. The rows behind hold its logits, as long as those of
    more than ``plan.backward_slab`` classes fit: wide slabs cost nothing there, and read and write d hidden less often.

    Args:
        kept: whether the first slab's logits are there from the forward.
    """
    own, first, (tokens, hidden_size), vocab = None, 0, call.hidden.shape, len(call.weight)
    columns = plan.backward_slab if call.needs_weight else plan.slab
    while first < vocab:
        size = _fit(tokens, hidden_size, vocab - first, _step(columns)) if call.needs_weight else 0
        if first:
            size = min(WIDE * columns, size)
        if size > columns:
            stop = first + size
            buffer = _behind(call, d_weight, stop, size)
        else:
            stop = min(first + columns, vocab)
            own = logits_buffer(call.hidden, call.weight[:columns], tokens) if own is None else own
            buffer = own
        yield first, stop, buffer if kept and not first else _logits(call, first, stop, buffer)
        first = stop


@operator(
    "linear_cross_entropy_vocabulary_slabs",
    f"({ARGUMENTS}, {PLAN}) -> ({', '.join(['Tensor'] * 8)})",
)
def forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """loss, log_probs, entropy, predicted, divisor, stats, d_weight, rest; stats only where a gradient is needed.

    ``d_weight`` holds the first slab's logits for the backward, and ``rest`` the others', as far as they are kept.
    """
    call, plan = _parsed(arguments)
    vocab, device = len(call.weight), call.hidden.device
    rows, carry = call.rows(stats=any(call.needs)), None
    if not plan.whole:
        if rows.predicted is not None:
            rows.predicted.zero_()
        carry = torch.zeros((4, len(call.hidden)), dtype=torch.float32, device=device)
        carry[1] = float("-inf")
    d_weight, rest = _kept_memory(call, plan)
    for first, logits in _forward_slabs(call, plan, d_weight, rest):
        slab = None if plan.whole else Slab(first, vocab, carry)
        forward_rows(logits, call.targets, call.class_weight, call.row_weight, call.options, rows, slab=slab)
    loss, divisor = rows.loss, call.divisor()
    if call.reduction != "none":
        loss = mean(loss, divisor)
    return loss, *beside(rows), divisor, present(rows.stats, device), d_weight, rest


@forward_op.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call, plan = _parsed(arguments)
    tokens, vocab, new = call.hidden.shape[0], call.weight.shape[0], call.hidden.new_empty
    return (
        *fake_rows(call),
        new((3, tokens) if any(call.needs) else (0,), dtype=torch.float32),
        new(call.weight.shape if plan.kept_classes else (0,)),
        new((0,) if plan.slab else (tokens, padded(vocab - plan.kept_classes))),
    )


def _overwritten(
    call: Call,
    plan: SlabPlan,
    slabs: Iterable[tuple[int, int, Tensor]],
    upstream: Upstream,
    d_bias: Tensor,
) -> Iterator[tuple[int, int, Tensor]]:
    """``slabs``, their logits overwritten by the gradient, of which ``d_bias`` and the observer get theirs."""
    (grad_loss, divisor, stats), vocab, observer = upstream, len(call.weight), current_observer()
    observed = _new(call, observer is not None, (len(call.hidden), vocab), torch.float32)
    for first, stop, logits in slabs:
        backward_rows(
            logits,
            call.targets,
            call.class_weight,
            call.options,
            stats,
            grad_loss,
            grad=logits,
            divisor=divisor,
            row_weight=call.row_weight,
            slab=None if plan.whole else Slab(first, vocab),
        )
        if observer is not None:
            observed[:, first:stop] = logits
        if call.needs_bias:
            torch.sum(logits, 0, out=d_bias[first:stop])
        yield first, stop, logits
    if observer is not None:
        observer(0, observed)


def _gradients_of_kept(
    call: Call, plan: SlabPlan, upstream: Upstream, d_weight: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor]:
    """d hidden and d bias of "fast"; ``d_weight`` is written where it is needed."""
    hidden, weight = call.hidden, call.weight
    d_hidden = _new(call, call.needs_hidden, hidden.shape)
    d_bias = _new(call, call.needs_bias, (len(weight),))
    slabs = list(_overwritten(call, plan, _kept_slabs(call, plan, d_weight, rest), upstream, d_bias))
    if call.needs_hidden and plan.whole:
        torch.mm(slabs[0][2], weight, out=d_hidden)
    elif call.needs_hidden:
        sums = d_weight[: plan.kept_classes].view(-1).view(torch.float32)[: hidden.numel()].view(hidden.shape)
        for first, stop, d_logits in slabs:
            add_product(sums, d_logits, weight[first:stop], keep=1.0 if first else 0.0)
        rounded(sums, None, d_hidden)
    if call.needs_weight:
        for first, stop, d_logits in slabs:  # the first one's rows end where its gradient begins, the second's do not
            torch.mm(d_logits.t(), hidden, out=d_weight[first:stop])
    return d_hidden, d_bias


def _gradients_again(
    call: Call, plan: SlabPlan, upstream: Upstream, d_weight: Tensor, kept: bool
) -> tuple[Tensor, Tensor]:
    """The same of "small". ``kept``: ``d_weight`` holds logits of the forward's."""
    hidden, weight = call.hidden, call.weight
    d_bias = _new(call, call.needs_bias, (len(weight),))
    first_half, second_half = (
        _new(call, call.needs_hidden, half, torch.float32) for half in halves(hidden.shape, hidden.dtype)
    )
    slabs = _slabs_again(call, plan, d_weight, kept)
    for first, stop, logits in _overwritten(call, plan, slabs, upstream, d_bias):
        if call.needs_weight:
            torch.mm(logits.t(), hidden, out=d_weight[first:stop])
        if call.needs_hidden:
            add_to_halves((first_half, second_half), logits, weight[first:stop], keep=1.0 if first else 0.0)
    del logits  # the slab's memory goes before d hidden is rounded
    whole = over_first_half(first_half, second_half, hidden.dtype) if call.needs_hidden else _new(call, False, ())
    if call.needs_hidden and hidden.dtype != torch.float32:
        round_halves(first_half, second_half, None, whole)
    return whole, d_bias


def _gradients(
    call: Call, plan: SlabPlan, upstream: Upstream, d_weight: Tensor, rest: Tensor, kept: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """d hidden, d weight if it is not ``d_weight``, which has it where a slab is kept there, and d bias."""
    new = _new(call, call.needs_weight and not plan.kept_classes, call.weight.shape)
    written = d_weight if plan.kept_classes else new
    if plan.slab:
        d_hidden, d_bias = _gradients_again(call, plan, upstream, written, kept)
    else:
        d_hidden, d_bias = _gradients_of_kept(call, plan, upstream, written, rest)
    return d_hidden, new, d_bias


@operator(
    "linear_cross_entropy_vocabulary_slabs_backward",
    f"(Tensor grad_loss, Tensor divisor, Tensor stats, {ARGUMENTS}, {PLAN}) -> (Tensor, Tensor, Tensor)",
)
def backward_op(grad_loss: Tensor, divisor: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias, from logits that are all computed again."""
    call, plan = _parsed(arguments)
    d_weight, rest = _kept_memory(call, plan)
    if not plan.slab:
        for _ in _forward_slabs(call, plan, d_weight, rest):
            pass  # they stay
    d_hidden, new, d_bias = _gradients(call, plan, (grad_loss, divisor, stats), d_weight, rest, kept=False)
    return d_hidden, d_weight if plan.kept_classes else new, d_bias


@backward_op.register_fake
def _fake_backward(grad_loss: Tensor, divisor: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(_parsed(arguments)[0])


@operator(
    "linear_cross_entropy_vocabulary_slabs_backward_",
    "(Tensor grad_loss, Tensor divisor, Tensor stats, Tensor(a!) d_weight, Tensor(b!) rest, "
    f"{ARGUMENTS}, {PLAN}) -> (Tensor, Tensor, Tensor)",
)
def finish_op(
    grad_loss: Tensor, divisor: Tensor, stats: Tensor, d_weight: Tensor, rest: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the logits that the forward kept, in their memory. Where ``d_weight`` holds some of them, it
    becomes the gradient of weight."""
    return _gradients(*_parsed(arguments), (grad_loss, divisor, stats), d_weight, rest, kept=True)


@finish_op.register_fake
def _fake_finish(
    grad_loss: Tensor, divisor: Tensor, stats: Tensor, d_weight: Tensor, rest: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call, plan = _parsed(arguments)
    return fake_gradients(call._replace(needs_weight=call.needs_weight and not plan.kept_classes))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, plan = _parsed(inputs)
    *_, divisor, stats, d_weight, rest = output
    ctx.needs, ctx.plan, ctx.rest = call.needs, plan, inputs[TENSORS:]
    ctx.save_for_backward(divisor, stats, *call._replace(denominator=None)[:TENSORS])
    # Not saved: a backward pass overwrites them, and autograd would then refuse a second one. Detached: an output knows
    # its node, which would keep itself alive.
    ctx.kept = (d_weight.detach(), rest.detach()) if plan.kept_classes or not plan.slab else None
    ctx.set_materialize_grads(False)  # nobody has a gradient for the logits, and zeros would cost their memory again


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_loss is not None:
        (divisor, stats, *tensors), kept, ctx.kept = ctx.saved_tensors, ctx.kept, None
        if kept is None:  # a second pass, or "small" without a first slab in d weight
            d_hidden, d_weight, d_bias = backward_op(grad_loss, divisor, stats, *tensors, *ctx.rest)
        else:
            d_hidden, d_weight, d_bias = finish_op(grad_loss, divisor, stats, *kept, *tensors, *ctx.rest)
            d_weight = kept[0] if ctx.plan.kept_classes else d_weight
        computed = d_hidden, d_weight, d_bias
        grads = tuple(grad if needed else None for grad, needed in zip(computed, ctx.needs, strict=True))
    return *grads, *(None,) * (len(Call._fields) + len(SlabPlan._fields) - 3)


forward_op.register_autograd(_backward, setup_context=_setup_context)
