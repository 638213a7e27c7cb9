"""RMSNorm with a gate: between attention without softmax, or a state-space scan, and the projection behind it.

With x and gate rows in float32, a = act(gate), act silu or sigmoid, and rms(h) = h * rsqrt(mean(h^2) + eps) over each
of ``groups`` equal parts of a row, three orders of two formulas occur in language models:

    y = (weight * rms(x).to(x.dtype)) * a    then x.dtype         Qwen3-Next, Qwen3.5, OLMo hybrid
    y = (weight.float() * rms(x)) * a        then x.dtype         Kimi Linear, Bailing hybrid (a = sigmoid(gate))
    y = weight * rms(x * a).to(x.dtype)                           Bamba, Granite hybrid, Zamba2; Mamba2 in groups

The first rounds the product to the dtype that weight and x promote to. ``formula`` says where is rounded, as for
:func:`rms_norm`, and ``gate_first`` what is normalised. With r = rsqrt(...) and norm the row before the weight,

    gate last:     u = dL/dy * a * weight    dL/dx = r * (u - norm * mean(u * norm))
                   dL/dweight = sum over rows of dL/dy * a * norm    dL/dgate = dL/dy * weight * norm * act'(gate)
    gate first:    u = dL/dy * weight        d = r * (u - norm * mean(u * norm))
                   dL/dx = d * a    dL/dweight = sum over rows of dL/dy * norm    dL/dgate = d * x * act'(gate)

x, gate and weight are saved; the activation and the norm are computed again. Each program has one group, whose part of
the weight it holds, and the backward goes over the rows as that of RMSNorm does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F

from liger_kernels.ops._glu import _activate, _sigmoid
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
from liger_kernels.ops.runtime.arguments import AT_LEAST_1, checked, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import backward_once, launch, tl, triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv

FORMULAS = ("cast_then_scale", "scale_then_cast")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
Activation = Annotated[str, one_of(ACTIVATIONS)]
Formula = Annotated[str, one_of(FORMULAS)]
Groups = Annotated[int, AT_LEAST_1]


@checked
def gated_rms_norm_ref(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: Eps = 1e-6,
    *,
    activation: Activation = "silu",
    gate_first: bool = False,
    groups: Groups = 1,
    formula: Formula = "cast_then_scale",
) -> torch.Tensor:
    """:func:`gated_rms_norm` in plain torch: the definition of correct, for any floating-point dtypes."""
    _check(x, gate, weight, groups)
    wide = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
    factor = ACTIVATIONS[activation](gate.to(wide))
    norm = x.to(wide) * factor if gate_first else x.to(wide)
    norm = norm.unflatten(-1, (groups, -1))
    norm = (norm * torch.rsqrt(norm.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    y = weight * norm.to(x.dtype) if formula == "cast_then_scale" else (weight.to(wide) * norm)
    if not gate_first:
        return (y * factor).to(x.dtype)
    return y if formula == "cast_then_scale" else y.to(x.dtype)


# fmt: off
@triton.jit
def _gate(gate, ACTIVATION: tl.constexpr):
    """act(gate) and act'(gate) in float32."""
    if ACTIVATION == "sigmoid":
        factor, slope = _sigmoid(gate)
    else:
        factor, slope = _activate(gate, "silu")
    return factor, slope


