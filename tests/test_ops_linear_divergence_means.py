"""The error of the mean log-ratio, which all classes of a row share, for heads whose logits are hard to add up."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from convergence.judge.tolerance import rms, three_way
from liger_kernels.ops import linear_divergence_ref
from liger_kernels.ops.divergence.rows import Teacher, backward_divergence, forward_divergence, merged
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.runtime.tiling import tiled

ROWS, CLASSES, FIRST = 96, 128, 16
OPTIONS = LossOptions()


def alike(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    z = torch.randn(ROWS, CLASSES, generator=rng) * 2
    return z, z + torch.randn(ROWS, CLASSES, generator=rng)


def added(student: Any, teacher: Any, to: slice = slice(None)) -> Any:
    def draw(rng: torch.Generator) -> tuple[Tensor, Tensor]:
        z, u = alike(rng)
        z[:, to] += student
        u[:, to] += teacher
        return z, u

    return draw


def masked(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where the teacher masks classes, the student's probability is about one over the number that masks them."""
    z, u = alike(rng)
    z[:, :FIRST] -= 26.0
    u[:, :FIRST] = -1e10
    return z, u


CLASS = torch.arange(CLASSES)
HEADS: dict[str, Any] = {
    "alike": alike,
    "independent": lambda rng: (alike(rng)[0], alike(rng)[0]),
    "student far below": added(-200.0, 0.0),
    "both far above": added(1000.0, 1000.0),
    "the teacher's first classes low": added(0.0, -60.0, slice(2 * FIRST)),
    "both heads' first classes low": added(-60.0, -60.0, slice(2 * FIRST)),
    "apart in one late class": added(6.0, -6.0, slice(-3, -2)),
    "confident, each in its class": lambda rng: tuple(t * 15 for t in alike(rng)),
    "drifting apart": added(CLASS * 0.08, -CLASS * 0.08),
    "apart by steps": added(CLASS // FIRST * 2.7, -(CLASS // FIRST) * 2.7),
    "classes that the student has lost": added(-120.0, 0.0, slice(None, None, 2)),
    "classes that the teacher masks": masked,
    "classes that the teacher has lost": added(0.0, -300.0, slice(None, None, 2)),
}


TEACHER = Teacher(torch.empty(0), torch.empty(0), None, 1.0, None, 1.0)  # KL(p || q)


def of_parts(z: Tensor, u: Tensor, size: int, ranks: int = 1) -> Tensor:
    """The gradient of ``z``. Each rank has its share of the classes, and goes through it ``size`` classes at a time."""
    targets = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    known: list[Tensor] = []
    for mine in zip(z.chunk(ranks, 1), u.chunk(ranks, 1), strict=True):
        rows = Teacher.empty_rows(len(z), z.device, OPTIONS)

        def merge(stats: Tensor, again: bool) -> None:
            known.append(stats.clone())
            if len(known) == ranks > 1:
                stats.copy_(merged(torch.stack(known), TEACHER.mode))

        def parts(again: bool, mine: Any = mine) -> Any:
            return zip(*(t.split(size, 1) for t in mine), strict=True)

        forward_divergence(parts, targets, OPTIONS, TEACHER, rows, merge)
    grad, one = z.clone(), torch.ones((), device=z.device)
    assert rows.stats is not None
    backward_divergence(grad, u, targets, OPTIONS, TEACHER, rows.stats, one, None, None)
    return grad


WAYS: dict[str, Any] = {
    "at once": lambda z, u: of_parts(z, u, CLASSES),
    "in slabs": lambda z, u: of_parts(z, u, 2 * FIRST),
    "over four ranks": lambda z, u: of_parts(z, u, CLASSES, ranks=4),
}


def of_reference(z: Tensor, u: Tensor) -> Tensor:
    leaf, eye = z.clone().requires_grad_(), torch.eye(CLASSES, dtype=z.dtype, device=z.device)
    return torch.autograd.grad(linear_divergence_ref(leaf, eye, u, eye, TEACHER.beta).divergence.sum(), leaf)[0]


@pytest.mark.parametrize("block", [FIRST, CLASSES])
@pytest.mark.parametrize("way", WAYS)
def test_the_mean_is_nearer_than_pytorchs(way, block, device):
    """The gradient adds up to 0 over a row's classes, but for the error of the mean that is subtracted."""
    ratios = {}
    for seed, (name, draw) in enumerate(HEADS.items()):
        z, u = (t.to(device) for t in draw(torch.Generator().manual_seed(seed)))
        with tiled(divergence=lambda *_: {"ROWS": 32, "BLOCK": block, "num_warps": 4}):
            ours = WAYS[way](z, u)
        theirs, truth = of_reference(z, u), of_reference(z.double(), u.double())
        three_way(ours, theirs, truth, torch.float32, name)
        ratios[name] = rms(ours.double().sum(1)) / rms(theirs.double().sum(1))
    assert max(ratios.values()) <= 1.0, ratios
    assert statistics.median(ratios.values()) <= 0.4, ratios
