"""SiLU in Triton, forward and backward. On a CPU it needs Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_fwd_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, 0.0).to(tl.float32)
    tl.store(y_ptr + i, (x * tl.sigmoid(x)).to(y_ptr.dtype.element_ty), i < n)


@triton.jit
def _silu_bwd_kernel(x_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + i, i < n, 0.0).to(tl.float32)
    s = tl.sigmoid(x)
    tl.store(dx_ptr + i, (dy * s * (1 + x * (1 - s))).to(dx_ptr.dtype.element_ty), i < n)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        _silu_fwd_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _silu_bwd_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, dy.contiguous(), dx, x.numel(), BLOCK)
        return dx


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` of a tensor of any shape, in its dtype."""
    return _SiLU.apply(x)


def silu_ref(x: Tensor) -> Tensor:
    """The same in plain torch."""
    return torch.nn.functional.silu(x)
