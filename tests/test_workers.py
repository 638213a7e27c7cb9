"""The pinned pytest and xdist distribute cases as the suites rely on."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import types

import pytest
import torch

from convergence import plugin
from convergence.report.records import TRAINER, Case
from tests.suite import QUICK

_CASES = """
import os
import pytest

@pytest.mark.parametrize(
    "i", [pytest.param(i, id=f"model{i // 4}/{i}", marks=pytest.mark.xdist_group(f"model{i // 4}")) for i in range(16)]
)
def test_case(i):
    assert "OMP_NUM_THREADS" in os.environ
"""
_CONFTEST = """
import os

pytest_plugins = ["convergence.plugin"]

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"who starts them has {os.environ.get('OMP_NUM_THREADS')} threads")
"""


@pytest.mark.slow
def test_cases_of_one_group_run_on_one_worker_which_has_its_share(tmp_path) -> None:
    """As a user runs them. Else every case trains truth and baseline again (with pytest 9.2, xdist 3.8 sees no groups:
    https://github.com/pytest-dev/pytest-xdist/issues/1386), and two workers take all cores each, and who
    starts them looks for records of other threads than theirs."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_cases.py").write_text(_CASES)
    command = (sys.executable, "-m", "pytest", "-v", "-n2", "--dist=loadgroup", "-p", "no:cacheprovider", *QUICK, ".")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment).stdout
    places = set(re.findall(r"\[(gw\d)\].*PASSED.*\[(model\d)/", shown))
    assert {model for _, model in places} == {f"model{i}" for i in range(4)}, shown
    assert len(places) == 4, shown
    assert "16 passed" in shown
    assert re.search(r"who starts them has \d+ threads", shown), shown  # --compare-to looks for records of so many


@pytest.mark.parametrize(
    ("workers", "references", "expected"),
    [(1, None, [12]), (3, None, [12]), (4, None, [6, 6]), (16, None, [4, 4, 4]), (16, "kept", [12])],
)
def test_many_patches_of_few_models_go_to_all_workers(workers, references, expected) -> None:
    """23 patches of two models in two dtypes kept 4 of 15 workers busy, for more than two minutes."""

    class Config:
        workerinput = types.MappingProxyType({"workercount": workers})

        def getoption(self, name: str) -> object:
            return references

    def given(model: str, **how: str) -> list[Case]:
        return [Case(model, dtype, f"m:p{i}", **how) for dtype in ("float32", "bfloat16") for i in range(12)]

    found = plugin.groups(Config(), given("llama-tied"))
    assert [len([*same]) for _, same in itertools.groupby(found)] == 2 * expected
    assert len({*found}) == 2 * len(expected)
    for whole in (
        given("llama-tied", setup="ddp"),
        given("llama", profile=TRAINER),
        given("llama3-8b-odd", profile="scale"),
    ):
        assert len({*plugin.groups(Config(), whole)}) == 2


@pytest.mark.parametrize(
    ("workers", "set_by_user", "expected"),
    [(15, None, (1, "1")), (4, None, (4, "4")), (40, None, (1, "1")), (1, None, (16, None)), (15, "3", (16, "3"))],
)
def test_workers_share_the_cores(workers, set_by_user, expected, monkeypatch) -> None:
    threads = [16]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    plugin._share_the_cores(workers)
    assert (threads[-1], os.environ.get("OMP_NUM_THREADS")) == expected
