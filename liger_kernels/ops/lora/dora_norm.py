"""The length of each row of W + s B A, a weight with a low-rank adapter. DoRA divides by this length.

The product B A would be as large as W, so the length is computed without it:

    n^2 = |W|^2 + 2 s (W A^T * B) + s^2 (B (A A^T) * B), the last two summed over the ranks

The three terms cancel if the adapter is nearly -W, so their sum is float64. It has few numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.products import ranks_of_program, rows_product
from liger_kernels.ops.runtime.arguments import checked, checked_op
from liger_kernels.ops.runtime.dispatch import as_values, launch, tl, triton, use_triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, next_power_of_2, tile


@checked
def dora_norm_ref(weight: Tensor, adapter: LoraAdapter) -> Tensor:
    """:func:`dora_norm` by its definition."""
    _check_weight(weight, adapter)
    dtype = torch.promote_types(torch.promote_types(weight.dtype, adapter.a.dtype), torch.float32)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        whole = weight.to(dtype) + adapter.scale * (adapter.b.to(dtype) @ adapter.a.to(dtype))
        return torch.linalg.vector_norm(whole, dim=1)


# fmt: off
@triton.jit
def _dora_square_kernel(
    w_ptr, w_stride, square_ptr,                        # [rows, columns], [rows] float32
    n_rows, n_cols,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """|W|^2. torch's own length takes twice the time that reading 16 bits needs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        mask = (row < n_rows)[:, None] & (col < n_cols)
        w = tl.load(w_ptr + row[:, None] * w_stride + col, mask=mask, other=0.0).to(tl.float32)
        total += w * w
    tl.store(square_ptr + row, tl.sum(total, axis=1), mask=row < n_rows)


@triton.jit
def _dora_gram_kernel(
    a_ptr, a_rank_stride, a_col_stride,                 # [ranks, columns]
    gram_ptr,                                           # [parts, RANKS, RANKS] float64
    n_cols, n_ranks, cols_of_part,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):
    """A A^T over a part of the columns. A program computes one row: one rank with all ranks."""
    part, own = tl.program_id(0), tl.program_id(1)
    rank = tl.arange(0, RANKS)
    total = tl.zeros((RANKS, BLOCK), tl.float64)
    first = part * cols_of_part
    for start in range(first, tl.minimum(first + cols_of_part, n_cols), BLOCK):
        col = start + tl.arange(0, BLOCK)
        known = col < n_cols
        at = col.to(tl.int64) * a_col_stride
        a = tl.load(
            a_ptr + rank[:, None].to(tl.int64) * a_rank_stride + at[None, :],
            mask=(rank[:, None] < n_ranks) & known[None, :], other=0.0,
        )
        of_own = tl.load(a_ptr + own.to(tl.int64) * a_rank_stride + at, mask=known & (own < n_ranks), other=0.0)
        total += a.to(tl.float64) * of_own.to(tl.float64)[None, :]
    tl.store(gram_ptr + (part * RANKS + own) * RANKS + rank, tl.sum(total, axis=1))


