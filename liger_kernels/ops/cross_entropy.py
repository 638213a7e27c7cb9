r"""Cross entropy over logits, with every option of the loss, in one read of the logits and one write of their gradient.

With raw logits x[row, c], z = softcap * tanh(logit_scale * x / softcap) (z = logit_scale * x without a cap),
lse = log(sum_c exp(z_c)), log p_c = z_c - lse, class weights w, V classes and smoothing eps, a row with target y costs

    loss = (1 - eps) * w_y * (-log p_y) + eps / V * sum_c w_c * (-log p_c) + z_loss * lse^2
    dloss/dx_c = ((1 - eps) * w_y * (p_c - [c = y]) + eps / V * (W * p_c - w_c) + 2 * z_loss * lse * p_c) * dz_c/dx_c

with W = sum_c w_c. A row weight multiplies the row's loss, all of it. "mean" divides by ``denominator``, or else by the
sum of row weight times w_y over the rows that are not ignored, as ``torch.nn.functional.cross_entropy`` does, whose
label smoothing and class weights these are; the soft cap is Gemma 2's (arXiv:2408.00118), the z-loss PaLM's
(arXiv:2204.02311).

Two quantities would cancel if they were formed by subtraction when p_y is near 1: the true class's gradient p_y - 1 and
the loss itself. Both are computed from the sum of the exponentials of the *other* classes, which each row keeps beside
its maximum and its total: p_y - 1 = -others / total and -log p_y = log1p(others / exp(z_y - max)).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from liger_kernels.ops._runtime import INTERPRET, launch, libdevice, next_power_of_2, tl, triton, use_triton

REDUCTIONS = ("mean", "sum", "none")
EXTRAS = ("token_accuracy", "predicted_tokens", "entropy", "log_probs")


class CrossEntropyOutput(NamedTuple):
    """The loss and what was asked for beside it; ``None`` for what was not. Only the loss is differentiable.

    Attributes:
        loss: float32, 0-d, or [tokens] for reduction "none".
        token_accuracy: float32, 0-d: the share of the rows not ignored whose largest logit is the target's; 0 if
            every row is ignored.
        predicted_tokens: int64 [tokens]: the class of the largest logit, the first one of equals.
        entropy: float32 [tokens]: -sum_c p_c log p_c, for ignored rows too.
        log_probs: float32 [tokens]: log p of the target; 0 for ignored rows.
    """

    loss: torch.Tensor
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None


class LossOptions(NamedTuple):
    """The scalar options, checked by :func:`check_options`."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    z_loss: float


