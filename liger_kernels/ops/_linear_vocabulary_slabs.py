"""Linear cross entropy in slabs of the vocabulary; which schedule is for what stands in linear_cross_entropy.py.

The forward goes through the logits of all tokens, some classes at a time, and keeps of them what the loss needs of each
row. The backward computes each slab again, overwrites it by its gradient, and finishes the slab's rows of d weight by
one GEMM straight into its dtype; d hidden is summed over the slabs in float32.

The rows of d weight that are not finished yet hold the logits of wide slabs. So do those of the first slab from the
forward on: the backward needs the memory anyway, and finds these logits computed.

Not for label smoothing: what it adds up is the distance of every logit to the target's, which an early slab does not
know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops._cross_entropy_rows import Slab, backward_rows, forward_rows
from liger_kernels.ops._linear import (
    ARGUMENTS,
    TENSORS,
    Call,
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
)
from liger_kernels.ops._mean import mean

# Widths are multiples of it: a product then fills whole waves of an H200's multiprocessors, or nearly so.
STEP = 1024
# 8192 x 2048 x 262144 on an H200, with 1, 2, 4, 8: 58.4, 54.8, 54.9, 54.5 ms.
WIDE = 8  # times as many classes, where their logits cost no memory


def _step(columns: int) -> int:
    return padded(min(columns, STEP))


def _beside(call: Call, columns: int, first: int = 0) -> int:
    """How many classes from ``first`` on are a slab whose logits lie in d weight, behind the rows of these classes; 0
    where those of no more than ``columns`` would fit. The first slab, which is not computed twice, is as wide as it can
    be."""
    tokens, hidden_size = call.hidden.shape
    step = _step(columns)
    fit = ((len(call.weight) - first) * hidden_size - step) // (tokens + hidden_size) // step * step
    size = min(WIDE * columns, fit) if first else fit
    return size if size > columns else 0


def _logits(call: Call, first: int, stop: int, buffer: Tensor) -> Tensor:
    bias = None if call.bias is None else call.bias[first:stop]
    return logits_of(call.hidden, call.weight[first:stop], bias, buffer)


def _behind(call: Call, d_weight: Tensor, stop: int, size: int) -> Tensor:
    """Room for the logits of ``size`` classes behind the rows of those before ``stop``, at an aligned address."""
    tokens, hidden_size = call.hidden.shape
    begin = padded(stop * hidden_size)
    return d_weight.view(-1)[begin : begin + tokens * size].view(tokens, size)


def _forward_slabs(call: Call, columns: int, narrow: int, d_weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The first class of each slab, and its logits, which the next one overwrites, but for those that ``d_weight``
    keeps for :func:`_backward_slabs`."""
    (tokens, hidden_size), vocab = call.hidden.shape, len(call.weight)
    kept = _beside(call, narrow) if len(d_weight) else 0
    if kept:
        yield 0, _logits(call, 0, kept, _behind(call, d_weight, kept, kept))
    free = d_weight.view(-1)[: kept * hidden_size]  # these rows are written by the backward
    fit = min(WIDE * columns, len(free) // max(tokens, 1)) // _step(columns) * _step(columns)
    if fit > columns:
        buffer = free[: tokens * fit].view(tokens, fit)
    else:
        buffer = logits_buffer(call.hidden, call.weight[:columns], tokens)
    width = max(fit, columns)
    for first in range(kept, vocab, width):
        yield first, _logits(call, first, min(first + width, vocab), buffer)


def _backward_slabs(
    call: Call, columns: int, d_weight: Tensor | None = None, kept: bool = False
) -> Iterator[tuple[int, int, Tensor]]:
    """First and last + 1 class of each slab, and its logits, which the next one overwrites.

    Args:
        columns: classes of a slab whose logits need memory of their own.
        d_weight: of which every slab finishes its rows. The rows behind hold its logits, as long as those of more than
            ``columns`` classes fit: wide slabs cost nothing there, and read and write d hidden less often.
        kept: whether the first slab's logits are there from the forward.
    """
    own, first, vocab = None, 0, len(call.weight)
    while first < vocab:
        size = 0 if d_weight is None else _beside(call, columns, first)
        stop = first + (size or min(columns, vocab - first))
        if d_weight is not None and size:
            buffer = _behind(call, d_weight, stop, size)
        else:
            own = logits_buffer(call.hidden, call.weight[:columns], len(call.hidden)) if own is None else own
            buffer = own
        yield first, stop, buffer if kept and not first else _logits(call, first, stop, buffer)
        first = stop


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_vocabulary_slabs",
    mutates_args=(),
    schema=f"({ARGUMENTS}, int columns, int narrow, bool keep) -> ({', '.join(['Tensor'] * 7)})",
)
def forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """loss, log_probs, entropy, predicted, divisor, stats, d_weight; stats only where a gradient is needed.

    With ``keep``, and where it is needed and has room, d_weight holds the first slab's logits for the backward.
    """
    *shared, columns, narrow, keep = arguments
    call = Call(*shared)
    tokens, vocab, device = len(call.hidden), len(call.weight), call.hidden.device
    rows = call.rows(stats=any(call.needs))
    if rows.predicted is not None:
        rows.predicted.zero_()
    carry = torch.zeros((4, tokens), dtype=torch.float32, device=device)
    carry[1] = float("-inf")
    d_weight = torch.empty(_kept_shape(call, narrow, keep), dtype=call.hidden.dtype, device=device)
    for first, logits in _forward_slabs(call, 2 * columns, narrow, d_weight):  # little else is held yet
        slab = Slab(first, vocab, carry)
        forward_rows(logits, call.targets, call.class_weight, call.row_weight, call.options, rows, slab=slab)
    loss, divisor = rows.loss, call.divisor()
    if call.reduction != "none":
        loss = mean(loss, divisor)
    return loss, *beside(rows), divisor, present(rows.stats, device), d_weight


