"""Launches of the divergence's kernels over rows of two heads' logits: all classes of a row, or a slab of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops.divergence import kernels as kernels
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.rows import Rows, lane_shape, scaling_of
from liger_kernels.ops.runtime.dispatch import launch
from liger_kernels.ops.runtime.tiling import cdiv, choice, next_power_of_2, tile


class DivergenceStats(IntEnum):
    """The rows of the statistics, in the order in which the kernels find them. All but the last two come of one pass.

    GAP is the sum of exp(u - TEACHER_MAXIMUM) ((z - CENTRE) - (u - TEACHER_CENTRE)) where beta is 0, and the same of
    exp(z - MAXIMUM) where it is 1. DISTANCE is the sum of exp(z - MAXIMUM) (z - MAXIMUM). HIGHEST and LOWEST are the
    largest z - u and u - z.
    MIXTURE is the divergence where beta is between. OF_STUDENT is what the gradient subtracts: KL(p || m), or GAP over
    TOTAL (beta 1).
    """

    MAXIMUM = 0
    TOTAL = 1
    TEACHER_MAXIMUM = 2
    TEACHER_TOTAL = 3
    GAP = 4
    CENTRE = 5
    TEACHER_CENTRE = 6
    DISTANCE = 7
    HIGHEST = 8
    LOWEST = 9
    MIXTURE = 10
    OF_STUDENT = 11


_LARGEST = (DivergenceStats.MAXIMUM, DivergenceStats.TEACHER_MAXIMUM, DivergenceStats.HIGHEST, DivergenceStats.LOWEST)


class Mode(IntEnum):
    """Which divergence ``beta`` asks for."""

    OF_TEACHER = 0  # KL(q || p)
    OF_STUDENT = 1  # KL(p || q)
    MIXTURE = 2


class Teacher(NamedTuple):
    """The head that a student is compared with. It has no gradient."""

    hidden: Tensor  # [tokens, its hidden size]
    weight: Tensor  # [vocab, its hidden size]
    bias: Tensor | None  # [vocab]
    beta: float
    softcap: float | None
    logit_scale: float

    @property
    def mode(self) -> Mode:
        return {0.0: Mode.OF_TEACHER, 1.0: Mode.OF_STUDENT}.get(self.beta, Mode.MIXTURE)

    def options(self, temperature: float) -> LossOptions:
        """How its logits are scaled. The temperature is that of both heads."""
        return LossOptions(softcap=self.softcap, logit_scale=self.logit_scale, temperature=temperature)

    def new(self, *shape: int) -> Tensor:
        """Uninitialised, for its logits."""
        return torch.empty(shape, dtype=self.hidden.dtype, device=self.hidden.device)

    @staticmethod
    def empty_rows(tokens: int, device: torch.device, options: LossOptions) -> Rows:
        """What the forward writes for each row. The backward needs the statistics, and so does the next slab."""

        def rows(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return Rows(
            rows(tokens), rows(len(DivergenceStats), tokens), {name: rows(tokens) for name in options.written()}
        )

    def as_numbers(self) -> list[float]:
        """Of an operator's schema."""
        return [self.beta, math.inf if self.softcap is None else self.softcap, self.logit_scale]

    @classmethod
    def of_numbers(cls, tensors: Any, numbers: Any) -> Teacher:
        """Of hidden, weight and bias, and :meth:`as_numbers`."""
        beta, softcap, logit_scale = numbers
        hidden, weight, bias = tensors
        return cls(hidden, weight, bias, beta, None if softcap == math.inf else softcap, logit_scale)


