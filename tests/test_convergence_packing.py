"""What a patched model learns from packed rows is what it learns from their samples one by one, in every reduction.

Truth, baseline and its replicas are the unpatched model over samples alone, in float64 and float32: no boundary, no
weight of a row and no denominator is computed there, only the mean, or the weighted sum, of each sample's own loss. The
candidate is the patched model over packed rows. The statistics and bounds are those of
:mod:`convergence.judge.compare`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import liger_kernels
from convergence.arms.float64 import InFloat64
from convergence.arms.quantities import GRADIENT, INITIAL, LOSS, Moment, Quantity
from convergence.arms.trajectory import Run, Trajectory, build
from convergence.judge import tolerance
from convergence.judge.arms import by_more
from convergence.judge.compare import Pair, compare
from convergence.judge.verdict import Verdict
from convergence.models.data import IGNORE, text
from convergence.models.models import MODELS, MiniModel
from convergence.report.records import worst as worst_of
from tests.packing_checks import EXPONENT, MODES, Sample, boundaries, isolated, packed
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


def alone(run: Run, steps: list[PackedStep]) -> Arm:
    """Every sample by itself through the unpatched model."""
    arm: Arm = []
    with InFloat64() if run.dtype is torch.float64 else contextlib.nullcontext():
        model = build(run)
        for step in steps:
            found = []
            for ids, labels in (one for batch in step.batches for one in batch):
                model.zero_grad(set_to_none=True)
                positions = torch.arange(len(ids), device=DEVICE)[None] + step.first_position
                logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0, :-1]
                loss = F.cross_entropy(logits.float(), labels[1:], ignore_index=IGNORE, reduction="sum")
                loss.backward()
                gradients = {Quantity(GRADIENT, n): p.grad.clone() for n, p in model.named_parameters()}
                found.append((int((labels[1:] != IGNORE).sum()), {LOSS: loss.detach(), **gradients}))
            arm.append(found)
    return arm


def arms_of(
    row: MiniModel, steps: list[PackedStep], nudges: Iterable[int | None] = (None, *range(tolerance.REPLICAS))
) -> list[tuple[Arm, Arm]]:
    """Truth and baseline of the initial weights (``None``) and of every replica: they serve all reductions."""
    run = functools.partial(Run, row.build(0), [], None, device=DEVICE, task=row.task)
    pairs = []
    for nudge in nudges:
        truth = alone(run(dtype=torch.float64, rounded_to=torch.float32, nudge=nudge), steps)
        pairs.append((truth, alone(run(dtype=torch.float32, nudge=nudge), steps)))
    return pairs


@pytest.fixture(scope="module")
def arms() -> list[tuple[Arm, Arm]]:
    return arms_of(MODELS["gemma"], packed_steps())


def reduced(arm: Arm, mode: str, steps: list[PackedStep]) -> Trajectory:
    """The samples' losses and gradients, put together as ``mode`` says."""
    result, p = Trajectory(), EXPONENT[mode]
    for step, found in zip(steps, arm, strict=True):
        counted = [(targets, values) for targets, values in found if targets]
        denominator = sum(targets ** (1 - p) for targets, _ in counted)
        for quantity in counted[0][1]:
            value = sum(values[quantity] * (targets**-p / denominator) for targets, values in counted)
            result.record(quantity, Moment(INITIAL, step.name), value)
    return result


def together(mode: str, mini: MiniModel, steps: list[PackedStep], bounded: bool = False) -> Trajectory:
    """The patched model over packed rows. ``bounded``: every argument says where samples begin."""
    result = Trajectory()
    model = build(Run(mini.build(0), [], None, torch.float32, DEVICE, mini.task))
    liger_kernels.patch(model, loss_reduction=mode)
    for step in steps:
        model.zero_grad(set_to_none=True)
        rows = [packed(batch, step.rows) | (boundaries(batch) if bounded else {}) for batch in step.batches]
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


def reduced_pairs(arms: list[tuple[Arm, Arm]], mode: str, steps: list[PackedStep]) -> list[Pair]:
    return [(reduced(truth, mode, steps), reduced(baseline, mode, steps)) for truth, baseline in arms]


