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
    metafunc.parametrize("case", cases(metafunc.config), ids=str)


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
