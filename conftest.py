"""Chooses the device before anything imports Triton: without a GPU, kernels run in Triton's interpreter."""

from __future__ import annotations

import gc

import pytest

pytest_plugins = ["convergence.plugin"]


@pytest.fixture(scope="module", autouse=True)
def little_for_the_garbage_collector() -> None:
    """What is there before a module's first test stays, millions of objects; looking through them again and again takes
    a collection half a second."""
    gc.collect()
    gc.freeze()
