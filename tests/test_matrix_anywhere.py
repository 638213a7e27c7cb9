"""The matrix in another repository: what a cell runs there, the gate, and the environments that tox makes for it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from matrix import __main__ as command
from matrix import cells, gate, new, records, runner, upstream
from matrix.records import CaseVerdict
from matrix.repository import config, workflow
from tests.import_checks import ROOT

CONFIGURATION = """
[project]
name = "kernels"

[tool.matrix]
product = ["kernels.py"]
tests = ["checks.py"]

[tool.matrix.axes]
pytest = { versions = ">=1" }

[tool.matrix.stages.tests]
command = "pytest checks.py"

[tool.matrix.stages.verdict]
command = "python kernels.py {records}"
records = true

[tool.matrix.kinds.of-pytest]
cells = "pytest{pytest}"
newest = "latest"
stages = ["tests", "verdict"]

[tool.matrix.kinds.main]
of = "of-pytest"
branches = { pytest = "git+https://example.org/pytest" }
stages = ["tests"]
"""
KERNELS = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "a.json").write_text(json.dumps({"name": "a", "verdict": "equal", "shares": {"rows": 0.5}}))
"""
PYTEST = ".".join(pytest.__version__.split(".")[:2])
CELL = f"pytest{PYTEST}"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "repository"
    (root / "ci" / "cells").mkdir(parents=True)
    (root / "pyproject.toml").write_text(CONFIGURATION)
    (root / "kernels.py").write_text(KERNELS)
    (root / "checks.py").write_text("def test_a(): pass\n")
    (root / "ci" / "cells" / f"{CELL}.txt").write_text(f"# The one that is here.\npytest=={pytest.__version__}\n")
    (root / "ci" / "cells" / "latest.txt").write_text("# Whatever there is.\npytest\n")
    monkeypatch.chdir(root)
    monkeypatch.delenv("MATRIX_RECORDS", raising=False)
    monkeypatch.delenv("TOX_ENV_NAME", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(gate, "git_user", lambda: "Somebody")
    return root


def test_a_cell_runs_is_accepted_and_judged(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "The one that is here." in listed
    assert "triton" not in listed  # the axes are the columns
    assert command.main(["cell", CELL, "--workers", "1"]) == 0
    record = records.load(repository / "build" / "matrix" / f"{CELL}.json")
    assert record.passed
    assert [(stage.name, stage.passed) for stage in record.stages] == [
        ("tests", ["checks::test_a"]),
        ("verdict", ["verdict"]),
    ]
    assert record.stages[1].findings == {"a": CaseVerdict("equal", shares={"rows": 0.5})}
    judge = ["gate", "--no-run", "--cells", CELL]
    assert command.main(judge) == 1  # there is no baseline
    assert command.main([*judge, "--accept", "the first"]) == 0
    assert (repository / "ci" / "baseline.json").exists()
    assert command.main(judge) == 0
    (repository / "kernels.py").write_text(KERNELS.replace("0.5", "0.4"))
    assert command.main(judge) == 1
    assert "stale record" in capsys.readouterr().out
    assert command.main(["cell", CELL, "--workers", "1"]) == 0
    assert command.main(judge) == 1
    assert "smaller share" in capsys.readouterr().out
    assert command.main(["report"]) == 1  # the other cell has not run


@pytest.mark.parametrize(
    ("kernels", "status", "reason"),
    [
        ("raise SystemExit('no')", "failed", "exit code 1: no"),
        ("pass", "nothing ran", "it left no record"),
        (KERNELS.replace('"equal"', "5"), "failed", "is no record: it has no verdict"),
    ],
)
def test_another_command_fails_by_its_exit_code_and_its_records(
    kernels: str, status: str, reason: str, repository: Path
) -> None:
    (repository / "kernels.py").write_text(kernels)
    assert command.main(["cell", CELL, "--workers", "1", "--stages", "verdict"]) == 1
    (stage,) = records.load(repository / "build" / "matrix" / f"{CELL}.json").stages
    assert stage.status == status
    assert reason in stage.reason


def test_a_program_that_is_not_there_is_named(repository: Path) -> None:
    text = CONFIGURATION.replace("python kernels.py", "nothing-of-that-name kernels.py")
    (repository / "pyproject.toml").write_text(text)
    assert command.main(["cell", CELL, "--workers", "1", "--stages", "verdict"]) == 1
    (stage,) = records.load(repository / "build" / "matrix" / f"{CELL}.json").stages
    assert stage.reason == "there is no program nothing-of-that-name"


def test_a_cell_runs_in_the_environment_of_another_python(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a folder with another pytest in front, as its Python says."""
    metadata = tmp_path / "other" / "pytest-0.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: pytest\nVersion: 0.1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{metadata.parent.parent}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for name, text in {"checks.py": "def test_a():\n    ", "kernels.py": KERNELS}.items():  # both run there
        check = f"import os; assert os.environ['PYTHONPATH'] == {str(metadata.parent.parent)!r}\n"
        (repository / name).write_text(text + check)
    assert command.main(["cell", CELL, "--python", str(python), "--workers", "1"]) == 1
    record = records.load(repository / "build" / "matrix" / f"{CELL}.json")
    assert record.deviations == [f"pytest is 0.1 instead of {pytest.__version__}"]
    assert [stage.status for stage in record.stages] == ["passed", "passed"]
    assert command.main(["cell", CELL, "--python", str(tmp_path / "nothing")]) == 2
    assert "cannot be started: No such file" in capsys.readouterr().err


def environment(repository: Path, monkeypatch: pytest.MonkeyPatch, *names: str, **variables: str) -> tuple[Any, str]:
    """How tox is called for these cells, and the file that it reads."""
    called: list[list[str]] = []

    class Done(contextlib.nullcontext[Any]):
        def __init__(self, words: list[str], **_: Any) -> None:
            called.append(words)
            super().__init__(self)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(runner.subprocess, "Popen", Done)
    runner.tox([cells.load_all()[name] for name in names], 1, ["--workers", "2"], repository / "there", **variables)
    (words,) = called
    file = repository / "there" / "environments" / "tox.ini"
    return words, file.read_text() if file.exists() else ""


def test_tox_gets_a_file_that_is_made_for_it(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, text = environment(repository, monkeypatch, CELL, "latest")
    assert words[words.index("-c") + 1] == str(repository / "there" / "environments" / "tox.ini")
    assert words[words.index("--root") + 1] == str(repository)
    assert words[-5:] == ["-e", f"{CELL},latest", "--", "--workers", "2"]
    assert f"deps = -r {repository}/ci/cells/{{env_name}}.txt\n" in text
    assert f"commands = {sys.executable} -m matrix cell {{env_name}} --python {{env_python}} {{posargs}}" in text
    assert "package = editable" in text
    assert f"[testenv:latest]\ndeps = -r {repository}/ci/cells/latest.txt\nrecreate = true" in text
    assert "[testenv:pytest" not in text


def test_a_repository_that_is_no_package_installs_nothing_of_its_own(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "pyproject.toml").write_text(CONFIGURATION[CONFIGURATION.index("[tool.matrix]") :])
    assert "skip_install = true" in environment(repository, monkeypatch, CELL)[1]


def test_a_tox_file_of_its_own_is_used(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "pyproject.toml").write_text(CONFIGURATION.replace("product =", 'tox = "ci/tox.ini"\nproduct ='))
    words, text = environment(repository, monkeypatch, CELL)
    assert words[words.index("-c") + 1] == str(repository / "ci" / "tox.ini")
    assert text == ""


def test_the_branches_of_its_axes(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = upstream.write_requirements(repository / "there", {})
    assert path.read_text() == "pytest @ git+https://example.org/pytest\n"
    _, text = environment(repository, monkeypatch, CELL, **{runner.REQUIREMENTS: str(path)})
    assert f"deps = -r {path}\nrecreate = true" in text


def test_a_new_release_within_the_axis_is_proposed(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "pyproject.toml").write_text(CONFIGURATION.replace(">=1", ">=1,<99"))
    monkeypatch.setattr(new, "versions", lambda package: ["99.1", "98.2", pytest.__version__])
    monkeypatch.setattr(new, "resolve", lambda cell, pins: {**pins, "pluggy": "1.0"})
    assert command.main(["new"]) == 0
    said = capsys.readouterr().out
    assert "pytest: the axis does not support 99.1: it is >=1,<99" in said
    assert "add" not in said  # there is no tox file to add it to
    assert cells.load(repository / "ci" / "cells" / "pytest98.2.txt").pins == {"pytest": "98.2", "pluggy": "1.0"}


def test_there_is_no_census_outside_of_the_checkout(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matrix.census", None)
    assert command.main(["census"]) == 2
    assert "it runs in a checkout of it only" in capsys.readouterr().err


HERE = """
[tool.matrix.stages.unit]
command = "pytest unit.py"

[tool.matrix.kinds.unit]
here = true
stages = ["unit"]

[tool.matrix.kinds.many]
here = true
gpus = 8
stages = ["unit"]
"""


@pytest.mark.parametrize("names", [(), (CELL,)], ids=["alone", "with another"])
def test_a_cell_of_the_environment_that_is_there_counts(
    names: tuple[str, ...], repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it has a record."""
    monkeypatch.setattr(runner, "gpu", lambda: "none")
    (repository / "pyproject.toml").write_text(CONFIGURATION + HERE)
    (repository / "unit.py").write_text("def test_a(): pass\n")
    for path in config.here().cells.iterdir():
        if path.stem not in names:
            path.unlink()
    for name in names:
        assert command.main(["cell", name, "--workers", "1"]) == 0
    assert command.main(["report"]) == (0 if names else 2)
    assert command.main(["gate", "--no-run", "--cells", "unit"]) == 1
    assert "it has not run; python -m matrix cell unit makes it" in capsys.readouterr().out
    assert command.main(["gate", "--no-run", "--cells", "many"]) == 1
    assert "it has not run; python -m matrix cell many makes it" in capsys.readouterr().out
    assert command.main(["cell", "unit", "--workers", "1"]) == 0
    assert command.main(["report"]) == 0
    (repository / "unit.py").write_text("def test_a(): assert False\n")
    assert command.main(["cell", "unit", "--workers", "1"]) == 1
    capsys.readouterr()
    assert command.main(["report", "--markdown"]) == 1
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [*([f"| {name}", "passed"] for name in names), ["| unit", "failed"]]
    monkeypatch.setattr(runner, "gpu", lambda: "a GPU")
    assert command.main(["cell", "many", "--workers", "1"]) == 1
    capsys.readouterr()
    assert command.main(["report", "--markdown"]) == 1
    assert "| many-gpu | failed | " in capsys.readouterr().out


def test_a_command_that_takes_none_of_these_cells_names_them(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "pyproject.toml").write_text(CONFIGURATION + HERE)
    for path in config.here().cells.iterdir():
        path.unlink()
    for name in ("run", "ci"):
        assert command.main([name]) == 2
        said = "has no requirement file; python -m matrix cell runs what needs none: unit, many\n"
        assert capsys.readouterr().err.endswith(said)


def test_the_jobs_of_a_ci(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ci"]) == 0
    assert json.loads(capsys.readouterr().out) == {"include": [{"cell": CELL}, {"cell": "latest"}]}


def test_the_workflow_of_a_ci(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ci", "--workflow"]) == 0
    printed = capsys.readouterr().out
    assert "path: build/matrix/*.json" in printed
    assert command.main(["ci", "--workflow", "--write"]) == 0
    file = repository / ".github" / "workflows" / "cells.yml"
    assert file.read_text() == printed
    assert command.main(["ci", "--workflow", "--write"]) == 0  # again
    file.write_text("name: mine\n")
    assert command.main(["ci", "--workflow", "--write"]) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert command.main(["ci", "--write"]) == 2
    assert "--write is for --workflow" in capsys.readouterr().err


def test_the_workflow_of_the_example_is_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test reads it as it reads the project's own workflows."""
    monkeypatch.chdir(ROOT / "examples" / "kernel_package")
    assert (ROOT / "examples" / "kernel_package" / workflow.FILE).read_text() == workflow.text()


def test_a_repository_without_a_cell(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in config.here().cells.iterdir():
        path.unlink()
    for name in ("gate", "run", "report", "ci"):
        assert command.main([name]) == 2
        printed = capsys.readouterr()
        assert f"there is no cell: {repository}/ci/cells has no requirement file" in printed.err
        assert not printed.out
