"""The thin products of low-rank adapters: a long matrix times one with few columns. Reading the long one limits the
speed.

Sums are float32. In a product with 16-bit numbers, a float32 number is the sum of three bfloat16 numbers (error 2^-24),
so that tensor cores can multiply it. float16 has too little range for such parts. Two parts (error 2^-17) are enough if
the result is rounded to bfloat16. Tensor cores truncate their sums, so ordinary multiplications compute float32 results
of float32 numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops._row_blocks import rows_of_block
from liger_kernels.ops.runtime.ahead import real_device
from liger_kernels.ops.runtime.device import room_for_loads
from liger_kernels.ops.runtime.dispatch import INTERPRET, launch, tl, triton
from liger_kernels.ops.runtime.launcher import current_stream
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, next_power_of_2, tile

MOST_RANKS = 256  # of one program, which holds all of them
PROGRAMS = 264  # two for each multiprocessor of an H100
_SCRATCH = 24 * 1024  # bytes of shared memory for data that is not loaded ahead
_SCRATCH_OF_TILES = 40 * 1024  # the same, in a program of several products
_COMPILED = tl.constexpr(not INTERPRET)
remembered = functools.lru_cache(maxsize=1024)  # without it, choosing shapes would cost the host as much as a launch


@triton.jit
def _split(x):
    """The bfloat16 nearest to float32 ``x``, and the rest of ``x``."""
    near = x.to(tl.bfloat16)
    return near, x - near.to(tl.float32)


@triton.jit
def _split_in_three(x):
    """Three bfloat16 numbers whose sum is ``x``, with a relative error of 2^-24."""
    x_1, rest = _split(x.to(tl.float32))
    x_2, rest = _split(rest)
    return x_1, x_2, rest.to(tl.bfloat16)


@triton.jit
def dot(a, b, total, EXACT: tl.constexpr):
    """total + a @ b in float32. With ``EXACT``, both operands may need all 24 bits. Otherwise at least one operand is
    bfloat16, or 16 bits are enough."""
    if not _COMPILED:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    elif EXACT and a.dtype == tl.float32 and b.dtype == tl.float32:
        total = tl.dot(a, b, total, input_precision="ieee")
    elif EXACT:
        a_1, a_2, a_3 = _split_in_three(a)
        b_1, b_2, b_3 = _split_in_three(b)
        total = tl.dot(a_3, b_1, total)
        total = tl.dot(a_1, b_3, total)
        total = tl.dot(a_2, b_2, total)
        total = tl.dot(a_2, b_1, total)
        total = tl.dot(a_1, b_2, total)
        total = tl.dot(a_1, b_1, total)
    elif a.dtype == tl.bfloat16:
        if b.dtype == tl.bfloat16:
            total = tl.dot(a, b, total)
        else:
            b_1, b_2, b_3 = _split_in_three(b)
            total = tl.dot(a, b_3, total)
            total = tl.dot(a, b_2, total)
            total = tl.dot(a, b_1, total)
    else:
        a_1, a_rest = _split(a.to(tl.float32))
        if b.dtype == tl.bfloat16:
            total = tl.dot(a_rest.to(tl.bfloat16), b, total)
            total = tl.dot(a_1, b, total)
        else:
            b_1, b_rest = _split(b.to(tl.float32))
            total = tl.dot(a_rest.to(tl.bfloat16), b_1, total)
            total = tl.dot(a_1, b_rest.to(tl.bfloat16), total)
            total = tl.dot(a_1, b_1, total)
    return total


@triton.jit
def _of_rank(w_ptr, w1_ptr, w2_ptr, end, end1, rank, rank_stride):
    """The address of each ``rank``'s row in up to three matrices. They count as one stacked matrix, but lie apart in
    memory."""
    at = w_ptr + rank.to(tl.int64) * rank_stride
    if w1_ptr is not None:
        at = tl.where(rank < end, at, w1_ptr + (rank - end).to(tl.int64) * rank_stride)
    if w2_ptr is not None:
        at = tl.where(rank < end1, at, w2_ptr + (rank - end1).to(tl.int64) * rank_stride)
    return at


@triton.jit
def one_of(which, a, b, c):
    """The argument of problem number ``which`` of up to three. ``c`` is None, or 0, where there are two."""
    a = tl.where(which == 1, b, a)
    if c is not None:
        a = tl.where(which == 2, c, a)
    return a


# fmt: off
@triton.jit
def some_of_w(
    w_ptr, w1_ptr, w2_ptr, end, end1, w_rank_stride, w_col_stride,
    first, col, n_cols, n_ranks, PART: tl.constexpr,
):
    """``PART`` ranks of w from ``first`` on, at ``col`` [1, columns]; None without w."""
    w = None
    if w_ptr is not None:
        rank = first + tl.arange(0, PART)[:, None]
        at = _of_rank(w_ptr, w1_ptr, w2_ptr, end, end1, rank, w_rank_stride) + col.to(tl.int64) * w_col_stride
        w = tl.load(at, mask=(rank < n_ranks) & (col < n_cols), other=0.0)
    return w


@triton.jit
def plus_delta(
    y0, z_ptr, z_stride, w_ptr, w1_ptr, w2_ptr, end, end1, w_rank_stride, w_col_stride, bias_ptr, first_w,
    row, col, n_rows, n_cols, n_ranks, scale, EXACT: tl.constexpr, RANKS: tl.constexpr, PART: tl.constexpr,
):
    """y0 + scale * (z w + bias) in float32 for the tile at ``row`` [rows, 1] and ``col`` [1, columns]; y0 alone without
    w. ``first_w`` has the first ``PART`` ranks of w. A program loads ``first_w`` once for all of its tiles."""
    y0 = y0.to(tl.float32)
    if w_ptr is not None:
        total = tl.zeros_like(y0)
        for first in tl.static_range(0, RANKS, PART):
            rank = first + tl.arange(0, PART)
            in_z = (row < n_rows) & (rank[None, :] < n_ranks)
            z = tl.load(z_ptr + row * z_stride + rank[None, :], mask=in_z, other=0.0)
            w = first_w
            if first > 0:
                w = some_of_w(
                    w_ptr, w1_ptr, w2_ptr, end, end1, w_rank_stride, w_col_stride, first, col, n_cols, n_ranks, PART
                )
            total = dot(z, w, total, EXACT)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        y0 += total * tl.full((), scale, tl.float32)
    return y0


@triton.jit
def _lora_linear_rows_kernel(
    x_ptr, x_stride, n_cols,                                # [rows, columns]
    x1_ptr, x1_stride, n_cols1, x2_ptr, x2_stride, n_cols2,           # more of them; or None, 0, 0
    w_ptr, w1_ptr, w2_ptr, end, end1, w_rank_stride, w_col_stride,    # [ranks, columns] of one or more matrices
    z_ptr, z_stride,                                        # [rows, ranks] float32
    sums_ptr, done_ptr,                                     # [xs, parts, rows, RANKS], zeros [xs, row tiles]; or None
    n_rows, n_ranks, scale,
    EXACT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """z = scale * x w^T. Each of ``PARTS`` programs sums over its part of the columns. The program that finishes last
    adds the sums in the order of the parts, so the bits do not depend on which program is last. It then resets the
    counter to zero. Of several x, each has a w, and its own ranks of z."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    rank = tl.arange(0, RANKS)[None, :]
    if x1_ptr is not None:
        which = tl.program_id(2)
        x_ptr = one_of(which, x_ptr, x1_ptr, x2_ptr)
        x_stride = one_of(which, x_stride, x1_stride, x2_stride)
        n_cols = one_of(which, n_cols, n_cols1, n_cols2)
        w_at = one_of(which, w_ptr, w1_ptr, w2_ptr) + rank.to(tl.int64) * w_rank_stride
        z_ptr += which * n_ranks
        if PARTS > 1:
            sums_ptr += which.to(tl.int64) * PARTS * n_rows * RANKS
            done_ptr += which * tl.num_programs(0)
    else:
        w_at = _of_rank(w_ptr, w1_ptr, w2_ptr, end, end1, rank, w_rank_stride)
    z = tl.zeros((ROWS, RANKS), tl.float32)
    cols_of_part = tl.cdiv(tl.cdiv(n_cols, PARTS), BLOCK) * BLOCK
    first = tl.program_id(1) * cols_of_part
    for start in range(first, tl.minimum(first + cols_of_part, n_cols), BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col[None, :], mask=(row < n_rows) & (col[None, :] < n_cols), other=0.0)
        at = w_at + col[:, None].to(tl.int64) * w_col_stride
        w = tl.load(at, mask=(rank < n_ranks) & (col[:, None] < n_cols), other=0.0)
        z = dot(x, w, z, EXACT)
    last = True
    if PARTS > 1:
        at = sums_ptr + row * RANKS + rank
        tl.store(at + tl.program_id(1).to(tl.int64) * n_rows * RANKS, z, mask=row < n_rows)
        tl.debug_barrier()  # all threads must have written before one thread counts up
        last = tl.atomic_add(done_ptr + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1
        if last:
            z = tl.zeros((ROWS, RANKS), tl.float32)
            for part in tl.static_range(PARTS):
                z += tl.load(at + tl.cast(part, tl.int64) * n_rows * RANKS, mask=row < n_rows, other=0.0)
            tl.store(done_ptr + tl.program_id(0), 0)
    if last:
        scale = tl.full((), scale, tl.float32)
        tl.store(z_ptr + row * z_stride + rank, z * scale, mask=(row < n_rows) & (rank < n_ranks))


@triton.jit
def _lora_linear_add_kernel(
    y0_ptr, y0_stride, z_ptr, z_stride,                     # [rows, columns] or None, [rows, ranks]
    w_ptr, w1_ptr, w2_ptr, end, end1, w_rank_stride, w_col_stride,    # [ranks, columns] of one or more matrices
    bias_ptr, factor_ptr, y_ptr, n_cols,                    # [columns] or None, twice; [rows, columns]
    y1_ptr, n_cols1, y2_ptr, n_cols2,                       # more y, which are their own y0; or None, 0
    n_rows, n_ranks, rows_of_program, scale,
    EXACT: tl.constexpr, RANKS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """y = factor * y0 + scale * (z w + bias). Of several y, each has a w, and its own ranks of z."""
    if y1_ptr is not None:
        which = tl.program_id(1)
        y_ptr = one_of(which, y_ptr, y1_ptr, y2_ptr)
        n_cols = one_of(which, n_cols, n_cols1, n_cols2)
        w_ptr = one_of(which, w_ptr, w1_ptr, w2_ptr)
        z_ptr += which * n_ranks
        y0_ptr = y_ptr
        y0_stride = n_cols
        w1_ptr = None
        w2_ptr = None
    program = tl.program_id(0)
    col_blocks = tl.cdiv(n_cols, BLOCK)
    first = (program // col_blocks).to(tl.int64) * rows_of_program
    col = (program % col_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    w = some_of_w(w_ptr, w1_ptr, w2_ptr, end, end1, w_rank_stride, w_col_stride, 0, col, n_cols, n_ranks, PART)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + col, mask=col < n_cols, other=0.0)
    if y1_ptr is not None:
        rows_of_program = tl.where(first < n_rows, rows_of_program, 0)  # a narrower y has fewer programs
    for start in range(0, rows_of_program, ROWS):
        row = first + start + tl.arange(0, ROWS)[:, None]
        mask = (row < n_rows) & (col < n_cols)
        if y0_ptr is not None:  # the slowest load starts first
            y0 = tl.load(y0_ptr + row * y0_stride + col, mask=mask, other=0.0)
        else:
            y0 = tl.zeros((ROWS, BLOCK), tl.float32)
        if factor_ptr is not None:
            y0 = y0.to(tl.float32) * factor
        total = plus_delta(
            y0, z_ptr, z_stride, w_ptr, w1_ptr, w2_ptr, end, end1, w_rank_stride, w_col_stride, bias_ptr, w,
            row, col, n_rows, n_cols, n_ranks, scale, EXACT, RANKS, PART,
        )
        tl.store(y_ptr + row * n_cols + col, total.to(y_ptr.dtype.element_ty), mask=mask)
# fmt: on


def ranks_of_program(n: int) -> int:
    """The number of ranks with padding: a tensor core multiplies at least 16 ranks."""
    return max(16, next_power_of_2(n))


def stages_that_fit(device: torch.device, bytes_: int) -> int:
    """How many loads of ``bytes_`` each a program can have in flight."""
    return max(2, min(4, (room_for_loads(real_device(device)) - _SCRATCH) // bytes_))


@choice("lora_rows")
@remembered
def _rows_shape(n_rows: int, n_cols: int, ranks: int, size: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """The number of parts of the columns, and launch choices. Every program reads all of w, so a program has many rows.
    The parts make enough programs. With 16 ranks, four parts take 56% of the time of one part (4096 x 4096, bfloat16,
    H200)."""
    rows, warps = (64, 4) if ranks * size <= 32 else (128, 8)
    rows, block = tile(
        n_rows, n_cols, rows if size == 2 else 32, max(16, min(8192 // rows, 256 // size, 4096 // ranks))
    )
    parts = PROGRAMS * 64 // rows // max(1, cdiv(n_rows, rows))
    stages = stages_that_fit(device, block * (rows * size + ranks * 4))
    return max(1, min(parts, cdiv(n_cols, 8 * block))), {
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": warps if size == 2 else 4,
        "num_stages": stages,
    }


def tiles_of_program(
    n_rows: int, n_cols: int, ranks: int, products: int, shape: dict[str, int], most: int, device: torch.device
) -> tuple[int, int]:
    """How many tiles of ``shape`` a program computes, one below the other, and the number of stages. A program splits
    its columns of w once for all tiles and loads ahead for the next tile. If shared memory does not suffice, a program
    computes one tile."""
    part, rows, block = shape["PART"], shape["ROWS"], shape["BLOCK"]
    parts = cdiv(ranks, part)
    bytes_ = products * 4 * part * (parts * rows + (parts - 1) * block)  # z, and w without its first part
    if _SCRATCH_OF_TILES + bytes_ > room_for_loads(real_device(device)):
        return 1, 1
    return max(1, min(most, cdiv(n_rows, rows) * cdiv(n_cols, block) // PROGRAMS)), 2


@choice("lora_add")
@remembered
def _add_shape(
    n_rows: int, n_cols: int, ranks: int, has_factor: bool, device: torch.device
) -> tuple[int, dict[str, int]]:
    """Tiles of a program, and launch choices. Four tiles were fastest in bfloat16 on an H100: one tile takes 17% longer
    for 4096 x 4096 and 64 ranks. With 16 ranks and a factor, 16384 x 14336 on an H200: 0.31 ms, with 32 rows and 128
    columns a tile 0.38."""
    few = ranks == 16
    rows, block = tile(n_rows, n_cols, 32 if few and not has_factor else 64, 64 if few and has_factor else 128)
    shape = {"PART": min(ranks, 32), "ROWS": rows, "BLOCK": block, "num_warps": 4}
    tiles, stages = tiles_of_program(n_rows, n_cols, ranks, 1, shape, 4, device)
    return tiles, {**shape, "num_stages": stages + (few and has_factor and tiles > 1)}


def _stack(ws: Sequence[Tensor], by_column: bool) -> tuple[tuple[Any, ...], int]:
    """A kernel's arguments for ``ws``, which the kernel reads as one [ranks, columns], and the number of all ranks.
    ``ws`` are up to three matrices [ranks, columns]; with ``by_column`` they are one [columns, ranks]."""
    w = ws[0]
    rank_stride, col_stride = w.stride()
    if by_column:
        (one,) = ws
        return (one, None, None, 0, 0, col_stride, rank_stride), one.shape[1]
    if len(ws) == 1:
        return (w, None, None, 0, 0, rank_stride, col_stride), w.shape[0]
    if len(ws) > 3 or any(other.dtype is not w.dtype or other.stride() != w.stride() for other in ws):
        return _stack([torch.cat([other.float() for other in ws])], by_column)
    end = w.shape[0]
    end1 = end + ws[1].shape[0]
    if len(ws) == 2:
        return (w, ws[1], None, end, end1, rank_stride, col_stride), end1
    return (w, ws[1], ws[2], end, end1, rank_stride, col_stride), end1 + ws[2].shape[0]


def _apart(ws: Sequence[Tensor]) -> tuple[Any, ...]:
    """A kernel's arguments for ``ws`` [columns, ranks], each of which belongs to a problem of its own."""
    col_stride, rank_stride = ws[0].stride()
    return *up_to_three([(w,) for w in ws]), 0, 0, rank_stride, col_stride


_zeros: dict[tuple[torch.device, int], Tensor] = {}


def _zeros_left_behind(n: int, device: torch.device) -> Tensor:
    """``n`` zeros, int32, for a kernel that uses them as counters and resets them to zero. The kernels of a stream run
    one after the other and share these zeros. A CUDA graph gets separate zeros, because other work cannot use a graph's
    memory."""
    kind = device.type
    if kind not in ("cuda", "cpu") or (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
        return torch.zeros(n, dtype=torch.int32, device=device)
    key = device, current_stream(device.index) if kind == "cuda" else 0
    known = _zeros.get(key)
    if known is None or len(known) < n:
        known = _zeros[key] = torch.zeros(max(n, 1024), dtype=torch.int32, device=device)
    return known


def room_for_sums(parts: int, size: int, counters: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Memory for ``size`` float32 numbers of each of ``parts``, and zeros for ``counters``; None if there is one
    part."""
    if parts == 1:
        return None, None
    return torch.empty(parts * size, dtype=torch.float32, device=device), _zeros_left_behind(counters, device)


def alike(ws: Sequence[Tensor]) -> bool:
    """Whether one launch accepts ``ws``: two or three of one dtype, one number of ranks and the same strides."""
    w = ws[0]
    dtype, ranks, stride = w.dtype, w.shape[1], w.stride()
    return 1 < len(ws) < 4 and all(
        other.dtype is dtype and other.shape[1] == ranks and other.stride() == stride for other in ws[1:]
    )


def up_to_three(problems: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """A kernel's arguments for ``problems``, each tensors and numbers. None and 0 are those of a problem that is not
    there."""
    if len(problems) == 3:
        return *problems[0], *problems[1], *problems[2]
    none = [0 if type(argument) is int else None for argument in problems[0]]
    return (*problems[0], *none, *none) if len(problems) == 1 else (*problems[0], *problems[1], *none)


def _chosen_for(n_rows: int, invariant: bool) -> int:
    """The number of rows for which tiles and the parts of a row's sum are chosen."""
    return rows_of_block() if invariant else n_rows


def rows_product(
    x: Tensor,
    ws: Sequence[Tensor],
    scale: float,
    out: Tensor | None = None,
    by_column: bool = False,
    invariant: bool = False,
) -> Tensor:
    """scale * x w^T, float32 [tokens, ranks], for ``x`` [..., columns]. w is one or more ``ws`` [ranks, columns], of
    any strides, stacked along the ranks. With ``by_column``, ``ws`` has one matrix [columns, ranks]. ``out`` may be
    columns of a larger tensor. With ``invariant``, the bits of a row do not depend on the other rows."""
    w_args, n_ranks = _stack(ws, by_column)
    n_rows = x.numel() // max(1, x.shape[-1])
    z = torch.empty((n_rows, n_ranks), dtype=torch.float32, device=x.device) if out is None else out
    _launch_rows([x], w_args, n_ranks, z, scale, invariant)
    return z


def rows_products(xs: Sequence[Tensor], ws: Sequence[Tensor], scale: float) -> Tensor:
    """:func:`rows_product` of each of two or three ``xs`` [tokens, columns] and its own of ``ws`` [columns, ranks],
    which are :func:`alike`, in one launch. The results lie side by side, [tokens, all ranks]."""
    n_ranks = ws[0].shape[1]
    z = torch.empty((xs[0].shape[0], len(xs) * n_ranks), dtype=torch.float32, device=xs[0].device)
    _launch_rows(xs, _apart(ws), n_ranks, z, scale, False)
    return z


def _launch_rows(
    xs: Sequence[Tensor], w_args: tuple[Any, ...], n_ranks: int, z: Tensor, scale: float, invariant: bool
) -> None:
    n_rows, device, ranks = z.shape[0], z.device, ranks_of_program(n_ranks)
    of_xs, widest = [(*as_rows(x), x.shape[-1]) for x in xs], max([x.shape[-1] for x in xs])
    parts, shape = _rows_shape(_chosen_for(n_rows, invariant), widest, ranks, xs[0].element_size(), device)
    tiles = cdiv(n_rows, shape["ROWS"])
    sums, done = room_for_sums(parts, len(xs) * n_rows * ranks, len(xs) * tiles, device)
    tensors = *up_to_three(of_xs), *w_args, z, z.stride(0), sums, done
    options = {"EXACT": xs[0].dtype is not torch.bfloat16, "RANKS": ranks, "PARTS": parts, **shape}
    grid = tiles, parts, len(xs)
    launch(_lora_linear_rows_kernel, grid, device, *tensors, n_rows, n_ranks, float(scale), **options)


def add_product(
    y0: Tensor | None,
    z: Tensor,
    ws: Sequence[Tensor],
    bias: Tensor | None,
    scale: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    in_place: bool = False,
    by_column: bool = False,
    invariant: bool = False,
    factor: Tensor | None = None,
) -> Tensor:
    """y0 + scale * (z w + bias), a new tensor of ``shape`` [..., columns] and ``dtype``. With ``in_place`` the result
    overwrites y0, which must be contiguous. ``y0`` None counts as zero. ``z`` is float32 [tokens, ranks]. ``ws`` and
    ``invariant`` are those of :func:`rows_product`. ``factor`` [columns], float32, multiplies y0."""
    y = y0 if in_place else torch.empty(shape, dtype=dtype, device=z.device)
    assert y is not None
    of_y0 = (None, 0) if y0 is None else as_rows(y0)
    bias = None if bias is None else bias.contiguous()
    _launch_add([y], of_y0, z, *_stack(ws, by_column), scale, bias, factor, invariant)
    return y


def add_products(ys: Sequence[Tensor], z: Tensor, ws: Sequence[Tensor], scale: float) -> None:
    """Add scale * z_i w_i^T to each of two or three contiguous ``ys`` [tokens, columns] in place, in one launch. ``z``
    [tokens, all ranks] has the z_i side by side, ``ws`` [columns, ranks] are :func:`alike`."""
    _launch_add(ys, as_rows(ys[0]), z, _apart(ws), ws[0].shape[1], scale)


def _launch_add(
    ys: Sequence[Tensor],
    of_y0: tuple[Tensor | None, int],
    z: Tensor,
    w_args: tuple[Any, ...],
    n_ranks: int,
    scale: float,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    invariant: bool = False,
) -> None:
    n_rows, device, ranks = z.shape[0], z.device, ranks_of_program(n_ranks)
    widest = max([y.shape[-1] for y in ys])
    tiles, options = _add_shape(_chosen_for(n_rows, invariant), widest, ranks, factor is not None, device)
    rows_of_program = tiles * options["ROWS"]
    grid = cdiv(n_rows, rows_of_program) * cdiv(widest, options["BLOCK"]), len(ys)
    of_ys = up_to_three([(y, y.shape[-1]) for y in ys])
    tensors = *of_y0, z, z.stride(0), *w_args, bias, factor, *of_ys
    options = {"EXACT": ys[0].dtype is not torch.bfloat16, "RANKS": ranks, **options}
    launch(_lora_linear_add_kernel, grid, device, *tensors, n_rows, n_ranks, rows_of_program, float(scale), **options)
