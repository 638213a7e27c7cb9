"""The judge of trainers asks for a launch of every kernel that the report of a patch names, and judges any patch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from convergence.arms.quantities import Failure
from convergence.arms.trajectory import Trajectory
from convergence.trainers import material
from convergence.trainers.cases import InCase
from convergence.trainers.observe import Seen
from convergence.trainers.prove import _check_ours, prove_in_trainer
from convergence.trainers.rows import case_of
from liger_kernels.patching.report import PatchReport, Replacement

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

    def failures(launches: dict[str, int]) -> list[tuple[str, str]]:
        found = _check_ours(InCase("sft", Path()), Seen(Trajectory(), [], launches, 0, report))
        return [(one.finding, one.value) for one in found if isinstance(one, Failure)]

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


@pytest.mark.slow
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
    case = case_of("trainer", "llama", f"{__name__}:{patch}", scope)
    outcome = prove_in_trainer(case, InCase("trainer", tmp_path / "llama"), timeout=600)
    assert outcome.verdict == ("cannot run" if statistic == "cannot run" else "different")
    assert statistic in {failure.finding for failure in outcome.failures}
