"""The head with its classes split over ranks: as exact as the whole one, and the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import on_ranks
from tests.vocab_parallel_ranks import WORLDS, checks, run


@pytest.mark.slow
@pytest.mark.parametrize(("world", "check"), [(world, check) for world in WORLDS for check in checks(world)])
def test_on_ranks(once: Callable[..., Any], world: int, check: str) -> None:
    found_by = once(f"vocab-parallel-{world}", lambda: on_ranks(run, ranks=world))
    for rank, found in enumerate(found_by):
        assert not found[check], f"rank {rank}: {found[check]}"
