"""What the norms of rows share: how rows become tiles, how gradients of weights are added up, which inputs are allowed.

A program holds whole rows in registers. The backward runs about as many programs as the device has multiprocessors.
Each writes its own part of a weight's gradient, and :func:`sum_parts` adds the parts in a fixed order.
"""

from __future__ import annotations

from typing import Annotated

import torch

from liger_kernels.ops.runtime.ahead import real_device
from liger_kernels.ops.runtime.arguments import NOT_NEGATIVE
from liger_kernels.ops.runtime.device import room_for_loads
from liger_kernels.ops.runtime.dispatch import launch, tl, triton, use_triton
from liger_kernels.ops.runtime.tiling import cdiv, choice, next_power_of_2, tile

# Wider rows than this would spill most of their registers; they run the reference.
MAX_HIDDEN = 65536
Eps = Annotated[float, NOT_NEGATIVE]


@choice("norm")
def launch_shape(n_rows: int, hidden: int, elements: int, per_lane: int) -> dict[str, int]:
    """Launch choices: as many rows a program as ``elements`` allow, ``per_lane`` of them a lane."""
    block = next_power_of_2(hidden)
    rows, _ = tile(n_rows, hidden, max(1, elements // block), block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // (32 * per_lane)))}


def stages(elements: int, bytes_per_column: int, device: torch.device) -> int:
    """Tiles in flight in the backward: two or three wait in shared memory while one is computed, if they fit there."""
    most = 4 if elements <= 4096 else 3
    return 1 if elements > 8192 else min(most, 1 + room_for_loads(real_device(device)) // (elements * bytes_per_column))


def backward_programs(device: torch.device) -> int:
    """How many programs share the rows of a backward."""
    device = real_device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device.index).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device.index).gpu_subslice_count
    return 2  # the interpreter: the fewest with which partial sums are still added up


@triton.jit
def _sum_parts_kernel(parts_ptr, sum_ptr, n_parts, hidden, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of ``parts_ptr`` [n_parts, hidden] over its rows, rounded once."""
    part = tl.arange(0, PARTS)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (part < n_parts)[:, None] & (col < hidden)[None, :]
    parts = tl.load(parts_ptr + part[:, None].to(tl.int64) * hidden + col[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + col, tl.sum(parts, axis=0).to(sum_ptr.dtype.element_ty), mask=col < hidden)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of ``parts`` [n_parts, hidden] over its rows, in ``dtype``: one launch where torch needs two or three."""
    n_parts, hidden = parts.shape
    total = parts.new_empty(hidden, dtype=dtype)
    _, block = tile(1, hidden, 1, 32)  # 128 bytes of each part
    grid = (cdiv(hidden, block),)
    shape = {"PARTS": next_power_of_2(n_parts), "BLOCK": block, "num_warps": 8}
    launch(_sum_parts_kernel, grid, parts.device, parts, total, n_parts, hidden, **shape)
    return total


def check_rows(x: torch.Tensor, **vectors: torch.Tensor | None) -> None:
    """Raise what the norms raise for an ``x`` that is not [..., hidden], or for one of ``vectors``, by name, that is
    neither None nor [hidden]."""
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; it must be floating point")
    shape = x.shape
    if not shape or shape[-1] == 0:
        raise ValueError(f"x has shape {tuple(shape)}; it must be [..., hidden] with at least one column")
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(vector.shape)}; for x of shape {tuple(x.shape)} it must be [{x.shape[-1]}]"
            )
        _check_kind(x, name, vector)


def check_like(x: torch.Tensor, **others: torch.Tensor) -> None:
    """Raise what the norms raise for one of ``others``, by name, that is not as ``x`` is."""
    for name, other in others.items():
        if other.shape != x.shape:
            raise ValueError(
                f"{name} has shape {tuple(other.shape)}, x {tuple(x.shape)}; they must be equal, nothing is broadcast"
            )
        _check_kind(x, name, other)


def _check_kind(x: torch.Tensor, name: str, t: torch.Tensor) -> None:
    if not t.is_floating_point():
        raise TypeError(f"{name} is {t.dtype}; it must be floating point")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, x on {x.device}; move it there")


def runs_kernel(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether a norm of ``x`` runs its kernel: no tensor is float64, and a row fits into registers."""
    if not use_triton(x) or x.dim() == 0 or x.shape[-1] > MAX_HIDDEN:
        return False
    return not [t for t in others if t is not None and t.dtype == torch.float64]
