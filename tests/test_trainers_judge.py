"""The judge of trainers asks for a launch of every kernel that the report of a patch names, and judges any patch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from convergence.arms.quantities import GRADIENT_NORM, SGD, Moment
from convergence.arms.trajectory import Trajectory
from liger_kernels.patching.report import PatchReport, Replacement
from matrix.trainers import material
from matrix.trainers.judge import TrainerRecord, _check_what_ran, judge_foreign
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
def test_a_replaced_kernel_must_have_been_launched(kernel, launched, asked) -> None:
    replaced = [Replacement(name, name, "Module", "") for name in ("rms_norm", "rope", "swiglu", kernel)]
    report = PatchReport(kernels=(kernel,), replaced=replaced)
    baseline = Seen(Trajectory(), [], {}, 0, None)
    for step in (1, 2):
        baseline.trajectory.record(GRADIENT_NORM, Moment(SGD, str(step)), torch.tensor(float(step)))

    def failures(launches: dict[str, int]) -> list[tuple[str, str]]:
        seen = Seen(Trajectory(), [], launches, 0, report)
        found = _check_what_ran(baseline, seen, TrainerRecord("sft", "f", "w"))
        return [(failure.finding, failure.value) for failure in found]

    assert failures(LAUNCHED) == [("not launched", kernel)] * asked
    assert failures({**LAUNCHED, launched: 1}) == []


def doubled(model: Any) -> None:
    """In the class, so that a model that is made later has it, too."""
    cls = type(model)
    forward = cls.forward

    @functools.wraps(forward)  # Trainer reads its signature
    def with_twice_the_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        outputs.loss = outputs.loss * 2
        return outputs

    cls.forward = with_twice_the_loss


def raises(model: Any) -> None:
    raise ValueError("no such model")


def crashes(model: Any) -> None:
    model.forward = None


@pytest.mark.parametrize(
    ("patch", "scope", "statistic"),
    [
        ("doubled", "class", "gain"),
        ("raises", "instance", "cannot run"),
        ("crashes", "instance", "raised"),
    ],
)
def test_a_patch_of_somebody_else(patch: str, scope: str, statistic: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    material.save("llama", tmp_path / "llama")
    record = judge_foreign("trainer", "llama", tmp_path / "llama", f"{__name__}:{patch}", scope, timeout=600)
    assert (record.verdict, record.way) == ("different", f"{patch}-{scope}")
    assert statistic in {failure.finding for failure in record.failures}
