"""What the suite can see: one percent of any one parameter's gradient, in bfloat16, in real trajectories."""

from __future__ import annotations

import copy

import torch

from convergence.arms.quantities import GRADIENT
from convergence.arms.train import train
from convergence.case import load_patch, references
from convergence.judge.compare import compare


def test_one_percent_of_any_gradient_is_seen_in_bfloat16():
    """A gain and its bound follow from one quantity alone, so all parameters can be scaled at once and looked up one at
    a time. Nothing else is asked of them than their own gain, and nothing of an honest candidate fails."""
    dtype, device = torch.bfloat16, torch.device("cpu")
    reference = references("gemma3", "bfloat16", "hard", "cpu", 0)
    patch = load_patch("convergence.patches:fused_cross_entropy")
    candidate = train(reference.run(dtype, device, patch=patch))
    candidate.model = None
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
