"""Cases of the losses: over logits, of linear heads, and of the weights of packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import CHECKED_ROWS, SHARE, BenchmarkCase, Site, Tensors, counted, pair
from liger_kernels.ops.loss.schedules.chosen import balanced_because

MASKED = " (30% of the labels)"
# By beta.
DIVERGENCES = {0.0: "KL", 0.5: "JSD"}


def of_counted(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` over hidden, weight and targets, which is told how many targets count."""
    return lambda *inputs, **options: op(*inputs, counted=counted(inputs[2]), **options)


def float_loss(logits: torch.Tensor, targets: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """The loss as models of transformers compute it; ``weights`` are those of the rows, and their sum."""
    if not weights:
        return F.cross_entropy(logits.float(), targets)
    row_weight, denominator = weights
    return (F.cross_entropy(logits.float(), targets, reduction="none") * row_weight).sum() / denominator


def linear_float_loss(hidden: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return float_loss(F.linear(hidden, weight), *rest)


def weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """``loss`` whose last two arguments are its row weights and denominator."""
    return lambda *inputs: loss(*inputs[:-2], row_weight=inputs[-2], denominator=inputs[-1])


def loss(site: Site, rows: int, vocab: int, weights: bool = False) -> BenchmarkCase:
    def inputs(n: int) -> Tensors:
        drawn = site.randn(n, vocab, scale=3), site.targets(n, vocab)
        return (*drawn, *site.row_weights(n)) if weights else drawn

    ours, truth = map(weighted, pair("cross_entropy")) if weights else pair("cross_entropy")
    return BenchmarkCase(
        "cross_entropy (row_weight)" if weights else "cross_entropy",
        f"{rows}x{vocab}",
        rows,
        inputs,
        ours,
        float_loss,
        2 * rows * vocab * site.dtype.itemsize,
        8 * rows * vocab,
        truth,
        checked_rows=CHECKED_ROWS,
    )


def computed_again(rows: int, hidden: int, vocab: int) -> int:
    """Of how many classes the schedule "small" computes the logits twice: others stay in grad_weight's memory."""
    return vocab - vocab * hidden // (rows + hidden) // 1024 * 1024


def head(
    site: Site,
    formula: str,
    shape: tuple[int, int, int],
    ours: Callable[..., Any],
    eager: Callable[..., Any],
    truth: Callable[..., Any],
    memory: str | None,
    masked: bool,
    weights: bool = False,
) -> BenchmarkCase:
    """An op that computes its logits itself, of ``shape`` tokens x hidden size x classes."""
    rows, hidden, vocab = shape

    def inputs(n: int) -> Tensors:
        targets = site.targets(n, vocab, masked)
        leaves = site.randn(n, hidden), site.randn(vocab, hidden, scale=hidden**-0.5), targets
        return (*leaves, *site.row_weights(n)) if weights else leaves

    ours = of_counted(ours) if masked else ours
    multiplied = round(rows * SHARE) if masked else rows
    again = memory == "small" and balanced_because(site.dtype, 0.0, memory) is None
    return BenchmarkCase(
        f"{formula}{' (row_weight)' if weights else ''}{MASKED if masked else ''}",
        "x".join(map(str, shape)),
        rows,
        inputs,
        weighted(ours) if weights else ours,
        eager,
        2 * (rows + vocab) * hidden * site.dtype.itemsize,
        2 * multiplied * hidden * (3 * vocab + (computed_again(multiplied, hidden, vocab) if again else 0)),
        weighted(truth) if weights else truth,
        memory,
        CHECKED_ROWS,
    )


def linear_loss(
    site: Site,
    rows: int,
    hidden: int,
    vocab: int,
    weights: bool = False,
    memory: str | None = None,
    masked: bool = False,
) -> BenchmarkCase:
    ours, truth = pair("linear_cross_entropy")
    shape = rows, hidden, vocab
    return head(
        site,
        "linear_cross_entropy",
        shape,
        partial(ours, memory=memory),
        linear_float_loss,
        truth,
        memory,
        masked,
        weights,
    )


def float_log_probs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Tensors:
    """Log-probabilities and entropy as they are written in plain torch."""
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    counts = targets >= 0
    log_probs, entropy = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return log_probs.where(counts, 0), entropy.where(counts, 0)


def linear_log_probs(
    site: Site, rows: int, hidden: int, vocab: int, memory: str | None = None, masked: bool = False
) -> BenchmarkCase:
    """Log-probabilities and entropy, both with gradient."""

    def both(op: Callable[..., Any]) -> Callable[..., Tensors]:
        return lambda *tensors, **options: op(*tensors, outputs=("log_probs", "entropy"), **options)[:2]

    ours, truth = map(both, pair("linear_log_probs"))
    ours = partial(ours, memory=memory)
    return head(site, "linear_log_probs", (rows, hidden, vocab), ours, float_log_probs, truth, memory, masked)


def log_probs_of_ids(site: Site, rows: int, hidden: int, vocab: int, ids: int, memory: str) -> BenchmarkCase:
    """Log-probabilities of the targets and of chosen classes, both with gradient."""

    def inputs(n: int) -> Tensors:
        leaves = site.randn(n, hidden), site.randn(vocab, hidden, scale=hidden**-0.5), site.targets(n, vocab)
        return (*leaves, torch.randint(vocab, (n, ids), device=site.device))

    def both(op: Callable[..., Any]) -> Callable[..., Tensors]:
        def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> Tensors:
            out = op(hidden, weight, targets, ids=ids)
            return out.log_probs, out.id_log_probs

        return run

    def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> Tensors:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        return log_p.gather(1, targets[:, None])[:, 0], log_p.gather(1, ids)

    shape, (ours, truth) = (rows, hidden, vocab), pair("linear_log_probs")
    ours, truth = both(partial(ours, memory=memory)), both(truth)
    plain = head(site, f"linear_log_probs ({ids} ids)", shape, ours, eager, truth, memory, masked=False)
    return replace(plain, inputs=inputs)


def float_divergence(beta: float) -> Callable[..., torch.Tensor]:
    """The mean divergence as it is written in plain torch."""

    def eager(h: torch.Tensor, w: torch.Tensor, teacher_h: torch.Tensor, teacher_w: torch.Tensor) -> torch.Tensor:
        log_p, log_q = (F.linear(x, weight).float().log_softmax(-1) for x, weight in ((h, w), (teacher_h, teacher_w)))
        if beta == 0.0:
            return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        of_student, of_teacher = (
            F.kl_div(log_m, log, reduction="batchmean", log_target=True) for log in (log_p, log_q)
        )
        return (1 - beta) * of_student + beta * of_teacher

    return eager


def linear_divergence(
    site: Site, rows: int, hidden: int, teacher_hidden: int, vocab: int, beta: float, memory: str
) -> BenchmarkCase:
    """The mean of the rows' divergences; liger-kernel's heads return nothing else."""

    def inputs(n: int) -> Tensors:
        teacher = site.randn(n, teacher_hidden), site.randn(vocab, teacher_hidden, scale=teacher_hidden**-0.5)
        student = site.randn(n, hidden), site.randn(vocab, hidden, scale=hidden**-0.5)
        return (*student, *(t.detach() for t in teacher))

    def mean(op: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda *heads: op(*heads, beta, reduction="mean").divergence

    ours, truth = pair("linear_divergence")
    # Of student and teacher. Only "small" computes logits twice; a mixture is one pass more.
    again = (0, 0) if memory != "small" else (1, 1) if beta in (0.0, 1.0) else (2, 2)
    return BenchmarkCase(
        f"linear_divergence ({DIVERGENCES[beta]})",
        f"{rows}x{hidden},{teacher_hidden}x{vocab}",
        rows,
        inputs,
        mean(partial(ours, memory=memory)),
        float_divergence(beta),
        2 * (rows + vocab) * (hidden + teacher_hidden) * site.dtype.itemsize,
        2 * rows * vocab * ((3 + again[0]) * hidden + (1 + again[1]) * teacher_hidden),
        mean(truth),
        memory,
        CHECKED_ROWS,
    )


def packing(site: Site, rows: int, longest: int) -> BenchmarkCase:
    """Targets, row weights and denominator of one packed row; forward only."""

    def inputs(n: int) -> Tensors:
        most = min(longest, n // 4)
        lengths = torch.randint(1, most + 1, (8 * n // most,))  # four times as many tokens as are taken
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[:n]
        labels = torch.randint(100, (1, n)).masked_fill(torch.rand(1, n) < 0.3, -100)
        return labels.to(site.device), positions[None].to(site.device)

    weights_of, _ = pair("packing_weights")

    def ours(labels: torch.Tensor, positions: torch.Tensor) -> Tensors:
        found = weights_of(labels, position_ids=positions, loss_reduction="square")
        return found.row_weight, found.denominator

    def eager(labels: torch.Tensor, positions: torch.Tensor) -> Tensors:
        index = (positions[0] == 0).cumsum(0)
        goes_on = F.pad(index[1:] == index[:-1], (0, 1))
        counted = goes_on & (labels[0].roll(-1) != -100)
        counts = torch.bincount(index, weights=counted.double())[index]
        weight = torch.where(counted, counts.clamp(min=1).rsqrt(), 0.0)
        return weight.float(), weight.sum().float()

    return BenchmarkCase("packing_weights", f"{rows} tokens", rows, inputs, ours, eager, rows * 32, rows * 4)
