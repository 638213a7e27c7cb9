"""Products whose rows have the same bits in any batch: blocks of a fixed number of rows, the last one padded.

A GEMM library chooses its kernel, and with it the order in which it sums, by the number of rows: a row alone and the
same row among others may differ in their last bits. Here every product has the same number of rows, and so the same
kernel and the same order. What a row is multiplied by does not depend on where it stands in its block, because each
tile of a kernel sums in one order. (A kernel that splits the sum of some tiles only, "stream-K", would break that;
``tests/test_ops_determinism.py`` asks the GPU.)

The block has 1024 rows. A block reads the whole matrix once, and makes 1024 operations of each byte of it in 16 bits,
where an H200 makes about 150 in the time that its memory takes: reading again costs little. Fewer rows would not hide
that, and would leave multiprocessors without a tile where the product has few columns. More rows would make one row
dearer, which is a whole block. Smaller blocks for fewer rows cannot be had: another size is another kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops.runtime.dispatch import as_autocast, backward_once
from liger_kernels.ops.runtime.tiling import choice


@choice("rows_of_block")
def rows_of_block() -> int:
    """The number of rows of every product that is to be the same in any batch."""
    return 1024


def in_blocks(product: Callable[..., Any], out: Tensor, *operands: Tensor) -> None:
    """``product(out, *operands)`` writes the rows of ``out`` [rows, columns] from those of the ``operands``, and may
    read what is there. It is called for every block; what is behind the last row is zero, and goes nowhere."""
    size = rows_of_block()
    whole = len(out) // size * size
    for start in range(0, whole, size):
        product(out[start : start + size], *[t[start : start + size] for t in operands])
    if whole < len(out):
        filled = [_padded(t[whole:], size) for t in operands]
        last = _padded(out[whole:], size)
        product(last, *filled)
        out[whole:] = last[: len(out) - whole]


def _padded(rows: Tensor, size: int) -> Tensor:
    """``rows`` and zeros behind them, as far apart in memory: that, too, decides which kernel runs."""
    stride = max(rows.stride(0), rows.shape[1])
    padded = rows.new_zeros((size, stride))[:, : rows.shape[1]]
    padded[: len(rows)] = rows
    return padded


def by_rows(invariant: bool, product: Callable[..., Any], out: Tensor, *operands: Tensor) -> None:
    """``product(out, *operands)``, all at once or, where that is to be ``invariant``, :func:`in_blocks`."""
    if invariant:
        in_blocks(product, out, *operands)
    else:
        product(out, *operands)


def multiply_rows(out: Tensor, a: Tensor, b: Tensor, invariant: bool) -> None:
    """``out`` becomes a @ b; where it is to be ``invariant``, :func:`in_blocks`."""
    by_rows(invariant, lambda out, a: torch.mm(a, b, out=out), out, a)


class InvariantLinearFunction(torch.autograd.Function):
    """``F.linear`` of rows [tokens, in features] in blocks, forward and for the gradient of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty((len(x), len(weight)))
        if bias is None:
            in_blocks(lambda out, x: torch.mm(x, weight.t(), out=out), out, x)
        else:
            in_blocks(lambda out, x: torch.addmm(bias, x, weight.t(), out=out), out, x)
        return out

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy = as_canonical(dy)
        dx = torch.empty_like(x) if needs_x else None
        if dx is not None:
            multiply_rows(dx, dy, weight, invariant=True)
        return dx, torch.mm(dy.t(), x) if needs_weight else None, dy.sum(0) if needs_bias else None


def as_canonical(rows: Tensor) -> Tensor:
    """``rows`` [rows, columns], one behind the other in memory, also where there is one row alone."""
    return rows if rows.stride() == (rows.shape[1], 1) else rows.clone(memory_format=torch.contiguous_format)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)`` [..., out features], of which each row, and its gradient, has the same bits in any
    batch. Under autocast, x, weight and bias are cast as ``F.linear`` casts them. The gradient is not differentiable.

    Args:
        x: [..., in features], of any float dtype.
        weight: [out features, in features], of the same dtype.
        bias: [out features], or None.
    """
    x, weight, bias = (as_autocast(t, x.device) for t in (x, weight, bias))
    rows = x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():
        parts = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % rows_of_block())).split(rows_of_block())
        y = torch.cat([torch.nn.functional.linear(part, weight, bias) for part in parts])[: len(rows)]
    else:
        y = InvariantLinearFunction.apply(as_canonical(rows), weight, bias)
    return y.view(*x.shape[:-1], len(weight))
