"""The kernels of chosen classes: their log-probabilities in the forward, and their gradients in the backward.

Tuples of options and None are as in ``formulas.py``.
"""

from __future__ import annotations

from liger_kernels.ops.loss.formulas import exp, finished_grad, scaled_logits
from liger_kernels.ops.runtime.dispatch import tl, triton


# The formatter would put every argument on a line of its own.
# fmt: off
@triton.jit
def _id_columns(ids_ptr, row, row_mask, first, vocab, n_ids, IDS: tl.constexpr):
    """Where the chosen classes of rows lie, [rows, IDS]: their offsets in a tensor [rows, n_ids], their columns, and
    whether each is one of the ``vocab`` columns, which are those from ``first`` on."""
    place = tl.arange(0, IDS)
    offset = row[:, None] * n_ids + place[None, :]
    column = tl.load(ids_ptr + offset, mask=row_mask[:, None] & (place < n_ids)[None, :], other=-1).to(tl.int64)
    here = column >= 0
    if first is not None:
        column -= first
        here = here & (column >= 0)
    return offset, column, here & (column < vocab)


@triton.jit
def _grad_at_ids(
    logits_rows, id_column, id_here, id_grad,     # pointers [rows], and three of [rows, ids]
    row_max, factor, inverse, upstream, entropy,  # [rows]
    vocab, scaling, smoothing, PRECISE: tl.constexpr,
):
    """Upstream * dloss/dx at the columns of chosen classes, for which ``id_grad`` comes in."""
    x = tl.load(logits_rows[:, None] + id_column, mask=id_here, other=0.0).to(tl.float32)
    below = scaled_logits(x, scaling, PRECISE) - row_max[:, None]
    e = exp(below, PRECISE)
    if entropy is not None:
        upstream_of_entropy, shift = entropy
        entropy = (upstream_of_entropy[:, None], shift[:, None])
    return finished_grad(
        id_grad + e * factor[:, None], e, below, x, 1.0, inverse[:, None], upstream[:, None],
        vocab, scaling, smoothing, entropy, PRECISE,
    )


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "targets_ptr"])
def _finish_ids_kernel(
    ids_ptr, id_logits_ptr, targets_ptr,                # [rows, n_ids] twice, [rows]
    stats_ptr, stats_stride,                            # [3, rows]
    n_rows, n_ids, classes, ignore_index, ROWS: tl.constexpr, IDS: tl.constexpr,
):
    """Overwrite the chosen classes' z by their log-probabilities: 0 for no class, NaN for one that does not exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    place = tl.arange(0, IDS)
    offset = row[:, None] * n_ids + place[None, :]
    mask = row_mask[:, None] & (place < n_ids)[None, :]
    chosen = tl.load(ids_ptr + offset, mask=mask, other=-1).to(tl.int64)
    target = tl.load(targets_ptr + row, mask=row_mask, other=ignore_index).to(tl.int64)
    ignored = target == ignore_index
    wrong_row = (ignored == 0) & ((target < 0) | (target >= classes))
    wrong_id = ((chosen < -1) | (chosen >= classes)) & (ignored == 0)[:, None]
    stats_rows = stats_ptr + row
    row_max = tl.load(stats_rows, mask=row_mask, other=0.0)
    log_total = tl.log(tl.load(stats_rows + stats_stride, mask=row_mask, other=1.0))
    z = tl.load(id_logits_ptr + offset, mask=mask, other=0.0)
    log_prob = tl.where(ignored[:, None] | (chosen < 0), 0.0, (z - row_max[:, None]) - log_total[:, None])
    tl.store(id_logits_ptr + offset, tl.where(wrong_row[:, None] | wrong_id, float("nan"), log_prob), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "targets_ptr"])
def _id_grads_kernel(
    ids_ptr, targets_ptr,                               # [rows, n_ids], [rows]
    upstream_ptr, upstream_stride, upstream_step,       # [rows, n_ids]
    grads_ptr, totals_ptr, totals_stride,               # [rows, n_ids], [2, rows]
    n_rows, n_ids, classes, ignore_index, ROWS: tl.constexpr, IDS: tl.constexpr,
):
    """For each chosen class of a row the sum of what comes in for it, over all ids of the row that are this class; in
    the row's totals the sum over all ids, and over those that are the target. An ignored row has zeros, as -1 has. An
    id that does not exist makes its row's gradient NaN."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    place = tl.arange(0, IDS)
    offset = row[:, None] * n_ids + place[None, :]
    mask = row_mask[:, None] & (place < n_ids)[None, :]
    target = tl.load(targets_ptr + row, mask=row_mask, other=ignore_index).to(tl.int64)
    counts = target != ignore_index
    chosen = tl.load(ids_ptr + offset, mask=mask, other=-1).to(tl.int64)
    summed = tl.zeros((ROWS, IDS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    at_target = tl.zeros((ROWS,), tl.float32)
    for i in range(n_ids):
        one = tl.load(ids_ptr + row * n_ids + i, mask=row_mask, other=-1).to(tl.int64)
        given = counts & (one != -1)
        grad = tl.load(upstream_ptr + row * upstream_stride + i * upstream_step, mask=given, other=0.0).to(tl.float32)
        total += tl.where(given & ((one < 0) | (one >= classes)), float("nan"), grad)
        at_target += tl.where(one == target, grad, 0.0)
        summed += tl.where(chosen == one[:, None], grad[:, None], 0.0)
    tl.store(grads_ptr + offset, summed, mask=mask)
    totals_rows = totals_ptr + row
    tl.store(totals_rows, total, mask=row_mask)
    tl.store(totals_rows + totals_stride, at_target, mask=row_mask)
# fmt: on
