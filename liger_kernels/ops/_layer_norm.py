"""LayerNorm: every row centred and divided by its standard deviation, times a weight, plus a bias (Ba et al.,
arXiv:1607.06450).

With x a row in float32, mean its mean and rstd = rsqrt(mean((x - mean)^2) + eps),

    norm = (x - mean) * rstd        y = (norm * weight + bias).to(x.dtype)

Weight and bias are optional, each for itself. A zero-centered weight (Nemotron) is stored as a distance from 1: then
weight + 1 takes its place, rounded to the weight's dtype. With u = dL/dy * weight,

    dL/dx = rstd * (u - mean(u) - norm * mean(u * norm))
    dL/dweight = sum over rows of dL/dy * norm        dL/dbias = sum over rows of dL/dy

The variance is that of the centred row, a second pass over registers: mean(x^2) - mean^2 would cancel where a row's
mean is large. The backward goes over the rows as that of RMSNorm does.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_kernels.ops._norm_rows import (
    Eps,
    backward_programs,
    check_rows,
    launch_shape,
    runs_kernel,
    stages,
    sum_parts,
)
from liger_kernels.ops.runtime.arguments import checked, checked_op
from liger_kernels.ops.runtime.dispatch import backward_once, launch, tl, triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv


@checked
def layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: Eps = 1e-5,
    *,
    zero_centered: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`layer_norm` in plain torch: the definition of correct, for any floating-point dtype."""
    dtype = _checked_dtype(x, weight, bias, dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide)
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight + 1.0 if zero_centered else weight).to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(dtype)


def _checked_dtype(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of the result, where all arguments fit."""
    check_rows(x, weight=weight, bias=bias)
    dtype = x.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise TypeError(f"dtype is {dtype}; it must be floating point")
    return dtype


# fmt: off
@triton.jit
def _load_weight(weight_ptr, col, in_row, ZERO_CENTERED: tl.constexpr):
    """What a row is multiplied by, in float32."""
    weight = tl.load(weight_ptr + col, mask=in_row, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight = (weight + 1.0).to(weight_ptr.dtype.element_ty).to(tl.float32)
    return weight


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr, x_stride,                # [rows, hidden]
    weight_ptr, bias_ptr,           # [hidden] or None
    y_ptr, mean_ptr, rstd_ptr,      # [rows, hidden], [rows] or None
    n_rows, hidden, eps,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    eps = tl.full((), eps, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    mask = (row < n_rows)[:, None] & in_row[None, :]

    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / hidden
    centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / hidden + eps)
    if rstd_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row < n_rows)
        tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y *= _load_weight(weight_ptr, col, in_row, ZERO_CENTERED)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None] * hidden + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_bwd_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride,    # [rows, hidden]
    weight_ptr, mean_ptr, rstd_ptr,        # [hidden] or None, [rows], [rows]
    dx_ptr, dweight_ptr, dbias_ptr,        # [rows, hidden] or None, [programs, hidden] or None
    n_rows, hidden,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    """``dweight_ptr`` and ``dbias_ptr`` get each program's own sums. What a pointer is None for is not computed."""
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    if weight_ptr is not None:
        weight = _load_weight(weight_ptr, col, in_row, ZERO_CENTERED)
    # One partial sum for each row of the tile: adding up rows inside the loop would be a shuffle per step.
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)

    for start in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < n_rows)[:, None] & in_row[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < n_rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)
        norm = (x - mean[:, None]) * rstd[:, None]  # not 0 where the mask ends, but dy is
        if dweight_ptr is not None:
            dweight += dy * norm
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy *= weight[None, :]
            projection = tl.sum(dy * norm, axis=1) / hidden
            shift = tl.sum(dy, axis=1) / hidden
            dx = (dy - shift[:, None] - norm * projection[:, None]) * rstd[:, None]
            tl.store(dx_ptr + row[:, None] * hidden + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)

    part = program.to(tl.int64) * hidden
    if dweight_ptr is not None:
        tl.store(dweight_ptr + part + col, tl.sum(dweight, axis=0), mask=in_row)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part + col, tl.sum(dbias, axis=0), mask=in_row)
# fmt: on


class LayerNormFunction(torch.autograd.Function):
    """Saves x, the weight and two float32 numbers per row; the gradients are new tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        zero_centered: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        rows, stride = as_rows(x)
        hidden = x.shape[-1]
        n_rows = x.numel() // hidden
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        differentiable = any(ctx.needs_input_grad)
        mean = x.new_empty(n_rows, dtype=torch.float32) if differentiable else None
        rstd = x.new_empty(n_rows, dtype=torch.float32) if differentiable else None
        shape = launch_shape(n_rows, hidden, elements=2048, per_lane=16)
        # fmt: off
        launch(
            _layer_norm_fwd_kernel, (cdiv(n_rows, shape["ROWS"]),), x.device,
            rows, stride, weight, bias, y, mean, rstd, n_rows, hidden, eps,
            ZERO_CENTERED=zero_centered, **shape,
        )
        # fmt: on
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.zero_centered = zero_centered
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        (rows, stride), (dy_rows, dy_stride) = as_rows(x), as_rows(dy)
        hidden = x.shape[-1]
        n_rows = x.numel() // hidden
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        # Two sums over the rows take twice the registers of RMSNorm's one.
        per_lane = 16 if needs_weight and needs_bias else 32
        shape = launch_shape(n_rows, hidden, elements=4096 if hidden <= 2048 else 8192, per_lane=per_lane)
        n_programs = min(backward_programs(x.device), cdiv(n_rows, shape["ROWS"]))
        dweight = x.new_empty((n_programs, hidden), dtype=torch.float32) if needs_weight else None
        dbias = x.new_empty((n_programs, hidden), dtype=torch.float32) if needs_bias else None
        loaded = dy.element_size() + x.element_size()
        # fmt: off
        launch(
            _layer_norm_bwd_kernel, (n_programs,), x.device,
            dy_rows, dy_stride, rows, stride, weight, mean, rstd, dx, dweight, dbias, n_rows, hidden,
            ZERO_CENTERED=ctx.zero_centered, STAGES=stages(shape["ROWS"] * shape["BLOCK"], loaded, x.device), **shape,
        )
        # fmt: on
        dweight = None if dweight is None else sum_parts(dweight, weight.dtype)
        dbias = None if dbias is None else sum_parts(dbias, ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None


@checked_op
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: Eps = 1e-5,
    *,
    zero_centered: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """LayerNorm over the last dimension; the formula stands at the top of this file.

    Args:
        x: [..., hidden], float16, bfloat16, float32, or float64 (which runs the reference); any strides. Never
            overwritten.
        weight, bias: [hidden], of any floating-point dtypes, or None.
        eps: added to the variance; not negative.
        zero_centered: whether rows are multiplied by weight + 1, rounded to the weight's dtype.
        dtype: of the result; x's by default. ``F.layer_norm`` under CUDA's autocast returns float32.

    Returns:
        A new contiguous tensor of x's shape, rounded once.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape or device.
    """
    if not runs_kernel(x, weight, bias) or dtype == torch.float64:
        return layer_norm_ref(x, weight, bias, eps, zero_centered=zero_centered, dtype=dtype)
    dtype = _checked_dtype(x, weight, bias, dtype)
    return LayerNormFunction.apply(x, weight, bias, eps, zero_centered, dtype)
