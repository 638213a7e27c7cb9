"""What a run leaves behind: a stage that did nothing fails, a killed run resumes, a partial record is none."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from matrix import __main__ as command
from matrix import cells, records, runner
from matrix.cells import Cell
from matrix.records import CaseVerdict, CellRecord, StageResult
from matrix.repository import config
from matrix.repository.config import Stage
from tests.import_checks import ROOT

CELL = Cell("tf9.9-trl9.9", "for this test", {}, "test", "0123")
Stages = Callable[..., tuple[Stage, ...]]
ONE_CELL = """\
[tool.matrix]
product = ["kernels"]
axes = {}
[tool.matrix.kinds.only]
here = true
stages = ["s"]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one cell, ``only``, whose stage ``s`` a test writes."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / config.FILE).write_text(ONE_CELL)
    return tmp_path


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """``stages(name=source)``: pytest files of this source as the stages of a cell, run outside of this project."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--records')\n")
    stages: dict[str, tuple[Stage, ...]] = {}
    here = dataclasses.replace(config.here(), root=root, stages=stages)
    monkeypatch.setattr(config, "here", lambda: here)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis alone takes a second of each start

    def make(leaves_records: bool = False, **sources: str) -> tuple[Stage, ...]:
        for name, source in sources.items():
            (root / f"test_{name}.py").write_text(source)
        made = tuple(Stage(name, "", (f"test_{name}.py",), leaves_records=leaves_records) for name in sources)
        stages["test"] = made
        return made

    return make


def run(stages: tuple[Stage, ...], folder: Path) -> tuple[CellRecord, list[str]]:
    said: list[str] = []
    return runner.run_stages(CELL, stages, folder, say=said.append), said


GREEN = "def test_a(): pass\n"
RED = "def test_a(): assert not 'the reason'\ndef test_b(): pass\n"


def test_a_green_run(stages: Stages, tmp_path: Path) -> None:
    made = stages(one=GREEN, two=GREEN)
    record, _ = run(made[:1], tmp_path)
    assert record.stages[0].status == "passed"
    assert not record.complete
    assert not record.passed
    record, _ = run(made, tmp_path)
    assert record.complete
    assert record.passed
    assert record.stages[0].passed == ["test_one::test_a"]
    assert records.load(tmp_path / "tf9.9-trl9.9.json") == record


@pytest.mark.parametrize(("chosen", "code"), [("one", 0), ("two", 1), ("one,two", 1)])
def test_the_exit_code_is_of_the_stages_that_were_asked_for(
    chosen: str, code: int, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages(one=GREEN, two=RED)
    monkeypatch.setattr(cells, "select", lambda *_, **__: [CELL])
    arguments = ["--records", str(tmp_path), "cell", CELL.name, "--stages", chosen, "--workers", "1"]
    assert command.main(arguments) == code
    assert not records.load(tmp_path / f"{CELL.name}.json").passed


@pytest.mark.parametrize(("variable", "option", "expected"), [("3", (), 3), ("3", ("-n", "2"), 2), ("", (), 7)])
def test_how_many_workers_a_cell_has(
    variable: str, option: tuple[str, ...], expected: int, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages(one=GREEN)
    found: list[int] = []
    monkeypatch.setenv("MATRIX_WORKERS", variable)
    monkeypatch.setattr(runner, "cpus", lambda: 7)
    monkeypatch.setattr(cells, "select", lambda *_, **__: [CELL])

    def run_stages(
        cell: Cell, chosen: tuple[Stage, ...], folder: Path, workers: int, *_: bool, python: str
    ) -> SimpleNamespace:
        found.append(workers)
        return SimpleNamespace(deviations=(), passed_so_far=True)

    monkeypatch.setattr(runner, "run_stages", run_stages)
    command.main(["cell", CELL.name, *option])
    assert found == [expected]


@pytest.mark.parametrize("variable", ["all", "0", "-1", "1.5"])
def test_a_variable_that_is_no_number_of_workers_is_refused(
    variable: str, stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages(one=GREEN)
    monkeypatch.setenv("MATRIX_WORKERS", variable)
    monkeypatch.setattr(cells, "select", lambda *_, **__: [CELL])
    assert command.main(["cell", CELL.name]) == 2
    assert f"MATRIX_WORKERS is '{variable}'; it must be a number of pytest workers" in capsys.readouterr().err


@pytest.mark.parametrize(("installed", "expected"), [({"pytest-xdist": "3"}, 3), ({"pytest": "9"}, 1)])
def test_a_cell_without_xdist_has_one_worker(
    installed: dict[str, str], expected: int, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def run_stage(stage: Stage, folder: Path, workers: int, *_: str, python: str) -> StageResult:
        found.append(workers)
        return StageResult(stage.name, [], "passed")

    monkeypatch.setattr(runner, "run_stage", run_stage)
    monkeypatch.setattr(runner, "environment", lambda: installed)
    runner.run_stages(CELL, stages(one=GREEN), tmp_path, workers=3, say=lambda line: None)
    assert found == [expected]


def test_a_failing_case_is_named(stages: Stages, tmp_path: Path) -> None:
    record, _ = run(stages(one=RED), tmp_path)
    (stage,) = record.stages
    assert (stage.status, stage.passed, list(stage.failed)) == ("failed", ["test_one::test_b"], ["test_one::test_a"])
    assert "the reason" in stage.failed["test_one::test_a"]
    assert not record.passed


@pytest.mark.parametrize(
    ("source", "leaves_records", "status", "reason"),
    [
        ("", False, "nothing ran", ""),
        ("import pytest\npytestmark = pytest.mark.skip(reason='no')\n" + GREEN, False, "nothing ran", ""),
        (GREEN, True, "nothing ran", "it left no record"),
        (GREEN + "def test_b():\n    import os\n    os._exit(0)\n", False, "failed", "ended before it wrote"),
    ],
    ids=["no case", "every case skipped", "no record", "it dies"],
)
def test_a_stage_that_did_not_do_its_work_fails(
    source: str, leaves_records: bool, status: str, reason: str, stages: Stages, tmp_path: Path
) -> None:
    record, _ = run(stages(leaves_records=leaves_records, one=source), tmp_path)
    assert record.stages[0].status == status
    assert reason in record.stages[0].reason
    assert not record.passed


def test_the_reason_of_a_usage_error_is_its_line(stages: Stages, tmp_path: Path) -> None:
    """pytest says after it, indented, where its configuration is."""
    (stage,) = stages(one=GREEN)
    wrong = dataclasses.replace(stage, arguments=(*stage.arguments, "--no-such-option"))
    result = runner.run_stage(wrong, tmp_path / "one", 1)
    assert result.status == "failed"
    assert re.match(r"exit code 4: .*error: unrecognized arguments: --no-such-option; no results", result.reason)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", "no output"),
        ("before\n==== 1 failed in 0.1s ====\n\n", "1 failed in 0.1s"),
        ("Traceback:\n  File\nValueError: two lines\n  of it\n", "ValueError: two lines"),
        ("  all\n  indented", "indented"),
    ],
)
def test_the_last_words_of_a_program(output: str, words: str) -> None:
    assert runner._last_words(output) == words


def test_a_stage_that_takes_too_long_is_killed(stages: Stages, tmp_path: Path) -> None:
    (stage,) = stages(one="def test_a():\n    import time\n    time.sleep(600)\n")
    result = runner.run_stage(stage, tmp_path / "one", 1, timeout=0.5)
    assert (result.status, result.reason.partition(";")[0]) == ("failed", "killed after 0 s")


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("ends", ["by itself", "SIGTERM", "SIGINT"])
def test_what_a_stage_started_ends_with_it(ends: str, repository: Path) -> None:
    """Also where the run is ended from outside: that is exit code 2, and no traceback."""
    lasts = "sleep 600 & echo $! > pid" + ("" if ends == "by itself" else "; wait")
    text = (repository / config.FILE).read_text()
    (repository / config.FILE).write_text(f"{text}\n[tool.matrix.stages.s]\ncommand = \"bash -c '{lasts}'\"\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MATRIX_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "matrix", "cell", "only"],
        cwd=repository,
        env={**variables, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid = repository / "pid"
    while not (pid.exists() and pid.read_text().strip()):
        assert process.poll() is None or ends == "by itself", process.communicate()
        time.sleep(0.05)
    if ends != "by itself":
        process.send_signal(getattr(signal, ends))
    _, said = process.communicate(timeout=60)
    assert process.returncode == (0 if ends == "by itself" else 2), said
    assert ("interrupted" in said, "Traceback" in said) == (ends != "by itself", False)
    until = time.monotonic() + 5  # whoever adopted it has noticed
    while is_there(int(pid.read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_stage_whose_code_changes_while_it_runs_fails(stages: Stages, tmp_path: Path) -> None:
    """Its record would be of the code before, or of that after, and both may not have run."""
    record, _ = run(stages(one=GREEN + "def test_b(): open(__file__, 'a').write('# A comment.')\n"), tmp_path)
    (stage,) = record.stages
    assert stage.status == "failed"
    assert stage.reason.endswith("changed while it ran")
    assert not record.passed


ONCE = "import pathlib\ndef test_a(): pathlib.Path('ran').open('a').write('x')\n"


def test_a_killed_run_resumes_where_it_stopped(stages: Stages, tmp_path: Path) -> None:
    """The second stage's process is killed from outside together with the run; the first is not repeated."""
    kill = "def test_a():\n    import os\n    assert 'KILL' not in os.environ\n"
    made = stages(one=ONCE, two=kill)

    def killed(line: str) -> None:
        if "two ..." in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_stages(CELL, made, tmp_path, say=killed)
    partial = records.load(tmp_path / "tf9.9-trl9.9.json")
    assert [stage.name for stage in partial.stages] == ["one"]
    assert not partial.complete
    assert not partial.passed
    record, said = run(made, tmp_path)
    assert record.passed
    assert (tmp_path / "project" / "ran").read_text() == "x"
    assert [line for line in said if "kept" in line]
    assert "one ..." not in " ".join(said)


