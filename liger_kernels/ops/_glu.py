"""Gated linear units: an activation of one tensor times another, in one pass (Shazeer, arXiv:2002.05202).

    swiglu(gate, up) = silu(gate) * up        silu(x) = x * sigmoid(x)
    geglu(gate, up)  = gelu(gate) * up        gelu(x) = x * Phi(x), or with approximate="tanh"
                                              x * (1 + tanh(u)) / 2 = x * sigmoid(2 u),
                                              u = sqrt(2 / pi) * (x + 0.044715 x^3)

The activation is rounded to gate's dtype before it is multiplied, as PyTorch's two separate operations do. The backward
recomputes it, rounding included, from the two inputs, which are all that is saved:

    dL/dup = dL/dy * act(gate)        dL/dgate = dL/dy * up * act'(gate)

swiglu_linear and geglu_linear are the unit and the linear layer behind it, y @ weight^T + bias. A linear layer keeps
its input y for the gradient of its weight; here the backward's kernel, which computes the activation anyway, writes y
once more, to the same bits, and between forward and backward it is not held. Under checkpointing, inputs are saved
before the linear layer is computed, which is not computed again (runtime/anchor.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F

from liger_kernels.ops.runtime.anchor import Computed, anchor, saves_first
from liger_kernels.ops.runtime.arguments import checked, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import (
    INTERPRET,
    as_autocast,
    autocast_dtype,
    backward_once,
    in_dtype,
    launch,
    libdevice,
    tl,
    triton,
    use_triton,
)
from liger_kernels.ops.runtime.kept import keeps_graph
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, next_power_of_2, tile

Approximate = Annotated[str, one_of(("tanh", "none"))]


@checked
def swiglu_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """:func:`swiglu` in plain torch: the definition of correct, for any floating-point dtype."""
    _check(gate, up)
    return F.silu(gate) * up


@checked
def geglu_ref(gate: torch.Tensor, up: torch.Tensor, *, approximate: Approximate = "tanh") -> torch.Tensor:
    """:func:`geglu` in plain torch: the definition of correct, for any floating-point dtype."""
    _check(gate, up)
    return F.gelu(gate, approximate=approximate) * up


@checked
def swiglu_linear_ref(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`swiglu_linear` in plain torch, which keeps the product."""
    _check_linear(gate, up, weight, bias)
    return F.linear(swiglu_ref(gate, up), weight, bias)


@checked
def geglu_linear_ref(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    approximate: Approximate = "tanh",
) -> torch.Tensor:
    """:func:`geglu_linear` in plain torch, which keeps the product."""
    _check_linear(gate, up, weight, bias)
    return F.linear(geglu_ref(gate, up, approximate=approximate), weight, bias)


# By the kernels' activations.
_REFERENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": swiglu_ref,
    "gelu_tanh": geglu_ref,
    "gelu": partial(geglu_ref, approximate="none"),
}
ACTIVATIONS = tuple(_REFERENCES)

# To the right of a tensor: the interpreter does not multiply a constant by one.
_COMPILED = tl.constexpr(not INTERPRET)
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBE = tl.constexpr(0.044715)
_SQRT_1_OVER_2 = tl.constexpr(0.7071067811865476)
_SQRT_1_OVER_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _sigmoid(x):
    """sigmoid(x) and its derivative, s * (1 - s), in a form that neither overflows nor cancels where s is near 1."""
    if _COMPILED:
        # Both without the scaling of results below 2^-126, which takes more instructions than the rest: an e that
        # small is 0 here, and 1 + e is between 1 and 2.
        e = libdevice.exp2(tl.abs(x) * _MINUS_LOG2_E)
        near_one = libdevice.fast_dividef(tl.full((), 1.0, tl.float32), 1.0 + e)
    else:
        e = tl.exp(-tl.abs(x))
        near_one = 1.0 / (1.0 + e)
    return tl.where(x >= 0.0, near_one, e * near_one), e * near_one * near_one


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """act(x) and act'(x) in float32; what the caller does not use is not computed."""
    if ACTIVATION == "silu":
        s, ds = _sigmoid(x)
        y = x * s
        slope = s + x * ds
    elif ACTIVATION == "gelu_tanh":
        # Beyond 12 the sigmoid is 0 or 1 to the last bit of float32; the cube of what lies far beyond would overflow,
        # and infinity times that 0 is NaN.
        t = tl.minimum(tl.maximum(x, -12.0), 12.0)
        cube = t * t * _CUBE
        s, ds = _sigmoid(t * _SQRT_8_OVER_PI * (1.0 + cube))
        y = x * s
        slope = s + t * ds * _SQRT_8_OVER_PI * (1.0 + 3.0 * cube)
    else:
        s = 0.5 + 0.5 * tl.math.erf(x * _SQRT_1_OVER_2)
        y = x * s
        slope = s + x * _SQRT_1_OVER_2PI * tl.exp(-0.5 * x * x)
    return y, slope


