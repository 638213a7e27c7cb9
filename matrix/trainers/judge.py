"""Judges patched arms of a trainer's case against unpatched ones, by the proof, and records it as the proof does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convergence import files
from convergence.report import report
from convergence.report.records import Case, Outcome, Record, write
from convergence.trainers import rows
from convergence.trainers.cases import InCase
from convergence.trainers.observe import Arm
from convergence.trainers.prove import prove_in_trainer


def patch_of(way: Callable[..., Any]) -> str:
    """The function that patches, as a case names it."""
    return f"{way.__module__}:{way.__name__}"


def prove(case: Case, folder: Path, records: str | None, arm: Arm) -> Outcome:
    """The outcome of ``case`` with the model in ``folder``, which is written to ``records``, and passes."""
    outcome = prove_in_trainer(case, InCase(case.setup, folder), arm)
    record = _written(case, outcome, records)
    assert report.passed(record), report.failure(record)
    return outcome


def skip_if_missing(case: Case, records: str | None) -> None:
    """Skip a case that the installed version does not have, and record that."""
    if reason := rows.absent(case):
        _written(case, Outcome("absent", reason), records)
        pytest.skip(reason)


def _written(case: Case, outcome: Outcome, records: str | None) -> Record:
    record = Record.of(case, outcome)
    if records:
        write(record, Path(records))
    return record


def write_fact(name: str, verdict: str, reason: str, records: str | None) -> None:
    """Record what is a fact about upstream and no outcome of a proof."""
    if records:
        fact = {"name": name, "verdict": verdict, "reason": reason}
        files.write_json(fact, Path(records) / f"{name.replace('/', '-')}.json")
