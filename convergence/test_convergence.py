"""The proof itself: one case per model, dtype and patch. ``pytest convergence`` runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from convergence import report
from convergence.case import Case, prove
from convergence.models import MODELS
from convergence.plugin import cases
from convergence.records import write


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # With xdist's --dist loadgroup, cases that share truth and baseline run where these have been trained.
    metafunc.parametrize(
        "case",
        [
            pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"{case.model}/{case.dtype}"))
            for case in cases(metafunc.config)
        ],
    )


def test_convergence(
    case: Case, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """The candidate is the same mathematics as the unpatched model."""
    if not MODELS[case.model].is_available():
        pytest.skip(f"this transformers has no {MODELS[case.model].architecture}")
    record = prove(case)
    folder = request.config.getoption("--records")
    if folder:
        write(record, Path(folder))
    record_property("convergence", record.summary())
    if record.verdict != "equal":
        pytest.fail(report.failure(record), pytrace=False)
