"""Launches of the cross entropy kernels over rows of logits: all classes of a row, or a slab of them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from liger_kernels.ops.loss import kernels as kernels
from liger_kernels.ops.loss.options import WRITTEN, LossOptions
from liger_kernels.ops.runtime.dispatch import INTERPRET, launch
from liger_kernels.ops.runtime.tiling import cdiv, choice, next_power_of_2, tile


class Rows(NamedTuple):
    """What the forward kernel writes per row; ``None`` is not computed."""

    loss: torch.Tensor  # [tokens]
    stats: torch.Tensor | None  # [3, tokens]: the maximum of z, the sum of exp(z - maximum), the same without y's
    extras: dict[str, torch.Tensor]  # [tokens] each: of WRITTEN

    @classmethod
    def empty(cls, tokens: int, device: torch.device, options: LossOptions, stats: bool) -> Rows:
        def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        extras = {name: rows(tokens, dtype=WRITTEN[name]) for name in options.written()}
        return cls(rows(tokens), rows(3, tokens) if stats else None, extras)

    def chunk(self, start: int, stop: int) -> Rows:
        """Views of rows ``start`` to ``stop``."""
        stats = None if self.stats is None else self.stats[:, start:stop]
        return Rows(self.loss[start:stop], stats, {name: t[start:stop] for name, t in self.extras.items()})


class Carried(IntEnum):
    """The rows of a slab's ``carry``, in the order in which the kernel finds them: what is known of the classes before.

    OTHERS, DISTANCE and SQUARES are the sums of exp(z - maximum), of exp(z - maximum) * (z - maximum) and of
    exp(z - maximum)^2, all without the target's. TOTAL is the sum of z.
    """

    TARGET = 0
    MAXIMUM = 1
    OTHERS = 2
    DISTANCE = 3
    SQUARES = 4
    TOTAL = 5


class Slab(NamedTuple):
    """Where a head's logits are those of some of its classes only. Not for label smoothing.

    Attributes:
        first: the class of the first column.
        classes: how many there are in all.
        carry: float32 [6, tokens], what the forward knows of the classes before: :class:`Carried`.
    """

    first: int
    classes: int
    carry: torch.Tensor | None = None

    @staticmethod
    def no_class(tokens: int, device: torch.device) -> torch.Tensor:
        """The ``carry`` of the first slab."""
        carry = torch.zeros((len(Carried), tokens), dtype=torch.float32, device=device)
        carry[Carried.MAXIMUM] = float("-inf")
        return carry


def _aligned(logits: torch.Tensor) -> bool:
    """Whether every row starts where a lane can read 16 bytes at once, as far as Triton looks. Dynamo does not tell
    where computed logits start; Inductor gives them memory that does."""
    starts = torch.compiler.is_compiling() or logits.storage_offset() * logits.element_size() % 16 == 0
    return starts and logits.stride(0) % 16 == 0


@choice("cross_entropy")
def _launch_shape(logits: torch.Tensor, passes: int) -> dict[str, int]:
    """Launch choices: 64 bytes a lane, several rows a program when a row is small. The longer a row, the fewer of them
    may be under way at once if the second of two ``passes`` is to find them in the L2 cache: so more lanes work on one.
    The forward has two even where it writes no gradient: its sums are then the same to the last bit. Rows that are
    read element by element go in small blocks."""
    tokens, vocab = logits.shape
    size = logits.element_size()
    row_bytes = vocab * size if passes > 1 else 0
    block_bytes = 2**14 if row_bytes < 112 * 2**10 else 2**15 if row_bytes < 224 * 2**10 else 2**16
    block, lane = (block_bytes // size, 64 // size) if _aligned(logits) else (4096, 16)
    block = min(next_power_of_2(vocab), block)
    rows, block = tile(tokens, vocab, max(1, 4096 // block), block, widest=8192)
    if INTERPRET:
        rows = max(2, rows)  # one row goes through its blocks in another order
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(1, rows * block // (32 * lane)))}


def _lane_shape(shape: dict[str, int], logits: torch.Tensor) -> dict[str, int]:
    """How Triton lays out a row's block over the lanes: vectors of 16 bytes, or single elements where rows are not
    aligned, one to each lane, in as many chunks as it takes. Only the speed depends on it."""
    # The interpreter has no lanes, and rows a program that follow the batch: what a row is added up in may not.
    per_lane = 16 if INTERPRET else max(1, shape["ROWS"] * shape["BLOCK"] // (32 * shape["num_warps"]))
    per_lane = min(shape["BLOCK"], per_lane)
    vector = min(16 // logits.element_size(), per_lane) if _aligned(logits) else 1
    return {"VECTOR": vector, "CHUNKS": per_lane // vector}


# Contracted into fma(x, scale, -max) in one kernel and not in the other, p would be off by the roundoff of max.
_FUSION = False


def _row_stride(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def _weight_sum(class_weight: torch.Tensor | None, options: LossOptions) -> torch.Tensor | None:
    return class_weight.sum() if class_weight is not None and options.label_smoothing else None


def _as_arguments(options: LossOptions) -> tuple[float | None, ...]:
    """ignore_index, label_smoothing, softcap, logit_scale, 1 / temperature and z_loss for a kernel, None for what
    changes nothing."""
    scale: float | None = options.logit_scale
    inverse: float | None = 1.0 / options.temperature
    if options.softcap is None:  # then one factor does
        scale, inverse = options.logit_scale / options.temperature, None
        scale = None if scale == 1.0 else scale
    elif inverse == 1.0:
        inverse = None
    return options.ignore_index, options.label_smoothing or None, options.softcap, scale, inverse, options.z_loss


def forward_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    options: LossOptions,
    rows: Rows,
    grad: torch.Tensor | None = None,
    denominator: torch.Tensor | None = None,
    slab: Slab | None = None,
) -> None:
    """Fill ``rows``, with a ``slab`` from the classes up to its last one; ``grad``, which may be ``logits``, gets
    dloss/dlogits over ``denominator`` (0-d, default 1). ``row_weight`` is float32 [tokens] and contiguous."""
    tokens, vocab = logits.shape
    shape = _launch_shape(logits, passes=2)
    first, classes, carry = (None, None, None) if slab is None else slab
    extras = [rows.extras.get(name) for name in WRITTEN]
    # fmt: off
    launch(
        kernels._cross_entropy_fwd_kernel, (cdiv(tokens, shape["ROWS"]),), logits.device,
        logits, logits.stride(0),
        targets, class_weight, _weight_sum(class_weight, options), row_weight,
        rows.loss, rows.stats, _row_stride(rows.stats), *extras,
        grad, _row_stride(grad), denominator,
        carry, _row_stride(carry), first, classes,
        tokens, vocab, *_as_arguments(options), PRECISE=logits.dtype == torch.float32,
        enable_fp_fusion=_FUSION, **_lane_shape(shape, logits), **shape,
    )
    # fmt: on


def backward_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    options: LossOptions,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    grad: torch.Tensor,
    *,
    denominator: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    skip_if_one: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    grad_entropy: torch.Tensor | None = None,
    slab: Slab | None = None,
) -> None:
    """Write upstream / denominator * row weight * dloss/dlogits into ``grad``, which may be ``logits``; ``upstream`` is
    0-d or [tokens], ``denominator`` 0-d, ``row_weight`` float32 [tokens] and contiguous. Where ``skip_if_one`` (0-d) is
    1, ``grad`` is left as it is: only the device knows, and nobody waits for it. With ``grad_entropy`` [tokens], the
    gradient of the rows' ``entropy`` times it is added."""
    tokens, vocab = logits.shape
    shape = _launch_shape(logits, passes=1)
    first, classes, _ = (None, None, None) if slab is None else slab
    # fmt: off
    launch(
        kernels._cross_entropy_bwd_kernel, (cdiv(tokens, shape["ROWS"]),), logits.device,
        logits, logits.stride(0), grad, grad.stride(0),
        targets, class_weight, _weight_sum(class_weight, options), stats, stats.stride(0),
        upstream, upstream.stride(0) if upstream.dim() else 0, denominator, row_weight, skip_if_one,
        entropy, grad_entropy, 0 if grad_entropy is None else grad_entropy.stride(0),
        first, classes,
        tokens, vocab, *_as_arguments(options), PRECISE=logits.dtype == torch.float32,
        enable_fp_fusion=_FUSION, **shape,
    )
    # fmt: on
