"""A linear layer whose weight has a low-rank adapter and rows of learned length (DoRA; Liu, arXiv:2402.09353).

    c = m / n        y = c * (x W^T + s z B^T) + b        z = x A^T

m is the magnitude and b the layer's bias. n is the length of the rows of W + s B A; dora_norm.py computes n, which
counts as a constant. The layer's output is y0 = x W^T + b. So the op is :func:`lora_linear` with c B in place of B, and
a different last step. With the upstream gradient dY, and with dB' = s dY^T z:

    g = s dY (c B)        dA = g^T x        dB = c * dB'        dm = (sum of the rows of dY * (y0 - b) + dB' * B) / n

where dB' * B is summed over the ranks. g A is added to the base's gradient of x, and the base's output gets c * dY. The
last step saves y0. One pass over dY and y0 computes what it needs, so activation checkpointing runs the base again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.lora_linear import LoraFunction, cast_as_base, check_base, checked_adapters, runs_kernel
from liger_kernels.ops.lora.products import (
    PROGRAMS,
    add_product,
    dot,
    ranks_of_program,
    remembered,
    stages_that_fit,
)
from liger_kernels.ops.runtime.arguments import checked, checked_op
from liger_kernels.ops.runtime.dispatch import as_values, backward_once, launch, tl, triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, tile


@checked
def dora_linear_ref(
    x: Tensor,
    base: Callable[[Tensor], Tensor],
    adapter: LoraAdapter,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """:func:`dora_linear` in plain torch: the definition of correct, for any floating-point dtype."""
    _check_vectors(x, adapter, magnitude=magnitude, norm=norm, bias=bias)
    x = cast_as_base(x)
    return _reference(base(x), x, adapter, magnitude, norm, bias)


def _reference(
    y0: Tensor, x: Tensor, adapter: LoraAdapter, magnitude: Tensor, norm: Tensor, bias: Tensor | None
) -> Tensor:
    check_base(x, y0, [adapter])
    dtype = torch.promote_types(y0.dtype, torch.float32)
    for t in (adapter.a, adapter.b, magnitude):
        dtype = torch.promote_types(dtype, t.dtype)
    with torch.autocast(x.device.type, enabled=False):
        c = magnitude.to(dtype) / norm.detach().to(dtype)
        b = 0.0 if bias is None else bias.to(dtype)
        delta = F.linear(F.linear(x.to(dtype), adapter.a.to(dtype)), adapter.b.to(dtype))
        return (c * (y0.to(dtype) - b + adapter.scale * delta) + b).to(y0.dtype)


# fmt: off
@triton.jit
def _dora_linear_bwd_kernel(
    dy_ptr, dy_stride, y0_ptr, y0_stride,                   # [rows, columns]
    z_ptr, z_stride,                                        # [rows, ranks] float32
    c_ptr, bias_ptr,                                        # [columns] float32, [columns] or None
    dy0_ptr, sums_ptr, w_ptr,                               # [rows, columns] or None; float32 [parts, columns], and
    n_rows, n_cols, n_ranks, rows_of_part,                  # [parts, columns, RANKS]
    EXACT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """dy0 = c * dy, and over the rows of each part: the sum of dy * (y0 - bias), and dy^T z."""
    part = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    in_cols = col[None, :] < n_cols
    c = tl.load(c_ptr + col[None, :], mask=in_cols, other=0.0)
    bias = tl.zeros((1, BLOCK), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col[None, :], mask=in_cols, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    w = tl.zeros((BLOCK, RANKS), tl.float32)
    first = part.to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, n_rows)
    for start in range(0, rows_of_part, ROWS):
        row = first + start + tl.arange(0, ROWS)[:, None]
        mask = (row < end) & in_cols
        dy = tl.load(dy_ptr + row * dy_stride + col[None, :], mask=mask, other=0.0)
        y0 = tl.load(y0_ptr + row * y0_stride + col[None, :], mask=mask, other=0.0)
        in_z = (row < end) & (rank[None, :] < n_ranks)
        z = tl.load(z_ptr + row * z_stride + rank[None, :], mask=in_z, other=0.0)
        slope = dy.to(tl.float32)
        if dy0_ptr is not None:
            tl.store(dy0_ptr + row * n_cols + col[None, :], (c * slope).to(dy0_ptr.dtype.element_ty), mask=mask)
        total += slope * (y0.to(tl.float32) - bias)
        w = dot(tl.trans(dy), z, w, EXACT)
    at = part.to(tl.int64) * n_cols + col
    tl.store(sums_ptr + at, tl.sum(total, axis=0), mask=col < n_cols)
    tl.store(w_ptr + at[:, None] * RANKS + rank[None, :], w, mask=(col < n_cols)[:, None])


@triton.jit
def _dora_linear_sum_kernel(
    sums_ptr, w_ptr,                                        # float32 [parts, columns], [parts, columns, RANKS]
    b_ptr, b_col_stride, b_rank_stride,                     # [columns, ranks]
    c_ptr, norm_ptr,                                        # [columns] float32
    dm_ptr, db_ptr,                                         # [columns], [columns, ranks]
    n_cols, n_ranks, n_parts, scale,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):
    """The sums of the parts in their order: sums and w. dm = (sums + scale * the sum over the ranks of w * b) / norm,
    and db = scale * c * w."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)[None, :]
    known = col < n_cols
    sums = tl.zeros((BLOCK,), tl.float32)
    w = tl.zeros((BLOCK, RANKS), tl.float32)
    at = col.to(tl.int64)
    for _ in range(0, n_parts):
        sums += tl.load(sums_ptr + at, mask=known, other=0.0)
        w += tl.load(w_ptr + at[:, None] * RANKS + rank, mask=known[:, None], other=0.0)
        at += n_cols
    mask = known[:, None] & (rank < n_ranks)
    w *= tl.full((), scale, tl.float32)
    at_b = b_ptr + col[:, None].to(tl.int64) * b_col_stride + rank.to(tl.int64) * b_rank_stride
    b = tl.load(at_b, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + col, mask=known, other=1.0)
    c = tl.load(c_ptr + col, mask=known, other=0.0)
    dm = (sums + tl.sum(w * b, axis=1)) / norm
    tl.store(dm_ptr + col, dm.to(dm_ptr.dtype.element_ty), mask=known)
    at_db = db_ptr + col[:, None].to(tl.int64) * n_ranks + rank
    tl.store(at_db, (w * c[:, None]).to(db_ptr.dtype.element_ty), mask=mask)
