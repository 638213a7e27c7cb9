"""The cell of upstream's main branches: what its environment is made of, and what is said of its record."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from matrix import __main__ as command
from matrix import baseline, cells, new, records, runner, upstream
from matrix.records import CaseVerdict, CellRecord, StageResult
from matrix.repository import config

STAGES = config.here().stages


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "setup.py").write_text('from setuptools import setup\n\nsetup(\n    name="transformers",\n)\n')
    return folder


def lines(folder: Path, **given: str | None) -> list[str]:
    return upstream.write_requirements(folder, given).read_text().splitlines()


def test_the_main_branches_and_the_newest_cells_torch(tmp_path: Path) -> None:
    found = lines(tmp_path)
    sources = {f"{package} @ {source}" for package, source in upstream.kind().branches.items()}
    pins = new.newest_cell(cells.load_all(), "versions").pins
    assert {f"torch=={pins['torch']}", f"pytest=={pins['pytest']}", "accelerate", *sources} < {*found}
    assert not any(line.startswith(("transformers==", "trl==")) for line in found)


def test_a_checkout_a_wheel_and_a_nightly_torch(tmp_path: Path, checkout: Path) -> None:
    wheel = tmp_path / "trl-1.17.0.dev0-py3-none-any.whl"
    wheel.touch()
    found = lines(tmp_path, transformers=str(checkout), trl=str(wheel), torch="nightly")
    assert {f"transformers @ {checkout.as_uri()}", f"trl @ {wheel.as_uri()}", "torch", "--pre"} < {*found}
    assert "torch==2.16.0" in lines(tmp_path, torch="2.16.0")


def test_another_requirement_is_another_cell(tmp_path: Path) -> None:
    upstream.write_requirements(tmp_path, {})
    first = upstream.cell(tmp_path)
    upstream.write_requirements(tmp_path, {"torch": "2.16.0"})
    assert (first.name, first.kind) == ("main", "main")
    assert upstream.cell(tmp_path).digest != first.digest


def test_it_runs_a_short_set_of_what_version_cells_run() -> None:
    assert {stage.name for stage in STAGES["main"]} == {"models", "convergence", "trainers"}
    assert set(STAGES["main"]) < set(STAGES["versions"])
    assert upstream.NAME not in cells.load_all()  # the gate does not ask for it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["main", "--transformers", "nowhere"], "--transformers nowhere: is not there"),
        (["main", "--trl", "{checkout}"], "is of transformers; it takes a checkout or a wheel of trl"),
        (["main", "--trl", "{empty}"], "is neither a wheel nor a Python project"),
        (["latest", "--transformers", "{checkout}"], "are for the cell main"),
    ],
)
def test_bad_sources_are_refused(
    arguments: list[str], message: str, checkout: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(runner, "tox", lambda *_, **__: pytest.fail("an environment was made"))
    filled = [argument.format(checkout=checkout, empty=tmp_path / "empty") for argument in arguments]
    assert command.main(["--records", str(tmp_path), "cell", *filled]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("gate", "-j"), ("run", "-j"), ("run", "-n"), ("cell", "latest", "-n")])
@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_number_of_processes_is_one_or_more(arguments: tuple[str, ...], number: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main([*arguments[:-1], f"{arguments[-1]}{number}"])
    assert raised.value.code == 2
    assert f"'{number}'; allowed is a number, 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_tox_is_asked_for_it_with_its_requirements(code: int, tmp_path: Path, checkout: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("TOX_ENV_NAME", raising=False)
    asked: list[Any] = []
    monkeypatch.setattr(runner, "tox", lambda *args, **variables: asked.append((args, variables)) or code)
    arguments = ["--records", str(tmp_path), "cell", "main", "--transformers", str(checkout)]
    assert command.main(arguments) == 1  # there is no record
    asked.clear()
    assert command.main([*arguments, "--stages", "models"]) == code
    (((chosen,), jobs, options, folder), variables) = asked[0]
    assert (chosen.name, jobs, folder) == ("main", 1, tmp_path)
    assert options[-2:] == ["--stages", "models"]
    assert variables == {"MATRIX_REQUIREMENTS": str(upstream.requirement_file(tmp_path))}


def record(name: str, census: int = 5, failed: bool = False) -> CellRecord:
    stage = StageResult("models", [], "failed" if failed else "passed", passed=["a"])
    stage.failed = {"b": "it broke"} if failed else {}
    stage.findings = {"LlamaForCausalLM": CaseVerdict("patched", census={"rms_norm": census})}
    versions = {"transformers": "5.24.0.dev0" if name == "main" else "5.23.0"}
    return CellRecord(name, "", "", "", versions, {"gpu": "none"}, "today", stages=[stage], complete=True)


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (record("main"), None),
        (record("main", census=4), "main models: smaller census: LlamaForCausalLM: rms_norm: 4 instead of 5"),
        (record("main", failed=True), "main models: failed case: b: it broke"),
        (dataclasses.replace(record("main"), complete=False), "main: partial record"),
    ],
    ids=["nothing", "smaller census", "failed", "partial"],
)
def test_what_moved_is_said(after: CellRecord, line: str | None, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    start = new.newest_cell(cells.load_all(), "versions").name
    before = record(start)
    before.stages.append(StageResult("packing", [], "passed", passed=["c"]))  # which main does not run
    accepted = baseline.Baseline({start: before}, None, [])
    monkeypatch.setattr(baseline, "load", lambda: accepted)
    records.write(after, tmp_path)
    assert command.main(["--records", str(tmp_path), "moved"]) == (line is not None)
    printed = capsys.readouterr().out
    assert printed.startswith(f"## {'Nothing' if line is None else 'Something'} moved: transformers 5.24.0.dev0")
    assert line is None or f"- {line}" in printed


def test_no_record_or_no_baseline(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert command.main(["--records", str(tmp_path), "moved"]) == 2
    assert "python -m matrix cell main makes it" in capsys.readouterr().err
    records.write(record("main"), tmp_path)
    monkeypatch.setattr(baseline, "load", lambda: None)
    assert command.main(["--records", str(tmp_path), "moved"]) == 2
