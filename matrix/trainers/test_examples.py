"""The examples with trl's trainers, in every cell whose trl they are written for."""

from __future__ import annotations

import importlib.metadata
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_kernels
from convergence.trainers import material

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMON: dict[str, Any] = {"use_cpu": not torch.cuda.is_available(), "bf16": False, "disable_tqdm": True}
COMMON |= {"max_steps": 1, "logging_steps": 1, "gradient_checkpointing": False}
ARGUMENTS = {
    "trl_sft": {"per_device_train_batch_size": 2},
    "trl_grpo": {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 6},
}


def run(name: str, folder: str) -> None:
    """Train a step: it logs a finite loss, and the model is patched."""
    train = runpy.run_path(str(EXAMPLES / f"{name}.py"))["train"]
    trainer = train(folder, material.sentences()[:4], **COMMON, **ARGUMENTS[name])
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert torch.tensor(losses).isfinite().all()
    assert len(losses) == 1
    report = liger_kernels.status(trainer.model)
    assert report is not None
    assert report.replaced


@pytest.mark.parametrize("name", [*ARGUMENTS])
def test_example(name: str, folders: dict[str, Path]) -> None:
    version = importlib.metadata.version("trl")
    if int(version.partition(".")[0]) < 1:
        pytest.skip(f"trl {version}: the examples are written for trl 1")
    run(name, str(folders["llama"]))
