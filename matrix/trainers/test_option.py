"""``pytest convergence --trainer``: the proof trains in a trainer, with a patch of anybody."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from convergence.report.records import load_folder

ROOT = Path(__file__).parents[2]


def equal(model: Any, factor: float = 1.0) -> None:
    """The norms of a Llama, written otherwise."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = functools.partial(_normed, module, factor)


def wrong(model: Any) -> None:
    equal(model, factor=1.01)


def _normed(module: Any, factor: float, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide / (wide.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()
    normed: torch.Tensor = module.weight * wide.to(x.dtype) * factor
    return normed


PROOF = ["convergence", "-q", "-p", "no:cacheprovider", "--no-blame"]


def test_patches_are_judged_in_a_trainer(tmp_path: Path) -> None:
    patches = (f"{__name__}:equal", f"{__name__}:wrong", "convergence.patches:fused_linear")
    options = ("--trainer", "trainer", "--patch", ",".join(patches), "--records", str(tmp_path))
    command = [sys.executable, "-m", "pytest", *PROOF, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    records = {record.patch.rpartition(":")[2]: record for record in load_folder(tmp_path)}
    assert done.returncode == 1, done.stdout[-2000:]
    assert {name: record.verdict for name, record in records.items()} == {
        "equal": "equal",
        "wrong": "different",
        "fused_linear": "equal",
    }, done.stdout[-3000:]
    assert records["equal"].census == {"LlamaRMSNorm": 5}
    assert {failure.finding for failure in records["wrong"].failures} & {"error ratio", "gain"}
    assert "trl" in records["equal"].versions


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--trainer", "ppo"), "unknown trainer 'ppo'; allowed are all, trainer,"),
        (("--trainer", "sft", "--models", "qwen2"), "unknown model 'qwen2'; allowed are all, llama, gemma"),
        (("--trainer", "sft", "--setups", "ddp"), "--trainer and --setups do not go together; leave --setups out"),
        (("--trainer", "sft", "--keep-candidates", "x"), "--trainer and --keep-candidates do not go together"),
        (("--trainer", "sft", "--dtypes", "bfloat16"), "--trainer and --dtypes do not go together"),
    ],
)
def test_what_no_trainer_can_be_asked(
    options: tuple[str, ...], shown: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    in_this_process = ("-p", "no:xdist", "-p", "no:faulthandler")
    assert pytest.main([*PROOF, "--collect-only", *in_this_process, *options]) == pytest.ExitCode.USAGE_ERROR
    assert shown in "".join(capfd.readouterr())
