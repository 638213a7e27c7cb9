"""The statistics on synthetic trajectories: what is judged, what it sees, and what it must not see."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from convergence.arms.quantities import (
    DECODING,
    DISPLACEMENT,
    END,
    EVALUATION,
    EVALUATION_LOGITS,
    GRADIENT,
    HIDDEN_GRADIENT,
    INITIAL,
    LOGITS,
    LOSS,
    SGD,
    TARGET_LOGIT,
    Moment,
    Quantity,
)
from convergence.arms.trajectory import Trajectory
from convergence.judge import tolerance
from convergence.judge.compare import compare
from convergence.report.records import STATISTICS

STEPS = [Moment(INITIAL, f"step {i}") for i in range(12)]
A, B, C, D = (Quantity(GRADIENT, name) for name in "abcd")
TENSORS = {A: (40, 50), B: (300,), C: (20, 30)}
NOISE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


ENTERING = Quantity(HIDDEN_GRADIENT, "norm")
MOVED = Quantity(DISPLACEMENT, "a")
# What runs in another way than training does, observed a few times only.
FEW = {
    EVALUATION_LOGITS: [*(Moment(INITIAL, EVALUATION, i) for i in range(12)), Moment(INITIAL, DECODING)],
    MOVED: [Moment(SGD, END), Moment("AdamW", END)],
}


def trajectories(dtype: torch.dtype, seed: int) -> tuple[list[tuple[Trajectory, Trajectory]], Trajectory]:
    """Six (truth, baseline) pairs with fresh noise, and an honest candidate for the first truth."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(truth: Trajectory) -> Trajectory:
        arm = Trajectory()
        for quantity, values in truth.values.items():
            for step, value in values.items():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                arm.record(quantity, step, (value * (1 + NOISE[dtype] * noise)).to(dtype))
        return arm

    pairs = []
    for _ in range(6):
        truth = Trajectory()
        for quantity, shape in TENSORS.items():
            for step in STEPS:
                truth.record(quantity, step, torch.randn(shape, generator=generator, dtype=torch.float64))
        for step in STEPS:
            truth.record(LOSS, step, 3 + torch.rand((), generator=generator, dtype=torch.float64))
            rows = torch.logspace(-6, 0, 20, dtype=torch.float64).view(2, 10, 1)  # of all sizes
            truth.record(ENTERING, step, rows * torch.randn(2, 10, 30, generator=generator, dtype=torch.float64))
        for quantity, steps in FEW.items():
            for step in steps:
                truth.record(quantity, step, torch.randn(30, 100, generator=generator, dtype=torch.float64))
        pairs.append((truth, noisy(truth)))
    return pairs, noisy(pairs[0][0])


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("seed", range(3))
def test_honest_noise_passes(dtype, seed):
    pairs, candidate = trajectories(dtype, seed)
    verdict = compare(pairs, candidate, dtype)
    assert verdict.passed, verdict.failures
    assert {s.statistic for s in verdict.statistics} == set(STATISTICS)


def change(candidate: Trajectory, quantity: Quantity, function) -> None:
    for step, value in list(candidate.values[quantity].items()):
        candidate.values[quantity][step] = function(value)


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize(("quantity", "factor"), [(A, 1.01), (B, 0.99), (C, 1.01)], ids=str)
def test_one_gradient_scaled_by_one_percent_fails_by_its_gain(dtype, quantity, factor):
    pairs, candidate = trajectories(dtype, 0)
    change(candidate, quantity, lambda value: value * factor)
    verdict = compare(pairs, candidate, dtype)
    assert any(f[0] == str(quantity) and f[2] == "gain" for f in verdict.failures)
    assert not any(f[0] != str(quantity) and f[2] in ("gain", "error ratio") for f in verdict.failures)


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("way", [EVALUATION, DECODING, END])
def test_what_is_scaled_in_one_way_of_running_alone_fails_by_its_gain(dtype, way):
    """In a mean over all steps, decoding is one of 13. How far the weights moved is observed once for an optimizer."""
    pairs, candidate = trajectories(dtype, 0)
    for quantity, steps in FEW.items():
        for step in steps:
            if step.step == way and step.phase != "AdamW":
                candidate.values[quantity][step] = candidate.values[quantity][step] * 1.01
    failures = {(f[0], f[2]) for f in compare(pairs, candidate, dtype).failures}
    by_gain = {(str(MOVED if way == END else EVALUATION_LOGITS), "gain")}
    assert failures >= by_gain
    assert failures == by_gain or dtype is torch.float32


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("spoil", [torch.zeros_like, lambda row: 1.5 * row], ids=["lost", "half as much more"])
def test_one_small_row_among_many_fails_by_its_own_size(dtype, spoil):
    pairs, candidate = trajectories(dtype, 0)
    row = candidate.values[ENTERING][STEPS[5]][0, 3]  # a ten-thousandth of the largest
    row.copy_(spoil(row))
    failures = compare(pairs, candidate, dtype).failures
    assert [f[:3] for f in failures if f[2] == "row error ratio"] == [(str(ENTERING), str(STEPS[5]), "row error ratio")]
    if dtype is torch.bfloat16:
        assert len(failures) == 1, "in the mean over a batch it is nothing"


def test_what_was_measured_of_other_arms_is_not_taken():
    """A baseline remembers the figures of the honest arms, which are these only as long as the tensors are."""
    pairs, candidate = trajectories(torch.float32, 0)
    others, _ = trajectories(torch.float32, 1)
    first, second = (compare(chosen, candidate, torch.float32) for chosen in (pairs, [pairs[0], *others[1:]]))
    again = compare(pairs, candidate, torch.float32)
    assert first.statistics == again.statistics != second.statistics
    copied = copy.deepcopy(([pairs[0], *others[1:]], candidate))
    assert compare(*copied, torch.float32).statistics == second.statistics


