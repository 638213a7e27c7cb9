"""Makes a dense matrix of a weight that bitsandbytes keeps in NF4, in one launch.

Two numbers share a byte, the first in the upper half. A number is code[its four bits] times the scale of its block.
With double quantisation a scale is code[its eight bits] times the scale of a block of scales, plus an offset (Dettmers
et al. 2023, QLoRA, section 3). The results are bit for bit those of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops.runtime.dispatch import launch, tl, triton, use_triton
from liger_kernels.ops.runtime.tiling import cdiv


class NestedScales(NamedTuple):
    """The quantisation of the blocks' scales to eight bits.

    Attributes:
        code: [256], float32.
        scales: [blocks of scales], float32.
        per_block: the number of scales in a block.
        offset: 0-d float32, added to each scale.
    """

    code: Tensor
    scales: Tensor
    per_block: int
    offset: Tensor


class PackedNf4(NamedTuple):
    """The quantisation of a weight to four bits.

    Attributes:
        code: [16], float32.
        scales: [blocks], float32, or uint8 if ``nested`` is given.
        per_block: the number of numbers in a block, a power of two from 32 on.
        shape: of the dense matrix.
        dtype: of the dense matrix.
        nested: the quantisation of the scales; None if they are float32.
    """

    code: Tensor
    scales: Tensor
    per_block: int
    shape: Sequence[int]
    dtype: torch.dtype
    nested: NestedScales | None


# fmt: off
@triton.jit
def _nf4_kernel(
    packed_ptr, code_ptr, scales_ptr,                              # [bytes], [16], [blocks]
    nested_code_ptr, nested_scales_ptr, offset_ptr, nested_block,  # [256], [blocks of scales], 0-d; or None
    y_ptr, n_bytes,
    BYTES: tl.constexpr, ROWS: tl.constexpr,                       # of a block; blocks of a program
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    known = block * BYTES < n_bytes
    scale = tl.load(scales_ptr + block, mask=known, other=0)
    if nested_code_ptr is not None:
        outer = tl.load(nested_scales_ptr + block // nested_block, mask=known, other=0.0)
        scale = tl.load(nested_code_ptr + scale.to(tl.int32)) * outer + tl.load(offset_ptr)
    packed = tl.load(packed_ptr + at, mask=at < n_bytes, other=0).to(tl.int32)
    first = tl.load(code_ptr + (packed >> 4)) * scale[:, None]
    second = tl.load(code_ptr + (packed & 15)) * scale[:, None]
    y = tl.reshape(tl.join(first, second), (ROWS, 2 * BYTES))
    to = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=to < 2 * n_bytes)
# fmt: on

_BYTES_OF_PROGRAM = 4096  # 32 a lane of 4 warps, as two loads of 16


def dense_nf4(packed: Tensor, state: PackedNf4) -> Tensor:
    """The matrix, of ``state.shape`` and ``state.dtype``, of the numbers in ``packed``, uint8 [half as many, 1]."""
    if not use_triton(state.code):
        return dense_nf4_ref(packed, state)
    y = torch.empty(state.shape, dtype=state.dtype, device=state.code.device)
    n_bytes, nested = y.numel() // 2, state.nested
    of_block = state.per_block // 2
    blocks = max(1, _BYTES_OF_PROGRAM // of_block)
    inner = (None, None, None, 1) if nested is None else (nested.code, nested.scales, nested.offset, nested.per_block)
    tensors, grid = (packed, state.code, state.scales, *inner, y), (cdiv(n_bytes, blocks * of_block),)
    options = {"BYTES": of_block, "ROWS": blocks, "num_warps": 4, "enable_fp_fusion": False}
    with torch._C.DisableTorchFunctionSubclass():  # of bitsandbytes' class of parameters
        launch(_nf4_kernel, grid, y.device, *tensors, n_bytes, **options)
    return y


def dense_nf4_ref(packed: Tensor, state: PackedNf4) -> Tensor:
    """Reference of :func:`dense_nf4`."""
    scales, nested = state.scales, state.nested
    if nested is not None:
        outer = nested.scales.repeat_interleave(nested.per_block)[: len(scales)]
        scales = nested.code[scales.long()] * outer + nested.offset
    flat = packed.reshape(-1)
    numbers = state.code[torch.stack([flat >> 4, flat & 15], 1).reshape(-1).long()]
    numbers = numbers * scales.repeat_interleave(state.per_block)[: len(numbers)]
    return numbers.to(state.dtype).reshape(state.shape)
