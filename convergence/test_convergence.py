"""The proof itself: one case per model, dtype and patch. ``pytest convergence`` runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from convergence.case import absent, prove
from convergence.files import Unusable
from convergence.judge import bitwise
from convergence.plugin import EARLIER, ORIGIN, RECORDS, RUN, UNUSABLE, cases, groups, shown
from convergence.report import report
from convergence.report.records import Case, Outcome, Record, digest, write
from convergence.tables import visible


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = cases(metafunc.config)
    marks = map(pytest.mark.xdist_group, groups(metafunc.config, given))
    metafunc.parametrize(
        "case", [pytest.param(case, id=str(case), marks=mark) for case, mark in zip(given, marks, strict=True)]
    )


def test_convergence(
    case: Case, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """The candidate is the same mathematics as the unpatched model, and with ``--compare-to`` what it was before."""
    origin = request.config.stash[ORIGIN]
    reason, unusable = absent(case) or origin.absent(case), ""
    if not reason:
        try:
            with shown(request.config, case):
                timeout, blames = map(request.config.getoption, ("--patch-timeout", "--blame"))
                outcome = prove(case, timeout, blames, origin)
        except Unusable as error:
            unusable = visible(str(error))
    else:
        outcome = Outcome(verdict="absent", reason=reason)
    if unusable:  # no fault of the patch
        record_property(UNUSABLE, True)
        pytest.fail(unusable, pytrace=False)
    if before := request.config.stash[EARLIER].get(case):
        outcome = bitwise.compared(outcome, before)
    record, folder = (
        Record.of(case, outcome, request.config.stash[RUN], origin.says(case)),
        request.config.stash[RECORDS],
    )
    file = str(write(record, Path(folder))) if folder else ""
    record_property("convergence", {**record.summary(), "file": file, "digest": digest(record)})
    if record.verdict == "absent":
        pytest.skip(record.reason)
    if not report.passed(record):
        pytest.fail(report.failure(record), pytrace=False)
