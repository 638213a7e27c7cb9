"""What a patched model learns from packed rows is what it learns from their samples one by one, in every reduction.

Truth, baseline and its replicas are the unpatched model over samples alone, in float64 and float32: no boundary, no
weight of a row and no denominator is computed there, only the mean, or the weighted sum, of each sample's own loss. The
candidate is the patched model over packed rows. The statistics and bounds are those of
:mod:`convergence.judge.compare`.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import liger_kernels
from convergence.arms.float64 import InFloat64
from convergence.arms.quantities import GRADIENT, INITIAL, LOSS, Moment, Quantity
from convergence.arms.trajectory import Run, Trajectory, build
from convergence.judge import tolerance
from convergence.judge.compare import Pair, compare
from convergence.models.data import IGNORE, text
from convergence.models.models import MODELS
from convergence.report.records import worst as worst_of
from tests.packing_checks import EXPONENT, MODES, Sample, isolated, packed
from tests.patching_checks import DEVICE

pytestmark = isolated


@dataclass
class PackedStep:
    """One optimizer step: the samples of each micro-batch, and how they are packed."""

    name: str
    batches: list[list[Sample]]
    rows: int = 1
    first_position: int = 0


def sample(start: int, length: int, *masked: slice) -> Sample:
    ids = text()[start : start + length].to(DEVICE)
    labels = ids.clone()
    for part in masked:
        labels[part] = IGNORE
    return ids, labels


def packed_steps() -> list[PackedStep]:
    """Samples of very different lengths: single turns, chats whose middle is masked, one without any target."""
    return [
        PackedStep("single turns", [[sample(100, 3), sample(200, 29), sample(300, 11)]]),
        PackedStep("chats", [[sample(400, 23, slice(4), slice(9, 15)), sample(500, 9, slice(3, 5)), sample(600, 5)]]),
        PackedStep("empty sample", [[sample(700, 17), sample(800, 12, slice(None)), sample(900, 4), sample(950, 8)]]),
        PackedStep("packed rows", [[sample(1000 + 50 * i, n) for i, n in enumerate((19, 4, 7, 13))]], rows=2),
        PackedStep(
            "accumulated", [[sample(1300, 5), sample(1400, 24)], [sample(1500, 7, slice(2))], [sample(1600, 2)]]
        ),
        PackedStep("positions from 2", [[sample(1700, 6), sample(1800, 21), sample(1900, 3)]], first_position=2),
    ]


Arm = list[list[tuple[int, dict[str, torch.Tensor]]]]  # for each step and sample: targets; summed loss and gradients


def alone(run: Run) -> Arm:
    """Every sample by itself through the unpatched model."""
    arm: Arm = []
    with InFloat64() if run.dtype is torch.float64 else contextlib.nullcontext():
        model = build(run)
        for step in packed_steps():
            found = []
            for ids, labels in (one for batch in step.batches for one in batch):
                model.zero_grad(set_to_none=True)
                positions = torch.arange(len(ids), device=DEVICE)[None] + step.first_position
                logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0, :-1]
                loss = F.cross_entropy(logits.float(), labels[1:], ignore_index=IGNORE, reduction="sum")
                loss.backward()
                gradients = {Quantity(GRADIENT, name): p.grad.clone() for name, p in model.named_parameters()}
                found.append((int((labels[1:] != IGNORE).sum()), {LOSS: loss.detach(), **gradients}))
            arm.append(found)
    return arm


@pytest.fixture(scope="module")
def arms() -> list[tuple[Arm, Arm]]:
    """Truth and baseline of the initial weights and of every replica: they serve all reductions."""
    run = functools.partial(Run, MODELS["gemma"].build(0), [], None, device=DEVICE)
    pairs = []
    for nudge in (None, *range(tolerance.REPLICAS)):
        truth = alone(run(dtype=torch.float64, rounded_to=torch.float32, nudge=nudge))
        pairs.append((truth, alone(run(dtype=torch.float32, nudge=nudge))))
    return pairs


def reduced(arm: Arm, mode: str) -> Trajectory:
    """The samples' losses and gradients, put together as ``mode`` says."""
    result, p = Trajectory(), EXPONENT[mode]
    for step, found in zip(packed_steps(), arm, strict=True):
        counted = [(targets, values) for targets, values in found if targets]
        denominator = sum(targets ** (1 - p) for targets, _ in counted)
        for quantity in counted[0][1]:
            value = sum(values[quantity] * (targets**-p / denominator) for targets, values in counted)
            result.record(quantity, Moment(INITIAL, step.name), value)
    return result


def together(mode: str) -> Trajectory:
    """The patched model over packed rows."""
    result = Trajectory()
    model = build(Run(MODELS["gemma"].build(0), [], None, torch.float32, DEVICE))
    liger_kernels.patch(model, loss_reduction=mode)
    for step in packed_steps():
        model.zero_grad(set_to_none=True)
        rows = [packed(batch, step.rows) for batch in step.batches]
        for row in rows:
            first = row["position_ids"] == 0
            row["position_ids"] += step.first_position
            if mode == "token":  # here the collators see to it that no sample predicts the next one
                row["labels"][first] = IGNORE
        count: Any = None
        if len(rows) > 1 and mode == "token":
            count = sum(int((row["labels"][:, 1:] != IGNORE).sum()) for row in rows)
        elif len(rows) > 1:
            count = liger_kernels.packing_denominator(rows, mode)
        total = torch.zeros((), device=DEVICE)
        for row in rows:
            loss = model(**row, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        result.record(LOSS, Moment(INITIAL, step.name), total)
        for name, parameter in model.named_parameters():
            result.record(Quantity(GRADIENT, name), Moment(INITIAL, step.name), parameter.grad)
    assert dict(liger_kernels.status(model).fallbacks) == {}
    return result


def reduced_pairs(arms: list[tuple[Arm, Arm]], mode: str) -> list[Pair]:
    return [(reduced(truth, mode), reduced(baseline, mode)) for truth, baseline in arms]


@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_teach_what_their_samples_teach(arms, mode):
    verdict = compare(reduced_pairs(arms, mode), together(mode), torch.float32)
    worst = {s: worst_of(verdict.statistics, s) for s in ("error ratio", "gain", "gain against the others")}
    assert verdict.passed, (verdict.failures, worst)


def test_the_reductions_are_told_apart(arms):
    """Judged by another reduction's truth, each fails: the samples' lengths differ enough."""
    for mode in MODES:
        for other in set(MODES) - {mode}:
            assert not compare(reduced_pairs(arms, mode), reduced(arms[0][1], other), torch.float32).passed
