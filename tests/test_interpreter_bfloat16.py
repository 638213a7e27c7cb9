"""Kernels that compute in bfloat16, in Triton's interpreter: the numbers of torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from convergence.arms.interpreter import prepare
from convergence.op.check import judge_op

if torch.cuda.is_available():
    pytest.skip("Triton's interpreter runs kernels on a CPU; this machine has a GPU", allow_module_level=True)

ONLY = {"without": ("compile", "launches"), "examples": 1, "rows": (1, 5), "columns": (1, 40)}


@triton.jit
def _twice(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def _many(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1.5)
    y = tl.where(x > 0, x * 0.3 + x, x * x - x)
    y = tl.fma(y, x, y) + (i - 2).to(x.dtype)
    tl.store(y_ptr + i, -y, mask=i < n)


def called(kernel: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            kernel[(1,)](x, y, x.numel(), triton.next_power_of_2(x.numel()))
        return y

    return call


def inputs(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(rows, columns).to(device, dtype)]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_kernel_that_computes_in_bfloat16_is_equal() -> None:
    report = judge_op(called(_twice), double, inputs, dtypes="bfloat16", **ONLY)
    assert report.failed() == [], str(report)


def test_the_results_are_those_of_torch() -> None:
    x = torch.randn(4, 250, generator=torch.Generator().manual_seed(0)).bfloat16()
    prepare()
    y = torch.where(x > 0, x * torch.tensor(0.3).bfloat16() + x, x * x - x)
    offsets = (torch.arange(1000) - 2).view(4, 250).bfloat16()
    y = (y.float() * x.float() + y.float()).bfloat16() + offsets
    assert torch.equal(called(_many)(x), -y)