def cross_entropy_ref(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    denominator: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    extras: tuple[str, ...] = (),
) -> torch.Tensor | CrossEntropyOutput:
    """What :func:`cross_entropy` computes, in plain torch: in float64 for float64 logits, else in float32."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    targets = targets.long()
    weights = None if class_weight is None else class_weight.to(z.dtype)
    rows = F.cross_entropy(
        z, targets, weights, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    counted = targets != ignore_index
    if z_loss:
        rows = rows + torch.where(counted, z_loss * torch.logsumexp(z, dim=-1).square(), 0.0)
    if row_weight is not None:
        rows = torch.where(counted, rows * row_weight.to(z.dtype), 0.0)
    # F.cross_entropy of zero rows is cut off from its input: this keeps the graph connected.
    rows = rows + z[:, 0] * 0.0 if not len(rows) else rows
    if reduction == "mean":
        if denominator is None:
            share = counted.to(z.dtype)
            if weights is not None:
                share = share * weights[targets.where(counted, 0)]
            if row_weight is not None:
                share = torch.where(counted, share * row_weight.to(z.dtype), 0.0)
            denominator = share.sum()
        denominator = denominator.to(z.dtype)
        loss = rows.sum() / denominator.masked_fill(denominator == 0, math.inf)
    else:
        loss = rows.sum() if reduction == "sum" else rows
    if not extras:
        return loss
    with torch.no_grad():
        predicted = z.argmax(dim=-1)
        accuracy = ((predicted == targets) & counted).sum() / counted.sum().clamp(min=1)
        log_p = torch.log_softmax(z, dim=-1)
        log_probs = log_p.gather(1, targets.where(counted, 0)[:, None])[:, 0].where(counted, 0.0)
        entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
    return _select_extras(loss, extras, accuracy, predicted, entropy, log_probs)


# A GPU has an instruction for 2^y. On the way from exp(x) to 2^(x * log2(e)) the product is rounded: x = -20 loses 20
# units of float32's roundoff. That is nothing beside the rounding of 16-bit logits, where putting it back would cost a
# sixth of the time.
_COMPILED = tl.constexpr(not INTERPRET)
_LOG2_E = tl.constexpr(1.44269502162933349609375)  # log2(e) in float32 ...
_LOG2_E_REST = tl.constexpr(1.92596299112661746e-8)  # ... and what that leaves
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    """exp(x) for x <= 0. PRECISE puts back, to first order, what rounding the exponent of 2 loses: 3 ulp."""
    if not _COMPILED:
        y = tl.exp(x)
    elif PRECISE:
        x = tl.where(x < -200.0, -200.0, x)  # 0 in float32; an infinite x would be infinity - infinity below
        power = x * _LOG2_E
        lost = tl.fma(x, _LOG2_E, -power) + x * _LOG2_E_REST
        y = libdevice.exp2(power)  # flushes to zero below 2^-126, which spares three instructions
        y = tl.fma(y, lost * _LN_2, y)
    else:
        y = libdevice.exp2(x * _LOG2_E)
    return y


@triton.jit
def _exp_above(x, start, PRECISE: tl.constexpr):
    """exp(x - start) for x <= start, up to one factor near 1 that all x of a ``start`` share: :func:`_log_above` knows
    it. In two instructions, because start * log2(e) is rounded once for all of them."""
    if _COMPILED and not PRECISE:
        y = libdevice.exp2(tl.fma(x, _LOG2_E, -(start * _LOG2_E)))
    else:
        y = _exp(x - start, PRECISE)
    return y


@triton.jit
def _decay(old, new, PRECISE: tl.constexpr):
    """What turns exp(x - old) of :func:`_exp_above` into its exp(x - new)."""
    if _COMPILED and not PRECISE:
        y = libdevice.exp2(old * _LOG2_E - new * _LOG2_E)
    else:
        y = _exp(old - new, PRECISE)
    return y


@triton.jit
def _log_above(total, start, PRECISE: tl.constexpr):
    """The logarithm of a sum of :func:`_exp_above` (x, start), without the factor."""
    y = tl.log(total)
    if _COMPILED and not PRECISE:
        y -= tl.fma(start, _LOG2_E, -(start * _LOG2_E)) * _LN_2
    return y


@triton.jit
def _log1p(x):
    """log(1 + x) for 0 <= x <= 1 without cancellation (Kahan; Goldberg 1991, theorem 4)."""
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0.0, x, tl.log(u) * (x / tl.where(d == 0.0, 1.0, d)))


@triton.jit
def _tanh(x, PRECISE: tl.constexpr):
    """tanh to 2 ulp (Cephes tanhf): near zero an odd polynomial, because there the exponential form cancels."""
    a = tl.abs(x)
    s = x * x
    p = tl.fma(s, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(p, s, -5.37397155531e-2)
    p = tl.fma(p, s, 1.33314422036e-1)
    p = tl.fma(p, s, -3.33332819422e-1)
    e = _exp(-2.0 * a, PRECISE)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(a < 0.625, tl.fma(p * s, x, x), tl.where(x < 0.0, -far, far))


@triton.jit
def _scaled_logits(x, logit_scale, softcap, SCALED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISE: tl.constexpr):
    """z of the formula, from the raw logits in float32."""
    if HAS_SOFTCAP:
        z = softcap * _tanh(x * (logit_scale / softcap), PRECISE)
    elif SCALED:
        z = x * logit_scale
    else:
        z = x
    return z


@triton.jit
def _softcap_slope(x, logit_scale, softcap, PRECISE: tl.constexpr):
    """dz/dx under a cap: logit_scale times 1 - tanh^2, in a form that does not cancel where the cap saturates."""
    e = _exp(-2.0 * tl.abs(x * (logit_scale / softcap)), PRECISE)
    return logit_scale * 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _load_target(targets_ptr, row, row_mask, ignore_index, vocab, first, classes):
    """The rows' targets (-1 where there is none), whether a row counts, and whether its target is out of range; then
    the target's column and whether it is one of the ``vocab`` columns. They are all classes, or those from ``first`` on
    of ``classes``."""
    target = tl.load(targets_ptr + row, mask=row_mask, other=ignore_index).to(tl.int64)
    ignored = target == ignore_index
    known = vocab
    if classes is not None:
        known = classes
    in_range = (target >= 0) & (target < known)
    counts = in_range & (ignored == 0)
    target = tl.where(counts, target, -1).to(tl.int32)
    column = target
    here = counts
    if first is not None:
        column = target - first
        here = counts & (column >= 0) & (column < vocab)
    return target, counts, (in_range == 0) & (ignored == 0), column, here


@triton.jit
def _finished_grad(
    grad,
    e,
    x,
    weight,
    inverse,
    upstream,
    weight_sum,
    vocab,
    label_smoothing,
    softcap,
    logit_scale,
    HAS_SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """``grad`` with what smoothing and a cap make of it; ``e`` is exp(z - max), ``weight`` the classes' weights."""
    if SMOOTHING:
        grad += label_smoothing / vocab * (weight_sum * (e * inverse) - weight) * upstream
    if HAS_SOFTCAP:
        grad *= _softcap_slope(x, logit_scale, softcap, PRECISE)
    return grad


