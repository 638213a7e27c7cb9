"""Linear cross entropy in chunks of tokens; which schedule is for what stands in linear_cross_entropy.py.

"mean" and "sum": every row's upstream gradient is the same number, so the forward already knows the gradient up to that
number. Per chunk: logits by one GEMM, then one kernel takes the loss and overwrites the logits by dloss/dlogits, then
one GEMM each for d hidden and d weight; d weight and d bias are summed over the chunks in float32. Neither
1 / denominator nor the upstream gradient is in them: in float16 they would flush most of the logits' gradient to zero.
The backward multiplies both in, in float32, with one rounding to the gradient's dtype.

"none": the upstream gradient per row is only known in the backward, which computes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops._cross_entropy_rows import backward_rows, forward_rows
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
    present,
    round_halves,
    rounded,
)
from liger_kernels.ops._mean import mean
from liger_kernels.ops._operator import operator


def _chunks(tokens: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, chunk_size):
        yield start, min(start + chunk_size, tokens)


class _GradientSums:
    """d hidden, d weight (in halves) and d bias of one pass over the chunks, each only if it is wanted (else without
    elements)."""

    def __init__(self, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> None:
        self.hidden, self.weight, (self.needs_hidden, self.needs_weight, self.needs_bias) = hidden, weight, needs
        vocab, device = len(weight), hidden.device
        # A first chunk writes what later ones add to; only without any chunk there is something to fill.
        new = torch.empty if len(hidden) else torch.zeros
        self.d_hidden = torch.empty(hidden.shape if self.needs_hidden else (0,), dtype=hidden.dtype, device=device)
        first, second = halves(weight.shape, weight.dtype)
        self.d_weight = (
            new(first if self.needs_weight else (0,), dtype=torch.float32, device=device),
            new(second if self.needs_weight else (0,), dtype=torch.float32, device=device),
        )
        self.d_bias = new((vocab,) if self.needs_bias else (0,), dtype=torch.float32, device=device)

    def add(self, start: int, stop: int, d_logits: Tensor) -> None:
        rows = self.hidden[start:stop]
        if self.needs_hidden:
            torch.mm(d_logits, self.weight, out=self.d_hidden[start:stop])
        keep = 1.0 if start else 0.0  # 0 never reads what it overwrites
        if self.needs_weight:
            add_to_halves(self.d_weight, d_logits.t(), rows, keep)
        if self.needs_bias:
            if start:
                self.d_bias += d_logits.sum(0, dtype=torch.float32)
            else:
                torch.sum(d_logits, 0, dtype=torch.float32, out=self.d_bias)


def _normalised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [tokens] in units of its largest magnitude, and that, 0-d; 1 for no or only zero weights."""
    largest = weight.abs().amax() if len(weight) else torch.ones((), dtype=torch.float32, device=weight.device)
    largest = largest.masked_fill(largest == 0, 1.0)
    return weight / largest, largest


@operator(
    "linear_cross_entropy_token_chunks",
    f"({ARGUMENTS}, int chunk_size, bool observed) -> ({', '.join(['Tensor'] * 11)})",
)
def forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """loss, log_probs, entropy, predicted, divisor, stats, d_hidden, two halves of d_weight, d_bias, d_logits.

    ``divisor`` is what the gradients are still to be divided by.
    """
    *shared, chunk_size, observed = arguments
    call = Call(*shared)
    hidden, weight, targets = call.hidden, call.weight, call.targets
    tokens, vocab, device = len(hidden), len(weight), hidden.device
    grad_in_forward = any(call.needs) and call.reduction != "none"
    rows = call.rows(stats=any(call.needs) and not grad_in_forward)
    buffer = logits_buffer(hidden, weight, min(chunk_size, tokens))
    sums = _GradientSums(hidden, weight, call.needs if grad_in_forward else (False, False, False))
    keep_logits = observed and grad_in_forward
    row_weight, largest = call.row_weight, None
    if grad_in_forward and row_weight is not None:  # the weights' size, too, stays out of 16-bit gradients
        row_weight, largest = _normalised(row_weight)
    d_logits = torch.empty((tokens, vocab) if keep_logits else (0,), dtype=hidden.dtype, device=device)
    for start, stop in _chunks(tokens, chunk_size):
        logits = logits_of(hidden[start:stop], weight, call.bias, buffer)
        forward_rows(
            logits,
            targets[start:stop],
            call.class_weight,
            None if row_weight is None else row_weight[start:stop],
            call.options,
            rows.chunk(start, stop),
            grad=logits if grad_in_forward else None,
        )
        if grad_in_forward:
            sums.add(start, stop, logits)
        if keep_logits:
            d_logits[start:stop] = logits
    loss, divisor = rows.loss, call.divisor()
    if largest is not None:
        divisor = divisor / largest
    if call.reduction != "none":
        loss = mean(loss, divisor)
    stats = present(rows.stats, device)
    return loss, *beside(rows), divisor, stats, sums.d_hidden, *sums.d_weight, sums.d_bias, d_logits


