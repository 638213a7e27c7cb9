r"""The kernels of cross entropy, row by row: the formulas stand at the top of ``cross_entropy.py``.

Two quantities would cancel if they were formed by subtraction when p_y is near 1: the true class's gradient p_y - 1 and
the loss itself. Both are computed from ``others``, the sum of the exponentials of the classes but y, which each row
keeps with its maximum and its total: p_y - 1 = -others / total and -log p_y = log1p(others / exp(z_y - max)).

A row is read in two passes, for its sums and for its gradient (``gradient.py``). Both go through whole blocks without
masks; the block of the target and the last one, which need masks, are separate, and the target's own gradient is stored
last.

Shifted targets of one row begin in the middle of a tensor, at an address that is no multiple of 16. One program serves
any address: each row reads one target.

Tuples of options and None are as in ``formulas.py``.
"""

from __future__ import annotations

from liger_kernels.ops.loss.formulas import as_float32, exp, log1p, read_target, scaled_logits
from liger_kernels.ops.loss.gradient import _store_grad
from liger_kernels.ops.loss.id_kernels import _id_columns
from liger_kernels.ops.runtime.dispatch import tl, triton


# The formatter would put every argument on a line of its own.
# fmt: off
@triton.jit
def _or_zero(x):
    """``x``, and 0 for -inf."""
    return tl.where(x > float("-inf"), x, 0.0)


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
    shift = _or_zero(new_max)  # -inf - -inf would be NaN
    decay = exp(group_max - shift, PRECISE)
    e = exp(z - shift[:, None, :, None], PRECISE)
    if not PLAIN:
        is_target = tl.reshape(cols, (CHUNKS, LANES, VECTOR))[None, :, :, :] == column[:, None, None, None]
        e = tl.where(is_target, 0.0, e)
    if entropy_ptr is not None:
        moved = tl.where(group_max > float("-inf"), group_max - shift, 0.0)
        distance = distance * decay + moved * (others * decay)  # a move of the largest number has a decay of 0
        distance += _over_lane(e * tl.where(e > 0.0, z - shift[:, None, :, None], 0.0))
    if squares_ptr is not None:
        squares = squares * (decay * decay) + _over_lane(e * e)
    others = others * decay + _over_lane(e)
    return new_max, others, distance, squares, mean, smooth, predicted


@triton.jit
def _carry_rows(carry_ptr, row, carry_stride):
    """Where the rows of ``Carried`` have their numbers of ``row``. Each row lies a stride after the one before: no
    product in 32 bits."""
    target = carry_ptr + row
    maximum = target + carry_stride
    others = maximum + carry_stride
    distance = others + carry_stride
    squares = distance + carry_stride
    return target, maximum, others, distance, squares, squares + carry_stride


@triton.jit
def _in_first_lane(x, ptr, mask, other):
    """``x`` [rows, lanes], but in the first lane what lies at ``ptr`` [rows]."""
    lane = (tl.arange(0, x.shape[1]) == 0)[None, :]
    before = tl.load(ptr, mask=mask, other=other).to(x.dtype)
    return tl.where(lane, before[:, None], x)


@triton.jit
def _known_before(carry, wanted, row, row_mask, ROWS: tl.constexpr, LANES: tl.constexpr):
    """What the lanes know before the first column: nothing, or with a ``carry`` what it says of the classes before, as
    if the first lane had seen them."""
    _, entropy_ptr, squares_ptr, mean_ptr, predicted_ptr = wanted
    group_max = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    others = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max) but for the target's
    distance = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max) * (z - max), for the entropy
    squares = tl.zeros((ROWS, LANES), tl.float32)  # sum of exp(z - max)^2 but for the target's
    mean = tl.zeros((ROWS, LANES), tl.float32)  # sum of z
    smooth = tl.zeros((ROWS, LANES), tl.float32)  # sum of w_c * (z_c - z_target), for label smoothing
    predicted = tl.zeros((ROWS, LANES), tl.int32)
    if carry is not None:
        _, carry_max, carry_others, carry_distance, carry_squares, carry_mean = carry
        group_max = _in_first_lane(group_max, carry_max, row_mask, float("-inf"))
        others = _in_first_lane(others, carry_others, row_mask, 0.0)
        if entropy_ptr is not None:
            distance = _in_first_lane(distance, carry_distance, row_mask, 0.0)
        if squares_ptr is not None:
            squares = _in_first_lane(squares, carry_squares, row_mask, 0.0)
        if mean_ptr is not None:
            mean = _in_first_lane(mean, carry_mean, row_mask, 0.0)
        if predicted_ptr is not None:
            predicted = _in_first_lane(predicted, predicted_ptr + row, row_mask, 0)
    return group_max, others, distance, squares, mean, smooth, predicted


