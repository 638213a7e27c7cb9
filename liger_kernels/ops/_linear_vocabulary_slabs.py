"""Linear cross entropy in slabs of the vocabulary; which schedule is for what stands in linear_cross_entropy.py.

The forward goes through the logits of all tokens, some classes at a time, and keeps of them what the loss needs of each
row. The backward computes each slab again, overwrites it by its gradient, and finishes the slab's rows of d weight by
one GEMM straight into its dtype; d hidden is summed over the slabs in float32.

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


def _slabs(call: Call, columns: int, unwritten: Tensor | None = None) -> Iterator[tuple[int, int, Tensor]]:
    """First and last + 1 class of each slab, and its logits, which the next one overwrites.

    Args:
        columns: classes of a slab whose logits need memory of their own.
        unwritten: d weight, of which every slab finishes its rows. The rows behind hold its logits, as long as those of
            more than ``columns`` classes fit: wide slabs cost nothing there, and read and write d hidden less often.
    """
    tokens, hidden_size = call.hidden.shape
    vocab, step = len(call.weight), padded(min(columns, STEP))
    own, first = None, 0
    while first < vocab:
        # d weight's rows of these classes, and their logits, which begin at an aligned address
        fit = 0 if unwritten is None else ((vocab - first) * hidden_size - step) // (tokens + hidden_size)
        size = min(WIDE * columns, fit // step * step)
        if unwritten is not None and size > columns:
            begin = padded((first + size) * hidden_size)
            buffer = unwritten.view(-1)[begin : begin + tokens * size].view(tokens, size)
        else:
            size = min(columns, vocab - first)
            own = logits_buffer(call.hidden, call.weight[:columns], tokens) if own is None else own
            buffer = own
        stop = first + size
        bias = None if call.bias is None else call.bias[first:stop]
        yield first, stop, logits_of(call.hidden, call.weight[first:stop], bias, buffer)
        first = stop


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_vocabulary_slabs",
    mutates_args=(),
    schema=f"({ARGUMENTS}, int columns, int narrow) -> ({', '.join(['Tensor'] * 6)})",
)
def forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """loss, log_probs, entropy, predicted, divisor, stats; the last one only where a gradient is needed."""
    *shared, columns, _ = arguments
    call = Call(*shared)
    tokens, vocab, device = len(call.hidden), len(call.weight), call.hidden.device
    rows = call.rows(stats=any(call.needs))
    if rows.predicted is not None:
        rows.predicted.zero_()
    carry = torch.zeros((4, tokens), dtype=torch.float32, device=device)
    carry[1] = float("-inf")
    for first, _, logits in _slabs(call, 2 * columns):  # nothing else is held yet
        slab = Slab(first, vocab, carry)
        forward_rows(logits, call.targets, call.class_weight, call.row_weight, call.options, rows, slab=slab)
    loss, divisor = rows.loss, call.divisor()
    if call.reduction != "none":
        loss = mean(loss, divisor)
    return loss, *beside(rows), divisor, present(rows.stats, device)


@forward_op.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = Call(*arguments[:-2])
    stats = (3, call.hidden.shape[0]) if any(call.needs) else (0,)
    return *fake_rows(call), call.hidden.new_empty(stats, dtype=torch.float32)


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
    hidden, weight = call.hidden, call.weight
    vocab, observer = len(weight), current_observer()
    upstream = grad_loss.to(torch.float32) / divisor
    if call.row_weight is not None:
        upstream = upstream * call.row_weight

    def new(needed: bool, shape: tuple[int, ...], dtype: torch.dtype = hidden.dtype) -> Tensor:
        return torch.empty(shape if needed else (0,), dtype=dtype, device=hidden.device)

    d_weight = new(call.needs_weight, weight.shape)
    d_bias = new(call.needs_bias, (vocab,))
    first_half, second_half = halves(hidden.shape, hidden.dtype)
    d_hidden = new(call.needs_hidden, first_half, torch.float32), new(call.needs_hidden, second_half, torch.float32)
    observed = new(observer is not None, (len(hidden), vocab), torch.float32)
    for first, stop, logits in _slabs(call, narrow, d_weight) if call.needs_weight else _slabs(call, columns):
        slab = Slab(first, vocab)
        backward_rows(logits, call.targets, call.class_weight, call.options, stats, upstream, grad=logits, slab=slab)
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
    return whole, d_weight, d_bias


@backward_op.register_fake
def _fake_backward(grad_loss: Tensor, divisor: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(Call(*arguments[:-2]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = Call(*inputs[:-2])
    *_, divisor, stats = output
    ctx.needs, ctx.rest = call.needs, inputs[TENSORS:]
    ctx.save_for_backward(divisor, stats, *call._replace(denominator=None)[:TENSORS])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_loss is not None:
        computed = backward_op(grad_loss, *ctx.saved_tensors, *ctx.rest)
        grads = tuple(grad if needed else None for grad, needed in zip(computed, ctx.needs, strict=True))
    return *grads, *(None,) * (len(Call._fields) - 1)


forward_op.register_autograd(_backward, setup_context=_setup_context)
