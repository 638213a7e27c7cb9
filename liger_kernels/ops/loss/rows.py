"""Launches of the cross entropy kernels over rows of logits: all classes of a row, or a slab of them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from liger_kernels.ops.loss import id_kernels as id_kernels
from liger_kernels.ops.loss import kernels as kernels
from liger_kernels.ops.loss.options import OF_DIVERGENCE, WRITTEN, LossOptions
from liger_kernels.ops.runtime.dispatch import INTERPRET, launch
from liger_kernels.ops.runtime.tiling import cdiv, choice, next_power_of_2, tile


class Rows(NamedTuple):
    """The results of the forward kernel per row. ``None`` is not computed."""

    loss: torch.Tensor  # [tokens]
    stats: torch.Tensor | None  # [3, tokens]: maximum of z, sum of exp(z - maximum), that sum without the target
    extras: dict[str, torch.Tensor]  # [tokens] each, by names in WRITTEN
    ids: torch.Tensor | None = None  # float32 [tokens, K]: z of the chosen classes, finally the log-probability

    @classmethod
    def empty(cls, tokens: int, device: torch.device, options: LossOptions, stats: bool, n_ids: int = 0) -> Rows:
        """Uninitialised results, with ``n_ids`` chosen classes of each row."""

        def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        extras = {name: rows(tokens, dtype=WRITTEN[name]) for name in options.written()}
        # Each slab writes only its own classes.
        ids = torch.zeros((tokens, n_ids), dtype=torch.float32, device=device) if n_ids else None
        return cls(rows(tokens), rows(3, tokens) if stats or n_ids else None, extras, ids)

    def chunk(self, start: int, stop: int) -> Rows:
        """Views of rows ``start`` to ``stop``."""
        stats = None if self.stats is None else self.stats[:, start:stop]
        ids = None if self.ids is None else self.ids[start:stop]
        return Rows(self.loss[start:stop], stats, {name: t[start:stop] for name, t in self.extras.items()}, ids)


class IdGrads(NamedTuple):
    """The gradients that a backward adds for the log-probabilities of chosen classes."""

    ids: torch.Tensor  # [tokens, K]
    grads: torch.Tensor  # float32 [tokens, K]: the gradient of this class, summed over the row's equal ids
    totals: torch.Tensor  # float32 [2, tokens]: sums over all ids, and over ids equal to the target

    def chunk(self, start: int, stop: int) -> IdGrads:
        """Views of rows ``start`` to ``stop``."""
        return IdGrads(self.ids[start:stop], self.grads[start:stop], self.totals[:, start:stop])


class Carried(IntEnum):
    """The rows of a slab's ``carry``, in the kernel's order: running values over the earlier classes.

    OTHERS, DISTANCE and SQUARES are the sums of exp(z - maximum), of exp(z - maximum) * (z - maximum) and of exp(z -
    maximum)^2, all without the target. TOTAL is the sum of z.
    """

    TARGET = 0
    MAXIMUM = 1
    OTHERS = 2
    DISTANCE = 3
    SQUARES = 4
    TOTAL = 5


class Slab(NamedTuple):
    """A slab: logits of only some classes of a head. Label smoothing cannot use slabs.

    Attributes:
        first: the class in the first column.
        classes: the number of all classes.
        carry: float32 [6, tokens], the forward's running values over the earlier classes (:class:`Carried`).
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
    """Whether Triton knows that a lane can read 16 bytes at once at the start of every row. Dynamo does not tell where
    computed logits start, but Inductor aligns them."""
    starts = torch.compiler.is_compiling() or logits.storage_offset() * logits.element_size() % 16 == 0
    return starts and logits.stride(0) % 16 == 0


# The number of logits, or of chosen classes, that one program holds if rows are short.
_ELEMENTS = 4096