def against(candidate: Trajectory, mode: str, steps: list[PackedStep], arms: list[tuple[Arm, Arm]]) -> Verdict:
    return compare(reduced_pairs(arms, mode, steps), candidate, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_teach_what_their_samples_teach(arms, mode):
    steps = packed_steps()
    verdict = against(together(mode, MODELS["gemma"], steps), mode, steps, arms)
    worst = {s: worst_of(verdict.statistics, s) for s in ("error ratio", "gain", "gain against the others")}
    assert verdict.passed, (verdict.failures, worst)


def test_the_reductions_are_told_apart(arms):
    """Judged by another reduction's truth, each fails: the samples' lengths differ enough."""
    steps = packed_steps()
    for mode in MODES:
        for other in set(MODES) - {mode}:
            candidate = reduced(arms[0][1], other, steps)
            assert not against(candidate, mode, steps, arms).passed


def truths_of(mini: MiniModel, steps: list[PackedStep], nudges: Iterable[int | None]) -> dict[int | None, Arm]:
    run = functools.partial(Run, mini.build(0), [], None, torch.float64, DEVICE, mini.task, rounded_to=torch.float32)
    return {nudge: alone(run(nudge=nudge), steps) for nudge in nudges}


def by_torch(mode: str, mini: MiniModel, steps: list[PackedStep], nudge: int | None) -> Trajectory:
    """The unpatched model over the packed rows of :func:`together`, with PyTorch's loss and a weight for each target.
    So the honest arms round where packed rows do, and not where samples alone do."""
    result, p = Trajectory(), EXPONENT[mode]
    model = build(Run(mini.build(0), [], None, torch.float32, DEVICE, mini.task, nudge=nudge))
    for step in steps:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=DEVICE)
        rows = [packed(batch, step.rows) | boundaries(batch) for batch in step.batches]
        weights = []
        for row in rows:
            first = row["position_ids"] == 0
            row["labels"][first] = IGNORE
            owner = (first.flatten().cumsum(0) - 1).view_as(first)[:, 1:]
            counts = torch.bincount(owner[row["labels"][:, 1:] != IGNORE], minlength=int(first.sum()))
            weights.append((counts, counts.clamp(min=1).float()[owner] ** -p))
            row["position_ids"] += step.first_position
        denominator = sum(float((counts[counts > 0].double() ** (1 - p)).sum()) for counts, _ in weights)
        for row, (_, weight) in zip(rows, weights, strict=True):
            labels = row.pop("labels")[:, 1:]
            logits = model(**row, use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
            loss = (losses * weight.flatten()).sum() / denominator
            loss.backward()
            total += loss.detach()
        result.record(LOSS, Moment(INITIAL, step.name), total)
        for name, parameter in model.named_parameters():
            result.record(Quantity(GRADIENT, name), Moment(INITIAL, step.name), parameter.grad)
    return result


_LINEAR = ("layer_types", "head_dim")
HYBRIDS = {
    "qwen3_next": MODELS["qwen3_next"],
    "qwen3_5": replace(
        MODELS["qwen3_next"],
        name="qwen3_5",
        architecture="Qwen3_5ForCausalLM",
        overrides={k: v for k, v in MODELS["qwen3_next"].overrides.items() if k.startswith(("linear_", *_LINEAR))},
    ),
}


def told_apart(monkeypatch: pytest.MonkeyPatch, mini: MiniModel) -> None:
    """Where a package is missing, a stand-in does what it does: upstream's plain torch for each sample by itself."""
    module = importlib.import_module(mini.model_class().__module__)
    if not hasattr(module, "causal_conv1d_fn") or not hasattr(module, "torch_chunk_gated_delta_rule"):
        pytest.skip("this transformers tells neither part of linear attention where samples begin")
    rule, convolution = (inspect.unwrap(f) for f in (module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn))

    def of_samples(*tensors: torch.Tensor, g: Any, beta: Any, cu_seqlens: Any = None, **how: Any) -> Any:
        if cu_seqlens is None:
            return rule(*tensors, g=g, beta=beta, **how)
        parts = [slice(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist())]
        found = [rule(*(x[:, i] for x in tensors), g=g[:, i], beta=beta[:, i], **how)[0] for i in parts]
        return torch.cat(found, 1), None

    def convolved(x: torch.Tensor, *args: Any, activation: Any, seq_idx: Any = None, **ignored: Any) -> Any:
        lengths = (
            [x.shape[-1]] if seq_idx is None else torch.unique_consecutive(seq_idx, return_counts=True)[1].tolist()
        )
        return torch.cat([convolution(part, *args, activation=activation) for part in x.split(lengths, -1)], -1)

    for package, name, stand_in in (
        ("fla", "torch_chunk_gated_delta_rule", of_samples),
        ("causal_conv1d", "causal_conv1d_fn", convolved),
    ):
        if importlib.util.find_spec(package) is None:
            monkeypatch.setattr(module, name, stand_in)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_rows_of_hybrids_teach_what_their_samples_teach(name, monkeypatch):
    """The patch hands on what says where samples begin; with ``position_ids`` alone, the state of one leaks."""
    mini, steps = HYBRIDS[name], packed_steps()[:2]
    if not mini.is_available():
        pytest.skip(f"this transformers has no {mini.architecture}")
    told_apart(monkeypatch, mini)
    every = (None, *range(tolerance.REPLICAS))
    truths = truths_of(mini, steps, every)
    for mode in ("token", "sample"):
        pairs = [
            (reduced(truth, mode, steps), by_torch(mode, mini, steps, truth_of)) for truth_of, truth in truths.items()
        ]
        candidate = together(mode, mini, steps, bounded=True)

        def more(mode: str = mode) -> list[Pair]:
            """As in a trainer, two steps and a few replicas may know a gain badly: terms of A_log's gradient cancel."""
            others = truths_of(mini, steps, range(tolerance.REPLICAS, tolerance.MANY_REPLICAS))
            return [(reduced(truth, mode, steps), by_torch(mode, mini, steps, n)) for n, truth in others.items()]

        verdict = by_more(pairs, more, lambda arms, candidate=candidate: compare(arms, candidate, torch.float32))
        assert verdict.passed, (mode, verdict.failures)
        assert not compare(pairs, together(mode, mini, steps), torch.float32).passed
