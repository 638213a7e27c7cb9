"""The thin products of low-rank adapters for groups of rows. Each group has its own matrices.

Rows are sorted by group, as in ops/_grouped.py. The precision is that of products.py. A program has a tile of rows and
visits each group with rows in the tile. So the host need not know where groups end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops.lora.products import dot, ranks_of_program, remembered, stages_that_fit
from liger_kernels.ops.runtime.dispatch import launch, tl, triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, tile


class Groups(NamedTuple):
    """The groups of sorted rows."""

    group: Tensor  # [rows], sorted; rows of no group have a larger number and come last
    ends: Tensor  # [groups], int32: one more than the last row of each group


@triton.jit
def _groups_of_tile(group_ptr, first, n_rows, n_groups, ROWS: tl.constexpr):
    """The first group of a tile of rows, and one more than its last group."""
    last = tl.minimum(first + ROWS, n_rows) - 1
    lowest = tl.load(group_ptr + first).to(tl.int32)
    return lowest, tl.minimum(tl.load(group_ptr + last).to(tl.int32) + 1, n_groups)


@triton.jit
def _bounds(ends_ptr, group):
    """The first row of a group, and one more than its last row."""
    return tl.load(ends_ptr + group - 1, mask=group > 0, other=0), tl.load(ends_ptr + group)


# fmt: off
@triton.jit
def _lora_experts_rows_kernel(
    x_ptr, x_stride, group_ptr, ends_ptr,               # [rows, columns], [rows], [groups]
    w_ptr, w_stride, w_rank_stride, w_col_stride,       # [groups, ranks, columns]
    z_ptr,                                              # [rows, ranks] float32
    n_rows, n_groups, n_cols, n_ranks, scale,
    EXACT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """z = scale * x w^T with the w of each row's group. Rows of no group get 0, even if they hold NaN."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    rank = tl.arange(0, RANKS)[None, :]
    z = tl.zeros((ROWS, RANKS), tl.float32)
    lowest, behind = _groups_of_tile(group_ptr, first, n_rows, n_groups, ROWS)
    for group in range(lowest, behind):
        start, end = _bounds(ends_ptr, group)
        member = (row >= start) & (row < end)
        of_group = w_ptr + tl.cast(group, tl.int64) * w_stride
        for at in range(0, tl.where(start < end, n_cols, 0), BLOCK):
            col = at + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + col[None, :], mask=member & (col[None, :] < n_cols), other=0.0)
            place = of_group + rank.to(tl.int64) * w_rank_stride + col[:, None].to(tl.int64) * w_col_stride
            w = tl.load(place, mask=(rank < n_ranks) & (col[:, None] < n_cols), other=0.0)
            z = dot(x, w, z, EXACT)
    scale = tl.full((), scale, tl.float32)
    tl.store(z_ptr + row * n_ranks + rank, z * scale, mask=(row < n_rows) & (rank < n_ranks))