# fmt: on


def _scaled(y0: Tensor, z: Tensor, scaled: Tensor, scale: float, c: Tensor, bias: Tensor | None) -> Tensor:
    """c * (y0 - bias) + bias + scale * z scaled^T, a new tensor of y0's shape and dtype."""
    rest = None
    if bias is not None:
        rest, scaled, scale = (1 - c) * bias, scale * scaled, 1.0
    return add_product(y0, z, [scaled], rest, scale, y0.shape, y0.dtype, by_column=True, factor=c)


class DoraFunction(torch.autograd.Function):
    """Returns y from ``compute``. Its inputs are the base's output ``y0``, an anchor of the adapter's result, m, B and
    the base's bias. The anchor's gradient is dY."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], Tensor],
        scale: float,
        y0: Tensor,
        anchor: Tensor,
        m: Tensor,
        b: Tensor,
        bias: Tensor | None,
        *constants: Tensor,
    ) -> Tensor:
        """``constants``: z, c and the length."""
        sums = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        ctx.save_for_backward(y0 if sums else None, b, bias, *constants)
        ctx.scale, ctx.dtype = scale, m.dtype
        return compute()

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, _, needs_y0, needs_anchor, needs_m, needs_b, needs_bias, *constants = ctx.needs_input_grad
        y0, b, bias, z, c, norm = ctx.saved_tensors
        dy0 = dm = db = dbias = None
        if y0 is not None:
            dy0, dm, db = _gradients(dy, y0, z, b, bias, c, norm, ctx.scale, ctx.dtype, needs_y0)
        elif needs_y0:
            dy0 = (c * dy).to(dy.dtype)
        if needs_bias:
            dbias = ((1 - c) * dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)).to(bias.dtype)
        of_tensors = dy0, dy if needs_anchor else None, dm if needs_m else None, db if needs_b else None, dbias
        return None, None, *of_tensors, *[None] * len(constants)


@choice("dora_backward")
@remembered
def _backward_shape(
    n_rows: int, n_cols: int, ranks: int, size: int, device: torch.device
) -> tuple[int, dict[str, int]]:
    """The number of parts of the rows, and launch choices. 16384 x 14336 on an H200, bfloat16 and 16 ranks: 0.47 ms,
    with 64 rows and 64 columns a tile 0.73."""
    rows, block = tile(n_rows, n_cols, 32, 128 if ranks <= 64 else 64)
    parts = max(1, min(PROGRAMS // cdiv(n_cols, block), cdiv(n_rows, 4 * rows)))
    stages = stages_that_fit(device, rows * (2 * block * size + ranks * 4))
    return parts, {"ROWS": rows, "BLOCK": block, "num_warps": 4, "num_stages": stages}


def _gradients(
    dy: Tensor,
    y0: Tensor,
    z: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    norm: Tensor,
    scale: float,
    dtype: torch.dtype,
    needs_y0: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of y0, or None where it needs none, of m in ``dtype``, and of B. One pass over dy and y0."""
    dy0 = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if needs_y0 else None
    (n_cols, n_ranks), ranks, n_rows = b.shape, ranks_of_program(b.shape[1]), len(z)
    n_parts, options = _backward_shape(n_rows, n_cols, ranks, dy.element_size(), dy.device)
    rows_of_part = cdiv(cdiv(n_rows, n_parts), options["ROWS"]) * options["ROWS"]
    sums, w = (
        torch.empty((n_parts, n_cols, *of_ranks), dtype=torch.float32, device=dy.device) for of_ranks in ((), (ranks,))
    )
    bias = None if bias is None else bias.contiguous()
    of_rows = *as_rows(dy), *as_rows(y0), z, z.stride(0), c, bias, dy0, sums, w, n_rows, n_cols, n_ranks, rows_of_part
    grid, exact = (cdiv(n_cols, options["BLOCK"]), n_parts), dy.dtype is not torch.bfloat16
    launch(_dora_linear_bwd_kernel, grid, dy.device, *of_rows, EXACT=exact, RANKS=ranks, **options)
    dm, db = torch.empty(n_cols, dtype=dtype, device=dy.device), torch.empty(b.shape, dtype=b.dtype, device=b.device)
    _, block = tile(1, n_cols, 1, max(1, 512 // ranks))
    of_parts = sums, w, b, *b.stride(), c, norm, dm, db, n_cols, n_ranks, n_parts, float(scale)
    launch(_dora_linear_sum_kernel, (cdiv(n_cols, block),), dy.device, *of_parts, RANKS=ranks, BLOCK=block)
    return dy0, dm, db


def _check_vectors(x: Tensor, adapter: LoraAdapter, **vectors: Tensor | None) -> None:
    checked_adapters(x, [adapter])
    if adapter.bias is not None or adapter.dropped is not None:
        raise ValueError("adapter has a bias or a dropout; DoRA is computed without: use an adapter with neither")
    for name, t in vectors.items():
        if t is None:
            continue
        if not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}; it must be floating point")
        if t.shape != adapter.b.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; with this adapter it must be ({len(adapter.b)},)")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x on {x.device}; move one to the other")


