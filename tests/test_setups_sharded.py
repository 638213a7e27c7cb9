"""Sharded and replicated models on two ranks: as exact as unpatched in the same set-up, and fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import sharded_ranks
from tests.ranks import RANKS, on_ranks
from tests.sharded_ranks import ORDERS, SETUPS, UNFUSED


@pytest.fixture(scope="module")
def found(once: Callable[..., Any]) -> list[dict[str, Any]]:
    """What each rank found, of every set-up: the ranks are started once in a run."""
    return once("sharded", lambda: on_ranks(sharded_ranks.run))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("setup", SETUPS)
def test_training(found: list[dict[str, Any]], setup: str, order: str) -> None:
    for rank in range(RANKS):
        if setup in found[rank]:
            pytest.skip(found[rank][setup]["absent"])
        result = found[rank][f"{setup}/{order}"]
        assert "error" not in result, f"rank {rank}: {result['error']}"
        if setup in UNFUSED:  # the head is split, and computes its logits itself
            assert not result["fuses_head"]
            assert any("tensor parallel plan" in reason for reason in result["left"])
        else:
            assert result["fuses_head"]
            assert result["left"] == []
            assert result["fallbacks"] == {"outputs.logits was read": 1}
            assert result["never ran"] == []
