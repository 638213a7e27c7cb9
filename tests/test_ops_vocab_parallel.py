"""The head with its classes split over ranks: as exact as the whole one, and the same bits on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convergence.files import make_once
from tests.ranks import on_ranks
from tests.vocab_parallel_ranks import WORLDS, checks, run


@pytest.mark.parametrize(("world", "check"), [(world, check) for world in WORLDS for check in checks(world)])
def test_on_ranks(shared_folder: Path, world: int, check: str) -> None:
    file = shared_folder / f"vocab-parallel-{world}.json"  # the ranks are started once in a run
    make_once(file, lambda path: path.write_text(json.dumps(on_ranks(run, ranks=world))))
    for rank, found in enumerate(json.loads(file.read_text())):
        assert not found[check], f"rank {rank}: {found[check]}"
