r"""Cross entropy of a linear head, from hidden states to loss and gradients, without ever holding [tokens, vocab].

    logits = hidden @ weight^T + bias,    loss = cross_entropy(logits, targets)  (formula in cross_entropy.py)

Chunking over tokens with the gradient computed in the forward is Liger Kernel's idea (arXiv:2410.10989). Two schedules:

- "mean" and "sum" with gradients: every row's upstream gradient is the same number, so the forward already knows the
  gradient up to that number. Per chunk: logits by one GEMM, then one kernel takes the loss and overwrites the logits by
  dloss/dlogits, then one GEMM each for d hidden and d weight; d weight and d bias are summed over the chunks in
  float32. Neither 1 / denominator nor the upstream gradient is in them: in float16 they would flush most of the
  logits' gradient to zero. The backward multiplies both in, in float32, with one rounding to the gradient's dtype.
- "none": the upstream gradient per row is only known in the backward, which computes each chunk's logits again.

Without gradients only the loss is computed; what needs no gradient costs no buffer and no GEMM.

The op is a ``torch.library`` custom op: ``torch.compile(fullgraph=True)`` traces through it. Its optional results are
tensors with no elements where they are not computed, because an op's schema knows no optional result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops._runtime import use_triton
from liger_kernels.ops.cross_entropy import (
    CrossEntropyOutput,
    LossOptions,
    Rows,
    as_kernel_weight,
    backward_rows,
    check_options,
    check_targets,
    check_weights,
    cross_entropy_ref,
    forward_rows,
    mean_denominator,
    with_extras,
)

Observer = Callable[[int, Tensor], None]

# Plain globals, not context variables: the backward of a CUDA tensor runs in autograd's own thread.
_observer: Observer | None = None
_chunk_size: int | None = None


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    extras: tuple[str, ...] = (),
) -> Tensor | CrossEntropyOutput:
    """What :func:`linear_cross_entropy` computes, in plain torch, holding all logits in the input's dtype."""
    logits = F.linear(hidden, weight, bias)
    if _observer is not None and logits.requires_grad:
        logits.register_hook(_observe_all_rows)
    return cross_entropy_ref(
        logits,
        targets,
        class_weight=class_weight,
        row_weight=row_weight,
        denominator=denominator,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
        reduction=reduction,
        extras=extras,
    )


def _observe_all_rows(grad: Tensor) -> None:
    if _observer is not None:
        _observer(0, grad if grad.dtype == torch.float64 else grad.float())


@contextlib.contextmanager
def observe_logits_grad(observer: Observer) -> Iterator[None]:
    """While installed, every backward of :func:`linear_cross_entropy` calls ``observer(start_row, grad)``, chunk by
    chunk in the order of the rows, with the float32 [rows, vocab] gradient of the head's raw output
    hidden @ weight^T + bias.

    It must be installed around the forward and the backward. It changes neither the schedule nor any computed number;
    it costs tokens x vocab memory. ``grad`` is the observer's to keep.
    """
    global _observer
    before = _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = before


@contextlib.contextmanager
def linear_cross_entropy_chunk_size(tokens: int) -> Iterator[None]:
    """Inside, :func:`linear_cross_entropy` takes chunks of ``tokens`` rows where its ``chunk_size`` is not given."""
    global _chunk_size
    before = _chunk_size
    _chunk_size = _check_chunk_size(tokens)
    try:
        yield
    finally:
        _chunk_size = before


def _check_chunk_size(tokens: int) -> int:
    if not isinstance(tokens, int):
        raise TypeError(f"the chunk size is a {type(tokens).__name__}; it must be an int, a number of tokens")
    if tokens < 1:
        raise ValueError(f"the chunk size is {tokens}; it must be at least 1 token")
    return tokens


def _default_chunk_size(hidden_size: int) -> int:
    """From the shape only, so that a result never depends on the state of the machine. Smaller chunks read and write
    d weight too often; with a small hidden size its GEMM needs more rows to be worth that."""
    return 2048 if hidden_size >= 2048 else 4096


def _chunks(tokens: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, chunk_size):
        yield start, min(start + chunk_size, tokens)