@pytest.mark.parametrize("dtype", NOISE)
def test_noise_three_times_as_large_fails_by_the_error_ratio(dtype):
    pairs, candidate = trajectories(dtype, 0)
    truth = pairs[0][0].values[A]
    for step, value in candidate.values[A].items():
        candidate.values[A][step] = (truth[step] + 3 * (value.double() - truth[step])).to(dtype)
    failures = compare(pairs, candidate, dtype).failures
    assert any(f[0] == "gradient of a" and f[2] == "error ratio" for f in failures), failures


def only_failure(pairs, candidate, **options) -> tuple[str, str, str]:
    failures = compare(pairs, candidate, torch.float32, **options).failures
    assert failures
    return failures[0][:3]


@pytest.mark.parametrize(
    ("spoil", "quantity", "step", "statistic"),
    [
        pytest.param(lambda c: c.values[B][STEPS[4]][7].fill_(math.nan), B, STEPS[4], "finite", id="NaN"),
        pytest.param(lambda c: c.values.pop(C), C, "every step", "missing", id="never arrives"),
        pytest.param(lambda c: c.values[C].pop(STEPS[3]), C, STEPS[3], "missing", id="missing in one step"),
        pytest.param(
            lambda c: c.record(D, STEPS[0], torch.ones(3)), D, STEPS[0], "unexpected", id="of the candidate alone"
        ),
        pytest.param(lambda c: change(c, A, torch.t), A, STEPS[0], "shape", id="another shape"),
        pytest.param(lambda c: change(c, A, torch.zeros_like), A, STEPS[0], "non-zero", id="zeros"),
    ],
)
def test_a_gradient_that_cannot_be_judged_fails(spoil, quantity, step, statistic):
    pairs, candidate = trajectories(torch.float32, 0)
    spoil(candidate)
    assert only_failure(pairs, candidate) == (str(quantity), str(step), statistic)


def test_a_gradient_where_the_truth_has_none_fails():
    pairs, candidate = trajectories(torch.float32, 0)
    for truth, arm in pairs:
        truth.values[B][STEPS[0]].zero_()
        arm.values[B][STEPS[0]].zero_()
    assert only_failure(pairs, candidate) == ("gradient of b", str(STEPS[0]), "zero")


def test_logits_that_never_exist_are_a_failure_of_ours_and_a_note_for_others():
    pairs, candidate = trajectories(torch.float32, 0)
    for truth, arm in pairs:
        for quantity in (LOGITS, TARGET_LOGIT):
            truth.record(quantity, STEPS[0], torch.ones(4).double())
            arm.record(quantity, STEPS[0], torch.ones(4) + 1e-6)
    assert not compare(pairs, candidate, torch.float32).passed
    verdict = compare(pairs, candidate, torch.float32, foreign=True)
    assert verdict.passed
    assert any("not observable" in note for note in verdict.notes)


def test_complaints_and_new_warnings_fail():
    pairs, candidate = trajectories(torch.float32, 0)
    candidate.warnings.append("falling back")
    assert only_failure(pairs, candidate)[2] == "warning that the baseline does not give"
    pairs[0][1].warnings.append("falling back")
    assert compare(pairs, candidate, torch.float32).passed
    candidate.complaints.append("the logits changed")
    assert only_failure(pairs, candidate)[2] == "overwritten"


def test_a_generated_token_may_differ_only_where_noise_cannot_tell():
    pairs, candidate = trajectories(torch.float32, 0)
    for arm, noise in ((pairs[0][0], 0.0), (pairs[0][1], 1e-3), (candidate, 1e-3)):
        arm.record(EVALUATION_LOGITS, Moment(SGD, EVALUATION), torch.ones(2, 5).double() + noise)
        arm.generated = torch.tensor([[1, 2, 3]])
        arm.scores = torch.zeros(3, 1, 5).double()
    for truth, arm in pairs[1:]:
        truth.values[EVALUATION_LOGITS], arm.values[EVALUATION_LOGITS] = copy.deepcopy(
            (pairs[0][0].values[EVALUATION_LOGITS], pairs[0][1].values[EVALUATION_LOGITS])
        )
    candidate.generated = torch.tensor([[1, 4, 0]])
    pairs[0][0].scores[1, 0, 2] = 3e-3
    assert compare(pairs, candidate, torch.float32).passed
    pairs[0][0].scores[1, 0, 2] = 1.0
    assert only_failure(pairs, candidate)[:2] == ("generated tokens", "row 0, token 1")


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize(("name", "statistic"), [("ratio_bound", "ratio"), ("gain_bound", "gain")])
def test_a_bound_that_no_honest_arm_comes_near_is_refused(dtype, name, statistic, monkeypatch):
    """Whatever it is inflated by. Nothing is beyond it, the fault neither."""
    pairs, candidate = trajectories(dtype, 0)
    change(candidate, A, lambda value: 1.5 * value)
    bound = getattr(tolerance, name)
    monkeypatch.setattr(tolerance, name, lambda *args, **options: 1e6 * bound(*args, **options))
    failures = compare(pairs, candidate, dtype).failures
    refused = [failure for failure in failures if failure[2] == "cannot judge"]
    assert {failure[0] for failure in refused} >= {str(q) for q in (*TENSORS, LOSS)}
    assert all(statistic in failure[3] for failure in refused)
