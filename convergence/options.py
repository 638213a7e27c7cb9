"""Options of the proof that choose what is trained, and with which others they do not go together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from convergence.models import own
from convergence.tables import visible
from convergence.trainers import rows


@contextlib.contextmanager
def usage_error(option: str) -> Iterator[None]:
    """Inside, a ValueError is one of the user's, who is told the ``option`` too. So is what may not be read."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise pytest.UsageError(visible(f"{option}{error}")) from None


def _check_alone(config: pytest.Config, option: str, **others: Any) -> None:
    """See that ``option`` comes without ``others``, which are given with their defaults."""
    for name, default in others.items():
        other = f"--{name.replace('_', '-')}"
        if config.getoption(other) not in (default, None):
            raise pytest.UsageError(f"{option} and {other} do not go together; leave {other} out")


def trainers(config: pytest.Config) -> list[tuple[str, str]]:
    """Model and trainer of every case of ``--trainer``; nothing without that option."""
    if not config.getoption(rows.OPTION):
        return []
    names = config.getoption("--models")
    return rows.select(config.getoption(rows.OPTION), "llama" if names == "core" else names)


def check_trainers(config: pytest.Config) -> None:
    if not config.getoption(rows.OPTION):
        return
    with usage_error(f"{rows.OPTION}: "):
        trainers(config)
    alone: dict[str, Any] = {"models_from": None, "checkpoint": None, "setups": "plain", "profile": "hard"}
    alone |= {
        "references": None,
        "compare_to": None,
        "candidate_from": None,
        "keep_candidates": None,
        "dtypes": rows.DTYPE,
        "device": rows.DEVICE.type,
    }
    _check_alone(config, rows.OPTION, **alone)


def check_own(config: pytest.Config) -> None:
    """See before anything is trained that the user's own models can be trained."""
    source = config.getoption(own.OPTION)
    if not source:
        return
    _check_alone(
        config, own.OPTION, checkpoint=None, setups="plain", profile="hard", candidate_from=None, keep_candidates=None
    )
    try:
        for row in own.rows(source) if not hasattr(config, "workerinput") else ():
            row.check()
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(visible(f"{own.OPTION}: {error}")) from None