@triton.jit
def _scan_rows(
    logits_rows, running, wanted, rows, here, first_class,    # as _scan_block has them; whether a target is here
    vocab, scaling, label_smoothing,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
    EVICTED: tl.constexpr,
):
    """What the lanes know of the rows after all columns. Most of a large vocabulary are whole blocks of one row without
    its target: nothing is asked of their elements. The target's block and the last one, if it is not whole, come after
    them; a tile of several rows has only such blocks."""
    group_max, others, distance, squares, mean, smooth, predicted = running
    _, column, _ = rows
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
    return group_max, others, distance, squares, mean, smooth, predicted


@triton.jit
def _of_all_lanes(running, wanted, PRECISE: tl.constexpr):
    """What all lanes of a row know together, each [rows]."""
    group_max, others, distance, squares, mean, smooth, predicted = running
    _, entropy_ptr, squares_ptr, mean_ptr, predicted_ptr = wanted
    known_max = tl.max(group_max, 1)
    if predicted_ptr is not None:  # of equal maxima the first
        none = 2**31 - 1
        predicted = tl.min(tl.where(group_max == known_max[:, None], predicted, none), 1)
        predicted = tl.where(predicted < none, predicted, 0)
    row_max = _or_zero(known_max)
    moved = tl.where(group_max > float("-inf"), group_max - row_max[:, None], 0.0)
    decay = tl.where(group_max > float("-inf"), exp(group_max - row_max[:, None], PRECISE), 0.0)
    if entropy_ptr is not None:
        distance = tl.sum(distance * decay + moved * (others * decay), 1)
    others = tl.sum(others * decay, 1)
    if squares_ptr is not None:
        squares = tl.sum(squares * (decay * decay), 1)
    if mean_ptr is not None:
        mean = tl.sum(mean, 1)
    return known_max, others, distance, squares, mean, tl.sum(smooth, 1), predicted


@triton.jit
def _store_carry(carry, wanted, z_target, known, row_mask):
    """Write what is known of the rows, for the classes after these."""
    carry_target, carry_max, carry_others, carry_distance, carry_squares, carry_mean = carry
    _, entropy_ptr, squares_ptr, mean_ptr, _ = wanted
    known_max, others, distance, squares, mean, _, _ = known
    tl.store(carry_target, z_target, mask=row_mask)
    tl.store(carry_max, known_max, mask=row_mask)
    tl.store(carry_others, others, mask=row_mask)
    if entropy_ptr is not None:
        tl.store(carry_distance, distance, mask=row_mask)
    if squares_ptr is not None:
        tl.store(carry_squares, squares, mask=row_mask)
    if mean_ptr is not None:
        tl.store(carry_mean, mean, mask=row_mask)


@triton.jit
def _loss_of_rows(
    nll, lse, smooth, target, counts,                   # [rows]
    weight_ptr, weight_sum_ptr, vocab, terms,
):
    """The loss of each row without its row weight, and the sum of the class weights."""
    label_smoothing, z_loss = terms
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
    return loss + z_loss * lse * lse, weight_sum


