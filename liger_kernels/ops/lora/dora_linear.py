"""A linear layer whose weight has a low-rank adapter and rows of learned length (DoRA; Liu, arXiv:2402.09353).

    c = m / n        y = c * (x W^T + s z B^T) + b        z = x A^T

m is the magnitude and b the layer's bias. n is the length of the rows of W + s B A; dora_norm.py computes n, which
counts as a constant. The layer's output is y0 = x W^T + b. So the op is :func:`lora_linear` with c B in place of B, and
a different last step. With the upstream gradient dY, and with dB' = s dY^T z, the gradient of c B:

    g = s dY (c B)        dB = c * dB'        dA = g^T x        dc = sum of the rows of dY * (y0 - b) + sum of dB' * B

where the last sum is over the ranks. g A is added to the base's gradient of x, and the base's output gets c * dY. The
last step saves y0, unless the magnitude is frozen. So activation checkpointing runs the base again.
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
from liger_kernels.ops.lora.products import PROGRAMS, dot, ranks_of_program
from liger_kernels.ops.runtime.arguments import checked, checked_op
from liger_kernels.ops.runtime.dispatch import as_values, backward_once, in_dtype, launch, tl, triton
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
def _dora_linear_add_kernel(
    y0_ptr, y0_stride, z_ptr, z_stride,                     # [rows, columns], [rows, ranks] float32
    w_ptr, w_col_stride, w_rank_stride,                     # [columns, ranks]
    c_ptr, bias_ptr,                                        # [columns] float32, [columns] or None
    y_ptr,                                                  # [rows, columns]
    n_rows, n_cols, n_ranks, col_blocks, scale,
    EXACT: tl.constexpr, RANKS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """y = c * (y0 - bias) + bias + scale * z w^T."""
    program = tl.program_id(0)
    row = (program // col_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (program % col_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < n_rows) & (col < n_cols)
    y0 = tl.load(y0_ptr + row * y0_stride + col, mask=mask, other=0.0)
    c = tl.load(c_ptr + col, mask=col < n_cols, other=0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.static_range(0, RANKS, PART):
        rank = first + tl.arange(0, PART)
        z = tl.load(z_ptr + row * z_stride + rank[None, :], mask=(row < n_rows) & (rank[None, :] < n_ranks), other=0.0)
        at = w_ptr + rank[:, None].to(tl.int64) * w_rank_stride + col.to(tl.int64) * w_col_stride
        w = tl.load(at, mask=(rank[:, None] < n_ranks) & (col < n_cols), other=0.0)
        total = dot(z, w, total, EXACT)
    total *= tl.full((), scale, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        total += c * (y0.to(tl.float32) - bias) + bias
    else:
        total += c * y0.to(tl.float32)
    tl.store(y_ptr + row * n_cols + col, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dora_linear_bwd_kernel(
    dy_ptr, dy_stride, y0_ptr, y0_stride,                   # [rows, columns], the second if there are parts
    c_ptr, bias_ptr,                                        # [columns] float32, [columns] or None
    dy0_ptr, parts_ptr,                                     # [rows, columns] or None, [parts, columns] float32 or None
    n_rows, n_cols, rows_of_part,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """dy0 = c * dy, and the sum over the rows of each part of dy * (y0 - bias)."""
    part = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    c = tl.load(c_ptr + col, mask=col < n_cols, other=0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first = part.to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, n_rows)
    for start in range(0, rows_of_part, ROWS):
        row = first + start + tl.arange(0, ROWS)[:, None]
        mask = (row < end) & (col < n_cols)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        if dy0_ptr is not None:
            tl.store(dy0_ptr + row * n_cols + col, (c * dy).to(dy0_ptr.dtype.element_ty), mask=mask)
        if parts_ptr is not None:
            y0 = tl.load(y0_ptr + row * y0_stride + col, mask=mask, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                y0 -= tl.load(bias_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
            total += dy * y0
    if parts_ptr is not None:
        sums = tl.sum(total, axis=0)[None, :]
        tl.store(parts_ptr + part.to(tl.int64) * n_cols + col, sums, mask=col < n_cols)
# fmt: on


@choice("dora_add")
def _add_shape(n_rows: int, n_cols: int, ranks: int, is_narrow: bool) -> dict[str, int]:
    """Launch choices. A sum of numbers with 24 bits takes twice the shared memory."""
    rows, block = tile(n_rows, n_cols, 64, 64 if is_narrow else 32)
    return {"PART": min(ranks, 32 if is_narrow else 16), "ROWS": rows, "BLOCK": block, "num_warps": 4}


def _scaled(y0: Tensor, z: Tensor, w: Tensor, c: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """c * (y0 - bias) + bias + scale * z w^T, a new tensor of y0's shape and dtype."""
    y = torch.empty(y0.shape, dtype=y0.dtype, device=y0.device)
    (n_cols, n_ranks), ranks = w.shape, ranks_of_program(w.shape[1])
    n_rows = len(z)
    exact = y0.dtype is not torch.bfloat16
    options = _add_shape(n_rows, n_cols, ranks, not exact)
    col_blocks = cdiv(n_cols, options["BLOCK"])
    grid = (cdiv(n_rows, options["ROWS"]) * col_blocks,)
    tensors = (*as_rows(y0), z, z.stride(0), w, *w.stride(), c, bias, y)
    sizes = n_rows, n_cols, n_ranks, col_blocks, float(scale)
    launch(_dora_linear_add_kernel, grid, y0.device, *tensors, *sizes, EXACT=exact, RANKS=ranks, **options)
    return y


