"""Makes dense matrices of weights that bitsandbytes keeps in NF4, up to three in one launch.

Two numbers share a byte, the first in the upper half. A number is code[its four bits] times the scale of its block.
With double quantisation a scale is code[its eight bits] times the scale of a block of scales, plus an offset (Dettmers
et al. 2023, QLoRA, section 3). The results are bit for bit those of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops.lora.products import one_of, up_to_three
from liger_kernels.ops.runtime.dispatch import launch, tl, triton
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


@dataclass(frozen=True, eq=False)
class PackedNf4:
    """The quantisation of a weight to four bits.

    Attributes:
        code: [16], float32.
        scales: [blocks], float32, or uint8 if ``nested`` is given.
        per_block: the number of numbers in a block, a power of two from 32 on.
        shape: of the dense matrix.
        dtype: of the dense matrix.
        nested: the quantisation of the scales; None if they are float32.

    A call makes the dense matrix: as ``dense`` of a :class:`liger_kernels.ops.Projection`.
    """

    code: Tensor
    scales: Tensor
    per_block: int
    shape: Sequence[int]
    dtype: torch.dtype
    nested: NestedScales | None

    def __call__(self, packed: Tensor) -> Tensor:
        """:func:`dense_nf4` of one weight."""
        return dense_nf4([packed], [self])[0]


# fmt: off
@triton.jit
def _nf4_kernel(
    packed_ptr, code_ptr, scales_ptr,                   # [bytes], [16], [blocks]
    nested_code_ptr, nested_scales_ptr, offset_ptr,     # [256], [blocks of scales], 0-d; or None
    y_ptr, n_bytes,
    packed1_ptr, code1_ptr, scales1_ptr, nested_code1_ptr, nested_scales1_ptr, offset1_ptr, y1_ptr, n_bytes1,
    packed2_ptr, code2_ptr, scales2_ptr, nested_code2_ptr, nested_scales2_ptr, offset2_ptr, y2_ptr, n_bytes2,
    end, end1, nested_block,                            # of the programs of the first weight, and of the second
    BYTES: tl.constexpr, ROWS: tl.constexpr,            # of a block; blocks of a program
):
    program = tl.program_id(0)
    if packed1_ptr is not None:
        which = (program >= end).to(tl.int32) + (program >= end1).to(tl.int32)
        program -= one_of(which, 0, end, end1)
        packed_ptr = one_of(which, packed_ptr, packed1_ptr, packed2_ptr)
        code_ptr = one_of(which, code_ptr, code1_ptr, code2_ptr)
        scales_ptr = one_of(which, scales_ptr, scales1_ptr, scales2_ptr)
        if nested_code_ptr is not None:
            nested_code_ptr = one_of(which, nested_code_ptr, nested_code1_ptr, nested_code2_ptr)
            nested_scales_ptr = one_of(which, nested_scales_ptr, nested_scales1_ptr, nested_scales2_ptr)
            offset_ptr = one_of(which, offset_ptr, offset1_ptr, offset2_ptr)
        y_ptr = one_of(which, y_ptr, y1_ptr, y2_ptr)
        n_bytes = one_of(which, n_bytes, n_bytes1, n_bytes2)
    block = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
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


def dense_nf4(packed: Sequence[Tensor], states: Sequence[PackedNf4]) -> list[Tensor]:
    """For each of up to three weights the matrix, of its state's shape and dtype, of the numbers in ``packed``, uint8
    [half as many, 1]. The states of several weights are :func:`same_nf4`. The caller asks whether kernels run there."""
    first = states[0]
    of_block = first.per_block // 2
    blocks = max(1, _BYTES_OF_PROGRAM // of_block)
    ys, problems, ends, end = [], [], [], 0
    for one, state in zip(packed, states, strict=True):
        nested = state.nested
        y = torch.empty(state.shape, dtype=state.dtype, device=state.code.device)
        n_bytes = y.numel() // 2
        end += cdiv(n_bytes, blocks * of_block)
        inner = (None, None, None) if nested is None else (nested.code, nested.scales, nested.offset)
        ys.append(y)
        ends.append(end)
        problems.append((one, state.code, state.scales, *inner, y, n_bytes))
    numbers = *[*ends, end][:2], 1 if first.nested is None else first.nested.per_block
    options = {"BYTES": of_block, "ROWS": blocks, "num_warps": 4, "enable_fp_fusion": False}
    with torch._C.DisableTorchFunctionSubclass():  # of bitsandbytes' class of parameters
        launch(_nf4_kernel, (end,), first.code.device, *up_to_three(problems), *numbers, **options)
    return ys


def same_nf4(states: Sequence[Any]) -> bool:
    """Whether ``states`` are two or three :class:`PackedNf4` with blocks of the same sizes and one dtype."""
    if not 1 < len(states) < 4 or not all(isinstance(one, PackedNf4) for one in states):
        return False
    kinds = {(one.per_block, one.dtype, one.nested and one.nested.per_block) for one in states}
    return len(kinds) == 1


def dense_nf4_ref(packed: Tensor, state: PackedNf4) -> Tensor:
    """Reference of :func:`dense_nf4` for one weight."""
    scales, nested = state.scales, state.nested
    if nested is not None:
        outer = nested.scales.repeat_interleave(nested.per_block)[: len(scales)]
        scales = nested.code[scales.long()] * outer + nested.offset
    flat = packed.reshape(-1)
    numbers = state.code[torch.stack([flat >> 4, flat & 15], 1).reshape(-1).long()]
    numbers = numbers * scales.repeat_interleave(state.per_block)[: len(numbers)]
    return numbers.to(state.dtype).reshape(state.shape)