@triton.jit
def _store_extras(
    wanted, max_ptr, row, row_mask, read,               # pointers as the kernel has them; [rows]
    known, e_target, below_target, total, log_total,    # seven of [rows], and [rows]
    classes,
):
    """Write what is reported of rows besides their loss and the target's log-probability."""
    _, entropy_ptr, squares_ptr, mean_ptr, predicted_ptr = wanted
    known_max, _, distance, squares, mean, _, predicted = known
    if entropy_ptr is not None:
        mean_distance = (distance + tl.where(e_target > 0.0, e_target * below_target, 0.0)) / total
        tl.store(entropy_ptr + row, log_total - mean_distance, mask=row_mask)
    if squares_ptr is not None:
        squares = tl.where(read, squares + e_target * e_target, 1.0)
        tl.store(squares_ptr + row, tl.log(squares) - 2.0 * log_total, mask=row_mask)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean / classes, mask=row_mask)
    if max_ptr is not None:
        tl.store(max_ptr + row, known_max, mask=row_mask)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, predicted.to(tl.int64), mask=row_mask)


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
    IDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
):
    PRECISE: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    scaling = (logit_scale, softcap, inverse_temperature)
    terms = (label_smoothing, as_float32(z_loss))

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
    carry, first_class = None, 0
    if carry_ptr is not None:
        carry, first_class = _carry_rows(carry_ptr, row, carry_stride), first
        z_target = tl.where(here, z_target, tl.load(carry[0], mask=row_mask, other=0.0))

    # Ignored rows are read only if something is reported about them.
    read = row_mask
    if entropy_ptr is None and predicted_ptr is None and squares_ptr is None and mean_ptr is None and max_ptr is None:
        read = counts

    # A maximum and its sums for what each lane holds of a block, CHUNKS times VECTOR neighbouring columns: nothing
    # crosses lanes, and nobody waits, until the loop is over.
    wanted = (weight_ptr, entropy_ptr, squares_ptr, mean_ptr, predicted_ptr)
    running = _known_before(carry, wanted, row, row_mask, ROWS, BLOCK // (CHUNKS * VECTOR))
    # A gradient needs the row again: it should still be in the L2 cache then.
    EVICTED: tl.constexpr = "evict_first" if grad_ptr is None else "evict_last"
    running = _scan_rows(
        logits_rows, running, wanted, (read, column, _or_zero(z_target)), here, first_class,
        vocab, scaling, label_smoothing, PRECISE, ROWS, BLOCK, CHUNKS, VECTOR, EVICTED,
    )
    known = _of_all_lanes(running, wanted, PRECISE)
    if carry_ptr is not None:
        _store_carry(carry, wanted, z_target, known, row_mask)

    known_max, others, _, _, _, smooth, _ = known
    row_max = _or_zero(known_max)
    e_target = tl.where(counts, exp(z_target - row_max, PRECISE), 0.0)
    total = tl.where(read, others + e_target, 1.0)
    log_total = tl.log(total)
    confident = others <= e_target
    ratio = tl.where(confident, others, 0.0) / tl.where(e_target > 0.0, e_target, 1.0)
    nll = tl.where(confident & (e_target > 0.0), log1p(ratio), row_max - z_target + log_total)

    loss, weight_sum = _loss_of_rows(
        nll, row_max + log_total, smooth, target, counts, weight_ptr, weight_sum_ptr, vocab, terms
    )
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
    _store_extras(
        wanted, max_ptr, row, row_mask, read, known, e_target, z_target - row_max, total, log_total,
        vocab if classes is None else classes,
    )

    if grad_ptr is not None:
        upstream = row_weight
        if denominator_ptr is not None:  # as the backward's upstream gradient is: one division, then the weight
            upstream *= tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(denominator_ptr))
        _store_grad(
            logits_rows, grad_ptr + row * grad_stride, weight_ptr,
            row_mask, target, column, counts, invalid, upstream,
            row_max, total, others, None, None,
            vocab, scaling, terms, weight_sum, PRECISE, ROWS, BLOCK,
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
    IDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    if skip_if_one_ptr is not None:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if tl.load(skip_if_one_ptr) == 1.0:
            return
    PRECISE: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    scaling = (logit_scale, softcap, inverse_temperature)
    terms = (label_smoothing, as_float32(z_loss))

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
        vocab, scaling, terms, weight_sum, PRECISE, ROWS, BLOCK,
    )
# fmt: on
