"""Fixtures of the trainer tests. ``liger_kernels.compat`` is installed before trl is imported, for the flags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import liger_kernels.compat

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--patch"):
        raise pytest.UsageError("--patch is judged in trainers by pytest convergence --trainer all --patch ...")
    # trl looks for the package when its modules are imported; without a flag it does nothing with it.
    liger_kernels.compat.install()


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    import datasets
    import torch

    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # tiny tensors gain nothing from more


@pytest.fixture(scope="session")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """Where the tiny model of each family lies."""
    from convergence.trainers import material

    return {family: material.save(family, tmp_path_factory.mktemp(family)) for family in material.FAMILIES}


@pytest.fixture(scope="session")
def records(pytestconfig: pytest.Config) -> str | None:
    """The folder that records go to."""
    return pytestconfig.getoption("records")
