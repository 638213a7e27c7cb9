"""The judge of trainers asks for a launch of every kernel that the report of a patch names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import liger_kernels
from convergence.arms.quantities import GRADIENT_NORM, SGD, Moment
from convergence.arms.trajectory import Trajectory
from convergence.judge.verdict import Verdict
from liger_kernels.patching.report import PatchReport, Replacement
from matrix.trainers.judge import TrainerRecord, _check_what_ran
from matrix.trainers.observe import Seen

LAUNCHED = {"_rms_norm_fwd_kernel": 1, "_rope_kernel": 1, "_glu_fwd_kernel": 1}


@pytest.mark.parametrize(
    ("kernel", "launched", "asked"),
    [
        ("layer_norm", "_layer_norm_fwd_kernel", True),
        ("gated_rms_norm", "_gated_rms_norm_fwd_kernel", True),
        ("experts", "_packed_glu_fwd_kernel", True),
        ("linear_cross_entropy", "_cross_entropy_fwd_kernel", False),  # a trainer may have a loss of its own
    ],
)
def test_a_replaced_kernel_must_have_been_launched(kernel, launched, asked, monkeypatch) -> None:
    replaced = [Replacement(name, name, "Module", "") for name in ("rms_norm", "rope", "swiglu", kernel)]
    report = PatchReport(kernels=(kernel,), replaced=replaced)
    monkeypatch.setattr(liger_kernels, "status", lambda model: report)
    model = SimpleNamespace(unwrap_model=lambda model: model)
    trainer = SimpleNamespace(accelerator=model, model=model)
    baseline = Seen(Trajectory(), [], {}, 0, trainer)
    for step in (1, 2):
        baseline.trajectory.record(GRADIENT_NORM, Moment(SGD, str(step)), torch.tensor(float(step)))

    def failures(launches: dict[str, int]) -> list[tuple[str, str]]:
        verdict = Verdict()
        _check_what_ran(verdict, baseline, Seen(Trajectory(), [], launches, 0, trainer), TrainerRecord("c", "f", "w"))
        return [(failure.statistic, failure.value) for failure in verdict.failures]

    assert failures(LAUNCHED) == [("not launched", kernel)] * asked
    assert failures({**LAUNCHED, launched: 1}) == []
