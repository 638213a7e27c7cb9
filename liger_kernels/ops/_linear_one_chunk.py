"""Linear cross entropy with all tokens in one chunk; which schedule is for what stands in linear_cross_entropy.py.

The forward computes the logits by one GEMM and keeps them. The backward knows the upstream gradient and the
denominator: one kernel overwrites the kept logits by the whole gradient, rounded once, and from it one GEMM each makes
d hidden and d weight, straight in their dtypes. A second backward pass (``retain_graph``) computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops._cross_entropy_rows import backward_rows, forward_rows
from liger_kernels.ops._linear import (
    ARGUMENTS,
    TENSORS,
    Call,
    beside,
    current_observer,
    fake_gradients,
    fake_rows,
    logits_buffer,
    logits_of,
    padded,
    present,
)
from liger_kernels.ops._mean import mean


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_one_chunk",
    mutates_args=(),
    schema=f"({ARGUMENTS}) -> ({', '.join(['Tensor'] * 7)})",
)
def forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """loss, log_probs, entropy, predicted, divisor, stats, logits [tokens, vocab with padding]."""
    call = Call(*arguments)
    rows = call.rows(stats=True)
    buffer = logits_buffer(call.hidden, call.weight, len(call.hidden))
    logits = logits_of(call.hidden, call.weight, call.bias, buffer)
    forward_rows(logits, call.targets, call.class_weight, call.row_weight, call.options, rows)
    loss, divisor = rows.loss, call.divisor()
    if call.reduction != "none":
        loss = mean(loss, divisor)
    return loss, *beside(rows), divisor, present(rows.stats, buffer.device), buffer


@forward_op.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = Call(*arguments)
    tokens = call.hidden.shape[0]
    new = call.hidden.new_empty
    return *fake_rows(call), new(3, tokens, dtype=torch.float32), new(tokens, padded(call.weight.shape[0]))


@torch.library.custom_op("liger_kernels::linear_cross_entropy_logits", mutates_args=())
def logits_op(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The forward's logits again, to the last bit."""
    buffer = logits_buffer(hidden, weight, len(hidden))
    logits_of(hidden, weight, bias, buffer)
    return buffer


@logits_op.register_fake
def _fake_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden.new_empty(hidden.shape[0], padded(weight.shape[0]))


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_one_chunk_backward",
    mutates_args=("logits",),
    schema=f"(Tensor grad_loss, Tensor divisor, Tensor stats, Tensor(a!) logits, {ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor)",
)
def backward_op(
    grad_loss: Tensor, divisor: Tensor, stats: Tensor, logits: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias. ``logits`` become their own gradient."""
    call = Call(*arguments)
    hidden, weight = call.hidden, call.weight
    d_logits = logits[:, : len(weight)]
    backward_rows(
        d_logits,
        call.targets,
        call.class_weight,
        call.row_weight,
        call.options,
        stats,
        grad_loss,
        divisor,
        grad=d_logits,
    )
    observer = current_observer()
    if observer is not None:
        observer(0, d_logits.to(torch.float32, copy=True))

    def new(needed: bool, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape if needed else (0,), dtype=hidden.dtype, device=hidden.device)

    d_hidden = new(call.needs_hidden, hidden.shape)
    d_weight = new(call.needs_weight, weight.shape)
    d_bias = new(call.needs_bias, (len(weight),))
    if call.needs_hidden:
        torch.mm(d_logits, weight, out=d_hidden)
    if call.needs_weight:
        torch.mm(d_logits.t(), hidden, out=d_weight)
    if call.needs_bias:
        torch.sum(d_logits, 0, out=d_bias)
    return d_hidden, d_weight, d_bias


@backward_op.register_fake
def _fake_backward(
    grad_loss: Tensor, divisor: Tensor, stats: Tensor, logits: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(Call(*arguments))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = Call(*inputs)
    *_, divisor, stats, logits = output
    ctx.needs, ctx.rest = call.needs, inputs[TENSORS:]
    ctx.save_for_backward(divisor, stats, *call._replace(denominator=None)[:TENSORS])
    # Not saved: a backward pass overwrites them, and autograd would then refuse a second one. Detached: an output knows
    # its node, which would keep itself alive.
    ctx.logits = logits.detach()
    ctx.set_materialize_grads(False)  # nobody has a gradient for the logits, and zeros would cost their memory again


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_loss is not None:
        divisor, stats, *tensors = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        if logits is None:
            logits = logits_op(*tensors[:3])
        computed = backward_op(grad_loss, divisor, stats, logits, *tensors, *ctx.rest)
        grads = tuple(grad if needed else None for grad, needed in zip(computed, ctx.needs, strict=True))
    return *grads, *(None,) * (len(Call._fields) - 3)


forward_op.register_autograd(_backward, setup_context=_setup_context)
