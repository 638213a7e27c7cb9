"""What one process measures of its arm: the steps of each length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import liger_kernels
from benchmarks.adapters.job import AdapterJob
from benchmarks.adapters.model import autocast, batch
from benchmarks.models import release, step
from benchmarks.timing import seconds, synchronize
from convergence import files

WARM_UP = 2
ENOUGH_S = 30.0  # slow steps are measured until their times add up to this, but FEWEST times at least
FEWEST = 2


@dataclass(frozen=True)
class StepRow:
    """One line of the table; ``note`` says why there are no numbers, or what is wrong with them, or names fallbacks.

    ``loss`` and ``gradient_norm``, of all adapters, are those of the first step, which takes ``first_s``. ``gib`` is
    the peak of a later step, of which ``model_gib`` are what the model holds between steps.
    """

    arm: str
    quantised: bool
    checkpointing: str
    precision: str
    tokens: int
    s: float | None = None
    best_s: float | None = None
    first_s: float | None = None
    gib: float | None = None
    model_gib: float | None = None
    loss: float = 0.0
    gradient_norm: float = 0.0
    note: str = ""


def row(job: AdapterJob, tokens: int, **numbers: Any) -> StepRow:
    return StepRow(job.arm, job.quantised, job.checkpointing, job.precision, tokens, **numbers)


def forget_peak() -> None:
    if torch.cuda.is_available():
        release()
        torch.cuda.reset_peak_memory_stats()


def gib(allocated: Callable[[], int]) -> float:
    """What ``allocated`` counts, in GiB; a CPU's memory is not counted."""
    return allocated() / 2**30 if torch.cuda.is_available() else 0.0


def measure(model: Any, job: AdapterJob, tokens: int) -> StepRow:
    """Forward and backward of one sequence; what the trainer does in addition is the same for all arms."""
    given = batch(model.config, tokens, job)
    model.zero_grad(set_to_none=True)
    run = partial(step, model, given, partial(autocast, job))
    forget_peak()
    model_gib = gib(torch.cuda.memory_allocated)
    loss, first_s = seconds(run)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    del gradients
    for _ in range(WARM_UP - 1):
        run()
    synchronize()
    forget_peak()
    times: list[float] = []
    while len(times) < min(FEWEST, job.repeats) or (len(times) < job.repeats and sum(times) < ENOUGH_S):
        times.append(seconds(run)[1])
    peak_gib = gib(torch.cuda.max_memory_allocated)
    return row(
        job,
        tokens,
        s=statistics.median(times),
        best_s=min(times),
        first_s=first_s,
        gib=peak_gib,
        model_gib=model_gib,
        loss=float(loss),
        gradient_norm=norm,
        note=fallbacks(model),
    )


def fallbacks(model: Any) -> str:
    """What did not run on a kernel although it was patched, and how often; empty where nothing did."""
    known = liger_kernels.status(model)
    return "" if known is None else "; ".join(f"fallback: {what} ({n})" for what, n in sorted(known.fallbacks.items()))


def measure_lengths(model: Any, job: AdapterJob, keep: Callable[[StepRow], None]) -> None:
    """``keep`` gets the row of each length as soon as it is there. One that fails does not end the others."""
    for tokens in job.lengths:
        try:
            keep(measure(model, job, tokens))
        except torch.OutOfMemoryError:
            keep(row(job, tokens, note="out of memory"))
        except Exception as error:
            keep(row(job, tokens, note=f"failed: {files.reason(error)}"))
        model.zero_grad(set_to_none=True)


def third_step(model: Any, job: AdapterJob) -> list[float]:
    """When the first three steps have ended, in seconds since the epoch."""
    given, ends = batch(model.config, job.lengths[0], job), []
    for _ in range(3):
        step(model, given, partial(autocast, job))
        synchronize()
        ends.append(time.time())
    return ends