def _kept_shape(call: Call, narrow: int, keep: bool) -> tuple[int, ...]:
    vocab, hidden_size = call.weight.shape
    return (vocab, hidden_size) if keep and call.needs_weight and _beside(call, narrow) else (0, hidden_size)


@forward_op.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *shared, _, narrow, keep = arguments
    call = Call(*shared)
    stats = (3, call.hidden.shape[0]) if any(call.needs) else (0,)
    new = call.hidden.new_empty
    return *fake_rows(call), new(stats, dtype=torch.float32), new(_kept_shape(call, narrow, keep))


def _gradients(
    call: Call,
    grad_loss: Tensor,
    divisor: Tensor,
    stats: Tensor,
    columns: int,
    narrow: int,
    d_weight: Tensor,
    kept: bool = False,
) -> tuple[Tensor, Tensor]:
    """d hidden and d bias; ``d_weight`` is written where it is needed. ``kept``: it holds logits of the forward's."""
    hidden, weight = call.hidden, call.weight
    vocab, observer = len(weight), current_observer()

    def new(needed: bool, shape: tuple[int, ...], dtype: torch.dtype = hidden.dtype) -> Tensor:
        return torch.empty(shape if needed else (0,), dtype=dtype, device=hidden.device)

    d_bias = new(call.needs_bias, (vocab,))
    first_half, second_half = halves(hidden.shape, hidden.dtype)
    d_hidden = new(call.needs_hidden, first_half, torch.float32), new(call.needs_hidden, second_half, torch.float32)
    observed = new(observer is not None, (len(hidden), vocab), torch.float32)
    slabs = _backward_slabs(call, narrow, d_weight, kept) if call.needs_weight else _backward_slabs(call, columns)
    for first, stop, logits in slabs:
        slab = Slab(first, vocab)
        backward_rows(
            logits,
            call.targets,
            call.class_weight,
            call.row_weight,
            call.options,
            stats,
            grad_loss,
            divisor,
            grad=logits,
            slab=slab,
        )
        if observer is not None:
            observed[:, first:stop] = logits
        if call.needs_weight:
            torch.mm(logits.t(), hidden, out=d_weight[first:stop])
        if call.needs_hidden:
            add_to_halves(d_hidden, logits, weight[first:stop], keep=1.0 if first else 0.0)
        if call.needs_bias:
            torch.sum(logits, 0, out=d_bias[first:stop])
    if observer is not None:
        observer(0, observed)
    del logits  # the slab's memory goes before d hidden is rounded
    whole = over_first_half(*d_hidden, hidden.dtype) if call.needs_hidden else new(False, ())
    if call.needs_hidden and hidden.dtype != torch.float32:
        round_halves(*d_hidden, None, whole)
    return whole, d_bias


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_vocabulary_slabs_backward",
    mutates_args=(),
    schema=f"(Tensor grad_loss, Tensor divisor, Tensor stats, {ARGUMENTS}, int columns, int narrow) "
    "-> (Tensor, Tensor, Tensor)",
)
def backward_op(grad_loss: Tensor, divisor: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias."""
    *shared, columns, narrow = arguments
    call = Call(*shared)
    d_weight = torch.empty(
        call.weight.shape if call.needs_weight else (0,), dtype=call.hidden.dtype, device=stats.device
    )
    d_hidden, d_bias = _gradients(call, grad_loss, divisor, stats, columns, narrow, d_weight)
    return d_hidden, d_weight, d_bias


@backward_op.register_fake
def _fake_backward(grad_loss: Tensor, divisor: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(Call(*arguments[:-2]))


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_vocabulary_slabs_backward_",
    mutates_args=("d_weight",),
    schema=f"(Tensor grad_loss, Tensor divisor, Tensor stats, Tensor(a!) d_weight, {ARGUMENTS}, int columns, "
    "int narrow) -> (Tensor, Tensor)",
)
def finish_op(
    grad_loss: Tensor, divisor: Tensor, stats: Tensor, d_weight: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and bias. ``d_weight`` holds logits of the forward's, and becomes that of weight."""
    *shared, columns, narrow = arguments
    return _gradients(Call(*shared), grad_loss, divisor, stats, columns, narrow, d_weight, kept=True)


@finish_op.register_fake
def _fake_finish(
    grad_loss: Tensor, divisor: Tensor, stats: Tensor, d_weight: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    d_hidden, _, d_bias = fake_gradients(Call(*arguments[:-2]))
    return d_hidden, d_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *shared, columns, narrow, _ = inputs
    call = Call(*shared)
    *_, divisor, stats, d_weight = output
    ctx.needs, ctx.rest = call.needs, (*shared[TENSORS:], columns, narrow)
    ctx.save_for_backward(divisor, stats, *call._replace(denominator=None)[:TENSORS])
    # Not saved, and detached, as the logits of one chunk are: the first backward pass overwrites it.
    ctx.d_weight = d_weight.detach() if len(d_weight) else None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_loss is not None:
        (divisor, stats, *tensors), d_weight, ctx.d_weight = ctx.saved_tensors, ctx.d_weight, None
        if d_weight is None:  # a second pass, or what is compiled
            d_hidden, d_weight, d_bias = backward_op(grad_loss, divisor, stats, *tensors, *ctx.rest)
        else:
            d_hidden, d_bias = finish_op(grad_loss, divisor, stats, d_weight, *tensors, *ctx.rest)
        computed = d_hidden, d_weight, d_bias
        grads = tuple(grad if needed else None for grad, needed in zip(computed, ctx.needs, strict=True))
    return *grads, *(None,) * len(Call._fields)


forward_op.register_autograd(_backward, setup_context=_setup_context)
