"""The pytest hooks of the proof: options, device choice, the table at the end. Only hooks; the work is done elsewhere.

Loaded by the root ``conftest.py`` for every run, ``tests/`` too, so nothing heavy is imported at the top.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("convergence", "the proof that a patch is the same mathematics")
    group.addoption("--patch", metavar="MODULE:FUNCTION", help="judge function(model) (default: liger_kernels' own)")
    group.addoption("--models", default="core", help="a comma-separated list, 'core' or 'all' (default: core)")
    group.addoption("--dtypes", default="float32,bfloat16", help="float32, bfloat16 or both (default: both)")
    group.addoption("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    group.addoption("--profile", default="hard", help="plain or hard inputs (default: hard)")
    group.addoption("--records", metavar="DIR", default=None, help="write one JSON record per case into DIR")


def choose_interpreter(device: str | None) -> None:
    """Without a GPU, kernels run in Triton's interpreter; Triton reads the variable once, when it is imported."""
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


# At import, not in pytest_configure, because a conftest.py below may import liger_kernels.ops while it is collected.
choose_interpreter(None)


def pytest_configure(config: pytest.Config) -> None:
    choose_interpreter(config.getoption("--device"))