@triton.jit
def _dora_norm_kernel(
    square_ptr, crossed_ptr, crossed_stride,            # [rows], [rows, ranks] float32
    b_ptr, b_row_stride, b_rank_stride,                 # [rows, ranks]
    gram_ptr,                                           # [parts, RANKS, RANKS] float64
    norm_ptr,                                           # [rows] float32
    n_rows, n_ranks, n_parts, scale,
    RANKS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):
    """The square root of |W|^2 + the sum over the ranks of b (2 s W A^T + s^2 B (A A^T))."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rank, part = tl.arange(0, RANKS), tl.arange(0, PARTS)[:, None]
    known = row < n_rows
    mask = known[:, None] & (rank[None, :] < n_ranks)
    s = tl.full((), scale, tl.float32).to(tl.float64)
    crossed = tl.load(crossed_ptr + row[:, None] * crossed_stride + rank[None, :], mask=mask, other=0.0)
    inner = 2.0 * s * crossed.to(tl.float64)
    for other in range(0, n_ranks):
        of_other = tl.load(b_ptr + row * b_row_stride + other * b_rank_stride, mask=known, other=0.0).to(tl.float64)
        gram = tl.load(gram_ptr + (part * RANKS + other) * RANKS + rank[None, :], mask=part < n_parts, other=0.0)
        inner += s * s * of_other[:, None] * tl.sum(gram, axis=0)[None, :]
    b = tl.load(b_ptr + row[:, None] * b_row_stride + rank[None, :] * b_rank_stride, mask=mask, other=0.0)
    square = tl.load(square_ptr + row, mask=known, other=0.0).to(tl.float64)
    total = square + tl.sum(inner * b.to(tl.float64), axis=1)
    tl.store(norm_ptr + row, tl.sqrt(tl.maximum(total, 0.0)).to(tl.float32), mask=known)
# fmt: on


@choice("dora_square")
def _square_shape(n_rows: int, n_cols: int) -> dict[str, int]:
    """Launch choices: 16 elements a lane and turn."""
    rows, block = tile(n_rows, n_cols, 2, 1024)
    return {"ROWS": rows, "BLOCK": block, "num_warps": 4}


@choice("dora_gram")
def _gram_shape(n_cols: int, ranks: int) -> tuple[int, int]:
    """The number of parts of the columns, and the number of columns that a program adds at once."""
    _, block = tile(1, n_cols, 1, max(16, 1024 // ranks))
    return max(1, min(16, n_cols // (4 * block))), block


def _norm(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    crossed = rows_product(weight, [a], 1.0)
    (n_rows, n_ranks), n_cols = b.shape, a.shape[1]
    square = torch.empty(n_rows, dtype=torch.float32, device=a.device)
    of_square = _square_shape(n_rows, n_cols)
    grid = (cdiv(n_rows, of_square["ROWS"]),)
    launch(_dora_square_kernel, grid, a.device, *as_rows(weight), square, n_rows, n_cols, **of_square)
    ranks = ranks_of_program(n_ranks)
    parts, block = _gram_shape(n_cols, ranks)
    gram = torch.empty((parts, ranks, ranks), dtype=torch.float64, device=a.device)
    of_gram = n_cols, n_ranks, cdiv(cdiv(n_cols, parts), block) * block
    launch(_dora_gram_kernel, (parts, ranks), a.device, a, *a.stride(), gram, *of_gram, RANKS=ranks, BLOCK=block)
    norm = torch.empty(n_rows, dtype=torch.float32, device=a.device)
    rows, _ = tile(n_rows, ranks, max(1, 512 // ranks), ranks)
    tensors = square, crossed, crossed.stride(0), b, *b.stride(), gram, norm
    grid, options = (cdiv(n_rows, rows),), {"RANKS": ranks, "PARTS": next_power_of_2(parts), "ROWS": rows}
    launch(_dora_norm_kernel, grid, a.device, *tensors, n_rows, n_ranks, parts, float(scale), **options)
    return norm


def _check_weight(weight: Tensor, adapter: LoraAdapter) -> None:
    if not weight.is_floating_point():
        raise TypeError(f"weight is {weight.dtype}; it must be floating point")
    if weight.device != adapter.a.device:
        raise ValueError(f"weight is on {weight.device}, the adapter on {adapter.a.device}; move one to the other")
    shape = (len(adapter.b), adapter.a.shape[1])
    if weight.shape != shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; with this adapter it must be {shape}")


@checked_op
def dora_norm(weight: Tensor, adapter: LoraAdapter) -> Tensor:
    """The length of each row of ``weight`` + scale * B A, without gradient, because DoRA treats it as a constant.

    Args:
        weight: [out features, in features], any floating dtype. A quantised weight must be dequantised first.
        adapter: the adapter of the layer.

    Returns:
        [out features], float32; float64 if ``weight`` or the adapter is float64.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, dtype, shape or device.
    """
    _check_weight(weight, adapter)
    wide = torch.float64 in (weight.dtype, adapter.a.dtype, adapter.b.dtype)
    dtype = torch.float64 if wide else torch.float32
    values: tuple[Tensor, ...] = as_values(weight, adapter.a, adapter.b)  # type: ignore[assignment]
    w, a, b = (t.detach() for t in values)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        if not wide and use_triton(weight):
            return _norm(w, a, b, adapter.scale)
        square = torch.linalg.vector_norm(w, dim=1, dtype=dtype).square()
        crossed, a, b, s = w.to(dtype) @ a.to(dtype).t(), a.double(), b.double(), adapter.scale
        more = 2 * s * (crossed * b).sum(1) + s * s * (b @ (a @ a.t()) * b).sum(1)
        return (square.double() + more).clamp(min=0).sqrt().to(dtype)
