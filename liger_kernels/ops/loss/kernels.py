r"""The kernels of cross entropy, row by row: the formulas stand at the top of ``cross_entropy.py``.

Two quantities would cancel if they were formed by subtraction when p_y is near 1: the true class's gradient p_y - 1 and
the loss itself. Both are computed from ``others``, the sum of the exponentials of the classes but y, which each row
keeps with its maximum and its total: p_y - 1 = -others / total and -log p_y = log1p(others / exp(z_y - max)).

A row is read in two passes, for its sums and for its gradient. Both go through whole blocks without masks; the block
of the target and the last one, which need masks, are separate, and the target's own gradient is stored last.

Shifted targets of one row begin in the middle of a tensor, at an address that is no multiple of 16. One program serves
any address: each row reads one target.

Tuples of options and None are as in ``formulas.py``.
"""

from __future__ import annotations

from liger_kernels.ops.loss.formulas import as_float32, exp, finished_grad, log1p, read_target, scaled_logits
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


@triton.jit
def _store_grad(
    logits_rows, grad_rows,                       # pointers [rows]; they may be the same
    weight_ptr,                                   # [vocab] or None
    row_mask, target, column, counts, invalid,    # [rows]; column: where the target's logit would be
    upstream, row_max, total, others,             # [rows]
    entropy,                                      # two of [rows]: its upstream gradient, and itself; or None
    ids,                                          # of chosen classes: _load_ids, or None
    vocab, z_loss, scaling, smoothing,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write upstream * dloss/dx for a tile of rows. The blocks run from last to first: after the forward's pass over
    the same rows the last blocks are still in the cache."""
    label_smoothing, _ = smoothing
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
    logits_rows, start,                                # pointers [rows], and the first column
    running,                                           # seven of [rows, lanes], of the columns before
    wanted,                                            # five pointers, None for what is not wanted
    rows, first_class,                                 # three of [rows]; the class of the first column of all
    vocab, scaling, label_smoothing,
    PRECISE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
    EVICTED: tl.constexpr, PLAIN: tl.constexpr,
):
    """What the lanes know of the rows after the columns from ``start`` on, too. PLAIN: all of them exist, and none is a
    target."""
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    group_max, others, distance, squares, mean, smooth, predicted = running
    weight_ptr, entropy_ptr, squares_ptr, mean_ptr, predicted_ptr = wanted
    read, column, finite_z_target = rows
    cols = start + tl.arange(0, BLOCK)
    in_row = cols < vocab
    mask = read[:, None] & in_row[None, :]
    if PLAIN:
        x = tl.load(logits_rows[:, None] + cols[None, :], mask=read[:, None], other=0.0, eviction_policy=EVICTED)
    else:
        x = tl.load(logits_rows[:, None] + cols[None, :], mask=mask, other=0.0, eviction_policy=EVICTED)
    x = x.to(tl.float32)
    z = scaled_logits(x, scaling, PRECISE)
    if not PLAIN:
        z = tl.where(mask, z, float("-inf"))
    if label_smoothing is not None:
        lower = tl.where(mask, z - finite_z_target[:, None], 0.0)
        if weight_ptr is not None:
            lower *= tl.load(weight_ptr + cols, mask=in_row, other=0.0)[None, :]
        smooth += _over_lane(tl.reshape(lower, (lower.shape[0], CHUNKS, LANES, VECTOR)))
    if mean_ptr is not None:
        summed = z
        if not PLAIN:
            summed = tl.where(mask, z, 0.0)
        mean += _over_lane(tl.reshape(summed, (z.shape[0], CHUNKS, LANES, VECTOR)))
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
    decay = exp(group_max - shift, PRECISE)
    e = exp(z - shift[:, None, :, None], PRECISE)
    if not PLAIN:
        is_target = tl.reshape(cols, (CHUNKS, LANES, VECTOR))[None, :, :, :] == column[:, None, None, None]
        e = tl.where(is_target, 0.0, e)
    if entropy_ptr is not None:
        moved = tl.where(group_max > float("-inf"), group_max - shift, 0.0)
        distance = (distance + moved * others) * decay
        distance += _over_lane(e * tl.where(e > 0.0, z - shift[:, None, :, None], 0.0))
    if squares_ptr is not None:
        squares = squares * (decay * decay) + _over_lane(e * e)
    others = others * decay + _over_lane(e)
    return new_max, others, distance, squares, mean, smooth, predicted


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _cross_entropy_fwd_kernel(
    logits_ptr, logits_stride,                          # [rows, vocab]
    targets_ptr,                                        # [rows]
    weight_ptr, weight_sum_ptr,                         # [vocab], 0-d, or None
    row_weight_ptr,                                     # [rows] or None
    loss_ptr,                                           # [rows]
    stats_ptr, stats_stride,                            # [3, rows] or None
    log_probs_ptr, entropy_ptr, predicted_ptr, squares_ptr, mean_ptr, max_ptr,    # [rows] or None
    ids_ptr, id_logits_ptr, n_ids,                      # [rows, n_ids] or None
    grad_ptr, grad_stride, denominator_ptr,            # [rows, vocab], 0-d, or None
    carry_ptr, carry_stride, first, classes,            # of a slab: Carried [6, rows] or None, and two numbers
    n_rows, vocab,
    ignore_index, label_smoothing, softcap, logit_scale, inverse_temperature, z_loss,
    IDS: tl.constexpr,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
):
    z_loss = as_float32(z_loss)
    scaling = (logit_scale, softcap, inverse_temperature)

    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    target = tl.load(targets_ptr + row, mask=row_mask, other=ignore_index)
    target, counts, invalid, column, here = read_target(target, ignore_index, vocab, first, classes)
    logits_rows = logits_ptr + row * logits_stride
    x_target = tl.load(logits_rows + column, mask=here, other=0.0).to(tl.float32)
    z_target = scaled_logits(x_target, scaling, PRECISE)
    if ids_ptr is not None:
        offset, id_column, id_here = _id_columns(ids_ptr, row, row_mask, first, vocab, n_ids, IDS)
        x_id = tl.load(logits_rows[:, None] + id_column, mask=id_here, other=0.0).to(tl.float32)
        tl.store(id_logits_ptr + offset, scaled_logits(x_id, scaling, PRECISE), mask=id_here)
    carry_rows = row
    if carry_ptr is not None:
        carry_rows = carry_ptr + row  # of its six rows, each a stride after the one before: no product in 32 bits
        carry_max = carry_rows + carry_stride
        carry_others = carry_max + carry_stride
        carry_distance = carry_others + carry_stride
        carry_squares = carry_distance + carry_stride
        carry_mean = carry_squares + carry_stride
        z_target = tl.where(here, z_target, tl.load(carry_rows, mask=row_mask, other=0.0))
    finite_z_target = tl.where(z_target > float("-inf"), z_target, 0.0)

    # Ignored rows are read only if something is reported about them.
    read = row_mask
    if entropy_ptr is None and predicted_ptr is None and squares_ptr is None and mean_ptr is None and max_ptr is None:
        read = counts

    # A maximum and its sums for what each lane holds of a block, CHUNKS times VECTOR neighbouring columns: nothing
    # crosses lanes, and nobody waits, until the loop is over.
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    group_max = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    others = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max) but for the target's
    distance = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max) * (z - max), for the entropy
    squares = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max)^2 but for the target's
    mean = tl.zeros((ROWS, LANES), tl.float32)  # sum of z
    smooth = tl.zeros((ROWS, LANES), tl.float32)  # sum of w_c * (z_c - z_target), for label smoothing
    predicted = tl.zeros((ROWS, LANES), tl.int32)
    first_class = 0
    if carry_ptr is not None:  # the classes before these, as if the first lane had seen them
        first_class = first
        lane = (tl.arange(0, LANES) == 0)[None, :]
        before = tl.load(carry_max, mask=row_mask, other=float("-inf"))
        group_max = tl.where(lane, before[:, None], group_max)
        before = tl.load(carry_others, mask=row_mask, other=0.0)
        others = tl.where(lane, before[:, None], others)
        if entropy_ptr is not None:
            before = tl.load(carry_distance, mask=row_mask, other=0.0)
            distance = tl.where(lane, before[:, None], distance)
        if squares_ptr is not None:
            before = tl.load(carry_squares, mask=row_mask, other=0.0)
            squares = tl.where(lane, before[:, None], squares)
        if mean_ptr is not None:
            before = tl.load(carry_mean, mask=row_mask, other=0.0)
            mean = tl.where(lane, before[:, None], mean)
        if predicted_ptr is not None:
            known = tl.load(predicted_ptr + row, mask=row_mask, other=0).to(tl.int32)
            predicted = tl.where(lane, known[:, None], predicted)
    # A gradient needs the row again: it should still be in the L2 cache then.
    EVICTED: tl.constexpr = "evict_first" if grad_ptr is None else "evict_last"
    # Most of a large vocabulary are whole blocks of one row without its target: nothing is asked of their elements. The
    # target's block and the last one, if it is not whole, come after them; a tile of several rows has only such blocks.
    wanted = (weight_ptr, entropy_ptr, squares_ptr, mean_ptr, predicted_ptr)
    rows = (read, column, finite_z_target)
    n_plain = 0
    n_edges = tl.cdiv(vocab, BLOCK)
    target_block = n_edges
    n_whole = vocab // BLOCK
    if ROWS == 1:
        target_block = tl.max(tl.where(here, column // BLOCK, n_edges), 0)
        with_target = tl.where(target_block < n_whole, 1, 0)
        n_plain = n_whole - with_target
        n_edges -= n_plain
    for edges in tl.static_range(2):
        for i in range(n_edges if edges else n_plain):
            block = i
            if not edges:
                block += tl.where(i >= target_block, 1, 0)
            elif ROWS == 1:
                block = tl.minimum(target_block, n_whole)
                if i > 0:
                    block = n_whole
            group_max, others, distance, squares, mean, smooth, predicted = _scan_block(
                logits_rows, block * BLOCK,
                (group_max, others, distance, squares, mean, smooth, predicted), wanted, rows, first_class,
                vocab, scaling, label_smoothing,
                PRECISE, BLOCK, CHUNKS, VECTOR, EVICTED, PLAIN=edges == 0,
            )

    row_max = tl.max(group_max, 1)
    if predicted_ptr is not None:  # of equal maxima the first
        none = 2**31 - 1
        predicted = tl.min(tl.where(group_max == row_max[:, None], predicted, none), 1)
        predicted = tl.where(predicted < none, predicted, 0)
    known_max = row_max
    row_max = tl.where(row_max > float("-inf"), row_max, 0.0)
    moved = tl.where(group_max > float("-inf"), group_max - row_max[:, None], 0.0)
    decay = tl.where(group_max > float("-inf"), exp(group_max - row_max[:, None], PRECISE), 0.0)
    if entropy_ptr is not None:
        distance = tl.sum((distance + moved * others) * decay, 1)
    others = tl.sum(others * decay, 1)
    if squares_ptr is not None:
        squares = tl.sum(squares * (decay * decay), 1)
    if mean_ptr is not None:
        mean = tl.sum(mean, 1)
    if carry_ptr is not None:
        tl.store(carry_rows, z_target, mask=row_mask)
        tl.store(carry_max, known_max, mask=row_mask)
        tl.store(carry_others, others, mask=row_mask)
        if entropy_ptr is not None:
            tl.store(carry_distance, distance, mask=row_mask)
        if squares_ptr is not None:
            tl.store(carry_squares, squares, mask=row_mask)
        if mean_ptr is not None:
            tl.store(carry_mean, mean, mask=row_mask)
    smooth = tl.sum(smooth, 1)
    e_target = tl.where(counts, exp(z_target - row_max, PRECISE), 0.0)
    total = tl.where(read, others + e_target, 1.0)
    log_total = tl.log(total)
    confident = others <= e_target
    ratio = tl.where(confident, others, 0.0) / tl.where(e_target > 0.0, e_target, 1.0)
    nll = tl.where(confident & (e_target > 0.0), log1p(ratio), row_max - z_target + log_total)
    lse = row_max + log_total

    loss = nll
    if label_smoothing is not None:
        loss = nll * (1.0 - as_float32(label_smoothing))
    if weight_ptr is not None:
        loss *= tl.load(weight_ptr + target, mask=counts, other=0.0)
    weight_sum = tl.full((), vocab, tl.float32)
    if weight_sum_ptr is not None:
        weight_sum = tl.load(weight_sum_ptr)
    if label_smoothing is not None:
        loss += as_float32(label_smoothing) / vocab * (weight_sum * nll - smooth)
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
    if squares_ptr is not None:
        squares = tl.where(read, squares + e_target * e_target, 1.0)
        tl.store(squares_ptr + row, tl.log(squares) - 2.0 * log_total, mask=row_mask)
    if mean_ptr is not None:
        classes_in_all = vocab
        if classes is not None:
            classes_in_all = classes
        tl.store(mean_ptr + row, mean / classes_in_all, mask=row_mask)
    if max_ptr is not None:
        tl.store(max_ptr + row, known_max, mask=row_mask)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, predicted.to(tl.int64), mask=row_mask)

    if grad_ptr is not None:
        upstream = row_weight
        if denominator_ptr is not None:  # as the backward's upstream gradient is: one division, then the weight
            upstream *= tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(denominator_ptr))
        _store_grad(
            logits_rows, grad_ptr + row * grad_stride, weight_ptr,
            row_mask, target, column, counts, invalid, upstream,
            row_max, total, others, None, None,
            vocab, z_loss, scaling, (label_smoothing, weight_sum), PRECISE, ROWS, BLOCK,
        )


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _cross_entropy_bwd_kernel(
    logits_ptr, logits_stride,                          # [rows, vocab]
    grad_ptr, grad_stride,                              # [rows, vocab]
    targets_ptr,                                        # [rows]
    weight_ptr, weight_sum_ptr,                         # [vocab], 0-d, or None
    stats_ptr, stats_stride,                            # [3, rows]
    upstream_ptr, upstream_stride, denominator_ptr,         # [rows], 0-d or None
    row_weight_ptr, skip_if_one_ptr,                    # [rows], 0-d, or None
    entropy_ptr, grad_entropy_ptr, grad_entropy_stride, # [rows] or None
    ids_ptr, id_grads_ptr, id_totals_ptr, id_totals_stride, n_ids,    # [rows, n_ids] twice, [2, rows], or None
    first, classes,                                     # of a slab
    n_rows, vocab,
    ignore_index, label_smoothing, softcap, logit_scale, inverse_temperature, z_loss,
    IDS: tl.constexpr, PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    if skip_if_one_ptr is not None:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if tl.load(skip_if_one_ptr) == 1.0:
            return
    z_loss = as_float32(z_loss)
    scaling = (logit_scale, softcap, inverse_temperature)

    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    target = tl.load(targets_ptr + row, mask=row_mask, other=ignore_index)
    target, counts, invalid, column, _ = read_target(target, ignore_index, vocab, first, classes)
    weight_sum = tl.full((), vocab, tl.float32)
    if weight_sum_ptr is not None:
        weight_sum = tl.load(weight_sum_ptr)
    upstream = tl.load(upstream_ptr + row * upstream_stride, mask=row_mask, other=0.0).to(tl.float32)
    if denominator_ptr is not None:
        upstream = tl.div_rn(upstream, tl.load(denominator_ptr))
    if row_weight_ptr is not None:
        upstream *= tl.load(row_weight_ptr + row, mask=counts, other=0.0)
    entropy = None
    if grad_entropy_ptr is not None:
        upstream_of_entropy = tl.load(grad_entropy_ptr + row * grad_entropy_stride, mask=row_mask, other=0.0)
        entropy = (upstream_of_entropy.to(tl.float32), tl.load(entropy_ptr + row, mask=row_mask, other=0.0))
    ids = None
    if ids_ptr is not None:
        offset, id_column, id_here = _id_columns(ids_ptr, row, row_mask, first, vocab, n_ids, IDS)
        id_grad = tl.load(id_grads_ptr + offset, mask=id_here, other=0.0)
        ids_total = tl.load(id_totals_ptr + row, mask=row_mask, other=0.0)
        ids_at_target = tl.load(id_totals_ptr + row + id_totals_stride, mask=row_mask, other=0.0)
        ids = (id_column, id_here, id_grad, ids_total, ids_at_target)
    stats_rows = stats_ptr + row
    _store_grad(
        logits_ptr + row * logits_stride, grad_ptr + row * grad_stride, weight_ptr,
        row_mask, target, column, counts, invalid, upstream,
        tl.load(stats_rows, mask=row_mask, other=0.0),
        tl.load(stats_rows + stats_stride, mask=row_mask, other=1.0),
        tl.load(stats_rows + stats_stride + stats_stride, mask=row_mask, other=0.0), entropy, ids,
        vocab, z_loss, scaling, (label_smoothing, weight_sum), PRECISE, ROWS, BLOCK,
    )
# fmt: on