@triton.jit
def _lora_experts_add_kernel(
    y_ptr, y_stride, z_ptr, group_ptr, ends_ptr,        # [rows, columns], [rows, ranks] float32, [rows], [groups]
    w_ptr, w_stride, w_col_stride, w_rank_stride,       # [groups, columns, ranks]
    n_rows, n_groups, n_cols, n_ranks, col_blocks, scale,
    EXACT: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """y += scale * z w^T with the w of each row's group."""
    program = tl.program_id(0)
    first = (program // col_blocks).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    col = (program % col_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    y = tl.load(y_ptr + row * y_stride + col, mask=inside, other=0.0)  # the slowest load starts first
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    lowest, behind = _groups_of_tile(group_ptr, first, n_rows, n_groups, ROWS)
    for group in range(lowest, behind):
        start, end = _bounds(ends_ptr, group)
        member = (row >= start) & (row < end)
        of_group = w_ptr + tl.cast(group, tl.int64) * w_stride
        for part in range(0, n_ranks, PART):
            rank = part + tl.arange(0, PART)
            z = tl.load(z_ptr + row * n_ranks + rank[None, :], mask=member & (rank[None, :] < n_ranks), other=0.0)
            place = of_group + rank[:, None].to(tl.int64) * w_rank_stride + col.to(tl.int64) * w_col_stride
            w = tl.load(place, mask=(rank[:, None] < n_ranks) & (col < n_cols), other=0.0)
            total = dot(z, w, total, EXACT)
    total = y.to(tl.float32) + total * tl.full((), scale, tl.float32)
    tl.store(y_ptr + row * y_stride + col, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _lora_experts_columns_kernel(
    x_ptr, x_stride, order_ptr,                         # [rows, columns], or [tokens, columns] and [rows]
    z_ptr, ends_ptr,                                    # [rows, ranks] float32, [groups]
    w_ptr, w_stride, w_col_stride, w_rank_stride,       # [groups, columns, ranks]
    n_choices, n_cols, n_ranks, scale,
    EXACT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """w = scale * x^T z over the rows of each group; 0 for a group without rows. If x has a row for each token,
    ``order_ptr`` has n_choices * token + choice for each row."""
    group = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)[None, :]
    w = tl.zeros((BLOCK, RANKS), tl.float32)
    begin, end = _bounds(ends_ptr, group)
    for at in range(begin, end, ROWS):
        row = at + tl.arange(0, ROWS).to(tl.int64)[:, None]
        if order_ptr is not None:
            source = tl.load(order_ptr + row, mask=row < end, other=0) // n_choices
        else:
            source = row
        x = tl.load(x_ptr + source * x_stride + col[None, :], mask=(row < end) & (col[None, :] < n_cols), other=0.0)
        z = tl.load(z_ptr + row * n_ranks + rank, mask=(row < end) & (rank < n_ranks), other=0.0)
        w = dot(tl.trans(x), z, w, EXACT)
    w *= tl.full((), scale, tl.float32)
    place = w_ptr + group.to(tl.int64) * w_stride + col[:, None].to(tl.int64) * w_col_stride
    mask = (col[:, None] < n_cols) & (rank < n_ranks)
    tl.store(place + rank.to(tl.int64) * w_rank_stride, w.to(w_ptr.dtype.element_ty), mask=mask)
# fmt: on


@choice("lora_experts_rows")
@remembered
def _rows_shape(n_rows: int, n_cols: int, ranks: int, size: int, device: torch.device) -> dict[str, int]:
    """Launch choices: 64 rows if there are many rows, because a tile on the border of two groups reads the matrices of
    both."""
    rows = min(64 if n_rows >= 4096 else 16, 128 // size)
    rows, block = tile(n_rows, n_cols, rows, max(16, min(256 // size, 4096 // ranks)))
    stages = stages_that_fit(device, block * (rows * size + ranks * 4))
    return {"ROWS": rows, "BLOCK": block, "num_warps": 4, "num_stages": stages}


@choice("lora_experts_add")
@remembered
def _add_shape(n_rows: int, n_cols: int, ranks: int) -> dict[str, int]:
    """Launch choices. Nothing is loaded ahead, because most tiles have one group and one part of the ranks."""
    rows, block = tile(n_rows, n_cols, 64, 128)
    return {"PART": min(ranks, 32), "ROWS": rows, "BLOCK": block, "num_warps": 4, "num_stages": 1}


@choice("lora_experts_columns")
@remembered
def _columns_shape(n_rows: int, n_cols: int, ranks: int, size: int, device: torch.device) -> dict[str, int]:
    rows, block = tile(n_rows, n_cols, 64 if ranks * size <= 128 else 32, 64)
    stages = stages_that_fit(device, rows * (block * size + ranks * 4))
    return {"ROWS": rows, "BLOCK": block, "num_warps": 4, "num_stages": stages}


def rows_product(x: Tensor, w: Tensor, groups: Groups, scale: float) -> Tensor:
    """scale * x w^T, float32 [rows, ranks], for ``x`` [rows, columns] with the w of each row's group in ``w`` [groups,
    ranks, columns]. Rows of no group get 0."""
    n_rows, n_cols = x.shape
    n_groups, n_ranks, _ = w.shape
    z = torch.empty((n_rows, n_ranks), dtype=torch.float32, device=x.device)
    ranks = ranks_of_program(n_ranks)
    shape = _rows_shape(n_rows, n_cols, ranks, x.element_size(), x.device)
    grid, exact = (cdiv(n_rows, shape["ROWS"]),), x.dtype is not torch.bfloat16
    tensors, sizes = (*as_rows(x), *groups, w, *w.stride(), z), (n_rows, n_groups, n_cols, n_ranks, float(scale))
    launch(_lora_experts_rows_kernel, grid, x.device, *tensors, *sizes, EXACT=exact, RANKS=ranks, **shape)
    return z


def add_product_(y: Tensor, z: Tensor, w: Tensor, groups: Groups, scale: float) -> None:
    """Add scale * z w^T to ``y`` [rows, columns], which has unit stride along a row. ``z`` is contiguous float32 [rows,
    ranks]. ``w`` [groups, columns, ranks] has the w of each row's group."""
    (n_rows, n_cols), (n_groups, _, n_ranks) = y.shape, w.shape
    options = _add_shape(n_rows, n_cols, ranks_of_program(n_ranks))
    col_blocks = cdiv(n_cols, options["BLOCK"])
    grid, exact = (cdiv(n_rows, options["ROWS"]) * col_blocks,), y.dtype is not torch.bfloat16
    tensors, sizes = (
        (y, y.stride(0), z, *groups, w, *w.stride()),
        (n_rows, n_groups, n_cols, n_ranks, col_blocks, float(scale)),
    )
    launch(_lora_experts_add_kernel, grid, y.device, *tensors, *sizes, EXACT=exact, **options)


def columns_product(
    x: Tensor, z: Tensor, w: Tensor, groups: Groups, scale: float, order: Tensor | None = None, choices: int = 1
) -> Tensor:
    """Fill ``w`` [groups, columns, ranks], of any strides, with scale * x^T z over the rows of each group, and return
    it. ``x`` is [rows, columns]. With ``order`` [rows], the token and choice of each row, ``x`` is [tokens, columns].
    ``z`` is contiguous float32 [rows, ranks]."""
    n_rows, n_ranks = z.shape
    n_cols = x.shape[1]
    ranks = ranks_of_program(n_ranks)
    options = _columns_shape(n_rows, n_cols, ranks, x.element_size(), x.device)
    grid, exact = (cdiv(n_cols, options["BLOCK"]), len(w)), x.dtype is not torch.bfloat16
    tensors, sizes = (*as_rows(x), order, z, groups.ends, w, *w.stride()), (choices, n_cols, n_ranks, float(scale))
    launch(_lora_experts_columns_kernel, grid, x.device, *tensors, *sizes, EXACT=exact, RANKS=ranks, **options)
    return w
