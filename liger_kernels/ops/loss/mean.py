"""The mean of the rows' losses, and what it divides by: a launch of one program each, where torch takes two and four.

One program adds up in one order, so both are the same to the last bit in every run. It reads 8 bytes a row, next to the
thousands that the loss itself reads of one. In a compiled program both are torch's operations, which Inductor launches
for a fraction of what a kernel of ours costs the host there.
"""

from __future__ import annotations

import math

import torch

from liger_kernels.ops.runtime.compiling import traces_reference
from liger_kernels.ops.runtime.dispatch import launch, tl, triton
from liger_kernels.ops.runtime.tiling import choice, tile


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _denominator_kernel(
    targets_ptr, class_weight_ptr, row_weight_ptr, denominator_ptr, n_rows, vocab, ignore_index, BLOCK: tl.constexpr
):
    """``class_weight_ptr`` or ``row_weight_ptr`` may be None: all 1."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        in_range = row < n_rows
        target = tl.load(targets_ptr + row, mask=in_range, other=0)
        counts = in_range & (target != ignore_index)
        if class_weight_ptr is not None:
            counts = counts & (target >= 0) & (target < vocab)
        weight = counts.to(tl.float32)
        if class_weight_ptr is not None:
            weight = tl.load(class_weight_ptr + target, mask=counts, other=0.0)
        if row_weight_ptr is not None:
            weight *= tl.load(row_weight_ptr + row, mask=counts, other=0.0)
        total += weight
    denominator = tl.sum(total, axis=0)
    tl.store(denominator_ptr, tl.where(denominator == 0.0, float("inf"), denominator))


@triton.jit
def _mean_kernel(losses_ptr, denominator_ptr, mean_ptr, n_rows, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + row, mask=row < n_rows, other=0.0)
    tl.store(mean_ptr, tl.div_rn(tl.sum(total, axis=0), tl.load(denominator_ptr)))


@choice("mean")
def _launch_shape(n_rows: int) -> dict[str, int]:
    """Launch choices: as many lanes as a program may have, four rows each."""
    _, block = tile(1, n_rows, 1, 4096)
    return {"BLOCK": block, "num_warps": 32}


def mean_denominator_ref(
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    ignore_index: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """:func:`mean_denominator` in plain torch, in ``dtype``."""
    if denominator is None:
        counts = targets != ignore_index
        if class_weight is not None:
            counts = counts & (targets >= 0) & (targets < vocab)
        weight = counts.to(dtype)
        if class_weight is not None:
            weight = torch.where(counts, class_weight.to(dtype)[targets.where(counts, 0)], 0.0)
        if row_weight is not None:
            weight = torch.where(counts, weight * row_weight.to(dtype), 0.0)
        denominator = weight.sum()
    denominator = denominator.to(dtype)
    return denominator.masked_fill(denominator == 0, math.inf)


def reduced_ref(
    losses: torch.Tensor,
    reduction: str,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    ignore_index: int,
    vocab: int,
) -> torch.Tensor:
    """The ``reduction`` of the rows' ``losses`` in plain torch, in their dtype."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    weights = class_weight, row_weight, denominator
    return total / mean_denominator_ref(targets, *weights, ignore_index, vocab, losses.dtype)


def mean_denominator(
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    ignore_index: int,
    vocab: int,
) -> torch.Tensor:
    """What "mean" divides by, 0-d float32: ``denominator``, or the rows' total weight. Infinity instead of 0: a mean
    over nothing is then 0, its gradient too. The weights are float32 and contiguous, as ``targets`` are."""
    if denominator is not None or traces_reference():
        return mean_denominator_ref(targets, class_weight, row_weight, denominator, ignore_index, vocab)
    denominator = torch.empty((), dtype=torch.float32, device=targets.device)
    n_rows = targets.shape[0]
    tensors, numbers = (targets, class_weight, row_weight, denominator), (n_rows, vocab, ignore_index)
    launch(_denominator_kernel, (1,), targets.device, *tensors, *numbers, **_launch_shape(n_rows))
    return denominator


def mean(losses: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """The sum of the float32 ``losses`` over the 0-d float32 ``denominator``, which no row makes 0 / inf."""
    if traces_reference():
        return losses.sum() / denominator
    result = torch.empty((), dtype=torch.float32, device=losses.device)
    n_rows = losses.shape[0]
    launch(_mean_kernel, (1,), losses.device, losses, denominator, result, n_rows, **_launch_shape(n_rows))
    return result