class ScaledFunction(torch.autograd.Function):
    """c = m / n and c B, both float32."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, b: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        c = m.float() / norm
        ctx.save_for_backward(b, norm, c)
        ctx.dtype = m.dtype
        return c, c[:, None] * b

    @staticmethod
    @backward_once
    def backward(ctx: Any, dc: Tensor, dscaled: Tensor) -> tuple[Tensor | None, ...]:
        b, norm, c = ctx.saved_tensors
        needs_m, needs_b, _ = ctx.needs_input_grad
        dm = in_dtype((dc + (dscaled * b).sum(1)) / norm, ctx.dtype) if needs_m else None
        return dm, in_dtype(c[:, None] * dscaled, b.dtype) if needs_b else None, None


class DoraFunction(torch.autograd.Function):
    """Returns y from ``compute``. Its inputs are the base's output ``y0`` and an anchor of the adapter's result.

    Saves y0 if c needs a gradient. The anchor's gradient is dY.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], Tensor], y0: Tensor, anchor: Tensor, c: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(y0 if ctx.needs_input_grad[3] else None, c, bias)
        return compute()

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, needs_y0, needs_anchor, _, needs_bias = ctx.needs_input_grad
        y0, c, bias = ctx.saved_tensors
        dy0 = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if needs_y0 else None
        dc = _backward(dy, y0, c, bias, dy0)
        dbias = None
        if needs_bias:
            dbias = ((1 - c) * dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)).to(bias.dtype)
        return None, dy0, dy if needs_anchor else None, dc, dbias


@choice("dora_backward")
def _backward_shape(n_rows: int, n_cols: int) -> tuple[int, dict[str, int]]:
    """The number of parts of the rows, and launch choices. 16384 x 14336 on an H200: 0.35 ms, with 64 columns a program
    0.51."""
    rows, block = tile(n_rows, n_cols, 32, 128)
    parts = max(1, min(4 * PROGRAMS // cdiv(n_cols, block), cdiv(n_rows, 2 * rows)))
    return parts, {"ROWS": rows, "BLOCK": block, "num_warps": 4, "num_stages": 2}


def _backward(dy: Tensor, y0: Tensor | None, c: Tensor, bias: Tensor | None, dy0: Tensor | None) -> Tensor | None:
    """Write c * dy to ``dy0``, if it is given. Return the sum of the rows of dy * (y0 - bias), if y0 is given."""
    if dy0 is None and y0 is None:
        return None
    n_cols = dy.shape[-1]
    n_rows = dy.numel() // max(1, n_cols)
    n_parts, options = _backward_shape(n_rows, n_cols)
    rows_of_part = cdiv(cdiv(n_rows, n_parts), options["ROWS"]) * options["ROWS"]
    parts = None if y0 is None else torch.empty((n_parts, n_cols), dtype=torch.float32, device=dy.device)
    tensors = (*as_rows(dy), *((None, 0) if y0 is None else as_rows(y0)), c, bias, dy0, parts)
    grid, sizes = (cdiv(n_cols, options["BLOCK"]), n_parts), (n_rows, n_cols, rows_of_part)
    launch(_dora_linear_bwd_kernel, grid, dy.device, *tensors, *sizes, **options)
    return None if parts is None else parts.sum(0)


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
    values: tuple[Any, ...] = as_values(x, adapter.a, adapter.b, magnitude, bias)
    x, a, b, m, bias = values
    c, scaled = ScaledFunction.apply(m, b, norm.detach())
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
    compute = partial(_scaled, value.detach(), z, scaled.detach(), c.detach(), constant, adapter.scale)
    y: Tensor = DoraFunction.apply(compute, value, anchor, c, bias)
    return y