@pytest.mark.parametrize(
    "changed",
    ["nothing", "another test", "a new stage", "code", "arguments", "cell", "environment", "option", "failed"],
)
def test_a_stage_runs_again_unless_it_passed_just_so(
    changed: str, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stages(one=ONCE + ("def test_b(): assert False\n" if changed == "failed" else ""))
    run(made, tmp_path)
    if changed in ("code", "another test"):
        name = "test_one.py" if changed == "code" else "test_other.py"
        with (tmp_path / "project" / name).open("a") as file:
            file.write("# A comment.\n")
        monkeypatch.setattr(runner, "code_digest", lambda: "other")
    elif changed == "arguments":
        made = (dataclasses.replace(made[0], arguments=(*made[0].arguments, "-q")),)
    elif changed == "a new stage":
        made = (*made, dataclasses.replace(made[0], name="two", arguments=("test_two.py",)))
        (tmp_path / "project" / "test_two.py").write_text(GREEN)
    elif changed == "environment":
        monkeypatch.setattr(runner, "environment", lambda: {"torch": "0"})
    cell = dataclasses.replace(CELL, digest="other") if changed == "cell" else CELL
    runner.run_stages(cell, made, tmp_path, fresh=changed == "option", say=lambda line: None)
    assert (tmp_path / "project" / "ran").read_text() == (
        "x" if changed in ("nothing", "another test", "a new stage") else "xx"
    )


def test_an_environment_with_other_versions_is_not_the_cell(stages: Stages, tmp_path: Path) -> None:
    cell = dataclasses.replace(CELL, pins={"pytest": "0.0.1"})
    record = runner.run_stages(cell, stages(one=GREEN), tmp_path, say=lambda line: None)
    assert record.deviations == [f"pytest is {pytest.__version__} instead of 0.0.1"]
    assert not record.passed


def test_of_two_installed_versions_the_imported_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.0", "2.0+cpu"):
        metadata = tmp_path / version / "Some_Package-1.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: Some_Package\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / version))
    assert runner.environment()["some-package"] == "2.0"


def test_what_is_half_installed_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken-1.0.dist-info").mkdir()
    before = runner.environment()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = tmp_path / "python"  # another Python
    python.symlink_to(sys.executable)
    assert runner.environment() == before
    assert "broken" not in runner.environment_of(str(python))[0]


def test_the_code_digest_sees_a_change(tmp_path: Path) -> None:
    (tmp_path / "matrix" / "cells").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    source = tmp_path / "tests" / "a.py"
    source.write_text("1")
    before = runner.code_digest(tmp_path)
    (tmp_path / "matrix" / "cells" / "x.txt").write_text("a cell of its own")
    (tmp_path / "matrix" / "baseline.json").write_text("{}")
    assert runner.code_digest(tmp_path) == before
    source.write_text("2")
    assert runner.code_digest(tmp_path) != before


def test_findings_are_read_from_records(tmp_path: Path) -> None:
    statistics = [
        {"quantity": "loss", "step": "1", "statistic": "gain", "value": 0.1, "bound": 1.0},
        {"quantity": "logits", "step": "2", "statistic": "gain", "value": 0.2, "bound": 0.4},
    ]
    record = {"model": "gemma", "dtype": "float32", "patch": "a.b:c", "verdict": "equal", "statistics": statistics}
    (tmp_path / "a.json").write_text(json.dumps(record))
    (tmp_path / "b.json").write_text(
        json.dumps({"name": "sft", "verdict": "different", "reason": "so", "census": {"x": 1}})
    )
    trained = {"model": "llama", "setup": "dpo", "order": "before", "dtype": "float32", "patch": "a:by_class"}
    trained["verdict"] = "equal"
    (tmp_path / "c.json").write_text(json.dumps(trained))
    worst = {"gain": {"value": 0.2, "bound": 0.4, "quantity": "logits", "step": "2"}}
    expected = {
        "gemma/float32/c": CaseVerdict("equal", "", worst),
        "sft": CaseVerdict("different", "so", census={"x": 1}),
        "llama/dpo/before/float32/by_class": CaseVerdict("equal"),
    }
    assert records.read_findings(tmp_path) == expected


def test_a_value_that_is_no_number_is_kept(tmp_path: Path) -> None:
    statistic = {"quantity": "loss", "step": "1", "statistic": "gain", "value": float("nan"), "bound": 1.0}
    (tmp_path / "a.json").write_text(json.dumps({"name": "a", "verdict": "different", "statistics": [statistic]}))
    found = records.read_findings(tmp_path)["a"].statistics["gain"]
    assert found["value"] == "nan"
    assert records.share(found) == float("inf")


@pytest.mark.parametrize(
    ("name", "case"),
    [("test_a[x/y]@x", "test_a[x/y]"), ("test_a[x/y]", "test_a[x/y]"), ("test_a[a@b]", "test_a[a@b]")],
)
def test_a_case_is_called_the_same_with_workers_and_without(name: str, case: str, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(f'<testsuites><testsuite><testcase classname="c" name="{name}"/></testsuite></testsuites>')
    assert records.read_cases(junit)[0] == [f"c::{case}"]


def test_what_is_no_record_of_today_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match=r"a\.json: is no record: it has no verdict"):
        records.read_findings(tmp_path)
    with pytest.raises(ValueError, match="schema 0; allowed are 1, 2; run the cell again"):
        records.load(file)


@pytest.mark.parametrize(
    ("alone", "gpu", "workers"), [(True, "one", False), (True, "none", True), (False, "one", True)]
)
def test_a_stage_that_takes_all_of_a_gpu_has_no_workers_there(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, gpu: str, workers: bool
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(runner, "_call", lambda command, *_: called.append(command) or "")
    (stage,) = stages(one=GREEN)
    runner.run_stage(dataclasses.replace(stage, alone=alone), tmp_path / "one", 4, gpu)
    assert ("-n" in called[0]) == workers
