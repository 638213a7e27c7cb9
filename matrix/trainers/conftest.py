"""Fixtures of the trainer tests. ``liger_kernels.compat`` is installed before trl is imported, for the flags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import liger_kernels.compat

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def pytest_configure(config: pytest.Config) -> None:
    # trl looks for the package when its modules are imported; without a flag it does nothing with it. A patch to judge
    # may be of the package that has this name.
    if not config.getoption("--patch"):
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
    from matrix.trainers import material

    return {family: material.save(family, tmp_path_factory.mktemp(family)) for family in material.FAMILIES}


@pytest.fixture(scope="session")
def records(pytestconfig: pytest.Config) -> str | None:
    """The folder that records go to."""
    return pytestconfig.getoption("records")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--patch``, what is about this package's own patch is left out."""
    if config.getoption("--patch"):
        here = Path(__file__).parent
        left = [item for item in items if item.path.parent == here and not item.name.startswith("test_trainer[")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
