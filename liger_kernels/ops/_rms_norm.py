"""RMSNorm: every row divided by its root mean square, times a weight (Zhang and Sennrich, arXiv:1910.07467).

With x a row in float32 and norm = x * rsqrt(mean(x^2) + eps), three formulas occur in language models; they are the
same function but round (and so promote) at different places:

    cast_then_scale         weight * norm.to(x.dtype)                 Llama, Qwen, Mistral, T5
    scale_then_cast         (weight.float() * norm).to(x.dtype)       OLMo 2
    offset_scale_then_cast  ((1 + weight.float()) * norm).to(x.dtype) Gemma: the weight is stored as a distance from 1

Without a weight all three are norm.to(x.dtype). With u = dL/dy * weight (or 1 + weight) and r = rsqrt(mean(x^2) + eps),

    dL/dx = r * (u - norm * mean(u * norm))        dL/dweight = sum over rows of dL/dy * norm

The backward kernel runs about as many programs as the device has multiprocessors. Each one walks over many rows with
the next rows' loads in flight and keeps its part of dL/dweight in float32 registers; the parts are added afterwards, in
a fixed order.

:func:`add_rms_norm` adds before it normalises, as between two blocks of a model: total = x + residual, y = norm of
total, in the same two kernels. total goes on next to y, so that both have a gradient:

    dL/dx = dL/dresidual = dL/dtotal + (dL/dx above, of total)
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from liger_kernels.ops._norm_rows import (
    Eps,
    backward_programs,
    check_like,
    check_rows,
    launch_shape,
    runs_kernel,
    stages,
    sum_parts,
)
from liger_kernels.ops.runtime.arguments import checked, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import backward_once, launch, tl, triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv

FORMULAS = ("cast_then_scale", "scale_then_cast", "offset_scale_then_cast")
Formula = Annotated[str, one_of(FORMULAS)]


@checked
def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: Eps = 1e-6, *, formula: Formula = "cast_then_scale"
) -> torch.Tensor:
    """:func:`rms_norm` in plain torch: the definition of correct, for any floating-point dtype."""
    check_rows(x, weight=weight)
    return _formula(x, weight, eps, formula)


def _formula(x: torch.Tensor, weight: torch.Tensor | None, eps: float, formula: str) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = x.to(wide)
    norm = norm * torch.rsqrt(norm.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return norm.to(x.dtype)
    if formula == "cast_then_scale":
        return weight * norm.to(x.dtype)
    if formula == "scale_then_cast":
        return (weight.to(wide) * norm).to(x.dtype)
    return ((1.0 + weight.to(wide)) * norm).to(x.dtype)


@checked
def add_rms_norm_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: Eps = 1e-6,
    *,
    formula: Formula = "cast_then_scale",
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm` in plain torch: the definition of correct, for any floating-point dtypes."""
    check_rows(x, weight=weight)
    check_like(x, residual=residual)
    total = x + residual
    return _formula(total, weight, eps, formula), total


# fmt: off
@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, x_stride,                             # [rows, hidden]
    residual_ptr, residual_stride, total_ptr,    # [rows, hidden] or None
    weight_ptr,                                  # [hidden] or None
    y_ptr, rstd_ptr,                             # [rows, hidden], [rows] or None
    n_rows, hidden, eps,
    FORMULA: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """With ``residual_ptr``, x + residual is normalised, and written to ``total_ptr``."""
    eps = tl.full((), eps, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < n_rows)[:, None] & (col < hidden)[None, :]

    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + col[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row[:, None] * hidden + col[None, :], x, mask=mask)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=col < hidden, other=0.0).to(tl.float32)
        if FORMULA == "cast_then_scale":
            y = y.to(dtype).to(tl.float32)
        if FORMULA == "offset_scale_then_cast":
            weight += 1.0
        y *= weight[None, :]
    tl.store(y_ptr + row[:, None] * hidden + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride,    # [rows, hidden]
    weight_ptr, rstd_ptr,                  # [hidden] or None, [rows]
    dtotal_ptr, dtotal_stride,             # [rows, hidden] or None
    dx_ptr, dweight_ptr,                   # [rows, hidden] or None, [programs, hidden] or None
    n_rows, hidden,
    FORMULA: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    """``dweight_ptr`` gets each program's own sum. What it and ``dx_ptr`` are None for is not computed. What
    ``dtotal_ptr`` holds is added to dx."""
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=in_row, other=0.0).to(tl.float32)
        if FORMULA == "offset_scale_then_cast":
            weight += 1.0
    # One partial sum for each row of the tile: adding up rows inside the loop would be a shuffle per step.
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)

    for start in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < n_rows)[:, None] & in_row[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)
        norm = x * rstd[:, None]
        if dweight_ptr is not None:
            dweight += dy * norm
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy *= weight[None, :]
            projection = tl.sum(dy * norm, axis=1) / hidden
            dx = (dy - norm * projection[:, None]) * rstd[:, None]
            if dtotal_ptr is not None:
                dtotal = tl.load(dtotal_ptr + row[:, None] * dtotal_stride + col[None, :], mask=mask, other=0.0)
                dx += dtotal.to(tl.float32)
            tl.store(dx_ptr + row[:, None] * hidden + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)

    if dweight_ptr is not None:
        tl.store(dweight_ptr + program.to(tl.int64) * hidden + col, tl.sum(dweight, axis=0), mask=in_row)
# fmt: on


