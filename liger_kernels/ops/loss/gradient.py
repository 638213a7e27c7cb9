"""The gradient of rows of logits, which the forward and the backward of cross entropy write.

``kernels.py`` says how a row is read. Tuples of options and None are as in ``formulas.py``.
"""

from __future__ import annotations

from liger_kernels.ops.loss.formulas import as_float32, exp, finished_grad, scaled_logits
from liger_kernels.ops.loss.id_kernels import _grad_at_ids
from liger_kernels.ops.runtime.dispatch import tl, triton


# The formatter would put every argument on a line of its own.
# fmt: off
@triton.jit
def _store_grad_block(
    logits_rows, grad_rows, start,    # pointers [rows], and the first column
    weight_ptr,                       # [vocab] or None
    rows, entropy,                    # six of [rows], two of [rows] or None
    vocab, scaling, smoothing,
    PRECISE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    """Upstream * dloss/dx for the columns from ``start`` on, as if none were a target. WHOLE: all of them exist."""
    label_smoothing, _ = smoothing
    row_mask, counts, row_max, factor, inverse, upstream = rows
    cols = start + tl.arange(0, BLOCK)
    read = counts[:, None]
    mask = row_mask[:, None]
    weight = 1.0
    if WHOLE:
        if label_smoothing is not None and weight_ptr is not None:
            weight = tl.load(weight_ptr + cols)[None, :]
    else:
        in_row = (cols < vocab)[None, :]
        read = read & in_row
        mask = mask & in_row
        if label_smoothing is not None and weight_ptr is not None:
            weight = tl.load(weight_ptr + cols, mask=cols < vocab, other=0.0)[None, :]
    x = tl.load(logits_rows[:, None] + cols[None, :], mask=read, other=0.0, eviction_policy="evict_first")
    x = x.to(tl.float32)
    z = scaled_logits(x, scaling, PRECISE)
    below = z - row_max[:, None]
    e = exp(below, PRECISE)
    if entropy is not None:
        upstream_of_entropy, shift = entropy
        entropy = (upstream_of_entropy[:, None], shift[:, None])
    grad = finished_grad(
        e * factor[:, None], e, below, x, weight, inverse[:, None], upstream[:, None],
        vocab, scaling, smoothing, entropy, PRECISE,
    )
    tl.store(
        grad_rows[:, None] + cols[None, :],
        grad.to(grad_rows.dtype.element_ty),
        mask=mask,
        eviction_policy="evict_first",
    )


@triton.jit
def _store_grad(
    logits_rows, grad_rows,                       # pointers [rows]; they may be the same
    weight_ptr,                                   # [vocab] or None
    row_mask, target, column, counts, invalid,    # [rows]; column: where the target's logit would be
    upstream, row_max, total, others,             # [rows]
    entropy,                                      # two of [rows]: its upstream gradient, and itself; or None
    ids,                                          # of chosen classes: _load_ids, or None
    vocab, scaling, terms, weight_sum,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write upstream * dloss/dx for a tile of rows. The blocks run from last to first: after the forward's pass over
    the same rows the last blocks are still in the cache."""
    label_smoothing, z_loss = terms
    smoothing = (label_smoothing, weight_sum)
    logit_scale, softcap, _ = scaling
    if weight_ptr is None:
        class_weight = tl.full(target.shape, 1.0, tl.float32)
    else:
        class_weight = tl.load(weight_ptr + target, mask=counts, other=0.0)
    true_weight = class_weight
    if label_smoothing is not None:
        true_weight = class_weight * (1.0 - as_float32(label_smoothing))
    total = tl.where(counts, total, 1.0)
    row_max = tl.where(counts, row_max, 0.0)
    inverse = 1.0 / total
    log_total = tl.log(total)
    z_loss_slope = 2.0 * z_loss * (row_max + log_total)
    if entropy is not None:
        upstream_of_entropy, own_entropy = entropy
        if logit_scale is not None and softcap is None:
            upstream_of_entropy *= as_float32(logit_scale)
        entropy = (tl.where(counts, upstream_of_entropy, 0.0), tl.where(counts, own_entropy - log_total, 0.0))
    if logit_scale is not None and softcap is None:
        upstream *= as_float32(logit_scale)
    # A row that does not count has factors of zero, or of NaN where its target is out of range.
    upstream = tl.where(counts, upstream, tl.where(invalid, float("nan"), 0.0))
    factor = (true_weight + z_loss_slope) * (inverse * upstream)
    if ids is not None:
        id_column, id_here, id_grad, ids_total, ids_at_target = ids
        if logit_scale is not None and softcap is None:
            id_grad *= as_float32(logit_scale)
            ids_total *= as_float32(logit_scale)
            ids_at_target *= as_float32(logit_scale)
        id_here = id_here & counts[:, None]
        factor -= inverse * ids_total
    # p - 1 at the target from the other classes' sum: subtracting would cancel.
    here = counts & (column >= 0) & (column < vocab)
    x_target = tl.load(logits_rows + column, mask=here, other=0.0).to(tl.float32)
    below_target = scaled_logits(x_target, scaling, PRECISE) - row_max
    e_target = exp(below_target, PRECISE)
    p_target = e_target * inverse
    at_target = (z_loss_slope * p_target - others * inverse * true_weight) * upstream
    if ids is not None:
        at_target += others * inverse * ids_at_target - p_target * (ids_total - ids_at_target)
    at_target = finished_grad(
        at_target, e_target, below_target, x_target, class_weight, inverse, upstream,
        vocab, scaling, smoothing, entropy, PRECISE,
    )
    if ids is not None:
        at_id = _grad_at_ids(
            logits_rows, id_column, id_here, id_grad, row_max, factor, inverse, upstream, entropy,
            vocab, scaling, smoothing, PRECISE,
        )
    rows = (row_mask, counts, row_max, factor, inverse, upstream)
    tl.debug_barrier()  # over logits, every lane has read its target's before any lane overwrites it
    # Most of a large vocabulary are whole blocks of one row, which need no masks. Two loops that are written out: made
    # of one by static_range they take 62 registers instead of 32.
    n_whole = 0
    if ROWS == 1:
        n_whole = vocab // BLOCK
    for i in range(n_whole, tl.cdiv(vocab, BLOCK)):
        _store_grad_block(
            logits_rows, grad_rows, i * BLOCK, weight_ptr, rows, entropy,
            vocab, scaling, smoothing, PRECISE, BLOCK, WHOLE=False,
        )
    for i in range(n_whole):
        _store_grad_block(
            logits_rows, grad_rows, (n_whole - 1 - i) * BLOCK, weight_ptr, rows, entropy,
            vocab, scaling, smoothing, PRECISE, BLOCK, WHOLE=True,
        )
    tl.debug_barrier()  # the target's own gradient comes after what its block wrote there
    tl.store(grad_rows + column, at_target.to(grad_rows.dtype.element_ty), mask=here)
    if ids is not None:  # equal ids store the same number
        id_here = id_here & ((id_column != column[:, None]) | (here == 0)[:, None])
        tl.store(grad_rows[:, None] + id_column, at_id.to(grad_rows.dtype.element_ty), mask=id_here)
# fmt: on