@choice("cross_entropy")
def _launch_shape(logits: torch.Tensor, passes: int) -> dict[str, int]:
    """Launch choices: 64 bytes a lane, and several short rows a program. The second of two ``passes`` should find its
    row in the L2 cache. So longer rows get more lanes, and fewer rows are in flight. The forward counts as two passes
    even if it writes no gradient, so that its sums have the same bits. Rows that are read element by element use small
    blocks."""
    tokens, vocab = logits.shape
    size = logits.element_size()
    row_bytes = vocab * size if passes > 1 else 0
    block_bytes = 2**14 if row_bytes < 112 * 2**10 else 2**15 if row_bytes < 224 * 2**10 else 2**16
    block, lane = (block_bytes // size, 64 // size) if _aligned(logits) else (_ELEMENTS, 16)
    block = min(next_power_of_2(vocab), block)
    rows, block = tile(tokens, vocab, max(1, _ELEMENTS // block), block, widest=8192)
    if INTERPRET:
        rows = max(2, rows)  # one row would process its blocks in another order
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(1, rows * block // (32 * lane)))}


def lane_shape(shape: dict[str, int], logits: torch.Tensor) -> dict[str, int]:
    """How Triton lays out a row's block over the lanes. Each lane gets a vector of 16 bytes, or a single element of
    unaligned rows, in as many chunks as needed. The layout affects only the speed."""
    # The interpreter has no lanes, and its rows a program depend on the batch. The order of a row's sum must not.
    per_lane = 16 if INTERPRET else max(1, shape["ROWS"] * shape["BLOCK"] // (32 * shape["num_warps"]))
    per_lane = min(shape["BLOCK"], per_lane)
    vector = min(16 // logits.element_size(), per_lane) if _aligned(logits) else 1
    return {"VECTOR": vector, "CHUNKS": per_lane // vector}


# If only one kernel contracted this to fma(x, scale, -max), p would be off by the roundoff of max.
_FUSION = False


def _row_stride(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def _weight_sum(class_weight: torch.Tensor | None, options: LossOptions) -> torch.Tensor | None:
    return class_weight.sum() if class_weight is not None and options.label_smoothing else None


def _with_ids(shape: dict[str, int], ids: torch.Tensor | None) -> dict[str, int]:
    """``shape``, with few enough rows a program for their chosen classes to fit into shared memory."""
    if ids is None:
        return {**shape, "IDS": 1}
    block = next_power_of_2(ids.shape[1])
    return {**shape, "ROWS": min(shape["ROWS"], max(1, _ELEMENTS // block)), "IDS": block}


@choice("ids")
def _ids_shape(ids: torch.Tensor) -> dict[str, int]:
    """Launch choices of kernels that only read the ids: two ids a lane."""
    n_rows, n_ids = ids.shape
    block = next_power_of_2(n_ids)
    rows, _ = tile(n_rows, n_ids, max(1, 128 // block), block)
    return {"ROWS": rows, "IDS": block, "num_warps": min(4, max(1, rows * block // 64))}


def finish_ids(rows: Rows, ids: torch.Tensor | None, targets: torch.Tensor, ignore_index: int, classes: int) -> None:
    """Turn ``rows.ids`` into log-probabilities, after ``rows`` have seen all ``classes``."""
    if ids is None:
        return
    assert rows.stats is not None
    shape, (n_rows, n_ids) = _ids_shape(ids), ids.shape
    tensors, numbers = (ids, rows.ids, targets, rows.stats), (n_rows, n_ids, classes, ignore_index)
    grid = (cdiv(n_rows, shape["ROWS"]),)
    launch(id_kernels._finish_ids_kernel, grid, ids.device, *tensors, _row_stride(rows.stats), *numbers, **shape)


def id_grads(
    ids: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor, ignore_index: int, classes: int
) -> IdGrads:
    """Convert ``upstream`` [tokens, K], the gradient of the log-probabilities, for :func:`backward_rows`. Gradients of
    a row's equal ids are summed here, so that all of them can store the same number later."""
    shape, (n_rows, n_ids) = _ids_shape(ids), ids.shape
    grads = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    totals = torch.empty((2, n_rows), dtype=torch.float32, device=ids.device)
    launch(
        id_kernels._id_grads_kernel, (cdiv(n_rows, shape["ROWS"]),), ids.device,
        ids, targets, upstream, upstream.stride(0), upstream.stride(1), grads, totals, _row_stride(totals),
        n_rows, n_ids, classes, ignore_index, **shape,
    )  # fmt: skip
    return IdGrads(ids, grads, totals)


def scaling_of(options: LossOptions) -> tuple[float | None, float | None, float | None]:
    """softcap, logit_scale and 1 / temperature for a kernel. A value that changes nothing is None."""
    scale: float | None = options.logit_scale
    inverse: float | None = 1.0 / options.temperature
    if options.softcap is None:  # then one factor is enough
        scale, inverse = options.logit_scale / options.temperature, None
        scale = None if scale == 1.0 else scale
    elif inverse == 1.0:
        inverse = None
    return options.softcap, scale, inverse


def _as_arguments(options: LossOptions) -> tuple[float | None, ...]:
    """ignore_index, label_smoothing, softcap, logit_scale, 1 / temperature and z_loss for a kernel. A value that
    changes nothing is None."""
    softcap, scale, inverse = scaling_of(options)
    return options.ignore_index, options.label_smoothing or None, softcap, scale, inverse, options.z_loss


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
    ids: torch.Tensor | None = None,
) -> None:
    """Fill ``rows``. With a ``slab``, ``rows`` cover the classes up to the slab's last. ``grad``, which may be
    ``logits``, gets dloss/dlogits divided by ``denominator`` (0-d, default 1). ``row_weight`` is float32 [tokens] and
    contiguous. ``rows.ids`` get z of the classes ``ids``, [tokens, K] and contiguous; :func:`finish_ids` turns z into
    log-probabilities."""
    tokens, vocab = logits.shape
    shape = _with_ids(_launch_shape(logits, passes=2), ids)
    first, classes, carry = (None, None, None) if slab is None else slab
    extras = [rows.extras.get(name) for name in WRITTEN if name != OF_DIVERGENCE]
    # fmt: off
    launch(
        kernels._cross_entropy_fwd_kernel, (cdiv(tokens, shape["ROWS"]),), logits.device,
        logits, logits.stride(0),
        targets, class_weight, _weight_sum(class_weight, options), row_weight,
        rows.loss, rows.stats, _row_stride(rows.stats), *extras,
        ids, rows.ids, 0 if ids is None else ids.shape[1],
        grad, _row_stride(grad), denominator,
        carry, _row_stride(carry), first, classes,
        tokens, vocab, *_as_arguments(options),
        enable_fp_fusion=_FUSION, **lane_shape(shape, logits), **shape,
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
    ids: IdGrads | None = None,
    slab: Slab | None = None,
) -> None:
    """Write upstream / denominator * row weight * dloss/dlogits into ``grad``, which may be ``logits``; ``upstream`` is
    0-d or [tokens], ``denominator`` 0-d, ``row_weight`` float32 [tokens] and contiguous. If ``skip_if_one`` (0-d) is 1,
    ``grad`` is not changed; the device decides that without the host. ``grad_entropy`` [tokens] times the gradient of
    the rows' ``entropy`` is added, and with ``ids`` the gradient of chosen classes."""
    tokens, vocab = logits.shape
    first, classes, _ = (None, None, None) if slab is None else slab
    chosen, of_ids, totals = (None, None, None) if ids is None else ids
    shape = _with_ids(_launch_shape(logits, passes=1), chosen)
    # fmt: off
    launch(
        kernels._cross_entropy_bwd_kernel, (cdiv(tokens, shape["ROWS"]),), logits.device,
        logits, logits.stride(0), grad, grad.stride(0),
        targets, class_weight, _weight_sum(class_weight, options), stats, stats.stride(0),
        upstream, upstream.stride(0) if upstream.dim() else 0, denominator, row_weight, skip_if_one,
        entropy, grad_entropy, 0 if grad_entropy is None else grad_entropy.stride(0),
        chosen, of_ids, totals, _row_stride(totals), 0 if chosen is None else chosen.shape[1],
        first, classes,
        tokens, vocab, *_as_arguments(options),
        enable_fp_fusion=_FUSION, **shape,
    )
    # fmt: on
