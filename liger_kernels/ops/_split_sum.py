"""Float32 sums of products, and their rounding to the result's dtype, also in their own memory."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._row_blocks import by_rows
from liger_kernels.ops.runtime.dispatch import launch, tl, triton
from liger_kernels.ops.runtime.tiling import cdiv, choice, tile


def add_product(out: Tensor, a: Tensor, b: Tensor, keep: float, invariant: bool = False) -> None:
    """float32 ``out`` becomes keep * out + a @ b, summed in float32. With 0, ``out`` is not read. ``invariant``: the
    bits of a row do not depend on the other rows."""

    def product(out: Tensor, a: Tensor) -> None:
        if a.dtype != torch.float32 and a.is_cuda and torch.version.hip is None:
            torch.addmm(out, a, b, beta=keep, out_dtype=torch.float32, out=out)
        else:  # no GEMM here reads 16 bits and writes 32
            torch.addmm(out, a.float(), b.float(), beta=keep, out=out)

    by_rows(invariant, product, out, a)


@triton.jit
def _round_kernel(wide_ptr, scale_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """torch's own product of two dtypes into a third takes four times as long as the memory needs. ``scale_ptr`` may be
    None: 1."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(wide_ptr + i, mask=i < n).to(tl.float32)
    if scale_ptr is not None:
        wide *= tl.load(scale_ptr)
    tl.store(out_ptr + i, wide.to(out_ptr.dtype.element_ty), mask=i < n)


def rounded(wide: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """``out``, which may be ``wide``, becomes it times the 0-d float32 ``scale`` (default 1), in float32 and rounded
    once; both are contiguous."""
    n = wide.numel()
    _, block = tile(1, n, 1, 1024)  # 16 bytes of a 16-bit result a lane
    launch(_round_kernel, (cdiv(n, block),), wide.device, wide, scale, out, n, BLOCK=block, num_warps=4)
    return out


@choice("copied_before_rounding")
def _copied() -> int:
    """The numbers at the front that are copied before they are rounded; every launch doubles what is done."""
    return 2**22


class SplitSum(NamedTuple):
    """A float32 sum [rows, ...] in two tensors, which :meth:`rounded` makes 16 bits wide in the memory of the first.

    So a float32 sum is never held next to the result. In float32 the first tensor has all rows.
    """

    first: Tensor
    second: Tensor

    @classmethod
    def empty(cls, wanted: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> SplitSum:
        """Uninitialised, for a result of ``shape`` and ``dtype``; without elements unless it is ``wanted``."""
        rows = shape[0] if dtype == torch.float32 else -(-shape[0] // 2)
        shapes = (rows, *shape[1:]), (shape[0] - rows, *shape[1:])
        return cls(*[torch.empty(s if wanted else (0,), dtype=torch.float32, device=device) for s in shapes])

    def add(self, a: Tensor, b: Tensor, keep: float, invariant: bool = False) -> None:
        """:func:`add_product` over all rows. A view of ``a`` must not outlive it: ``a`` is a slab of logits, whose
        memory is freed before the sums are rounded."""
        for part, rows in zip(self, a.split([len(part) for part in self]), strict=True):
            if len(part):
                add_product(part, rows, b, keep, invariant)

    def rounded(self, scale: Tensor | None, dtype: torch.dtype, overwrite: bool) -> Tensor:
        """All rows times the 0-d float32 ``scale`` (default 1), in ``dtype``: with ``overwrite`` in the memory of the
        first tensor, else in new memory."""
        first, second = self
        shape = first.shape[0] + second.shape[0], *first.shape[1:]
        if not overwrite:
            out = torch.empty(shape, dtype=dtype, device=first.device)
        else:
            out = first if dtype == torch.float32 else first.view(dtype).view(-1)[: math.prod(shape)].view(shape)
        flat, front = first.view(-1), out.view(-1)
        n = first.numel()
        if not overwrite or dtype == torch.float32:
            rounded(flat, scale, front[:n])
        else:
            ends = [0]
            while ends[-1] < n:
                ends.append(min(2 * ends[-1] or _copied(), n))
            for start, stop in itertools.pairwise(ends):  # number i goes where number i / 2 was: it must have been read
                rounded(flat[start:stop] if start else flat[:stop].clone(), scale, front[start:stop])
        rounded(second.view(-1), scale, front[n:])
        return out