@triton.jit
def _store_grad_block(
    logits_rows,
    grad_rows,
    start,
    weight_ptr,
    weight_sum,
    row_mask,
    counts,
    row_max,
    factor,
    inverse,
    upstream,
    vocab,
    label_smoothing,
    softcap,
    logit_scale,
    SCALED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Upstream * dloss/dx for the columns from ``start`` on, as if none were a target. WHOLE: all of them exist."""
    cols = start + tl.arange(0, BLOCK)
    read = counts[:, None]
    mask = row_mask[:, None]
    weight = 1.0
    if WHOLE:
        if SMOOTHING and weight_ptr is not None:
            weight = tl.load(weight_ptr + cols)[None, :]
    else:
        in_row = (cols < vocab)[None, :]
        read = read & in_row
        mask = mask & in_row
        if SMOOTHING and weight_ptr is not None:
            weight = tl.load(weight_ptr + cols, mask=cols < vocab, other=0.0)[None, :]
    x = tl.load(logits_rows[:, None] + cols[None, :], mask=read, other=0.0, eviction_policy="evict_first").to(
        tl.float32
    )
    z = _scaled_logits(x, logit_scale, softcap, SCALED, HAS_SOFTCAP, PRECISE)
    e = _exp_above(z, row_max[:, None], PRECISE)
    grad = _finished_grad(
        e * factor[:, None],
        e,
        x,
        weight,
        inverse[:, None],
        upstream[:, None],
        weight_sum,
        vocab,
        label_smoothing,
        softcap,
        logit_scale,
        HAS_SOFTCAP,
        PRECISE,
        SMOOTHING,
    )
    tl.store(
        grad_rows[:, None] + cols[None, :],
        grad.to(grad_rows.dtype.element_ty),
        mask=mask,
        eviction_policy="evict_first",
    )


@triton.jit
def _store_grad(
    logits_rows,
    grad_rows,
    weight_ptr,
    weight_sum,
    row_mask,
    target,
    column,
    counts,
    invalid,
    upstream,
    row_max,
    total,
    others,
    vocab,
    label_smoothing,
    softcap,
    logit_scale,
    z_loss,
    SCALED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write upstream * dloss/dx for a tile of rows. The blocks run from last to first: after the forward's pass over
    the same rows the last blocks are still in the cache. ``grad_rows`` may be ``logits_rows``; ``column`` is where the
    target's logit would be in them."""
    if weight_ptr is None:
        class_weight = tl.full(target.shape, 1.0, tl.float32)
    else:
        class_weight = tl.load(weight_ptr + target, mask=counts, other=0.0)
    true_weight = class_weight * (1.0 - label_smoothing)
    total = tl.where(counts, total, 1.0)
    row_max = tl.where(counts, row_max, 0.0)
    inverse = 1.0 / total
    z_loss_slope = 2.0 * z_loss * (row_max + _log_above(total, row_max, PRECISE))
    if SCALED and not HAS_SOFTCAP:
        upstream *= logit_scale
    # A row that does not count has factors of zero, or of NaN where its target is out of range.
    upstream = tl.where(counts, upstream, tl.where(invalid, float("nan"), 0.0))
    factor = (true_weight + z_loss_slope) * (inverse * upstream)
    # p - 1 at the target from the other classes' sum: subtracting would cancel.
    here = counts & (column >= 0) & (column < vocab)
    x_target = tl.load(logits_rows + column, mask=here, other=0.0).to(tl.float32)
    z_target = _scaled_logits(x_target, logit_scale, softcap, SCALED, HAS_SOFTCAP, PRECISE)
    e_target = _exp_above(z_target, row_max, PRECISE)
    p_target = e_target * inverse
    at_target = (z_loss_slope * p_target - others * inverse * true_weight) * upstream
    at_target = _finished_grad(
        at_target,
        e_target,
        x_target,
        class_weight,
        inverse,
        upstream,
        weight_sum,
        vocab,
        label_smoothing,
        softcap,
        logit_scale,
        HAS_SOFTCAP,
        PRECISE,
        SMOOTHING,
    )
    tl.debug_barrier()  # over logits, every lane has read its target's before any lane overwrites it
    # Most of a large vocabulary are whole blocks of one row, which need no masks.
    n_whole = 0
    if ROWS == 1:
        n_whole = vocab // BLOCK
    for i in range(n_whole, tl.cdiv(vocab, BLOCK)):
        _store_grad_block(
            logits_rows,
            grad_rows,
            i * BLOCK,
            weight_ptr,
            weight_sum,
            row_mask,
            counts,
            row_max,
            factor,
            inverse,
            upstream,
            vocab,
            label_smoothing,
            softcap,
            logit_scale,
            SCALED,
            HAS_SOFTCAP,
            PRECISE,
            SMOOTHING,
            BLOCK,
            WHOLE=False,
        )
    for i in range(n_whole):
        _store_grad_block(
            logits_rows,
            grad_rows,
            (n_whole - 1 - i) * BLOCK,
            weight_ptr,
            weight_sum,
            row_mask,
            counts,
            row_max,
            factor,
            inverse,
            upstream,
            vocab,
            label_smoothing,
            softcap,
            logit_scale,
            SCALED,
            HAS_SOFTCAP,
            PRECISE,
            SMOOTHING,
            BLOCK,
            WHOLE=True,
        )
    tl.debug_barrier()  # the target's own gradient comes after what its block wrote there
    tl.store(grad_rows + column, at_target.to(grad_rows.dtype.element_ty), mask=here)


@triton.jit
def _over_lane(x):
    """The sum of ``x`` [rows, chunks, lanes, vector] over what each lane holds."""
    return tl.sum(tl.sum(x, 3), 1)


@triton.jit
def _argmax_of_lane(z):
    """The maximum of ``z`` [rows, chunks, lanes, vector] over what each lane holds, and its column: the first one."""
    highest, column = tl.max(z, 3, return_indices=True)
    column += tl.arange(0, z.shape[2])[None, None, :] * z.shape[3]
    column += tl.arange(0, z.shape[1])[None, :, None] * (z.shape[2] * z.shape[3])
    block_max = tl.max(highest, 1)
    first = tl.where(highest == block_max[:, None, :], column, z.shape[1] * z.shape[2] * z.shape[3])
    return block_max, tl.min(first, 1)


@triton.jit
def _scan_block(
    logits_rows,
    start,
    group_max,
    others,
    distance,
    smooth,
    predicted,
    weight_ptr,
    entropy_ptr,
    predicted_ptr,
    read,
    column,
    finite_z_target,
    first_class,
    vocab,
    softcap,
    logit_scale,
    SCALED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    EVICTED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """What the lanes know of the rows after the columns from ``start`` on, too. PLAIN: all of them exist, and none is a
    target."""
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    cols = start + tl.arange(0, BLOCK)
    in_row = cols < vocab
    mask = read[:, None] & in_row[None, :]
    if PLAIN:
        x = tl.load(logits_rows[:, None] + cols[None, :], mask=read[:, None], other=0.0, eviction_policy=EVICTED)
    else:
        x = tl.load(logits_rows[:, None] + cols[None, :], mask=mask, other=0.0, eviction_policy=EVICTED)
    x = x.to(tl.float32)
    z = _scaled_logits(x, logit_scale, softcap, SCALED, HAS_SOFTCAP, PRECISE)
    if not PLAIN:
        z = tl.where(mask, z, float("-inf"))
    if SMOOTHING:
        lower = tl.where(mask, z - finite_z_target[:, None], 0.0)
        if weight_ptr is not None:
            lower *= tl.load(weight_ptr + cols, mask=in_row, other=0.0)[None, :]
        smooth += _over_lane(tl.reshape(lower, (lower.shape[0], CHUNKS, LANES, VECTOR)))
    z = tl.reshape(z, (z.shape[0], CHUNKS, LANES, VECTOR))
    if predicted_ptr is None:
        block_max = tl.max(tl.max(z, 3), 1)
    else:  # the first of equals, in whatever order the blocks come
        block_max, where_max = _argmax_of_lane(z)
        where_max += first_class + start
        better = (block_max > group_max) | ((block_max == group_max) & (where_max < predicted))
        predicted = tl.where(better, where_max, predicted)
    new_max = tl.maximum(group_max, block_max)
    shift = tl.where(new_max > float("-inf"), new_max, 0.0)  # -inf - -inf would be NaN
    decay = _decay(group_max, shift, PRECISE)
    e = _exp_above(z, shift[:, None, :, None], PRECISE)
    if not PLAIN:
        is_target = tl.reshape(cols, (CHUNKS, LANES, VECTOR))[None, :, :, :] == column[:, None, None, None]
        e = tl.where(is_target, 0.0, e)
    if entropy_ptr is not None:
        moved = tl.where(group_max > float("-inf"), group_max - shift, 0.0)
        distance = (distance + moved * others) * decay
        distance += _over_lane(e * tl.where(e > 0.0, z - shift[:, None, :, None], 0.0))
    others = others * decay + _over_lane(e)
    return new_max, others, distance, smooth, predicted


@triton.jit
def _cross_entropy_fwd_kernel(
    logits_ptr,
    logits_stride,
    targets_ptr,
    weight_ptr,
    weight_sum_ptr,
    row_weight_ptr,
    loss_ptr,
    stats_ptr,
    stats_stride,
    log_probs_ptr,
    entropy_ptr,
    predicted_ptr,
    grad_ptr,
    grad_stride,
    grad_scale_ptr,
    carry_ptr,
    carry_stride,
    first,
    classes,
    n_rows,
    vocab,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    z_loss,
    SCALED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    label_smoothing = tl.full((), label_smoothing, tl.float32)
    softcap = tl.full((), softcap, tl.float32)
    logit_scale = tl.full((), logit_scale, tl.float32)
    z_loss = tl.full((), z_loss, tl.float32)

    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    target, counts, invalid, column, here = _load_target(
        targets_ptr, row, row_mask, ignore_index, vocab, first, classes
    )
    logits_rows = logits_ptr + row * logits_stride
    x_target = tl.load(logits_rows + column, mask=here, other=0.0).to(tl.float32)
    z_target = _scaled_logits(x_target, logit_scale, softcap, SCALED, HAS_SOFTCAP, PRECISE)
    carry_rows = row
    if carry_ptr is not None:
        carry_rows = carry_ptr + row
        z_target = tl.where(here, z_target, tl.load(carry_rows, mask=row_mask, other=0.0))
    finite_z_target = tl.where(z_target > float("-inf"), z_target, 0.0)

    # Ignored rows are read only if something is reported about them.
    read = row_mask
    if entropy_ptr is None and predicted_ptr is None:
        read = counts

    # A maximum and its sums for what each lane holds of a block, CHUNKS times VECTOR neighbouring columns: nothing
    # crosses lanes, and nobody waits, until the loop is over.
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    group_max = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    others = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max) but for the target's
    distance = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max) * (z - max), for the entropy
    smooth = tl.zeros((ROWS, LANES), tl.float32)  # sum of w_c * (z_c - z_target), for label smoothing
    predicted = tl.zeros((ROWS, LANES), tl.int32)
    first_class = 0
    if carry_ptr is not None:  # the classes before these, as if the first lane had seen them
        first_class = first
        lane = (tl.arange(0, LANES) == 0)[None, :]
        before = tl.load(carry_rows + carry_stride, mask=row_mask, other=float("-inf"))
        group_max = tl.where(lane, before[:, None], group_max)
        before = tl.load(carry_rows + carry_stride + carry_stride, mask=row_mask, other=0.0)
        others = tl.where(lane, before[:, None], others)
        if entropy_ptr is not None:
            before = tl.load(carry_rows + carry_stride + carry_stride + carry_stride, mask=row_mask, other=0.0)
            distance = tl.where(lane, before[:, None], distance)
        if predicted_ptr is not None:
            known = tl.load(predicted_ptr + row, mask=row_mask, other=0).to(tl.int32)
            predicted = tl.where(lane, known[:, None], predicted)
    # A gradient needs the row again: it should still be in the L2 cache then.
    EVICTED: tl.constexpr = "evict_first" if grad_ptr is None else "evict_last"
    # Most of a large vocabulary are whole blocks of one row without its target: nothing is asked of their elements. The
    # target's block and the last one, if it is not whole, come after them; a tile of several rows has only such blocks.
    n_plain = 0
    n_edges = tl.cdiv(vocab, BLOCK)
    target_block = n_edges
    n_whole = vocab // BLOCK
    if ROWS == 1:
        target_block = tl.max(tl.where(here, column // BLOCK, n_edges), 0)
        with_target = tl.where(target_block < n_whole, 1, 0)
        n_plain = n_whole - with_target
        n_edges -= n_plain
    for i in range(n_plain):
        group_max, others, distance, smooth, predicted = _scan_block(
            logits_rows,
            (i + tl.where(i >= target_block, 1, 0)) * BLOCK,
            group_max,
            others,
            distance,
            smooth,
            predicted,
            weight_ptr,
            entropy_ptr,
            predicted_ptr,
            read,
            column,
            finite_z_target,
            first_class,
            vocab,
            softcap,
            logit_scale,
            SCALED,
            HAS_SOFTCAP,
            PRECISE,
            SMOOTHING,
            BLOCK,
            CHUNKS,
            VECTOR,
            EVICTED,
            PLAIN=True,
        )
    for i in range(n_edges):
        block = i
        if ROWS == 1:
            block = tl.minimum(target_block, n_whole)
            if i > 0:
                block = n_whole
        group_max, others, distance, smooth, predicted = _scan_block(
            logits_rows,
            block * BLOCK,
            group_max,
            others,
            distance,
            smooth,
            predicted,
            weight_ptr,
            entropy_ptr,
            predicted_ptr,
            read,
            column,
            finite_z_target,
            first_class,
            vocab,
            softcap,
            logit_scale,
            SCALED,
            HAS_SOFTCAP,
            PRECISE,
            SMOOTHING,
            BLOCK,
            CHUNKS,
            VECTOR,
            EVICTED,
            PLAIN=False,
        )

    row_max = tl.max(group_max, 1)
    if predicted_ptr is not None:  # of equal maxima the first
        none = 2**31 - 1
        predicted = tl.min(tl.where(group_max == row_max[:, None], predicted, none), 1)
        predicted = tl.where(predicted < none, predicted, 0)
    known_max = row_max
    row_max = tl.where(row_max > float("-inf"), row_max, 0.0)
    moved = tl.where(group_max > float("-inf"), group_max - row_max[:, None], 0.0)
    decay = tl.where(group_max > float("-inf"), _decay(group_max, row_max[:, None], PRECISE), 0.0)
    if entropy_ptr is not None:
        distance = tl.sum((distance + moved * others) * decay, 1)
    others = tl.sum(others * decay, 1)
    if carry_ptr is not None:
        tl.store(carry_rows, z_target, mask=row_mask)
        tl.store(carry_rows + carry_stride, known_max, mask=row_mask)
        tl.store(carry_rows + carry_stride + carry_stride, others, mask=row_mask)
        if entropy_ptr is not None:
            tl.store(carry_rows + carry_stride + carry_stride + carry_stride, distance, mask=row_mask)
    smooth = tl.sum(smooth, 1)
    e_target = tl.where(counts, _exp_above(z_target, row_max, PRECISE), 0.0)
    total = tl.where(read, others + e_target, 1.0)
    log_total = _log_above(total, row_max, PRECISE)
    confident = others <= e_target
    ratio = tl.where(confident, others, 0.0) / tl.where(e_target > 0.0, e_target, 1.0)
    nll = tl.where(confident & (e_target > 0.0), _log1p(ratio), row_max - z_target + log_total)
    lse = row_max + log_total

    loss = nll * (1.0 - label_smoothing)
    if weight_ptr is not None:
        loss *= tl.load(weight_ptr + target, mask=counts, other=0.0)
    weight_sum = tl.full((), vocab, tl.float32)
    if weight_sum_ptr is not None:
        weight_sum = tl.load(weight_sum_ptr)
    if SMOOTHING:
        loss += label_smoothing / vocab * (weight_sum * nll - smooth)
    loss += z_loss * lse * lse
    row_weight = tl.full((ROWS,), 1.0, tl.float32)
    if row_weight_ptr is not None:
        row_weight = tl.load(row_weight_ptr + row, mask=counts, other=0.0)
        loss *= row_weight
    tl.store(loss_ptr + row, tl.where(counts, loss, tl.where(invalid, float("nan"), 0.0)), mask=row_mask)
    if stats_ptr is not None:
        stats_rows = stats_ptr + row
        tl.store(stats_rows, row_max, mask=row_mask)
        tl.store(stats_rows + stats_stride, total, mask=row_mask)
        tl.store(stats_rows + stats_stride + stats_stride, others, mask=row_mask)
    if log_probs_ptr is not None:
        log_prob = tl.where(counts, -nll, tl.where(invalid, float("nan"), 0.0))
        tl.store(log_probs_ptr + row, log_prob, mask=row_mask)
    if entropy_ptr is not None:
        mean_distance = (distance + tl.where(e_target > 0.0, e_target * (z_target - row_max), 0.0)) / total
        tl.store(entropy_ptr + row, log_total - mean_distance, mask=row_mask)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, predicted.to(tl.int64), mask=row_mask)

    if grad_ptr is not None:
        upstream = row_weight
        if grad_scale_ptr is not None:
            upstream *= tl.load(grad_scale_ptr)
        _store_grad(
            logits_rows,
            grad_ptr + row * grad_stride,
            weight_ptr,
            weight_sum,
            row_mask,
            target,
            column,
            counts,
            invalid,
            upstream,
            row_max,
            total,
            others,
            vocab,
            label_smoothing,
            softcap,
            logit_scale,
            z_loss,
            SCALED,
            HAS_SOFTCAP,
            PRECISE,
            SMOOTHING,
            ROWS,
            BLOCK,
        )


@triton.jit
def _cross_entropy_bwd_kernel(
    logits_ptr,
    logits_stride,
    grad_ptr,
    grad_stride,
    targets_ptr,
    weight_ptr,
    weight_sum_ptr,
    stats_ptr,
    stats_stride,
    upstream_ptr,
    upstream_stride,
    unless_one_ptr,
    first,
    classes,
    n_rows,
    vocab,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    z_loss,
    SCALED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if unless_one_ptr is not None:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if tl.load(unless_one_ptr) == 1.0:
            return
    label_smoothing = tl.full((), label_smoothing, tl.float32)
    softcap = tl.full((), softcap, tl.float32)
    logit_scale = tl.full((), logit_scale, tl.float32)
    z_loss = tl.full((), z_loss, tl.float32)

    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    target, counts, invalid, column, _ = _load_target(targets_ptr, row, row_mask, ignore_index, vocab, first, classes)
    weight_sum = tl.full((), vocab, tl.float32)
    if weight_sum_ptr is not None:
        weight_sum = tl.load(weight_sum_ptr)
    stats_rows = stats_ptr + row
    _store_grad(
        logits_ptr + row * logits_stride,
        grad_ptr + row * grad_stride,
        weight_ptr,
        weight_sum,
        row_mask,
        target,
        column,
        counts,
        invalid,
        tl.load(upstream_ptr + row * upstream_stride, mask=row_mask, other=0.0).to(tl.float32),
        tl.load(stats_rows, mask=row_mask, other=0.0),
        tl.load(stats_rows + stats_stride, mask=row_mask, other=1.0),
        tl.load(stats_rows + stats_stride + stats_stride, mask=row_mask, other=0.0),
        vocab,
        label_smoothing,
        softcap,
        logit_scale,
        z_loss,
        SCALED,
        HAS_SOFTCAP,
        PRECISE,
        SMOOTHING,
        ROWS,
        BLOCK,
    )


class Rows(NamedTuple):
    """What the forward kernel writes per row; ``None`` is not computed."""

    loss: torch.Tensor  # [tokens]
    stats: torch.Tensor | None  # [3, tokens]: the maximum of z, the sum of exp(z - maximum), the same without y's
    log_probs: torch.Tensor | None  # [tokens]
    entropy: torch.Tensor | None  # [tokens]
    predicted: torch.Tensor | None  # [tokens]

    @classmethod
    def empty(cls, tokens: int, device: torch.device, extras: tuple[str, ...], stats: bool) -> Rows:
        def rows(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        predict = "token_accuracy" in extras or "predicted_tokens" in extras
        return cls(
            loss=rows(tokens),
            stats=rows(3, tokens) if stats else None,
            log_probs=rows(tokens) if "log_probs" in extras else None,
            entropy=rows(tokens) if "entropy" in extras else None,
            predicted=torch.empty(tokens, dtype=torch.int64, device=device) if predict else None,
        )

    def chunk(self, start: int, stop: int) -> Rows:
        """Views of rows ``start`` to ``stop``."""
        return Rows(*(None if t is None else t[..., start:stop] for t in self))  # type: ignore[arg-type]


class Slab(NamedTuple):
    """Where a head's logits are those of some of its classes only. Not for label smoothing.

    Attributes:
        first: the class of the first column.
        classes: how many there are in all.
        carry: float32 [4, tokens], what the forward knows of the classes before: the target's z, the maximum, and the
            sums of exp(z - maximum) and of exp(z - maximum) * (z - maximum) without the target's.
    """

    first: int
    classes: int
    carry: torch.Tensor | None = None


def _aligned(logits: torch.Tensor) -> bool:
    """Whether every row starts where a lane can read 16 bytes at once, as far as Triton looks."""
    return logits.stride(0) % 16 == 0 and logits.storage_offset() * logits.element_size() % 16 == 0


def _launch_shape(logits: torch.Tensor) -> dict[str, int]:
    """Launch choices: 64 bytes a lane, several rows a program when a row is small. The longer a row, the fewer of them
    may be under way at once if the second look is to find them in the L2 cache: so more lanes work on one. Rows that
    are read element by element go in small blocks."""
    tokens, vocab = logits.shape
    size = logits.element_size()
    block_bytes = 2**14 if vocab * size < 112 * 2**10 else 2**15 if vocab * size < 224 * 2**10 else 2**16
    block, lane = (block_bytes // size, 64 // size) if _aligned(logits) else (4096, 16)
    if INTERPRET:  # every program costs about a millisecond, whatever its size
        block = min(next_power_of_2(vocab), 8192)
        rows = min(65536 // block, next_power_of_2(tokens))
    else:
        block = min(next_power_of_2(vocab), block)
        rows = max(1, 4096 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(1, rows * block // (32 * lane)))}


def _lane_shape(shape: dict[str, int], logits: torch.Tensor) -> dict[str, int]:
    """How Triton lays out a row's block over the lanes: vectors of 16 bytes, or single elements where rows are not
    aligned, one to each lane, in as many chunks as it takes. Only the speed depends on it."""
    per_lane = min(shape["BLOCK"], max(1, shape["ROWS"] * shape["BLOCK"] // (32 * shape["num_warps"])))
    vector = min(16 // logits.element_size(), per_lane) if _aligned(logits) else 1
    return {"VECTOR": vector, "CHUNKS": per_lane // vector}


def _weight_sum(class_weight: torch.Tensor | None, options: LossOptions) -> torch.Tensor | None:
    return class_weight.sum() if class_weight is not None and options.label_smoothing else None


def forward_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    options: LossOptions,
    rows: Rows,
    grad: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    slab: Slab | None = None,
) -> None:
    """Fill ``rows``, with a ``slab`` from the classes up to its last one; ``grad``, which may be ``logits``, gets
    ``grad_scale`` (0-d, default 1) * dloss/dlogits. ``row_weight`` is float32 [tokens] and contiguous."""
    tokens, vocab = logits.shape
    shape = _launch_shape(logits)
    launch(
        _cross_entropy_fwd_kernel,
        (triton.cdiv(tokens, shape["ROWS"]),),
        logits.device,
        logits,
        logits.stride(0),
        targets,
        class_weight,
        _weight_sum(class_weight, options),
        row_weight,
        rows.loss,
        rows.stats,
        0 if rows.stats is None else rows.stats.stride(0),
        rows.log_probs,
        rows.entropy,
        rows.predicted,
        grad,
        0 if grad is None else grad.stride(0),
        grad_scale,
        None if slab is None else slab.carry,
        0 if slab is None or slab.carry is None else slab.carry.stride(0),
        None if slab is None else slab.first,
        None if slab is None else slab.classes,
        tokens,
        vocab,
        options.ignore_index,
        options.label_smoothing,
        options.softcap or 1.0,
        options.logit_scale,
        options.z_loss,
        SCALED=options.logit_scale != 1.0,
        HAS_SOFTCAP=options.softcap is not None,
        PRECISE=logits.dtype == torch.float32,
        # Contracted into fma(x, scale, -max) in one kernel and not in the other, p would be off by the roundoff of max.
        enable_fp_fusion=False,
        SMOOTHING=options.label_smoothing != 0.0,
        **_lane_shape(shape, logits),
        **shape,
    )


def backward_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    options: LossOptions,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    grad: torch.Tensor,
    unless_one: torch.Tensor | None = None,
    slab: Slab | None = None,
) -> None:
    """Write upstream * dloss/dlogits into ``grad``, which may be ``logits``; ``upstream`` is 0-d or [tokens]. Where
    ``unless_one`` (0-d) is 1, ``grad`` is left as it is: only the device knows, and nobody waits for it."""
    tokens, vocab = logits.shape
    shape = _launch_shape(logits)
    launch(
        _cross_entropy_bwd_kernel,
        (triton.cdiv(tokens, shape["ROWS"]),),
        logits.device,
        logits,
        logits.stride(0),
        grad,
        grad.stride(0),
        targets,
        class_weight,
        _weight_sum(class_weight, options),
        stats,
        stats.stride(0),
        upstream,
        upstream.stride(0) if upstream.dim() else 0,
        unless_one,
        None if slab is None else slab.first,
        None if slab is None else slab.classes,
        tokens,
        vocab,
        options.ignore_index,
        options.label_smoothing,
        options.softcap or 1.0,
        options.logit_scale,
        options.z_loss,
        SCALED=options.logit_scale != 1.0,
        HAS_SOFTCAP=options.softcap is not None,
        PRECISE=logits.dtype == torch.float32,
        # Contracted into fma(x, scale, -max) in one kernel and not in the other, p would be off by the roundoff of max.
        enable_fp_fusion=False,
        SMOOTHING=options.label_smoothing != 0.0,
        **shape,
    )


def mean_denominator(
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    given: torch.Tensor | None,
    ignore_index: int,
    vocab: int,
) -> torch.Tensor:
    """What "mean" divides by, 0-d float32: ``given``, or the rows' total weight. Infinity instead of 0: a mean over
    nothing is then 0, its gradient too."""
    if given is not None:
        total = given.to(torch.float32)
    else:
        counted = targets != ignore_index
        if class_weight is None:
            total = counted.sum().to(torch.float32) if row_weight is None else row_weight.where(counted, 0.0).sum()
        else:
            usable = counted & (targets >= 0) & (targets < vocab)
            share = class_weight[targets.where(usable, 0)].where(usable, 0.0)
            total = share.sum() if row_weight is None else (share * row_weight.where(usable, 0.0)).sum()
    return total.masked_fill(total == 0, math.inf)


def token_accuracy(predicted: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The share of right predictions among the rows not ignored, 0-d float32."""
    counted = targets != ignore_index
    return ((predicted == targets) & counted).sum().to(torch.float32) / counted.sum().clamp(min=1)


def _empty_grad(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


class CrossEntropyFunction(torch.autograd.Function):
    """Saves the caller's logits and three float32 numbers per row; the gradient is a new tensor.

    For a mean the forward writes the gradient, too, as if the upstream gradient were 1, while each row is still in the
    cache: one read and one write of memory in all. The backward's launch looks at the upstream gradient on the device,
    and computes anew only what another one asks for. A sum is usually divided by the caller, so its forward does not
    guess.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        row_weight: torch.Tensor | None,
        denominator: torch.Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None,
        logit_scale: float,
        z_loss: float,
        reduction: str,
        extras: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
        if logits.stride(1) != 1:
            logits = logits.contiguous()  # the kernels step through a row one element at a time
        rows = Rows.empty(logits.shape[0], logits.device, extras, stats=ctx.needs_input_grad[0])
        grad = scale = None
        if reduction == "mean":
            vocab = logits.shape[1]
            denominator = mean_denominator(targets, class_weight, row_weight, denominator, ignore_index, vocab)
            # What is compiled can be differentiated again and again, and has no place to remember that it was.
            if ctx.needs_input_grad[0] and not torch.compiler.is_compiling():
                grad, scale = _empty_grad(logits), 1.0 / denominator
        else:
            denominator = None
        forward_rows(logits, targets, class_weight, row_weight, options, rows, grad, scale)
        loss = rows.loss if reduction == "none" else rows.loss.sum()
        loss = loss if denominator is None else loss / denominator
        ctx.save_for_backward(logits, targets, class_weight, row_weight, rows.stats, denominator)
        ctx.options, ctx.grad = options, grad
        ctx.set_materialize_grads(False)
        # Tensors only: Dynamo takes every result for one whose gradient it can make contiguous.
        beside = [t for t in (rows.log_probs, rows.entropy, rows.predicted) if t is not None]
        ctx.mark_non_differentiable(*beside)
        return loss, *beside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 12
        logits, targets, class_weight, row_weight, stats, denominator = ctx.saved_tensors
        upstream = grad_loss if denominator is None else grad_loss / denominator
        upstream = upstream if row_weight is None else upstream * row_weight
        grad, ctx.grad = ctx.grad, None  # whoever gets it may write over it; a second backward pass makes its own
        unless_one = None if grad is None else grad_loss
        grad = _empty_grad(logits) if grad is None else grad
        backward_rows(logits, targets, class_weight, ctx.options, stats, upstream, grad, unless_one)
        return grad, *(None,) * 11


def check_options(
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    reduction: str,
    extras: tuple[str, ...],
) -> LossOptions:
    """The options as plain numbers, or the error that says which one is wrong and what is allowed."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; allowed are {', '.join(map(repr, REDUCTIONS))}")
    if isinstance(extras, str) or any(extra not in EXTRAS for extra in extras):
        raise ValueError(f"extras is {extras!r}; it must be a tuple of names from {', '.join(map(repr, EXTRAS))}")
    for name, value in (
        ("ignore_index", ignore_index),
        ("label_smoothing", label_smoothing),
        ("logit_scale", logit_scale),
        ("z_loss", z_loss),
        ("softcap", 1.0 if softcap is None else softcap),
    ):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be a Python number")
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}; it must be finite")
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index is a {type(ignore_index).__name__}; it must be an int")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing!r}; it must be between 0 and 1")
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"softcap is {softcap!r}; it must be positive, or None for no cap")
    if z_loss < 0.0:
        raise ValueError(f"z_loss is {z_loss!r}; it must not be negative")
    return LossOptions(
        ignore_index,
        float(label_smoothing),
        None if softcap is None else float(softcap),
        float(logit_scale),
        float(z_loss),
    )


def check_targets(
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    tokens: int,
    vocab: int,
    device: torch.device,
) -> None:
    """Raise for targets or class weights that do not fit [tokens, vocab] logits on ``device``."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets are {targets.dtype}; they must be int64 or int32 class indices")
    if targets.shape != (tokens,):
        raise ValueError(f"targets have shape {tuple(targets.shape)}; for {tokens} rows they must be [{tokens}]")
    if targets.device != device:
        raise ValueError(f"targets are on {targets.device}, the rows on {device}; move the targets there")
    if class_weight is not None:
        if class_weight.shape != (vocab,) or not class_weight.is_floating_point():
            raise ValueError(
                f"class_weight is {class_weight.dtype} of shape {tuple(class_weight.shape)}; "
                f"it must be floating point of shape [{vocab}], one weight per class"
            )
        if class_weight.device != device:
            raise ValueError(f"class_weight is on {class_weight.device}, the rows on {device}; move it there")
        if class_weight.requires_grad:
            raise ValueError(
                "class_weight requires a gradient, which the loss does not have; pass class_weight.detach()"
            )
    if device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere looking would stall the device
        wrong = targets[((targets < 0) | (targets >= vocab)) & (targets != ignore_index)]
        if len(wrong):
            raise ValueError(
                f"target {int(wrong[0])} is out of range: there are {vocab} classes, and ignore_index is {ignore_index}"
            )


def check_weights(
    row_weight: torch.Tensor | None, denominator: torch.Tensor | None, tokens: int, device: torch.device
) -> None:
    """Raise for row weights or a denominator that do not fit [tokens] rows on ``device``."""
    for name, value, shape, what in (
        ("row_weight", row_weight, (tokens,), "one weight per row"),
        ("denominator", denominator, (), "what a mean divides by"),
    ):
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            came = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"{name} is {came}; it must be a floating point tensor of shape {list(shape)}: {what}")
        if value.shape != shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; it must be {list(shape)}: {what}")
        if value.device != device:
            raise ValueError(f"{name} is on {value.device}, the rows on {device}; move it there")
        if value.requires_grad:
            raise ValueError(f"{name} requires a gradient, which the loss does not have; pass {name}.detach()")


def as_kernel_weight(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Class or row weights as the kernels read them: float32, contiguous."""
    return None if weight is None else weight.to(torch.float32).contiguous()


def _select_extras(
    loss: torch.Tensor,
    extras: tuple[str, ...],
    accuracy: torch.Tensor | None,
    predicted: torch.Tensor | None,
    entropy: torch.Tensor | None,
    log_probs: torch.Tensor | None,
) -> CrossEntropyOutput:
    return CrossEntropyOutput(
        loss,
        accuracy if "token_accuracy" in extras else None,
        predicted if "predicted_tokens" in extras else None,
        entropy if "entropy" in extras else None,
        log_probs if "log_probs" in extras else None,
    )


def with_extras(
    loss: torch.Tensor,
    extras: tuple[str, ...],
    targets: torch.Tensor,
    ignore_index: int,
    log_probs: torch.Tensor | None,
    entropy: torch.Tensor | None,
    predicted: torch.Tensor | None,
) -> torch.Tensor | CrossEntropyOutput:
    """What the public functions return: the loss alone, or with what was asked for."""
    if not extras:
        return loss
    accuracy = None
    if "token_accuracy" in extras:
        assert predicted is not None
        accuracy = token_accuracy(predicted, targets, ignore_index)
    return _select_extras(loss, extras, accuracy, predicted, entropy, log_probs)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    denominator: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    extras: tuple[str, ...] = (),
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of ``logits`` against class indices; the formula stands at the top of this file.

    Args:
        logits: [tokens, vocab], float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        targets: [tokens], int64 or int32; rows whose target is ``ignore_index`` cost nothing and get zero gradient.
        class_weight: [vocab], floating point, constant: the weight w of each class.
        row_weight: [tokens], floating point, constant: a factor on each row's loss, label smoothing and z-loss
            included; :func:`packing_weights` makes those of packed sequences. Rows that are ignored may have any.
        denominator: 0-d, floating point, constant: what "mean" divides by (0 makes the loss 0), by default the sum of
            row weight times class weight over the rows that are not ignored. "sum" and "none" do not divide.
        label_smoothing: eps, between 0 and 1.
        softcap: the bound of the tanh cap, or None; ``logit_scale`` multiplies the logits before it.
        z_loss: the factor of lse^2 (``lse_square_scale``).
        reduction: "mean", "sum" or "none". A mean over no row (or a total weight of 0) is 0 with zero gradients,
            where PyTorch returns NaN.
        extras: names of further results from the same pass: "token_accuracy", "predicted_tokens", "entropy",
            "log_probs". They carry no gradient.

    Returns:
        The loss in float32 (float64 for float64 logits), 0-d or [tokens] for "none"; with ``extras`` a
        :class:`CrossEntropyOutput`.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, shape, device or range. A target that is neither a class
            nor ``ignore_index`` raises on a CPU; on a GPU, where looking at it would stall the device, its row's loss
            and gradient are NaN.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} of shape {tuple(logits.shape)}; they must be floating point "
            "[tokens, vocab]: flatten the leading dimensions"
        )
    tokens, vocab = logits.shape
    options = check_options(ignore_index, label_smoothing, softcap, logit_scale, z_loss, reduction, extras)
    check_targets(targets, class_weight, ignore_index, tokens, vocab, logits.device)
    check_weights(row_weight, denominator, tokens, logits.device)
    if not use_triton(logits):
        return cross_entropy_ref(
            logits,
            targets,
            class_weight=class_weight,
            row_weight=row_weight,
            denominator=denominator,
            reduction=reduction,
            extras=extras,
            **options._asdict(),
        )
    targets = targets.contiguous()
    weights = as_kernel_weight(class_weight), as_kernel_weight(row_weight), denominator
    loss, *found = CrossEntropyFunction.apply(logits, targets, *weights, *options, reduction, tuple(extras))
    predict = "token_accuracy" in extras or "predicted_tokens" in extras
    asked = {"log_probs": "log_probs" in extras, "entropy": "entropy" in extras, "predicted": predict}
    given = [name for name, is_asked in asked.items() if is_asked]
    beside = [found[given.index(name)] if name in given else None for name in asked]
    return with_extras(loss, extras, targets, ignore_index, *beside)
