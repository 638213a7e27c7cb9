"""What every check in a cell gets."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def little_for_the_garbage_collector() -> None:
    """What is there before a module's first test, mostly imported, is not looked through again and again."""
    gc.collect()
    gc.freeze()