# fmt: off
@triton.jit
def _glu_fwd_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, y_ptr,    # [rows, columns]
    n_rows, n_cols, row_blocks,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (program % row_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < n_rows) & (col < n_cols)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    y, _ = _activate(gate, ACTIVATION)
    y = y.to(gate_ptr.dtype.element_ty).to(tl.float32) * up
    tl.store(y_ptr + row * n_cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _glu_bwd_kernel(
    dy_ptr, dy_stride, gate_ptr, gate_stride, up_ptr, up_stride,    # [rows, columns]
    dgate_ptr, dup_ptr,                                             # [rows, columns] or None
    n_rows, n_cols, row_blocks,
    ACTIVATION: tl.constexpr, PRODUCT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """``dgate_ptr`` or ``dup_ptr`` may be None: not computed. Either may be the memory of gate or of up. With
    ``PRODUCT``, dy becomes the forward's y."""
    program = tl.program_id(0)
    row = (program // row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (program % row_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < n_rows) & (col < n_cols)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    act, slope = _activate(gate, ACTIVATION)
    act = act.to(gate_ptr.dtype.element_ty).to(tl.float32)
    if PRODUCT or dgate_ptr is not None:  # before anything is stored, which may be over it
        up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    if dup_ptr is not None:
        dup = dy * act
        tl.store(dup_ptr + row * n_cols + col, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if dgate_ptr is not None:
        dgate = dy * up * slope
        tl.store(dgate_ptr + row * n_cols + col, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if PRODUCT:
        tl.store(dy_ptr + row * dy_stride + col, (act * up).to(dy_ptr.dtype.element_ty), mask=mask)
# fmt: on


def _as_2d(*tensors: torch.Tensor) -> tuple[int, int, list[tuple[torch.Tensor, int]]]:
    """Numbers of rows and columns, and each tensor as rows with the stride between them: one long row each where all
    are contiguous."""
    numel, n_cols = tensors[0].numel(), tensors[0].shape[-1]
    contiguous = [t.is_contiguous() for t in tensors]  # Dynamo of torch 2.15 fails on a generator here
    if all(contiguous):
        return 1, numel, [(t, numel) for t in tensors]
    return numel // n_cols, n_cols, [as_rows(t) for t in tensors]


@choice("glu")
def _launch_shape(n_rows: int, n_cols: int) -> tuple[tuple[int], int, dict[str, int]]:
    """Grid, programs side by side in a row, and launch choices: 8 elements a lane, 16 bytes of a 16-bit dtype."""
    # One long row is as short as the tensor is small; a compiled program would be one of that size alone if the block
    # depended on it.
    block = 1024 if n_rows == 1 or n_cols >= 1024 else next_power_of_2(n_cols)
    rows, block = tile(n_rows, n_cols, 1024 // block, block)
    row_blocks = cdiv(n_cols, block)
    return (cdiv(n_rows, rows) * row_blocks,), row_blocks, {"ROWS": rows, "BLOCK": block, "num_warps": 4}


def _product(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    n_rows, n_cols, (gate_rows, up_rows) = _as_2d(gate, up)
    grid, row_blocks, shape = _launch_shape(n_rows, n_cols)
    sizes = n_rows, n_cols, row_blocks
    launch(_glu_fwd_kernel, grid, gate.device, *gate_rows, *up_rows, y, *sizes, ACTIVATION=activation, **shape)
    return y


def _gradient_of(t: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Memory for the gradient of ``t``."""
    return t.detach() if in_place and t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device)


def unit_gradients(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    needs: tuple[bool, bool],
    product: bool,
    in_place: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of gate and up as far as ``needs`` says. With ``product``, ``dy`` becomes the forward's y; it must
    then be contiguous. With ``in_place`` gate and up, where they are contiguous, become their gradients."""
    dgate = _gradient_of(gate, in_place) if needs[0] else None
    dup = _gradient_of(up, in_place) if needs[1] else None
    n_rows, n_cols, (dy_rows, gate_rows, up_rows) = _as_2d(dy, gate, up)
    grid, row_blocks, shape = _launch_shape(n_rows, n_cols)
    tensors, sizes = (*dy_rows, *gate_rows, *up_rows, dgate, dup), (n_rows, n_cols, row_blocks)
    launch(_glu_bwd_kernel, grid, gate.device, *tensors, *sizes, ACTIVATION=activation, PRODUCT=product, **shape)
    return dgate, dup


class GLUFunction(torch.autograd.Function):
    """Saves the caller's gate and up, nothing else; the gradients are new tensors."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _product(gate, up, activation)

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = unit_gradients(dy, gate, up, ctx.activation, ctx.needs_input_grad[:2], product=False)
        return dgate, dup, None


class GLULinearFunction(torch.autograd.Function):
    """Saves the caller's gate, up and weight, and not the product, which lies between them, nor what autocast makes of
    weight. With ``first`` it returns an anchor.

    With ``owned`` nobody else reads gate and up. Unless the graph is kept for another backward, their gradients are
    written over them, so that three tensors of their size exist there, and not five.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        dtype: torch.dtype,
        first: bool,
        owned: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation, ctx.owned = activation, owned
        if first:
            return anchor((*gate.shape[:-1], weight.shape[0]), dtype, gate.device)
        return _glu_linear(gate, up, weight, bias, activation, dtype)

    @staticmethod
    @backward_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows, dtype = dout.reshape(-1, dout.shape[-1]), dout.dtype
        dgate = dup = dweight = None
        if needs_gate or needs_up:
            # The product's gradient; it becomes the product where that is needed.
            y = torch.mm(rows, in_dtype(weight, dtype)).view(gate.shape)
            in_place, needs = ctx.owned and not keeps_graph(), (needs_gate, needs_up)
            dgate, dup = unit_gradients(y, gate, up, ctx.activation, needs, product=needs_weight, in_place=in_place)
        elif needs_weight:
            y = in_dtype(_product(gate, up, ctx.activation), dtype)
        if needs_weight:
            dweight = in_dtype(torch.mm(rows.t(), y.view(-1, y.shape[-1])), weight.dtype)
        return dgate, dup, dweight, rows.sum(0) if needs_bias else None, *[None] * 4


def _glu_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    return F.linear(_product(gate, up, activation), in_dtype(weight, dtype), bias)


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    dtype = gate.dtype
    if not dtype.is_floating_point or (up.dtype is not dtype and not up.is_floating_point()):
        raise TypeError(f"gate is {dtype} and up {up.dtype}; both must be floating point")
    shape = gate.shape
    if not shape or shape != up.shape:
        raise ValueError(
            f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; both must be [..., features] of one shape"
        )
    if gate.device != up.device:
        raise ValueError(f"gate is on {gate.device}, up on {up.device}; move one to the other")


def _check_linear(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    _check(gate, up)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}; it must be floating point")
        if t.device != gate.device:
            raise ValueError(f"{name} is on {t.device}, gate on {gate.device}; move it there")
    if weight.dim() != 2 or weight.shape[1] != gate.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be [out features, {gate.shape[-1]}], as gate and up have "
            "features"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [{weight.shape[0]}], one per row of weight")


def _runs_kernel(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return use_triton(gate) and up.dtype != torch.float64 and gate.numel() > 0


def _apply(function: Any, gate: torch.Tensor, up: torch.Tensor, *others: Any) -> torch.Tensor:
    """``function`` over gate and up; in a compiled program over their rows, [tokens, features].

    Where features are no multiple of 16 bytes, Inductor pads them in the product before, and writes down the strides of
    a padded tensor that is kept as numbers, those of the first shape. Rows have none that depends on a shape."""
    if not torch.compiler.is_compiling():
        return function.apply(gate, up, *others)
    rows = function.apply(gate.flatten(0, -2), up.flatten(0, -2), *others)
    return rows.view(*gate.shape[:-1], rows.shape[-1])


def _gelu(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


@checked_op
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; the formula stands at the top of this file.

    Args:
        gate, up: [..., features] of one shape, float16, bfloat16, float32, or float64 (which runs the reference). The
            halves of one tensor, ``x.chunk(2, dim=-1)``, are read where they lie. Never overwritten.

    Returns:
        A new contiguous tensor of that shape, in the dtype that gate and up promote to.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape or device.
    """
    if not _runs_kernel(gate, up):
        return swiglu_ref(gate, up)
    _check(gate, up)
    return _apply(GLUFunction, gate, up, "silu")


@checked_op
def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: Approximate = "tanh") -> torch.Tensor:
    """gelu(gate) * up; the formula stands at the top of this file.

    Args:
        gate, up: as for :func:`swiglu`.
        approximate: "tanh" for the tanh form of gelu, "none" for the exact one.

    Returns:
        A new contiguous tensor of that shape, in the dtype that gate and up promote to.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape, device or name.
    """
    if not _runs_kernel(gate, up):
        return geglu_ref(gate, up, approximate=approximate)
    _check(gate, up)
    return _apply(GLUFunction, gate, up, _gelu(approximate))


def _linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    owned: bool = False,
) -> torch.Tensor:
    _check_linear(gate, up, weight, bias)
    if not _runs_kernel(gate, up):
        return F.linear(_REFERENCES[activation](gate, up), weight, bias)
    autocast, bias = autocast_dtype(gate.device), as_autocast(bias, gate.device)
    dtype = autocast or torch.promote_types(gate.dtype, up.dtype)
    of_weight = weight.dtype if autocast is None or weight.dtype == torch.float64 else dtype
    if of_weight != dtype or (bias is not None and bias.dtype != dtype):
        given = f"{of_weight} on {weight.device}" + ("" if bias is None else f", {bias.dtype} on {bias.device}")
        raise ValueError(f"weight (and bias) are {given}; the product is {dtype} on {gate.device}: cast or move them")
    first = saves_first()
    out = _apply(GLULinearFunction, gate, up, weight, bias, activation, dtype, first, owned)
    return Computed.apply(partial(_glu_linear, gate, up, weight, bias, activation, dtype), out) if first else out


def glu_linear_of_owned(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """:func:`swiglu_linear` or :func:`geglu_linear` of a gate and up that nobody else has: the backward may overwrite
    them."""
    return _linear(gate, up, weight, bias, activation, owned=True)


@checked_op
def swiglu_linear(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear(swiglu(gate, up), weight, bias)`` that does not keep the product for its backward.

    Under autocast, product, weight and bias are cast as ``F.linear`` casts them.

    Args:
        gate, up: as for :func:`swiglu`.
        weight: [out features, features], of the dtype that gate and up promote to.
        bias: [out features] of that dtype, or None.

    Returns:
        A new tensor [..., out features] of that dtype.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape or device.
    """
    return _linear(gate, up, weight, bias, "silu")


@checked_op
def geglu_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    approximate: Approximate = "tanh",
) -> torch.Tensor:
    """``F.linear(geglu(gate, up), weight, bias)`` that does not keep the product for its backward.

    Args:
        gate, up, weight, bias: as for :func:`swiglu_linear`.
        approximate: as for :func:`geglu`.

    Returns:
        A new tensor [..., out features] of weight's dtype.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape, device or name.
    """
    return _linear(gate, up, weight, bias, _gelu(approximate))