@choice("divergence")
def _launch_shape(logits: Tensor, of_teacher: Tensor) -> dict[str, int]:
    """Launch choices: a lane has 32 bytes of each head, which are two tiles of float32 in its registers."""
    tokens, vocab = logits.shape
    size = max(logits.element_size(), of_teacher.element_size())
    block = min(next_power_of_2(vocab), 2**13 // size)
    rows, block = tile(tokens, vocab, max(1, 2048 // block), block, widest=8192)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(1, rows * block * size // 1024))}


@choice("divergence_rows")
def _finish_shape(n_rows: int) -> dict[str, int]:
    """Launch choices: a row a lane."""
    _, block = tile(1, n_rows, 1, 128)
    return {"BLOCK": block, "num_warps": 4}


def _scalings(options: LossOptions, teacher: Teacher) -> tuple[float | None, ...]:
    return *scaling_of(options), *scaling_of(teacher.options(options.temperature))


def _shares(beta: float) -> tuple[float, float, float]:
    """beta, log(1 - beta) and log(beta); any number where there is no mixture."""
    return beta, math.log1p(-beta) if beta < 1.0 else 0.0, math.log(beta) if beta > 0.0 else 0.0


def _precision(*logits: Tensor) -> dict[str, bool]:
    """Whether float32 decides the error. Then nothing is contracted to an fma: threads that add up the same products
    would disagree in the last bit of a centre, and kernels in that of a scaled logit less its maximum."""
    precise = any(t.dtype == torch.float32 for t in logits)
    return {"PRECISE": precise, "enable_fp_fusion": not precise}


def forward_divergence(
    parts: Callable[[bool], Iterable[tuple[Tensor, Tensor]]],
    targets: Tensor,
    options: LossOptions,
    teacher: Teacher,
    rows: Rows,
    merge: Callable[[Tensor, bool], None] | None = None,
) -> None:
    """Fill ``rows`` of :meth:`Teacher.empty_rows`.

    Args:
        parts: the logits of both heads, [tokens, some classes], part by part; called with False, and where there is a
            mixture once more with True.
        targets: [tokens]: 0, or ignore_index.
        merge: makes statistics of this rank's classes those of all ranks', after the first pass and after the second.
    """
    stats = rows.stats
    assert stats is not None
    stats.zero_()
    for name in _LARGEST:
        stats[name] = -math.inf
    sums = stats[DivergenceStats.MIXTURE :]
    scalings, mode = _scalings(options, teacher), teacher.mode
    of_entropy, of_difference = (name in rows.extras for name in ("entropy", "max_abs_difference"))
    for again in (False, True)[: 1 + (mode == Mode.MIXTURE)]:
        for logits, of_teacher in parts(again):
            shape, (tokens, vocab) = _launch_shape(logits, of_teacher), logits.shape
            grid, lanes = (cdiv(tokens, shape["ROWS"]),), lane_shape(shape, logits)
            both = logits, logits.stride(0), of_teacher, of_teacher.stride(0), targets
            numbers = tokens, vocab, options.ignore_index
            if again:
                launch(
                    kernels._divergence_mixture_kernel, grid, logits.device, *both, stats, sums, stats.stride(0),
                    *numbers, *_shares(teacher.beta), *scalings,
                    **_precision(logits, of_teacher), **lanes, **shape,
                )  # fmt: skip
            else:
                launch(
                    kernels._divergence_scan_kernel, grid, logits.device, *both, stats, stats.stride(0),
                    *numbers, *scalings, MODE=int(mode), ENTROPY=of_entropy, DIFFERENCE=of_difference,
                    **_precision(logits, of_teacher), **lanes, **shape,
                )  # fmt: skip
        if merge is not None:
            merge(stats, again)
    n_rows = len(targets)
    shape = _finish_shape(n_rows)
    results = rows.loss, rows.extras.get("entropy"), rows.extras.get("max_abs_difference")
    launch(
        kernels._divergence_finish_kernel, (cdiv(n_rows, shape["BLOCK"]),), targets.device,
        targets, stats, sums, stats.stride(0), *results, n_rows, options.ignore_index, MODE=int(mode), **shape,
    )  # fmt: skip


def backward_divergence(
    logits: Tensor,
    of_teacher: Tensor,
    targets: Tensor,
    options: LossOptions,
    teacher: Teacher,
    stats: Tensor,
    upstream: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """``logits`` are overwritten by ``upstream``, 0-d or [tokens], times the divergence's gradient; with
    ``grad_entropy`` [tokens], the gradient of the rows' ``entropy`` times it is added."""
    shape, (tokens, vocab) = _launch_shape(logits, of_teacher), logits.shape
    sums = stats[DivergenceStats.MIXTURE :]
    launch(
        kernels._divergence_bwd_kernel, (cdiv(tokens, shape["ROWS"]),), logits.device,
        logits, logits.stride(0), of_teacher, of_teacher.stride(0), targets, stats, sums, stats.stride(0),
        upstream, upstream.stride(0) if upstream.dim() else 0,
        entropy, grad_entropy, 0 if grad_entropy is None else grad_entropy.stride(0),
        tokens, vocab, options.ignore_index, *_shares(teacher.beta), *_scalings(options, teacher),
        MODE=int(teacher.mode), **_precision(logits, of_teacher), **shape,
    )  # fmt: skip


def _weighted(weights: Tensor, x: Tensor) -> Tensor:
    """As the kernels' function of this name."""
    return weights * x.where(weights > 0.0, 0.0)


def merged(every: Tensor, mode: Mode) -> Tensor:
    """The statistics of all classes, from those of each rank's: ``every`` is [ranks, 12, tokens]. All but the last
    two."""
    S = DivergenceStats
    result = every[0].clone()
    known = {}
    for name, total in ((S.MAXIMUM, S.TOTAL), (S.TEACHER_MAXIMUM, S.TEACHER_TOTAL)):
        highest = every[:, name]
        result[name] = highest.amax(0)
        some = highest > -math.inf
        moved = (highest - result[name]).where(some, 0.0)
        known[name] = moved, moved.exp().where(some, 0.0)
        result[total] = (every[:, total] * known[name][1]).sum(0)
    moved, decay = known[S.MAXIMUM]
    of_total, scale = S.TOTAL, decay
    if mode == Mode.OF_TEACHER:
        of_total, scale = S.TEACHER_TOTAL, known[S.TEACHER_MAXIMUM][1]
    totals = every[:, of_total] * scale
    share = totals / totals.sum(0).clamp(min=1.0)  # 1 and more, but for rows that no rank read
    for name, maximum in ((S.CENTRE, S.MAXIMUM), (S.TEACHER_CENTRE, S.TEACHER_MAXIMUM)):
        top = result[maximum].where(result[maximum] > -math.inf, 0.0)
        result[name] = top + _weighted(share, every[:, name] - top).sum(0)
    apart = (every[:, S.CENTRE] - result[S.CENTRE]) - (every[:, S.TEACHER_CENTRE] - result[S.TEACHER_CENTRE])
    terms = _weighted(scale, every[:, S.GAP]) + _weighted(totals, apart)
    result[S.GAP] = terms.sum(0)
    result[S.DISTANCE] = (every[:, S.DISTANCE] * decay + _weighted(every[:, S.TOTAL] * decay, moved)).sum(0)
    for name in (S.HIGHEST, S.LOWEST):
        result[name] = every[:, name].amax(0)
    return result