class RMSNormFunction(torch.autograd.Function):
    """The norm of x, or, with a residual, the norm of their sum and the sum.

    Saves what was normalised, the weight and one float32 number per row; the gradients are new tensors, but where the
    norm was not used: then the sum's gradient is that of both terms, as it is in torch's own addition.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        formula: str,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        rows, stride = as_rows(x)
        hidden = x.shape[-1]
        n_rows = x.numel() // hidden
        dtype = x.dtype
        residual_rows = residual_stride = total = None
        if residual is not None:
            residual_rows, residual_stride = as_rows(residual)
            dtype = torch.promote_types(dtype, residual.dtype)
            total = torch.empty(x.shape, dtype=dtype, device=x.device)
        if weight is not None:
            weight = weight.contiguous()
            if formula == "cast_then_scale":
                dtype = torch.promote_types(dtype, weight.dtype)
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        rstd = x.new_empty(n_rows, dtype=torch.float32) if any(ctx.needs_input_grad) else None
        shape = launch_shape(n_rows, hidden, elements=2048, per_lane=16)
        # fmt: off
        launch(
            _rms_norm_fwd_kernel, (cdiv(n_rows, shape["ROWS"]),), x.device,
            rows, stride, residual_rows, residual_stride, total, weight, y, rstd, n_rows, hidden, eps,
            FORMULA=formula, **shape,
        )
        # fmt: on
        ctx.save_for_backward(x if total is None else total, weight, rstd)
        ctx.formula = formula
        ctx.dtypes = None if residual is None else (x.dtype, residual.dtype)
        if total is None:
            return y
        if not torch.compiler.is_compiling():  # Dynamo does not know it, and hands over zeros
            ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @backward_once
    def backward(
        ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return *_of_terms(ctx, dtotal), None, None, None
        x, weight, rstd = ctx.saved_tensors
        (rows, stride), (dy_rows, dy_stride) = as_rows(x), as_rows(dy)
        hidden = x.shape[-1]
        n_rows = x.numel() // hidden
        needs_x, needs_residual, needs_weight, *_ = ctx.needs_input_grad
        needs_dx = needs_x or needs_residual
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
        dtotal_rows, dtotal_stride = as_rows(dtotal) if needs_dx and dtotal is not None else (None, None)
        shape = launch_shape(n_rows, hidden, elements=4096 if hidden <= 2048 else 8192, per_lane=32)
        n_programs = min(backward_programs(x.device), cdiv(n_rows, shape["ROWS"]))
        loaded = dy.element_size() + x.element_size() + (0 if dtotal_rows is None else dtotal_rows.element_size())
        parts = x.new_empty((n_programs, hidden), dtype=torch.float32) if needs_weight else None
        # fmt: off
        launch(
            _rms_norm_bwd_kernel, (n_programs,), x.device,
            dy_rows, dy_stride, rows, stride, weight, rstd, dtotal_rows, dtotal_stride, dx, parts, n_rows, hidden,
            FORMULA=ctx.formula, STAGES=stages(shape["ROWS"] * shape["BLOCK"], loaded, x.device), **shape,
        )
        # fmt: on
        dweight = None if parts is None else sum_parts(parts, weight.dtype)
        if ctx.dtypes is None:
            return dx, None, dweight, None, None
        return *_of_terms(ctx, dx), dweight, None, None


def _of_terms(ctx: Any, d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The gradient ``d`` of what was normalised as that of x and of the residual, each in its own dtype."""
    return tuple(
        d.to(dtype) if d is not None and needed else None
        for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
    )


@checked_op
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: Eps = 1e-6, *, formula: Formula = "cast_then_scale"
) -> torch.Tensor:
    """RMSNorm over the last dimension; the formulas stand at the top of this file.

    Args:
        x: [..., hidden], float16, bfloat16, float32, or float64 (which runs the reference); any strides. Never
            overwritten.
        weight: [hidden], of any floating-point dtype, or None.
        eps: added to the mean of the squares; not negative.
        formula: "cast_then_scale", "scale_then_cast" or "offset_scale_then_cast".

    Returns:
        A new contiguous tensor of x's shape, in x's dtype, but for "cast_then_scale" in the dtype that x and weight
        promote to (float32 weights make bfloat16 inputs float32).

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape, device or name.
    """
    if not runs_kernel(x, weight):
        return rms_norm_ref(x, weight, eps, formula=formula)
    check_rows(x, weight=weight)
    return RMSNormFunction.apply(x, None, weight, eps, formula)


@checked_op
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: Eps = 1e-6,
    *,
    formula: Formula = "cast_then_scale",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = x + residual`` and ``rms_norm(total, weight, eps, formula=formula)``, without reading total back.

    Args:
        x, residual: [..., hidden] of one shape, float16, bfloat16, float32, or float64 (which runs the reference); any
            strides, and of two dtypes where they differ. Never overwritten.
        weight, eps, formula: as for :func:`rms_norm`.

    Returns:
        (y, total), new contiguous tensors of that shape. total is torch's x + residual, bit for bit, in the dtype that
        x and residual promote to; y is what :func:`rms_norm` returns for it. An in-place change of total before the
        backward makes the backward raise, because total is saved for it.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape, device or name.
    """
    if not runs_kernel(x, weight, residual):
        return add_rms_norm_ref(x, residual, weight, eps, formula=formula)
    check_rows(x, weight=weight)
    check_like(x, residual=residual)
    return RMSNormFunction.apply(x, residual, weight, eps, formula)
