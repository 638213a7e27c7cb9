"""``check_op`` and ``python -m convergence op``: what is broken fails by the check that is meant for it, and what is
honest passes all of them."""

from __future__ import annotations

from typing import Any

import pytest

import convergence
from convergence.op.check import LEFT_OUT, NOT_JUDGED, PASSED, judge_op
from convergence.op.checks import CHECKS
from tests.op_faults import FAULTS, Honest, inputs, plain

# Small and few: an honest op is tried on many sizes below.
FEW: dict[str, Any] = {"examples": 2, "rows": (1, 9), "columns": (1, 33)}
# Dynamo takes seconds. It says itself what it cannot trace, and a fault below is found by it.
SLOW = {"compile"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_the_check_that_is_meant_for_it(name: str) -> None:
    fault = FAULTS[name]
    without = SLOW - {fault.check}
    report = judge_op(fault.op, fault.reference, fault.inputs, without=without, name=name, **FEW, **fault.options)
    assert report.failed() == [fault.check], str(report)


def test_every_check_has_a_fault() -> None:
    assert {fault.check for fault in FAULTS.values()} == {*CHECKS}


def test_an_honest_op_passes_all_checks() -> None:
    """Dynamo traces no class methods; what it traces passes that check in ``test_ops_every.py``."""
    report = convergence.check_op(Honest.apply, plain, inputs, without=SLOW, name="honest")
    verdicts = {check: verdict for check, (verdict, _) in report.rows.items()}
    expected = dict.fromkeys(CHECKS, PASSED) | {"launches": NOT_JUDGED, "compile": LEFT_OUT}
    assert verdicts == expected, str(report)