def _logits_buffer(hidden: Tensor, weight: Tensor, chunk_size: int) -> Tensor:
    """What one chunk's logits are written to, for every chunk anew. Tensor cores want rows that begin at multiples of
    16 bytes, which the rows of an odd vocabulary do only with some padding."""
    rows, vocab = min(chunk_size, len(hidden)), len(weight)
    padded = -(-vocab // 8) * 8
    return torch.empty((rows, padded), dtype=hidden.dtype, device=hidden.device)[:, :vocab]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    # Here and below every GEMM is given its ``out``, which also keeps autocast from casting its operands again.
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


class _GradientSums:
    """d hidden, d weight and d bias of one pass over the chunks, each only if it is wanted (else without elements)."""

    def __init__(self, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> None:
        self.hidden, self.weight, (self.needs_hidden, self.needs_weight, self.needs_bias) = hidden, weight, needs
        vocab, device = len(weight), hidden.device
        # A first chunk writes what later ones add to; only without any chunk there is something to fill.
        new = torch.empty if len(hidden) else torch.zeros
        self.d_hidden = torch.empty(hidden.shape if self.needs_hidden else (0,), dtype=hidden.dtype, device=device)
        self.d_weight = new(weight.shape if self.needs_weight else (0,), dtype=torch.float32, device=device)
        self.d_bias = new((vocab,) if self.needs_bias else (0,), dtype=torch.float32, device=device)

    def add(self, start: int, stop: int, d_logits: Tensor) -> None:
        rows = self.hidden[start:stop]
        if self.needs_hidden:
            torch.mm(d_logits, self.weight, out=self.d_hidden[start:stop])
        keep = 1.0 if start else 0.0  # 0 never reads what it overwrites
        if self.needs_weight:
            out = self.d_weight
            if rows.dtype != torch.float32 and rows.is_cuda and torch.version.hip is None:
                torch.addmm(out, d_logits.t(), rows, beta=keep, out_dtype=torch.float32, out=out)
            else:  # no GEMM here reads 16 bits and writes 32
                torch.addmm(out, d_logits.t().float(), rows.float(), beta=keep, out=out)
        if self.needs_bias:
            if start:
                self.d_bias += d_logits.sum(0, dtype=torch.float32)
            else:
                torch.sum(d_logits, 0, dtype=torch.float32, out=self.d_bias)


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad`` times the 0-d float32 ``scale`` in float32, rounded once to ``dtype``, without a float32 copy."""
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    # A 0-d factor would be rounded to grad's dtype first; one of shape [1] makes the product float32.
    return torch.mul(grad, scale.reshape(1), out=out)


def _normalised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [tokens] in units of its largest magnitude, and that, 0-d; 1 for no or only zero weights."""
    largest = weight.abs().amax() if len(weight) else torch.ones((), dtype=torch.float32, device=weight.device)
    largest = largest.masked_fill(largest == 0, 1.0)
    return weight / largest, largest


@torch.library.custom_op("liger_kernels::linear_cross_entropy", mutates_args=())
def _forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    row_weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    reduction: str,
    extras: str,
    chunk_size: int,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    observed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, log_probs, entropy, predicted, divisor, stats, d_hidden, d_weight, d_bias, d_logits.

    ``divisor`` is what the gradients are still to be divided by.
    """
    options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    tokens, vocab = len(hidden), len(weight)
    device = hidden.device
    needs = (needs_hidden, needs_weight, needs_bias)
    grad_in_forward = any(needs) and reduction != "none"
    rows = Rows.empty(tokens, device, tuple(extras.split()), stats=any(needs) and not grad_in_forward)
    buffer = _logits_buffer(hidden, weight, chunk_size)
    sums = _GradientSums(hidden, weight, needs if grad_in_forward else (False, False, False))
    keep_logits = observed and grad_in_forward
    kernel_weight, largest = row_weight, None
    if grad_in_forward and row_weight is not None:  # the weights' size, too, stays out of 16-bit gradients
        kernel_weight, largest = _normalised(row_weight)
    d_logits = torch.empty((tokens, vocab) if keep_logits else (0,), dtype=hidden.dtype, device=device)
    for start, stop in _chunks(tokens, chunk_size):
        logits = _logits(hidden[start:stop], weight, bias, buffer[: stop - start])
        forward_rows(
            logits,
            targets[start:stop],
            class_weight,
            None if kernel_weight is None else kernel_weight[start:stop],
            options,
            rows.chunk(start, stop),
            grad=logits if grad_in_forward else None,
        )
        if grad_in_forward:
            sums.add(start, stop, logits)
        if keep_logits:
            d_logits[start:stop] = logits
    loss = rows.loss if reduction == "none" else rows.loss.sum()
    divisor = torch.ones((), dtype=torch.float32, device=device)
    if reduction == "mean":
        divisor = mean_denominator(targets, class_weight, row_weight, denominator, ignore_index, vocab)
    if largest is not None:
        divisor = divisor / largest
    if reduction == "mean" or largest is not None:
        loss = loss / divisor

    def present(t: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(0, dtype=dtype, device=device) if t is None else t

    return (
        loss,
        present(rows.log_probs),
        present(rows.entropy),
        present(rows.predicted, torch.int64),
        divisor,
        present(rows.stats),
        sums.d_hidden,
        sums.d_weight,
        sums.d_bias,
        d_logits,
    )


@_forward_op.register_fake
def _fake_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    row_weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    reduction: str,
    extras: str,
    chunk_size: int,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    observed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, vocab = hidden.shape[0], weight.shape[0]
    asked = extras.split()
    grads = needs_hidden or needs_weight or needs_bias
    in_forward = grads and reduction != "none"

    def new(present: bool, *shape: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        return hidden.new_empty(shape if present else (0,), dtype=dtype)

    predict = "token_accuracy" in asked or "predicted_tokens" in asked
    return (
        new(True, tokens) if reduction == "none" else new(True),
        new("log_probs" in asked, tokens),
        new("entropy" in asked, tokens),
        new(predict, tokens, dtype=torch.int64),
        new(True),
        new(grads and not in_forward, 3, tokens),
        new(in_forward and needs_hidden, tokens, hidden.shape[1], dtype=hidden.dtype),
        new(in_forward and needs_weight, vocab, weight.shape[1]),
        new(in_forward and needs_bias, vocab),
        new(in_forward and observed, tokens, vocab, dtype=hidden.dtype),
    )


@torch.library.custom_op("liger_kernels::linear_cross_entropy_scale", mutates_args=())
def _scale_op(
    grad_loss: Tensor,
    divisor: Tensor,
    d_hidden: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
    d_logits: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of "mean" and "sum"."""
    scale = grad_loss.to(torch.float32) / divisor
    if _observer is not None and d_logits.dim() == 2:
        for start, stop in _chunks(len(d_logits), chunk_size):
            _observer(start, d_logits[start:stop].float() * scale)
    return (
        _scaled(d_hidden, scale, d_hidden.dtype),
        _scaled(d_weight, scale, weight_dtype),
        _scaled(d_bias, scale, bias_dtype),
    )


@_scale_op.register_fake
def _fake_scale(
    grad_loss: Tensor,
    divisor: Tensor,
    d_hidden: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
    d_logits: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        d_hidden.new_empty(d_hidden.shape),
        d_weight.new_empty(d_weight.shape, dtype=weight_dtype),
        d_bias.new_empty(d_bias.shape, dtype=bias_dtype),
    )


@torch.library.custom_op("liger_kernels::linear_cross_entropy_recompute", mutates_args=())
def _recompute_op(
    grad_loss: Tensor,
    stats: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    row_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    chunk_size: int,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of "none"."""
    options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    tokens = len(hidden)
    # The upstream gradient's size stays out of the 16-bit logits' gradient here too.
    grad_loss = grad_loss.to(torch.float32)
    upstream, scale = _normalised(grad_loss if row_weight is None else grad_loss * row_weight)
    buffer = _logits_buffer(hidden, weight, chunk_size)
    sums = _GradientSums(hidden, weight, (needs_hidden, needs_weight, needs_bias))
    for start, stop in _chunks(tokens, chunk_size):
        logits = _logits(hidden[start:stop], weight, bias, buffer[: stop - start])
        backward_rows(
            logits,
            targets[start:stop],
            class_weight,
            options,
            stats[:, start:stop],
            upstream[start:stop],
            grad=logits,
        )
        if _observer is not None:
            _observer(start, logits.float() * scale)
        sums.add(start, stop, logits)
    return (
        _scaled(sums.d_hidden, scale, hidden.dtype),
        _scaled(sums.d_weight, scale, weight.dtype),
        _scaled(sums.d_bias, scale, hidden.dtype if bias is None else bias.dtype),
    )


@_recompute_op.register_fake
def _fake_recompute(
    grad_loss: Tensor,
    stats: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    row_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    chunk_size: int,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,)),
        hidden.new_empty((weight.shape[0],) if needs_bias else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, class_weight, row_weight, _, *options, reduction, _, chunk_size, _, _, _, _ = inputs
    _, _, _, _, divisor, stats, d_hidden, d_weight, d_bias, d_logits = output
    ctx.needs = inputs[-4:-1]
    ctx.options, ctx.reduction, ctx.chunk_size = options, reduction, chunk_size
    ctx.dtypes = weight.dtype, hidden.dtype if bias is None else bias.dtype
    if reduction == "none":
        ctx.save_for_backward(stats, hidden, weight, bias, targets, class_weight, row_weight)
    else:
        ctx.save_for_backward(divisor, d_hidden, d_weight, d_bias, d_logits)
    ctx.set_materialize_grads(False)  # nobody has a gradient for the gradients, and zeros would cost their memory again


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_loss is not None:
        if ctx.reduction == "none":
            computed = _recompute_op(grad_loss, *ctx.saved_tensors, *ctx.options, ctx.chunk_size, *ctx.needs)
        else:
            computed = _scale_op(grad_loss, *ctx.saved_tensors, *ctx.dtypes, ctx.chunk_size)
        grads = tuple(grad if needed else None for grad, needed in zip(computed, ctx.needs, strict=True))
    return *grads, *(None,) * 16


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    extras: tuple[str, ...] = (),
    chunk_size: int | None = None,
) -> Tensor | CrossEntropyOutput:
    """:func:`cross_entropy` of ``F.linear(hidden, weight, bias)``, without holding the logits.

    Under autocast, hidden, weight and bias are cast as ``F.linear`` casts them.

    Args:
        hidden: [tokens, hidden size], float16, bfloat16, float32, or float64 (which runs the reference).
        weight: [vocab, hidden size], of the same dtype.
        targets: [tokens], int64 or int32.
        bias: [vocab], of the same dtype, or None.
        class_weight, row_weight, denominator, ignore_index, label_smoothing, softcap, logit_scale, z_loss, reduction,
            extras: as in :func:`cross_entropy`.
        chunk_size: tokens whose logits are held at once; by default 2048, or 4096 for a hidden size below 2048.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or [tokens] for "none"; with ``extras`` a
        :class:`CrossEntropyOutput`. Nothing but the loss carries a gradient, and that gradient is not differentiable.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, shape, device or range; for targets out of range as
            :func:`cross_entropy` does.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they must be "
            "[tokens, hidden size] and [vocab, hidden size]: flatten hidden's leading dimensions"
        )
    tokens, vocab = hidden.shape[0], weight.shape[0]
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [{vocab}], one number per row of weight")
    options = check_options(ignore_index, label_smoothing, softcap, logit_scale, z_loss, reduction, extras)
    check_targets(targets, class_weight, ignore_index, tokens, vocab, hidden.device)
    check_weights(row_weight, denominator, tokens, hidden.device)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = _autocast(hidden, dtype), _autocast(weight, dtype), _autocast(bias, dtype)
    parameters = [weight] if bias is None else [weight, bias]
    if any(p.dtype != hidden.dtype or p.device != hidden.device for p in parameters):
        given = ", ".join(f"{t.dtype} on {t.device}" for t in (hidden, *parameters))
        raise ValueError(f"hidden, weight and bias are {given}; they must have one dtype and device: cast or move them")
    if chunk_size is None:
        chunk_size = _default_chunk_size(hidden.shape[1]) if _chunk_size is None else _chunk_size
    _check_chunk_size(chunk_size)
    if not use_triton(hidden, opaque=True):
        return linear_cross_entropy_ref(
            hidden,
            weight,
            targets,
            bias,
            class_weight=class_weight,
            row_weight=row_weight,
            denominator=denominator,
            reduction=reduction,
            extras=extras,
            **options._asdict(),
        )
    grad = torch.is_grad_enabled()
    targets = targets.contiguous()
    loss, log_probs, entropy, predicted, *_ = _forward_op(
        hidden,
        weight,
        bias,
        targets,
        as_kernel_weight(class_weight),
        as_kernel_weight(row_weight),
        denominator,
        *options,
        reduction,
        " ".join(extras),
        chunk_size,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
        _observer is not None,
    )
    return with_extras(loss, extras, targets, ignore_index, log_probs.detach(), entropy.detach(), predicted)


def _autocast(t: Any, dtype: torch.dtype) -> Any:
    """As ``F.linear`` casts it under autocast: differentiably, and float64 not at all."""
    return t if t is None or t.dtype == torch.float64 else t.to(dtype)
