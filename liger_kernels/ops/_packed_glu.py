"""Gated linear units of one tensor that holds gate and up, as the experts of a mixture have them.

    packed_glu(x, GluFormula()) = act(gate) * (up + offset)    gate, up = the halves of x, or its even and odd columns

A :class:`GluFormula` says where gate and up lie, which activation there is (``silu`` with a factor:
x * sigmoid(alpha * x)), and whether both are clamped first: gate to at most ``limit``, up to at most ``limit`` in
magnitude (gpt-oss, arXiv:2508.10925). Without limit, factor and offset this is swiglu or geglu, and rounds where those
do. The backward recomputes the activation from x, which is all that is saved, and writes one gradient for both:

    dL/dup = dL/dy * act(gate)        dL/dgate = dL/dy * (up + offset) * act'(gate)        0 beyond the limit

On the limit itself a gradient is what torch's clamp has there: that of the number until torch 2.14, 0 from 2.15.

For rows of several experts there is more: each row's expert may add a bias of its own to gate and up, and a row may be
multiplied by a number (the router's score), in float32, before it is rounded. The number's gradient is the sum over the
row of dL/dy times the product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F

from liger_kernels.ops._glu import ACTIVATIONS, _activate
from liger_kernels.ops.runtime.arguments import FINITE, Limit, checked, checked_fields, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import backward_once, launch, tl, triton, use_triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, next_power_of_2, tile


@checked_fields
@dataclass(frozen=True)
class GluFormula:
    """What a packed unit computes; the formula stands at the top of this file.

    Attributes:
        activation: "silu", "gelu_tanh" or "gelu".
        alpha: the factor inside of silu's sigmoid.
        limit: gate is clamped to at most ``limit``, up to between ``-limit`` and ``limit``; None: neither is.
        offset: added to up.
        interleaved: whether gate and up are the even and odd columns, not the halves.
        gate_first: whether gate is the first of the two.

    Raises:
        TypeError, ValueError: an unknown activation, a factor without silu, a limit that is not positive, or what is of
            another type.
    """

    activation: Annotated[str, one_of(ACTIVATIONS)] = "silu"
    alpha: Annotated[float, FINITE] = 1.0
    limit: Annotated[float, Limit("{x} > 0", "positive")] | None = None
    offset: Annotated[float, FINITE] = 0.0
    interleaved: bool = False
    gate_first: bool = True

    def __post_init__(self) -> None:
        if self.alpha != 1.0 and self.activation != "silu":
            raise ValueError(f"alpha is {self.alpha}, and only silu has one; leave it out for {self.activation}")

    def __str__(self) -> str:
        act = self.activation if self.alpha == 1.0 else f"{self.activation}[{self.alpha:g}]"
        gate, up = ("gate", "up") if self.limit is None else ("min(gate, L)", "clamp(up, -L, L)")
        up = up if self.offset == 0.0 else f"({up} + {self.offset:g})"
        layout = ("gate and up" if self.gate_first else "up and gate") + (" interleaved" if self.interleaved else "")
        limit = "" if self.limit is None else f", L = {self.limit:g}"
        return f"{act}({gate}) * {up}{limit}, {layout}"


SWIGLU = GluFormula()


@checked
def packed_glu_ref(x: torch.Tensor, gate: GluFormula | None = None) -> torch.Tensor:
    """:func:`packed_glu` in plain torch: the definition of correct, for any floating-point dtype."""
    formula = SWIGLU if gate is None else gate
    _check(x)
    halves = (x[..., ::2], x[..., 1::2]) if formula.interleaved else x.chunk(2, dim=-1)
    g, up = halves if formula.gate_first else halves[::-1]
    if formula.limit is not None:
        g, up = g.clamp(max=formula.limit), up.clamp(-formula.limit, formula.limit)
    if formula.offset:
        up = up + formula.offset
    if formula.activation == "silu":
        return (F.silu(g) if formula.alpha == 1.0 else g * torch.sigmoid(formula.alpha * g)) * up
    return F.gelu(g, approximate="tanh" if formula.activation == "gelu_tanh" else "none") * up


# fmt: off
@triton.jit
def _load_pair(x_ptr, row, stride, col, n_cols, mask, INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Gate and up in float32: [rows, columns] each."""
    if INTERLEAVED:
        both = tl.arange(0, 2)[None, None, :]
        x = tl.load(x_ptr + (row * stride)[:, :, None] + (2 * col)[:, :, None] + both, mask=mask[:, :, None], other=0.0)
        first, second = tl.split(x)
    else:
        first = tl.load(x_ptr + row * stride + col, mask=mask, other=0.0)
        second = tl.load(x_ptr + row * stride + n_cols + col, mask=mask, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if GATE_FIRST:
        gate, up = first, second
    else:
        gate, up = second, first
    return gate, up


@triton.jit
def _store_pair(
    x_ptr, gate, up, row, col, n_cols, mask, INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr,
):
    """As :func:`_load_pair`, into rows without gaps."""
    gate, up = gate.to(x_ptr.dtype.element_ty), up.to(x_ptr.dtype.element_ty)
    if GATE_FIRST:
        first, second = gate, up
    else:
        first, second = up, gate
    if INTERLEAVED:
        both = tl.arange(0, 2)[None, None, :]
        x = tl.join(first, second)
        tl.store(x_ptr + (row * 2 * n_cols)[:, :, None] + (2 * col)[:, :, None] + both, x, mask=mask[:, :, None])
    else:
        tl.store(x_ptr + row * 2 * n_cols + col, first, mask=mask)
        tl.store(x_ptr + row * 2 * n_cols + n_cols + col, second, mask=mask)


@triton.jit
def _factors(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
             EDGE: tl.constexpr, OFFSET: tl.constexpr):
    """The two factors of the product, the first rounded to ``dtype``, and their derivatives by gate and by up, which
    are 0 beyond ``EDGE``."""
    if LIMIT is not None:
        by_up = tl.where(tl.abs(up) > EDGE, 0.0, 1.0)
        inside = gate > EDGE
        gate = tl.where(inside, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    else:
        by_up = 1.0
    if ALPHA == 1.0:
        act, by_gate = _activate(gate, ACTIVATION)
    else:  # alpha * x * sigmoid(alpha * x) has the derivative of silu at alpha * x, times alpha
        act, by_gate = _activate(gate * ALPHA, ACTIVATION)
        act = act / ALPHA
    if LIMIT is not None:
        by_gate = tl.where(inside, 0.0, by_gate)
    return act.to(dtype).to(tl.float32), up + OFFSET, by_gate, by_up


@triton.jit
def _load_biased(
    x_ptr, x_stride, bias_ptr, group_ptr, n_groups, row, col, n_rows, n_cols, mask,
    INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr,
):
    gate, up = _load_pair(x_ptr, row, x_stride, col, n_cols, mask, INTERLEAVED, GATE_FIRST)
    if bias_ptr is not None:
        group = tl.load(group_ptr + row, mask=row < n_rows, other=0).to(tl.int64)
        group = tl.minimum(group, n_groups - 1)  # a row of no group may hold anything
        bias_gate, bias_up = _load_pair(bias_ptr, 2 * group, n_cols, col, n_cols, mask, INTERLEAVED, GATE_FIRST)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        gate = (gate + bias_gate).to(dtype).to(tl.float32)
        up = (up + bias_up).to(dtype).to(tl.float32)
    return gate, up


@triton.jit
def _packed_glu_fwd_kernel(
    x_ptr, x_stride, bias_ptr, group_ptr, n_groups,    # [rows, 2 columns], [groups, 2 columns] or None, [rows] or None
    y_ptr,                                             # [rows, columns]
    n_rows, n_cols,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, EDGE: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        mask = (row < n_rows) & (col < n_cols)
        gate, up = _load_biased(
            x_ptr, x_stride, bias_ptr, group_ptr, n_groups, row, col, n_rows, n_cols, mask, INTERLEAVED, GATE_FIRST
        )
        act, up, _, _ = _factors(gate, up, dtype, ACTIVATION, ALPHA, LIMIT, EDGE, OFFSET)
        tl.store(y_ptr + row * n_cols + col, (act * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _packed_glu_bwd_kernel(
    dy_ptr, x_ptr, x_stride,               # [rows, columns], [rows, 2 columns]
    bias_ptr, group_ptr, n_groups,         # as in the forward
    scale_ptr, dx_ptr, dscale_ptr,         # [rows] or None; [rows, 2 columns], [rows] float32, None: not computed
    n_rows, n_cols,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, EDGE: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr, PRODUCT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """With ``PRODUCT``, dy becomes the forward's y, times ``scale``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    dscale = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        mask = (row < n_rows) & (col < n_cols)
        dy = tl.load(dy_ptr + row * n_cols + col, mask=mask, other=0.0).to(tl.float32)
        gate, up = _load_biased(
            x_ptr, x_stride, bias_ptr, group_ptr, n_groups, row, col, n_rows, n_cols, mask, INTERLEAVED, GATE_FIRST
        )
        act, up, by_gate, by_up = _factors(gate, up, dtype, ACTIVATION, ALPHA, LIMIT, EDGE, OFFSET)
        y = act * up
        if dscale_ptr is not None:
            dscale += dy * y
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + row, mask=row < n_rows, other=0.0).to(tl.float32)
            dy *= scale
            y *= scale
        if dx_ptr is not None:
            _store_pair(dx_ptr, dy * up * by_gate, dy * act * by_up, row, col, n_cols, mask, INTERLEAVED, GATE_FIRST)
        if PRODUCT:
            tl.store(dy_ptr + row * n_cols + col, y.to(dy_ptr.dtype.element_ty), mask=mask)
    if dscale_ptr is not None:
        tl.store(dscale_ptr + row, tl.sum(dscale, axis=1)[:, None], mask=row < n_rows)
# fmt: on


@choice("packed_glu")
def _launch_shape(n_rows: int, n_cols: int) -> dict[str, int]:
    """Whole rows in a program, in blocks of columns that leave few lanes idle: 768 columns are three of 256."""
    widths = [width for width in (1024, 512, 256) if width <= next_power_of_2(n_cols)] or [next_power_of_2(n_cols)]
    block = min(widths, key=lambda width: cdiv(n_cols, width) * width)
    rows, block = tile(n_rows, n_cols, 1024 // block, block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": 4}


@functools.cache
def _edge(limit: float) -> float:
    """The largest number whose gradient passes torch's clamp, in float32."""
    # A checkpoint around the first call counts what is saved, and would not find it in the recomputation.
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.inference_mode(False), torch.enable_grad(), own:
        x = torch.full((), limit, dtype=torch.float32, device="cpu", requires_grad=True)
        passes = bool(torch.autograd.grad(x.clamp(max=limit), x)[0])
    return float(x.detach() if passes else torch.nextafter(x.detach(), torch.zeros(())))


def _constants(gate: GluFormula) -> dict[str, Any]:
    return {
        "ACTIVATION": gate.activation,
        "ALPHA": gate.alpha,
        "LIMIT": gate.limit,
        "EDGE": None if gate.limit is None else _edge(gate.limit),
        "OFFSET": gate.offset,
        "INTERLEAVED": gate.interleaved,
        "GATE_FIRST": gate.gate_first,
    }


class GroupBias(NamedTuple):
    """What is added to rows."""

    bias: torch.Tensor | None = None  # [groups, 2 features], without gaps
    group: torch.Tensor | None = None  # [rows], which of them; a number that is none adds an arbitrary one

    def arguments(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        return (None, None, 0) if self.bias is None else (self.bias, self.group, len(self.bias))


_NO_BIAS = GroupBias()


def product(x: torch.Tensor, gate: GluFormula, bias: GroupBias = _NO_BIAS) -> torch.Tensor:
    """The unit of ``x`` [..., 2 features]."""
    n_cols = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], n_cols))
    n_rows = y.numel() // n_cols
    shape = _launch_shape(n_rows, n_cols)
    grid, tensors = (cdiv(n_rows, shape["ROWS"]),), (*as_rows(x), *bias.arguments(), y)
    launch(_packed_glu_fwd_kernel, grid, x.device, *tensors, n_rows, n_cols, **_constants(gate), **shape)
    return y


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: GluFormula,
    bias: GroupBias = _NO_BIAS,
    scale: torch.Tensor | None = None,
    needs: tuple[bool, bool] = (True, False),
    keep_product: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x`` and (in float32) of ``scale`` [rows], which multiplies the unit, as far as ``needs`` says.

    ``dy`` must be contiguous, and with ``keep_product`` becomes the forward's result times ``scale``."""
    n_cols = x.shape[-1] // 2
    n_rows = dy.numel() // n_cols
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    dscale = dy.new_empty(n_rows, dtype=torch.float32) if needs[1] else None
    shape = _launch_shape(n_rows, n_cols)
    # fmt: off
    launch(
        _packed_glu_bwd_kernel, (cdiv(n_rows, shape["ROWS"]),), x.device,
        dy, *as_rows(x), *bias.arguments(), scale, dx, dscale, n_rows, n_cols,
        **_constants(gate), PRODUCT=keep_product, **shape,
    )
    # fmt: on
    return dx, dscale


class PackedGLUFunction(torch.autograd.Function):
    """Saves the caller's x, nothing else; its gradient is one new tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: GluFormula) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.gate = gate
        return product(x, gate)

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (x,) = ctx.saved_tensors
        return gradients(dy.contiguous(), x, ctx.gate)[0], None


def _check(x: torch.Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; it must be floating point")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [..., 2 features], gate and up in one")


@checked_op
def packed_glu(x: torch.Tensor, gate: GluFormula | None = None) -> torch.Tensor:
    """act(gate) * (up + offset) of the two in ``x``; the formula stands at the top of this file.

    Args:
        x: [..., 2 features], float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        gate: where gate and up lie and what is computed of them; by default silu(first half) * second half.

    Returns:
        A new contiguous tensor [..., features] of x's dtype. In a program of ``torch.compile`` the reference makes it.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype or shape.
    """
    formula = SWIGLU if gate is None else gate
    if not use_triton(x, eager_only=True) or x.numel() == 0:
        return packed_glu_ref(x, formula)
    _check(x)
    return PackedGLUFunction.apply(x, formula)
