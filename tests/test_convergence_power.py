"""What the suite can see in real trajectories: one percent of any one parameter's gradient, and faults that hooks put
where no rule about patching sees them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from convergence.arms.quantities import DECODING, EVALUATION, GRADIENT
from convergence.arms.train import train
from convergence.arms.trajectory import Trajectory
from convergence.case import DTYPES, References, load_patch, references
from convergence.judge.compare import compare
from tests import convergence_faults

CPU = torch.device("cpu")
# By fault: the statistic that is meant for it, and where it shows.
IN_HOOKS = {
    "last_norm_too_large_in_evaluation": ("gain", {"accumulated mean", EVALUATION, DECODING}),
    "layer_too_large_in_evaluation": ("gain", {"accumulated mean", EVALUATION, DECODING}),
    "last_norm_too_large_in_decoding": ("gain", {DECODING}),
    "rope_of_the_first_row_in_decoding": ("row error ratio", {DECODING}),
    "padding_seen_in_decoding": ("row error ratio", {DECODING}),
    "gradient_too_large_in_evaluation": ("gain", {"accumulated mean"}),
    "norm_keeps_its_state_in_the_module": ("error ratio", {"logits read"}),
    "last_rows_without_gradient": ("row error ratio", {"packed"}),
}


def trained(reference: References, dtype: torch.dtype, patch: str, **options: Any) -> Trajectory:
    candidate = train(reference.run(dtype, CPU, patch=load_patch(patch), **options))
    candidate.model = None
    return candidate


@pytest.mark.power
def test_one_percent_of_any_gradient_is_seen_in_bfloat16():
    """A gain and its bound follow from one quantity alone, so all parameters can be scaled at once and looked up one at
    a time. Nothing else is asked of them than their own gain, and nothing of an honest candidate fails."""
    dtype = torch.bfloat16
    reference = references("gemma3", "bfloat16", "hard", "cpu", 0)
    candidate = trained(reference, dtype, "convergence.patches:fused_cross_entropy")
    assert compare(reference.pairs, candidate, dtype).passed
    parameters = {q for q in candidate.values if q.kind == GRADIENT}
    names = set(map(str, parameters))
    assert len(names) > 20
    for factor in (1.01, 0.99):
        scaled = copy.deepcopy(candidate)
        for quantity in parameters:
            for step, value in scaled.values[quantity].items():
                scaled.values[quantity][step] = (value.double() * factor).to(value.dtype)
        verdict = compare(reference.pairs, scaled, dtype)
        seen = {quantity for quantity, _, statistic, *_ in verdict.failures if statistic == "gain"}
        assert seen >= names, (factor, names - seen)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [("gemma3", "bfloat16"), ("llama-untied", "float32")])
@pytest.mark.parametrize(
    ("fault", "statistic", "steps"),
    [pytest.param(fault, *of, id=f"{fault}-{of[0]}") for fault, of in IN_HOOKS.items()],
)
def test_a_fault_in_a_hook_is_seen_by_the_statistic_that_is_meant_for_it(model, dtype, fault, statistic, steps):
    """Only ``steps`` at the initial weights run with the fault. All else is the baseline's: it makes a fault harder to
    see, never easier."""
    reference, judged = references(model, dtype, "hard", "cpu", 0), DTYPES[dtype]
    part = trained(reference, judged, f"{convergence_faults.__name__}:{fault}", only=frozenset(steps))
    candidate = copy.deepcopy(reference.pairs[0][1])
    for quantity, by_step in part.values.items():
        candidate.values[quantity].update(by_step)
    verdict = compare(reference.pairs, candidate, judged, foreign=True)
    assert statistic in {failure[2] for failure in verdict.failures}, verdict.failures


def test_a_layout_of_its_own_between_modules_is_noted_of_others_and_fails_ours():
    """Without padding, say: what a patch of somebody else keeps inside is its own affair."""
    reference = references("llama-untied", "float32", "hard", "cpu", 0)
    candidate = copy.deepcopy(reference.pairs[0][1])
    for quantity, by_step in candidate.values.items():
        if str(quantity).endswith("hidden states entering model.layers.1"):
            by_step.update({step: value.flatten(0, 1) for step, value in by_step.items()})
    foreign, ours = (compare(reference.pairs, candidate, torch.float32, foreign=f) for f in (True, False))
    assert foreign.passed, foreign.failures
    assert any("another layout" in note for note in foreign.notes)
    assert {failure[2] for failure in ours.failures} == {"shape"}