@triton.jit
def _gated_rms_norm_fwd_kernel(
    x_ptr, x_stride, gate_ptr, gate_stride,    # [rows, hidden]
    weight_ptr, y_ptr, rstd_ptr,               # [hidden], [rows, hidden], [rows, groups] or None
    n_rows, hidden, width, eps,
    FORMULA: tl.constexpr, ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Programs: row blocks, groups of ``width`` columns."""
    eps = tl.full((), eps, tl.float32)
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_group = tl.arange(0, BLOCK) < width
    col = group.to(tl.int64) * width + tl.arange(0, BLOCK)
    mask = (row < n_rows)[:, None] & in_group[None, :]

    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=in_group, other=0.0)
    dtype: tl.constexpr = x.dtype
    same: tl.constexpr = x.dtype == weight.dtype
    x = x.to(tl.float32)
    factor, _ = _gate(gate, ACTIVATION)
    if GATE_FIRST:
        x *= factor
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row * tl.num_programs(1) + group, rstd, mask=row < n_rows)
    y = x * rstd[:, None]
    if FORMULA == "cast_then_scale":
        y = y.to(dtype).to(tl.float32)
    y *= weight.to(tl.float32)[None, :]
    if not GATE_FIRST:
        if FORMULA == "cast_then_scale" and same:
            y = y.to(dtype).to(tl.float32)
        y *= factor
    tl.store(y_ptr + row[:, None] * hidden + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_rms_norm_bwd_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, gate_ptr, gate_stride,    # [rows, hidden]
    weight_ptr, rstd_ptr,                                         # [hidden], [rows, groups]
    dx_ptr, dgate_ptr, dweight_ptr,                               # [rows, hidden] twice, [programs, hidden], or None
    n_rows, hidden, width,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    """``dweight_ptr`` gets each program's own sum. What a pointer is None for is not computed."""
    program, group = tl.program_id(0), tl.program_id(1)
    in_group = tl.arange(0, BLOCK) < width
    col = group.to(tl.int64) * width + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, mask=in_group, other=0.0).to(tl.float32)
    # One partial sum for each row of the tile: adding up rows inside the loop would be a shuffle per step.
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)

    for start in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < n_rows)[:, None] & in_group[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row * tl.num_programs(1) + group, mask=row < n_rows, other=0.0)
        factor, slope = _gate(gate, ACTIVATION)
        norm = x * rstd[:, None]
        if GATE_FIRST:
            norm *= factor
            dnorm = dy
        else:
            dnorm = dy * factor
        if dweight_ptr is not None:
            dweight += dnorm * norm
        dnorm *= weight[None, :]
        at = row[:, None] * hidden + col[None, :]
        if GATE_FIRST:
            projection = tl.sum(dnorm * norm, axis=1) / width
            d = (dnorm - norm * projection[:, None]) * rstd[:, None]
            if dx_ptr is not None:
                tl.store(dx_ptr + at, (d * factor).to(dx_ptr.dtype.element_ty), mask=mask)
            if dgate_ptr is not None:
                tl.store(dgate_ptr + at, (d * x * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        else:
            if dx_ptr is not None:
                projection = tl.sum(dnorm * norm, axis=1) / width
                d = (dnorm - norm * projection[:, None]) * rstd[:, None]
                tl.store(dx_ptr + at, d.to(dx_ptr.dtype.element_ty), mask=mask)
            if dgate_ptr is not None:
                dgate = dy * weight[None, :] * norm * slope
                tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)

    if dweight_ptr is not None:
        tl.store(dweight_ptr + program.to(tl.int64) * hidden + col, tl.sum(dweight, axis=0), mask=in_group)
# fmt: on


class GatedRMSNormFunction(torch.autograd.Function):
    """Saves x, gate, the weight and one float32 number per row and group; the gradients are new tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        activation: str,
        gate_first: bool,
        groups: int,
        formula: str,
    ) -> torch.Tensor:
        (rows, stride), (gate_rows, gate_stride) = as_rows(x), as_rows(gate)
        hidden = x.shape[-1]
        n_rows, width = x.numel() // hidden, hidden // groups
        weight = weight.contiguous()
        promotes = gate_first and formula == "cast_then_scale"
        dtype = torch.promote_types(x.dtype, weight.dtype) if promotes else x.dtype
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        rstd = x.new_empty(n_rows * groups, dtype=torch.float32) if any(ctx.needs_input_grad) else None
        shape = launch_shape(n_rows, width, elements=2048, per_lane=16)
        # fmt: off
        launch(
            _gated_rms_norm_fwd_kernel, (cdiv(n_rows, shape["ROWS"]), groups), x.device,
            rows, stride, gate_rows, gate_stride, weight, y, rstd, n_rows, hidden, width, eps,
            FORMULA=formula, ACTIVATION=activation, GATE_FIRST=gate_first, **shape,
        )
        # fmt: on
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = activation, gate_first, groups
        return y

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        activation, gate_first, groups = ctx.options
        (rows, stride), (gate_rows, gate_stride), (dy_rows, dy_stride) = as_rows(x), as_rows(gate), as_rows(dy)
        hidden = x.shape[-1]
        n_rows, width = x.numel() // hidden, hidden // groups
        needs_x, needs_gate, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs_gate else None
        # The gate's row takes the registers that LayerNorm's second sum takes.
        shape = launch_shape(n_rows, width, elements=4096 if width <= 2048 else 8192, per_lane=16)
        n_programs = min(cdiv(backward_programs(x.device), groups), cdiv(n_rows, shape["ROWS"]))
        parts = x.new_empty((n_programs, hidden), dtype=torch.float32) if needs_weight else None
        loaded = dy.element_size() + x.element_size() + gate.element_size()
        # fmt: off
        launch(
            _gated_rms_norm_bwd_kernel, (n_programs, groups), x.device,
            dy_rows, dy_stride, rows, stride, gate_rows, gate_stride, weight, rstd, dx, dgate, parts,
            n_rows, hidden, width, ACTIVATION=activation, GATE_FIRST=gate_first,
            STAGES=stages(shape["ROWS"] * shape["BLOCK"], loaded, x.device), **shape,
        )
        # fmt: on
        dweight = None if parts is None else sum_parts(parts, weight.dtype)
        return dx, dgate, dweight, None, None, None, None, None


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int) -> None:
    check_rows(x, weight=weight)
    check_like(x, gate=gate)
    if x.shape[-1] % groups:
        raise ValueError(f"groups is {groups}; it must be a divisor of the {x.shape[-1]} columns of x")


@checked_op
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: Eps = 1e-6,
    *,
    activation: Activation = "silu",
    gate_first: bool = False,
    groups: Groups = 1,
    formula: Formula = "cast_then_scale",
) -> torch.Tensor:
    """RMSNorm over the last dimension times an activated gate; the formulas stand at the top of this file.

    Args:
        x, gate: [..., hidden] of one shape, float16, bfloat16, float32, or float64 (which runs the reference); any
            strides, and of two dtypes where they differ. Never overwritten.
        weight: [hidden], of any floating-point dtype.
        eps: added to the mean of the squares; not negative.
        activation: of the gate, "silu" or "sigmoid".
        gate_first: whether x times the activation is normalised, instead of x.
        groups: how many equal parts of a row are normalised, each for itself.
        formula: "cast_then_scale" or "scale_then_cast".

    Returns:
        A new contiguous tensor of x's shape, in x's dtype, but with ``gate_first`` and "cast_then_scale" in the dtype
        that x and weight promote to.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape, device or name.
    """
    if not runs_kernel(x, gate, weight):
        options: dict[str, Any] = {"activation": activation, "gate_first": gate_first}
        return gated_rms_norm_ref(x, gate, weight, eps, groups=groups, formula=formula, **options)
    _check(x, gate, weight, groups)
    return GatedRMSNormFunction.apply(x, gate, weight, eps, activation, gate_first, groups, formula)
