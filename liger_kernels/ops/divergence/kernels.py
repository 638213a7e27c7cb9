r"""The kernels of the divergence of two heads, row by row: the formulas stand at the top of ``linear_divergence.py``.

A row of both heads' logits is read once for both normalisers and, where beta is 0 or 1, the divergence itself: the sums
are relative to the running maxima, and rescaled as these grow. A sum is scaled before it is moved: what the smallest
number of a dtype masks has a scale of 0, and a move as large as numbers get. A mixture is of normalised probabilities,
so that its terms need a second pass. What each lane holds of a block has sums of its own; nothing crosses lanes before
a loop ends.

The sum of p (z - u), or of q (z - u), is relative to a centre of each head. In 16 bits the centres are the maxima. For
float32 logits they are the means under p, or q, of the columns so far (Welford 1962, "Note on a method for calculating
corrected sums of squares and products"). No term is then much larger than what the terms differ by. The error of that
sum is common to a row's classes: the gradient of the hidden states adds it up.

``MODE`` is :class:`Mode` of ``rows.py``. Scalings and None are as in ``loss/formulas.py``.
"""

from __future__ import annotations

from liger_kernels.ops.loss.formulas import as_float32, exp, scaled_logits, softcap_slope
from liger_kernels.ops.loss.kernels import _over_lane
from liger_kernels.ops.runtime.dispatch import tl, triton


