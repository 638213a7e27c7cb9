"""The gradient of a low-rank matrix, x^T z, of one x or of several in one launch. Reading x limits the speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_kernels.ops.lora.products import (
    PROGRAMS,
    dot,
    one_of,
    ranks_of_program,
    remembered,
    room_for_sums,
    stages_that_fit,
    up_to_three,
)
from liger_kernels.ops.runtime.dispatch import launch, tl, triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, tile

_MOST_PARTS = 32  # of a sum, which one program adds


# fmt: off
@triton.jit
def _lora_linear_columns_kernel(
    x_ptr, x_stride, n_cols,                                # [rows, columns]
    x1_ptr, x1_stride, n_cols1, x2_ptr, x2_stride, n_cols2, # more of them; or None, 0, 0
    z_ptr, z_stride,                                        # [rows, ranks] float32
    w_ptr, w1_ptr, w2_ptr, w_col_stride, w_rank_stride,     # [columns, ranks] for each x
    sums_ptr, done_ptr,                                     # [xs, blocks, parts, BLOCK, RANKS], zeros [xs, blocks]
    n_rows, n_ranks, rows_of_part, scale,
    EXACT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """w = scale * x^T z. Each of ``PARTS`` programs sums over its part of the rows. The program that finishes last adds
    the sums in the order of the parts, as in the kernel of the rows' products. Of several x, each has its own ranks of
    z. ``sums_ptr`` and ``done_ptr`` are None if there is one part."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    which = tl.program_id(2)
    if x1_ptr is not None:
        x_ptr = one_of(which, x_ptr, x1_ptr, x2_ptr)
        x_stride = one_of(which, x_stride, x1_stride, x2_stride)
        n_cols = one_of(which, n_cols, n_cols1, n_cols2)
        w_ptr = one_of(which, w_ptr, w1_ptr, w2_ptr)
        z_ptr += which * n_ranks
        rows_of_part = tl.where(block * BLOCK < n_cols, rows_of_part, 0)  # a narrower x has fewer blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)[None, :]
    w = tl.zeros((BLOCK, RANKS), tl.float32)
    first = part.to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, n_rows)
    for start in range(0, rows_of_part, ROWS):
        row = first + start + tl.arange(0, ROWS)[:, None]
        x = tl.load(x_ptr + row * x_stride + col[None, :], mask=(row < end) & (col[None, :] < n_cols), other=0.0)
        z = tl.load(z_ptr + row * z_stride + rank, mask=(row < end) & (rank < n_ranks), other=0.0)
        w = dot(tl.trans(x), z, w, EXACT)
    last = True
    if PARTS > 1:
        number = which * tl.num_programs(0) + block
        at = sums_ptr + number.to(tl.int64) * (PARTS * BLOCK * RANKS) + tl.arange(0, BLOCK)[:, None] * RANKS + rank
        tl.store(at + part * (BLOCK * RANKS), w)
        tl.debug_barrier()  # all threads must have written before one thread counts up
        last = tl.atomic_add(done_ptr + number, 1, sem="acq_rel") == PARTS - 1
        if last:
            w = tl.zeros((BLOCK, RANKS), tl.float32)
            if RANKS <= 64:
                for i in tl.static_range(PARTS):  # all loads are in flight at once
                    w += tl.load(at + i * (BLOCK * RANKS))
            else:
                for i in range(PARTS):  # the registers would not hold them
                    w += tl.load(at + i * (BLOCK * RANKS))
            tl.store(done_ptr + number, 0)
    if last:
        w *= tl.full((), scale, tl.float32)
        to = w_ptr + col[:, None].to(tl.int64) * w_col_stride + rank.to(tl.int64) * w_rank_stride
        tl.store(to, w.to(w_ptr.dtype.element_ty), mask=(col[:, None] < n_cols) & (rank < n_ranks))
# fmt: on


@choice("lora_columns")
@remembered
def _columns_shape(n_rows: int, n_cols: int, ranks: int, size: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """The number of parts of the rows, a power of two, and launch choices."""
    rows, block = tile(n_rows, n_cols, 64 if ranks * size <= 128 else 32, 64)
    parts = max(1, min(PROGRAMS // cdiv(n_cols, block), cdiv(n_rows, 4 * rows), _MOST_PARTS))
    stages = stages_that_fit(device, rows * (block * size + ranks * 4))
    return 1 << (parts.bit_length() - 1), {"ROWS": rows, "BLOCK": block, "num_warps": 4, "num_stages": stages}


def columns_product(
    x: Tensor, z: Tensor, shape: Sequence[int], dtype: torch.dtype, scale: float, by_rank: bool = False
) -> Tensor:
    """scale * x^T z, a new tensor of ``shape`` [columns, ranks] and ``dtype``. With ``by_rank`` the result is
    transposed, [ranks, columns]. ``x`` is [..., columns], ``z`` is float32 [tokens, ranks]."""
    w = torch.empty(shape, dtype=dtype, device=x.device)
    strides = (1, x.shape[-1]) if by_rank else (z.shape[1], 1)
    _launch([x], z, [w], z.shape[1], strides, scale)
    return w


def columns_products(
    xs: Sequence[Tensor], z: Tensor, shapes: Sequence[Sequence[int]], dtype: torch.dtype, scale: float
) -> list[Tensor]:
    """:func:`columns_product` of each of two or three ``xs`` and its own ranks of ``z`` [tokens, all ranks], as many
    for each, in one launch."""
    ws = [torch.empty(shape, dtype=dtype, device=z.device) for shape in shapes]
    n_ranks = ws[0].shape[1]
    _launch(xs, z, ws, n_ranks, (n_ranks, 1), scale)
    return ws


def _launch(
    xs: Sequence[Tensor], z: Tensor, ws: Sequence[Tensor], n_ranks: int, strides: tuple[int, int], scale: float
) -> None:
    n_rows, device = z.shape[0], z.device
    of_xs, widest = [(*as_rows(x), x.shape[-1]) for x in xs], max([x.shape[-1] for x in xs])
    ranks, exact = ranks_of_program(n_ranks), xs[0].dtype is not torch.bfloat16
    parts, shape = _columns_shape(n_rows, widest, ranks, xs[0].element_size(), device)
    rows_of_part = cdiv(cdiv(n_rows, parts), shape["ROWS"]) * shape["ROWS"]
    blocks = cdiv(widest, shape["BLOCK"])
    sums, done = room_for_sums(parts, len(xs) * blocks * shape["BLOCK"] * ranks, len(xs) * blocks, device)
    tensors = *up_to_three(of_xs), z, z.stride(0), *up_to_three([(w,) for w in ws]), *strides, sums, done
    options = {"EXACT": exact, "RANKS": ranks, "PARTS": parts, **shape}
    sizes = n_rows, n_ranks, rows_of_part, float(scale)
    launch(_lora_linear_columns_kernel, (blocks, parts, len(xs)), device, *tensors, *sizes, **options)
