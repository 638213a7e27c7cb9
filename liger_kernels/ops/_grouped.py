"""Matrix products of groups of rows, each with a matrix of its own: torch's grouped product, or a loop.

Rows are sorted by group, and ``ends`` [groups], int32, says behind which row each group ends. Rows behind the last end
belong to no group; what is written there is not defined. The loop, for whatever torch's product does not take, makes
the host wait for the ends, and so does torch's own where it is not one kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from liger_kernels.ops._row_blocks import multiply_rows, rows_of_block
from liger_kernels.ops.runtime.tiling import choice

# torch.nn.functional.grouped_mm since torch 2.10; under its private name before.
_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
_IS_PUBLIC = hasattr(torch.nn.functional, "grouped_mm")


@choice("grouped")
def _is_native(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's product takes these operands: on a GPU, with strides that are multiples of 16 bytes."""
    if _grouped_mm is None or a.device.type != "cuda" or a.dtype != b.dtype:
        return False
    oldest = (8, 0) if _IS_PUBLIC else (9, 0)
    if torch.version.hip is None and torch.cuda.get_device_capability(a.device) < oldest:
        return False
    if not _IS_PUBLIC and a.dtype != torch.bfloat16:
        return False
    strides = [stride * t.element_size() for t in (a, b) for stride in t.stride() if stride != 1]
    return all(number % 16 == 0 for number in (*strides, a.data_ptr(), b.data_ptr()))


def _is_one_kernel(rows: torch.Tensor) -> bool:
    """Whether torch's product is one kernel, and not a loop over the groups in C++: in bfloat16 on Hopper and on
    Blackwell's data center GPUs."""
    one: bool = torch.version.hip is None and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)
    return one and rows.dtype == torch.bfloat16


def grouped_product(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, invariant: bool = False
) -> torch.Tensor:
    """``rows`` [rows, in] times ``matrices`` [groups, in, out]: [rows, out], without gaps, as kernels read it. In
    torch's product each row begins at a multiple of 16 bytes. ``invariant``: the bits of a row do not depend on the
    other rows. torch's product then takes a block of rows of whatever groups: which kernel it runs
    depends on the shapes, and not on where groups end, which the host does not know."""
    is_native = _is_native(rows, matrices)
    if is_native and not invariant:
        return _grouped_mm(rows, matrices, offs=ends).contiguous()
    if is_native and _is_one_kernel(rows):
        size, out = rows_of_block(), rows.new_empty(len(rows), matrices.shape[2])
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            part = torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
            found = _grouped_mm(part, matrices, offs=(ends - start).clamp(0, size))
            out[start : start + size] = found[: len(rows) - start]
        return out
    out = rows.new_empty(len(rows), matrices.shape[2])
    for group, (start, end) in enumerate(_bounds(ends)):
        if start < end:
            multiply_rows(out[start:end], rows[start:end], matrices[group], invariant)
    return out


def grouped_outer_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of a group, left^T right: [groups, left columns, right columns]; zero for no rows."""
    if _is_native(left, right):
        return _grouped_mm(left.t(), right, offs=ends)
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for group, (start, end) in enumerate(_bounds(ends)):
        torch.mm(left[start:end].t(), right[start:end], out=out[group])
    return out


def _bounds(ends: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *ends.tolist()]))