# The formatter would put every argument on a line of its own.
# fmt: off
@triton.jit
def _load_both(
    student_rows, teacher_rows, start, read,           # pointers [rows], the first column, [rows]
    vocab, scaling, teacher_scaling,
    PRECISE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    """The student's raw logits and both heads' z in the columns from ``start`` on, and where they exist; minus infinity
    elsewhere. WHOLE: all columns exist."""
    cols = start + tl.arange(0, BLOCK)
    mask = read[:, None]
    if not WHOLE:
        mask = mask & (cols < vocab)[None, :]
    x = tl.load(student_rows[:, None] + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    y = tl.load(teacher_rows[:, None] + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    x = x.to(tl.float32)
    z = scaled_logits(x, scaling, PRECISE)
    u = scaled_logits(y.to(tl.float32), teacher_scaling, PRECISE)
    if not WHOLE:
        z = tl.where(mask, z, float("-inf"))
        u = tl.where(mask, u, float("-inf"))
    return cols, mask, x, z, u


@triton.jit
def _max_of_lane(x):
    """The maximum of ``x`` [rows, chunks, lanes, vector] over what each lane holds."""
    return tl.max(tl.max(x, 3), 1)


@triton.jit
def _finite(x):
    """``x``, or 0 where it is minus infinity, which minus itself would be NaN."""
    return tl.where(x > float("-inf"), x, 0.0)


@triton.jit
def _centres(z_max, u_max, means, PRECISE: tl.constexpr):
    """What the sums of log-ratios are relative to, of the student and of the teacher."""
    if PRECISE:
        centres = means
    else:
        centres = (_finite(z_max), _finite(u_max))
    return centres


@triton.jit
def _weighted(weights, x):
    """The products; 0 where the weight is, whatever ``x`` is there."""
    return weights * tl.where(weights > 0.0, x, 0.0)


@triton.jit
def _scan_both_block(
    student_rows, teacher_rows, start, read,           # as in _load_both
    running,                                           # of [rows, lanes], of the columns before
    vocab, scaling, teacher_scaling,
    MODE: tl.constexpr, ENTROPY: tl.constexpr, DIFFERENCE: tl.constexpr,
    PRECISE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr,
):
    """What the lanes know of the rows after the columns from ``start`` on, too."""
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    z_max, z_total, u_max, u_total, gap, means, distance, highest, lowest = running
    _, _, _, z, u = _load_both(
        student_rows, teacher_rows, start, read, vocab, scaling, teacher_scaling, PRECISE, BLOCK, WHOLE
    )
    z = tl.reshape(z, (z.shape[0], CHUNKS, LANES, VECTOR))
    u = tl.reshape(u, (u.shape[0], CHUNKS, LANES, VECTOR))
    if DIFFERENCE:
        apart = z - u  # NaN where both are minus infinity: a class that neither has
        highest = tl.maximum(highest, _max_of_lane(tl.where(apart == apart, apart, float("-inf"))))
        lowest = tl.maximum(lowest, _max_of_lane(tl.where(apart == apart, -apart, float("-inf"))))
    new_z = tl.maximum(z_max, _max_of_lane(z))
    new_u = tl.maximum(u_max, _max_of_lane(u))
    z_shift = _finite(new_z)
    u_shift = _finite(new_u)
    z_decay = exp(z_max - z_shift, PRECISE)
    u_decay = exp(u_max - u_shift, PRECISE)
    z_below = z - z_shift[:, None, :, None]
    z_exp = exp(z_below, PRECISE)
    u_exp = exp(u - u_shift[:, None, :, None], PRECISE)
    z_own = _over_lane(z_exp)
    u_own = _over_lane(u_exp)
    if MODE < 2:
        weights, own, known, decay = (z_exp, z_own, z_total, z_decay) if MODE == 1 else (u_exp, u_own, u_total, u_decay)
        z_old, u_old = _centres(z_max, u_max, means, PRECISE)
        before = known * decay
        if PRECISE:
            total = before + own
            # The new mean is a small step from what weighs more. A step from a number that masks classes would lose the
            # last digits of the mean.
            z_from = tl.where(before > own, z_old, z_shift)
            u_from = tl.where(before > own, u_old, u_shift)
            z_added = _over_lane(_weighted(weights, z - z_from[:, None, :, None])) + _weighted(before, z_old - z_from)
            u_added = _over_lane(_weighted(weights, u - u_from[:, None, :, None])) + _weighted(before, u_old - u_from)
            z_new = z_from + z_added / total
            u_new = u_from + u_added / total
            moves = tl.abs(z_new - u_new) < float("inf")  # not where no weight is, nor where the divergence is infinite
            means = (tl.where(moves, z_new, z_shift), tl.where(moves, u_new, u_shift))
        z_centre, u_centre = _centres(new_z, new_u, means, PRECISE)
        gap = _weighted(decay, gap) + _weighted(before, (z_old - z_centre) - (u_old - u_centre))
        difference = (z - z_centre[:, None, :, None]) - (u - u_centre[:, None, :, None])
        gap += _over_lane(_weighted(weights, difference))
    if ENTROPY:
        z_moved = tl.where(z_max > float("-inf"), z_max - z_shift, 0.0)
        distance = distance * z_decay + _weighted(z_total * z_decay, z_moved)
        distance += _over_lane(_weighted(z_exp, z_below))
    z_total = z_total * z_decay + z_own
    u_total = u_total * u_decay + u_own
    return new_z, z_total, new_u, u_total, gap, means, distance, highest, lowest


@triton.jit
def _carried(pointers, row_mask, none, LANES: tl.constexpr):
    """What is known of the columns before, [rows, lanes], as if the first lane had seen them."""
    before = tl.load(pointers, mask=row_mask, other=none)
    return tl.where((tl.arange(0, LANES) == 0)[None, :], before[:, None], none)


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _divergence_scan_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride,    # [rows, vocab]
    targets_ptr,                                        # [rows]
    stats_ptr, stats_stride,                            # DivergenceStats [12, rows]
    n_rows, vocab, ignore_index,
    softcap, logit_scale, inverse_temperature, teacher_softcap, teacher_scale, teacher_inverse,
    MODE: tl.constexpr, ENTROPY: tl.constexpr, DIFFERENCE: tl.constexpr,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
):
    """Both normalisers of each row, and for beta 0 and 1 the divergence's sum, with these columns, too."""
    scaling = (logit_scale, softcap, inverse_temperature)
    teacher_scaling = (teacher_scale, teacher_softcap, teacher_inverse)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    read = row_mask & (tl.load(targets_ptr + row, mask=row_mask, other=ignore_index) != ignore_index)
    student_rows = student_ptr + row * student_stride
    teacher_rows = teacher_ptr + row * teacher_stride
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    NONE: tl.constexpr = float("-inf")
    of_max = stats_ptr + row  # of the rows of stats, each a stride after the one before: no product in 32 bits
    of_total = of_max + stats_stride
    of_teacher_max = of_total + stats_stride
    of_teacher_total = of_teacher_max + stats_stride
    of_gap = of_teacher_total + stats_stride
    of_z_centre = of_gap + stats_stride
    of_u_centre = of_z_centre + stats_stride
    of_distance = of_u_centre + stats_stride
    of_highest = of_distance + stats_stride
    of_lowest = of_highest + stats_stride
    z_max = _carried(of_max, row_mask, NONE, LANES)
    z_total = _carried(of_total, row_mask, 0.0, LANES)
    u_max = _carried(of_teacher_max, row_mask, NONE, LANES)
    u_total = _carried(of_teacher_total, row_mask, 0.0, LANES)
    gap = _carried(of_gap, row_mask, 0.0, LANES)
    means = (_carried(of_z_centre, row_mask, 0.0, LANES), _carried(of_u_centre, row_mask, 0.0, LANES))
    distance = _carried(of_distance, row_mask, 0.0, LANES)
    highest = _carried(of_highest, row_mask, NONE, LANES)
    lowest = _carried(of_lowest, row_mask, NONE, LANES)
    n_whole = vocab // BLOCK
    for edge in tl.static_range(2):
        for i in range(n_whole if edge else 0, tl.cdiv(vocab, BLOCK) if edge else n_whole):
            z_max, z_total, u_max, u_total, gap, means, distance, highest, lowest = _scan_both_block(
                student_rows, teacher_rows, i * BLOCK, read,
                (z_max, z_total, u_max, u_total, gap, means, distance, highest, lowest),
                vocab, scaling, teacher_scaling, MODE, ENTROPY, DIFFERENCE,
                PRECISE, BLOCK, CHUNKS, VECTOR, WHOLE=edge == 0,
            )
    row_max = tl.max(z_max, 1)
    teacher_max = tl.max(u_max, 1)
    z_moved = tl.where(z_max > NONE, z_max - _finite(row_max)[:, None], 0.0)
    z_decay = tl.where(z_max > NONE, exp(z_moved, PRECISE), 0.0)
    u_decay = exp(u_max - _finite(teacher_max)[:, None], PRECISE)
    tl.store(of_max, row_max, mask=row_mask)
    tl.store(of_total, tl.sum(z_total * z_decay, 1), mask=row_mask)
    tl.store(of_teacher_max, teacher_max, mask=row_mask)
    tl.store(of_teacher_total, tl.sum(u_total * u_decay, 1), mask=row_mask)
    if MODE < 2:
        known, decay = (z_total, z_decay) if MODE == 1 else (u_total, u_decay)
        known *= decay
        share = known / tl.maximum(tl.sum(known, 1), 1.0)[:, None]  # 1 and more, but for rows that are not read
        z_mean, u_mean = means
        z_top = _finite(row_max)
        u_top = _finite(teacher_max)
        z_row = z_top + tl.sum(_weighted(share, z_mean - z_top[:, None]), 1)
        u_row = u_top + tl.sum(_weighted(share, u_mean - u_top[:, None]), 1)
        z_centre, u_centre = _centres(z_max, u_max, means, PRECISE)
        z_row, u_row = _centres(row_max, teacher_max, (z_row, u_row), PRECISE)
        gap = _weighted(decay, gap) + _weighted(known, (z_centre - z_row[:, None]) - (u_centre - u_row[:, None]))
        tl.store(of_gap, tl.sum(gap, 1), mask=row_mask)
        tl.store(of_z_centre, z_row, mask=row_mask)
        tl.store(of_u_centre, u_row, mask=row_mask)
    if ENTROPY:
        tl.store(of_distance, tl.sum(distance * z_decay + _weighted(z_total * z_decay, z_moved), 1), mask=row_mask)
    if DIFFERENCE:
        tl.store(of_highest, tl.max(highest, 1), mask=row_mask)
        tl.store(of_lowest, tl.max(lowest, 1), mask=row_mask)


@triton.jit
def _normalisers(stats_rows, stats_stride, counts):
    """Of each row the student's maximum and the logarithm of its total, and the teacher's; 0 for rows that do not
    count."""
    of_total = stats_rows + stats_stride
    of_teacher_max = of_total + stats_stride
    return (
        _finite(tl.load(stats_rows, mask=counts, other=0.0)),
        tl.log(tl.load(of_total, mask=counts, other=1.0)),
        _finite(tl.load(of_teacher_max, mask=counts, other=0.0)),
        tl.log(tl.load(of_teacher_max + stats_stride, mask=counts, other=1.0)),
    )


@triton.jit
def _log_ratios_to_mixture(log_p, log_q, log_of_student, log_of_teacher, PRECISE: tl.constexpr):
    """log(p / m) and log(q / m) of the mixture m, whose shares have these logarithms. From log(q / p), so that neither
    log m, which is as large as log p, nor a mixture that underflows is ever formed."""
    ratio = log_q - log_p
    apart = log_of_teacher - log_of_student + ratio
    rest = tl.log(1.0 + exp(-tl.abs(apart), PRECISE))
    by_teacher = apart > 0.0
    of_student = -rest - tl.where(by_teacher, log_of_teacher + ratio, log_of_student)
    of_teacher = -rest + tl.where(by_teacher, -log_of_teacher, ratio - log_of_student)
    return of_student, of_teacher


@triton.jit
def _mixture_block(
    student_rows, teacher_rows, start, read, sums,      # as in _load_both; two of [rows, lanes]
    normalisers, shares,                                # four of [rows], and beta, log(1 - beta) and log(beta)
    vocab, scaling, teacher_scaling,
    PRECISE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr,
):
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    divergence, student_kl = sums
    z_max, log_z, u_max, log_u = normalisers
    beta, log_of_student, log_of_teacher = shares
    _, _, _, z, u = _load_both(
        student_rows, teacher_rows, start, read, vocab, scaling, teacher_scaling, PRECISE, BLOCK, WHOLE
    )
    log_p = (z - z_max[:, None]) - log_z[:, None]
    log_q = (u - u_max[:, None]) - log_u[:, None]
    of_student, of_teacher = _log_ratios_to_mixture(log_p, log_q, log_of_student, log_of_teacher, PRECISE)
    p = exp(log_p, PRECISE)
    q = exp(log_q, PRECISE)
    of_student = _weighted(p, of_student)
    of_teacher = _weighted(q, of_teacher)
    both = (1.0 - beta) * of_student + beta * of_teacher
    divergence += _over_lane(tl.reshape(both, (both.shape[0], CHUNKS, LANES, VECTOR)))
    student_kl += _over_lane(tl.reshape(of_student, (both.shape[0], CHUNKS, LANES, VECTOR)))
    return divergence, student_kl


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _divergence_mixture_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride,    # [rows, vocab]
    targets_ptr,                                        # [rows]
    stats_ptr, sums_ptr, stats_stride,                  # DivergenceStats [12, rows], and its last two rows
    n_rows, vocab, ignore_index, beta, log_of_student, log_of_teacher,
    softcap, logit_scale, inverse_temperature, teacher_softcap, teacher_scale, teacher_inverse,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
):
    """The divergence from the mixture, and the student's own, with these columns, too; both normalisers are known."""
    scaling = (logit_scale, softcap, inverse_temperature)
    teacher_scaling = (teacher_scale, teacher_softcap, teacher_inverse)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    read = row_mask & (tl.load(targets_ptr + row, mask=row_mask, other=ignore_index) != ignore_index)
    student_rows = student_ptr + row * student_stride
    teacher_rows = teacher_ptr + row * teacher_stride
    normalisers = _normalisers(stats_ptr + row, stats_stride, read)
    shares = (as_float32(beta), as_float32(log_of_student), as_float32(log_of_teacher))
    LANES: tl.constexpr = BLOCK // (CHUNKS * VECTOR)
    of_divergence = sums_ptr + row
    of_student = of_divergence + stats_stride
    divergence = _carried(of_divergence, row_mask, 0.0, LANES)
    student_kl = _carried(of_student, row_mask, 0.0, LANES)
    n_whole = vocab // BLOCK
    for edge in tl.static_range(2):
        for i in range(n_whole if edge else 0, tl.cdiv(vocab, BLOCK) if edge else n_whole):
            divergence, student_kl = _mixture_block(
                student_rows, teacher_rows, i * BLOCK, read, (divergence, student_kl), normalisers, shares,
                vocab, scaling, teacher_scaling, PRECISE, BLOCK, CHUNKS, VECTOR, WHOLE=edge == 0,
            )
    tl.store(of_divergence, tl.sum(divergence, 1), mask=row_mask)
    tl.store(of_student, tl.sum(student_kl, 1), mask=row_mask)


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _divergence_finish_kernel(
    targets_ptr, stats_ptr, sums_ptr, stats_stride,     # [rows], DivergenceStats [12, rows], and its last two rows
    divergence_ptr, entropy_ptr, difference_ptr,        # [rows], the last two or None
    n_rows, ignore_index, MODE: tl.constexpr, BLOCK: tl.constexpr,
):
    """The rows' results from their sums over all classes: 0 for ignored rows, NaN for what is neither that nor 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_mask = row < n_rows
    target = tl.load(targets_ptr + row, mask=row_mask, other=ignore_index)
    counts = row_mask & (target != ignore_index)
    invalid = counts & (target != 0)
    stats_rows = stats_ptr + row
    z_max, log_z, u_max, log_u = _normalisers(stats_rows, stats_stride, counts)
    of_total = stats_rows + stats_stride
    of_teacher_total = of_total + stats_stride + stats_stride
    of_gap = of_teacher_total + stats_stride
    of_z_centre = of_gap + stats_stride
    of_u_centre = of_z_centre + stats_stride
    of_distance = of_u_centre + stats_stride
    z_total = tl.load(of_total, mask=counts, other=1.0)
    sums_rows = sums_ptr + row
    if MODE < 2:  # the mean of log(p / q), from that of z - u
        total = z_total if MODE == 1 else tl.load(of_teacher_total, mask=counts, other=1.0)
        gap = tl.div_rn(tl.load(of_gap, mask=counts, other=0.0), total)
        z_centre = tl.load(of_z_centre, mask=counts, other=0.0)
        u_centre = tl.load(of_u_centre, mask=counts, other=0.0)
        divergence = gap + (((z_centre - z_max) - (u_centre - u_max)) + (log_u - log_z))
        if MODE == 0:
            divergence = -divergence
        else:
            tl.store(sums_rows + stats_stride, gap, mask=row_mask)
    else:
        divergence = tl.load(sums_rows, mask=counts, other=0.0)
    divergence = tl.where(invalid, float("nan"), tl.where(counts, divergence, 0.0))
    tl.store(divergence_ptr + row, divergence, mask=row_mask)
    if entropy_ptr is not None:
        entropy = log_z - tl.load(of_distance, mask=counts, other=0.0) / z_total
        tl.store(entropy_ptr + row, tl.where(counts, entropy, 0.0), mask=row_mask)
    if difference_ptr is not None:
        of_highest = of_distance + stats_stride
        apart = (z_max - u_max) + (log_z - log_u)
        highest = tl.load(of_highest, mask=counts, other=0.0) - apart
        lowest = tl.load(of_highest + stats_stride, mask=counts, other=0.0) + apart
        tl.store(difference_ptr + row, tl.where(counts, tl.maximum(highest, lowest), 0.0), mask=row_mask)


@triton.jit
def _store_divergence_grad_block(
    student_rows, teacher_rows, start, rows,            # as in _load_both; six of [rows]
    entropy, normalisers, shares,                       # two of [rows] or None; as in _mixture_block
    vocab, scaling, teacher_scaling,
    MODE: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    row_mask, counts, upstream, z_centre, u_centre, of_student = rows
    z_max, log_z, u_max, log_u = normalisers
    beta, log_of_student, log_of_teacher = shares
    _, softcap, _ = scaling
    cols, _, x, z, u = _load_both(
        student_rows, teacher_rows, start, counts, vocab, scaling, teacher_scaling, PRECISE, BLOCK, WHOLE
    )
    log_p = (z - z_max[:, None]) - log_z[:, None]
    log_q = (u - u_max[:, None]) - log_u[:, None]
    p = exp(log_p, PRECISE)
    if MODE == 0:
        grad = p - exp(log_q, PRECISE)
    elif MODE == 1:
        difference = (z - z_centre[:, None]) - (u - u_centre[:, None])
        grad = _weighted(p, difference - of_student[:, None])
    else:
        ratio, _ = _log_ratios_to_mixture(log_p, log_q, log_of_student, log_of_teacher, PRECISE)
        grad = (1.0 - beta) * p * tl.where(p > 0.0, ratio - of_student[:, None], 0.0)
    grad *= upstream[:, None]
    if entropy is not None:
        upstream_of_entropy, own_entropy = entropy
        grad -= upstream_of_entropy[:, None] * p * tl.where(p > 0.0, log_p + own_entropy[:, None], 0.0)
    if softcap is not None:
        grad *= softcap_slope(x, scaling, PRECISE)
    written = row_mask[:, None]
    if not WHOLE:
        written = written & (cols < vocab)[None, :]
    tl.store(
        student_rows[:, None] + cols[None, :], grad.to(student_rows.dtype.element_ty), mask=written,
        eviction_policy="evict_first",
    )


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _divergence_bwd_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride,    # [rows, vocab]
    targets_ptr,                                        # [rows]
    stats_ptr, sums_ptr, stats_stride,                  # DivergenceStats [12, rows], and its last two rows
    upstream_ptr, upstream_stride,                      # [rows]
    entropy_ptr, grad_entropy_ptr, grad_entropy_stride, # [rows] or None
    n_rows, vocab, ignore_index, beta, log_of_student, log_of_teacher,
    softcap, logit_scale, inverse_temperature, teacher_softcap, teacher_scale, teacher_inverse,
    MODE: tl.constexpr, PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """The student's logits are overwritten by their gradient."""
    scaling = (logit_scale, softcap, inverse_temperature)
    teacher_scaling = (teacher_scale, teacher_softcap, teacher_inverse)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    target = tl.load(targets_ptr + row, mask=row_mask, other=ignore_index)
    counts = row_mask & (target != ignore_index)
    upstream = tl.load(upstream_ptr + row * upstream_stride, mask=counts, other=0.0).to(tl.float32)
    upstream = tl.where(counts & (target != 0), float("nan"), upstream)
    if logit_scale is not None and softcap is None:
        upstream *= as_float32(logit_scale)
    entropy = None
    if grad_entropy_ptr is not None:
        grad_entropy = tl.load(grad_entropy_ptr + row * grad_entropy_stride, mask=counts, other=0.0).to(tl.float32)
        if logit_scale is not None and softcap is None:
            grad_entropy *= as_float32(logit_scale)
        entropy = (grad_entropy, tl.load(entropy_ptr + row, mask=counts, other=0.0))
    normalisers = _normalisers(stats_ptr + row, stats_stride, counts)
    of_z_centre = stats_ptr + row + stats_stride + stats_stride + stats_stride + stats_stride + stats_stride
    z_centre = tl.load(of_z_centre, mask=counts, other=0.0)
    u_centre = tl.load(of_z_centre + stats_stride, mask=counts, other=0.0)
    of_student = tl.load(sums_ptr + row + stats_stride, mask=counts, other=0.0)
    rows = (row_mask, counts, upstream, z_centre, u_centre, of_student)
    shares = (as_float32(beta), as_float32(log_of_student), as_float32(log_of_teacher))
    student_rows = student_ptr + row * student_stride
    teacher_rows = teacher_ptr + row * teacher_stride
    n_whole = vocab // BLOCK
    for i in range(n_whole):
        _store_divergence_grad_block(
            student_rows, teacher_rows, i * BLOCK, rows, entropy, normalisers, shares,
            vocab, scaling, teacher_scaling, MODE, PRECISE, BLOCK, WHOLE=True,
        )
    for i in range(n_whole, tl.cdiv(vocab, BLOCK)):
        _store_divergence_grad_block(
            student_rows, teacher_rows, i * BLOCK, rows, entropy, normalisers, shares,
            vocab, scaling, teacher_scaling, MODE, PRECISE, BLOCK, WHOLE=False,
        )
# fmt: on