@checked_op
def dora_linear(
    x: Tensor,
    base: Callable[[Tensor], Tensor],
    adapter: LoraAdapter,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """The result of ``base`` with an adapter, each output scaled to a learned magnitude. The formula is at the top of
    this file.

    Under autocast, x is cast as ``F.linear`` casts it, and base gets the cast x. All other tensors keep their dtype.

    Args:
        x: [..., in features]: float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        base: the adapted layer. It is called once, with x or an alias of x. Its result is not overwritten.
        adapter: the layer's adapter, without bias and dropout.
        magnitude: [out features], any floating dtype.
        norm: [out features], the result of :func:`dora_norm`. It gets no gradient.
        bias: [out features], the bias of base, or None. It is not scaled.

    Returns:
        A new tensor [..., out features] of the dtype of base's result.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, dtype, shape or device.
    """
    _check_vectors(x, adapter, magnitude=magnitude, norm=norm, bias=bias)
    x = cast_as_base(x)
    if not runs_kernel(x, [adapter]) or torch.float64 in (magnitude.dtype, norm.dtype):
        return _reference(base(x), x, adapter, magnitude, norm, bias)
    values: tuple[Any, ...] = as_values(x, adapter.a, adapter.b, magnitude, bias, norm)
    x, a, b, m, bias, norm = values
    with torch.no_grad():
        norm = norm.float().contiguous()
        c = m.float() / norm
        scaled = c[:, None] * b
    passes = x.requires_grad and torch.is_grad_enabled()
    given = x
    z, anchor, *passed = LoraFunction.apply(x, x.dtype, passes, (adapter.scale,), a, scaled, None)
    if passes:
        (x,) = passed
    y0 = base(x)
    check_base(x, y0, [adapter])
    if y0.dtype is not x.dtype:
        return _reference(y0, given, adapter, magnitude, norm, bias)
    (value,) = as_values(y0)
    assert value is not None
    constant = None if bias is None else bias.detach()
    compute = partial(_scaled, value.detach(), z, scaled, adapter.scale, c, constant)
    y: Tensor = DoraFunction.apply(compute, adapter.scale, value, anchor, m, b, bias, z, c, norm)
    return y