@forward_op.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *shared, _, observed = arguments
    call = Call(*shared)
    hidden, (tokens, size), vocab = call.hidden, call.hidden.shape, call.weight.shape[0]
    in_forward = any(call.needs) and call.reduction != "none"

    def new(present: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return hidden.new_empty(shape if present else (0,), dtype=dtype)

    return (
        *fake_rows(call),
        new(any(call.needs) and not in_forward, 3, tokens),
        new(in_forward and call.needs_hidden, tokens, size, dtype=hidden.dtype),
        *[new(in_forward and call.needs_weight, *half) for half in halves((vocab, size), hidden.dtype)],
        new(in_forward and call.needs_bias, vocab),
        new(in_forward and observed, tokens, vocab, dtype=hidden.dtype),
    )


@operator("linear_cross_entropy_scale", "(Tensor grad_loss, Tensor divisor, Tensor d_logits, int chunk_size) -> Tensor")
def scale_op(grad_loss: Tensor, divisor: Tensor, d_logits: Tensor, chunk_size: int) -> Tensor:
    """What the backward of "mean" and "sum" has to multiply the gradients by, 0-d float32."""
    scale = grad_loss.to(torch.float32) / divisor
    observer = current_observer()
    if observer is not None and d_logits.dim() == 2:
        for start, stop in _chunks(len(d_logits), chunk_size):
            observer(start, d_logits[start:stop].float() * scale)
    return scale


@scale_op.register_fake
def _fake_scale(grad_loss: Tensor, divisor: Tensor, d_logits: Tensor, chunk_size: int) -> Tensor:
    return divisor.new_empty(())


@operator("linear_cross_entropy_scaled", "(Tensor grad, Tensor rest, Tensor scale, ScalarType dtype) -> Tensor")
def scaled_op(grad: Tensor, rest: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of ``grad`` and ``rest`` times ``scale``."""
    shape = len(grad) + len(rest), *grad.shape[1:]
    out = torch.empty(shape, dtype=dtype, device=grad.device)
    return round_halves(grad.contiguous(), rest.contiguous(), scale, out)


@scaled_op.register_fake
def _fake_scaled(grad: Tensor, rest: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((grad.shape[0] + rest.shape[0], *grad.shape[1:]), dtype=dtype)


@operator("linear_cross_entropy_scale_", "(Tensor(a!) grad, Tensor rest, Tensor scale, ScalarType dtype) -> ()")
def scale_in_place_op(grad: Tensor, rest: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """The same over the memory of ``grad``."""
    out = grad if grad.dtype == dtype else over_first_half(grad, rest, dtype)
    round_halves(grad, rest, scale, out)


@scale_in_place_op.register_fake
def _fake_scale_in_place(grad: Tensor, rest: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    pass


@operator(
    "linear_cross_entropy_recompute",
    f"(Tensor grad_loss, Tensor stats, {ARGUMENTS}, int chunk_size) -> (Tensor, Tensor, Tensor)",
)
def recompute_op(grad_loss: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of "none"."""
    *shared, chunk_size = arguments
    call = Call(*shared)
    hidden, weight, bias, row_weight = call.hidden, call.weight, call.bias, call.row_weight
    observer = current_observer()
    # The upstream gradient's size stays out of the 16-bit logits' gradient here too.
    grad_loss = grad_loss.to(torch.float32)
    upstream, scale = _normalised(grad_loss if row_weight is None else grad_loss * row_weight)
    buffer = logits_buffer(hidden, weight, min(chunk_size, len(hidden)))
    sums = _GradientSums(hidden, weight, call.needs)
    for start, stop in _chunks(len(hidden), chunk_size):
        logits = logits_of(hidden[start:stop], weight, bias, buffer)
        backward_rows(
            logits,
            call.targets[start:stop],
            call.class_weight,
            call.options,
            stats[:, start:stop],
            upstream[start:stop],  # the row weights, too
            grad=logits,
        )
        if observer is not None:
            observer(start, logits.float() * scale)
        sums.add(start, stop, logits)
    d_weight = over_first_half(*sums.d_weight, hidden.dtype) if call.needs_weight else sums.d_weight[0]
    return (
        rounded(sums.d_hidden, scale, sums.d_hidden),
        round_halves(*sums.d_weight, scale, d_weight) if call.needs_weight else d_weight,
        rounded(sums.d_bias, scale, torch.empty(sums.d_bias.shape, dtype=hidden.dtype, device=hidden.device)),
    )


@recompute_op.register_fake
def _fake_recompute(grad_loss: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(Call(*arguments[:-1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = Call(*inputs[:-2])
    *_, divisor, stats, d_hidden, d_weight, more_d_weight, d_bias, d_logits = output
    ctx.needs, ctx.reduction, ctx.chunk_size, ctx.rest = call.needs, call.reduction, inputs[-2], inputs[TENSORS:-1]
    ctx.dtype = call.hidden.dtype
    if call.reduction == "none":
        ctx.save_for_backward(stats, *call._replace(denominator=None)[:TENSORS])
    else:
        ctx.save_for_backward(divisor)
        # Not saved: the last backward pass scales them in place. Detached: an output knows its node, which would keep
        # itself alive.
        ctx.sums = tuple(t.detach() for t in (d_hidden, d_weight, more_d_weight, d_bias, d_logits))
    ctx.set_materialize_grads(False)  # nobody has a gradient for the gradients, and zeros would cost their memory again


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_loss is not None and ctx.reduction == "none":
        computed = recompute_op(grad_loss, *ctx.saved_tensors, *ctx.rest)
        grads = tuple(grad if needed else None for grad, needed in zip(computed, ctx.needs, strict=True))
    elif grad_loss is not None:
        (divisor,) = ctx.saved_tensors  # raises where an earlier pass was the last one
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        d_hidden, d_weight, more_d_weight, d_bias, d_logits = ctx.sums
        if last:
            ctx.sums = None
        scale = scale_op(grad_loss, divisor, d_logits, ctx.chunk_size)
        sums = (d_hidden, d_hidden[:0]), (d_weight, more_d_weight), (d_bias, d_bias[:0])
        grads = tuple(
            _finished(*both, scale, ctx.dtype, last) if needed else None
            for both, needed in zip(sums, ctx.needs, strict=True)
        )
    return *grads, *(None,) * (len(Call._fields) - 1)


def _finished(grad: Tensor, rest: Tensor, scale: Tensor, dtype: torch.dtype, last: bool) -> Tensor:
    """Whoever comes for a gradient last gets the memory that its sum was kept in: a second tensor beside the float32
    sum of d weight would raise the peak."""
    if not last or (grad.dtype != dtype and not len(rest)):
        return scaled_op(grad, rest, scale, dtype)
    scale_in_place_op(grad, rest, scale, dtype)
    return over_first_half(grad, rest, dtype) if grad.dtype != dtype else grad


forward_op.register_autograd(_backward, setup_context=_setup_context)
