"""Chooses the device before anything imports Triton: without a GPU, kernels run in Triton's interpreter."""

from __future__ import annotations

import gc
import os

import pytest

pytest_plugins = ["convergence.plugin"]


@pytest.fixture(scope="module", autouse=True)
def little_for_the_garbage_collector() -> None:
    """What is there before a module's first test stays, millions of objects; looking through them again and again takes
    a collection half a second. The interpreter and torch.compile make so many more that a collection after every few
    hundred of them is 5% of the time; on a GPU, whose memory garbage may hold, that is left as it is."""
    gc.collect()
    gc.freeze()
    if "TRITON_INTERPRET" in os.environ:
        gc.set_threshold(100_000, 20, 20)
