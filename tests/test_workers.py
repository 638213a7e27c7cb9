"""The pinned pytest and xdist distribute cases as the suites rely on."""

from __future__ import annotations

import os
import re
import subprocess
import sys

_GROUPED = """
import pytest

@pytest.mark.parametrize(
    "i", [pytest.param(i, id=f"model{i // 4}/{i}", marks=pytest.mark.xdist_group(f"model{i // 4}")) for i in range(16)]
)
def test_case(i):
    pass
"""


def test_cases_of_one_group_run_on_one_worker(tmp_path) -> None:
    """Else every case trains truth and baseline again. With pytest 9.2, xdist 3.8 sees no groups:
    https://github.com/pytest-dev/pytest-xdist/issues/1386"""
    (tmp_path / "test_grouped.py").write_text(_GROUPED)
    command = (sys.executable, "-m", "pytest", "-v", "-n2", "--dist=loadgroup", "-p", "no:cacheprovider", ".")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment).stdout
    places = set(re.findall(r"\[(gw\d)\].*PASSED.*\[(model\d)/", shown))
    assert {model for _, model in places} == {f"model{i}" for i in range(4)}, shown
    assert len(places) == 4, shown
