"""``python -m matrix init``: what it writes is allowed, and each cell is a set that existed."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import urllib.error
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from matrix import __main__ as command
from matrix import cells
from matrix.repository import config, index, start
from tests.import_checks import ROOT

PROJECT = """[project]
name = "my-kernels"
dependencies = ["torch>=2.8", "transformers>=4.46,<6"]
"""
# By package, its releases and the months in which they were uploaded.
INDEX = {
    "transformers": {"4.45.0": 1, "4.46.0": 2, "4.46.1": 3, "4.57.0": 5, "5.0.0": 7, "5.2.0": 9, "6.0.0": 10},
    "torch": {"2.7.0": 1, "2.8.0": 2, "2.9.0": 6, "2.10.0": 9},
    "triton": {"3.4.0": 2},
}


def answer(request: Any, **_: Any) -> io.BytesIO:
    package = request.full_url.rstrip("/").rpartition("/")[2]
    if package not in INDEX:
        raise urllib.error.HTTPError(request.full_url, 404, "Not Found", request.headers, None)
    assert request.get_header("Accept") == "application/vnd.pypi.simple.v1+json"
    files = [
        {"filename": f"{package}-{version}-py3-none-any.whl", "upload-time": f"2026-{month:02}-15T12:00:00.5Z"}
        for version, month in INDEX[package].items()
    ]
    files += [
        {"filename": f"{package}-{version}.tar.gz", "upload-time": "2026-12-01T00:00:00Z"} for version in ("5.2.0",)
    ]
    files += [{"filename": f"{package}-4.99.0.tar.gz", "upload-time": "2026-01-01T00:00:00Z", "yanked": "it is broken"}]
    files += [{"filename": f"{package}-5.9.0rc1.tar.gz", "upload-time": "2026-01-01T00:00:00Z"}]
    return io.BytesIO(json.dumps({"files": files}).encode())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "my_kernels").mkdir()
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(index, "indexes", lambda: ["https://example.org/simple"])
    monkeypatch.setattr(index.urllib.request, "urlopen", answer)
    index.uploads.cache_clear()
    config._nearest.cache_clear()
    return tmp_path


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], datetime]]:
    """What the resolver was asked for. It answers with the upper bounds that it got."""
    asked: list[tuple[list[str], datetime]] = []

    def compiled(lines: list[str], day: datetime, of_today: Any) -> dict[str, str]:
        asked.append((lines, day))
        bounds = {name: v for line in lines if "<=" in line for name, v in [line.split("<=")] if name.isalpha()}
        first, version = lines[0].split("==")
        return {**bounds, "triton": "3.4.0", first: version, "pytest": "9.0.0"}

    monkeypatch.setattr(start, "compiled", compiled)
    return asked


def test_the_first_cells_are_sets_that_existed(
    package: Path, resolved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["init", "--patch", "my_kernels:patch"]) == 0
    found = cells.load_all()  # by the configuration that it wrote
    pins = {name: (cell.pins["transformers"], cell.pins["torch"]) for name, cell in found.items()}
    assert pins == {"tf4.46": ("4.46.1", "2.8.0"), "tf5.0": ("5.0.0", "2.9.0"), "tf5.2": ("5.2.0", "2.10.0")}
    assert [day for _, day in resolved] == [
        datetime(2026, month, 16, 12, 0, 0, 500000, timezone.utc) for month in (3, 7, 9)
    ]
    assert {"transformers>=4.46,<6", "torch>=2.8", "pytest", "liger-kernels[proof]"} <= {*resolved[0][0]}
    assert "of 2026-03-15 and what there was a day later" in found["tf4.46"].why
    here = config.here()
    assert [stage.name for stage in here.stages["versions"]] == ["tests", "proof"]
    assert here.product == ("my_kernels",)
    assert here.upstream == ("transformers",)
    assert here.axes["triton"].follows == "torch"
    assert (package / "pyproject.toml").read_text().startswith(PROJECT)
    assert "[tool.matrix]; say there what else runs" in capsys.readouterr().out
    assert command.main(["init"]) == 2
    assert "has [tool.matrix] already" in capsys.readouterr().err


def test_a_set_that_does_not_fit_together_is_said_and_left_out(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(lines: list[str], *_: Any, **__: Any) -> dict[str, str]:
        raise ValueError("torch and transformers do not fit")

    monkeypatch.setattr(start, "compiled", compiled)
    assert command.main(["init"]) == 2
    said = capsys.readouterr()
    assert "transformers 5.0.0 of 2026-07-15: torch and transformers do not fit" in said.out
    assert "no set of packages fits together" in said.err
    assert (package / "pyproject.toml").read_text() == PROJECT
    assert not (package / "ci").exists()


@pytest.mark.parametrize(
    ("project", "arguments", "message"),
    [
        (PROJECT.replace("torch>=2.8", "numpy").replace("transformers>=4.46,<6", "scipy"), [], "name packages with"),
        (
            PROJECT,
            ["--axes", "nothing"],
            "no index tells when nothing was released: https://example.org/simple/nothing/",
        ),
        (PROJECT.replace(">=4.46,<6", ">=7"), [], "the index has no release of transformers >=7"),
        (PROJECT.replace("my-kernels", "others"), [], "has no others, src/others or others.py"),
        ("[tool.ruff]\n", [], "has no [project] with a name"),
        ("[project", [], "is no TOML"),
    ],
)
def test_what_init_cannot_begin_with(
    project: str, arguments: list[str], message: str, package: Path, resolved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "pyproject.toml").write_text(project)
    assert command.main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert (package / "pyproject.toml").read_text() == project


def test_nothing_to_run_and_no_project(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "tests").rmdir()
    assert command.main(["init"]) == 2
    assert "there is nothing to run: no folder tests, and no --patch" in capsys.readouterr().err
    (package / "pyproject.toml").unlink()
    assert command.main(["init"]) == 2
    assert "has no pyproject.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        (">=4.46,<6", ">=4.46,<6"),
        ("~=4.46", ">=4.46,<5"),
        ("~=2.8.1", ">=2.8.1,<2.9"),
        ("==2.*,!=2.3", "!=2.3"),
        ("", ""),
    ],
)
def test_ranges_of_requirements(asked: str, allowed: str) -> None:
    assert start.ranges(asked) == allowed


def test_the_indexes_are_those_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        stdout = (
            "global.extra-index-url='file:///wheels https://one.example/simple/'\nglobal.cert='/x.crt'\n"
            ":env:.index-url='https://two.example/simple'\n"
        )

    monkeypatch.setattr(index.subprocess, "run", lambda *_, **__: Done)
    assert index.indexes() == ["https://two.example/simple", "https://one.example/simple"]


def test_without_a_configured_index_it_is_the_default_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "config": "",
        "download": "  --retries <n>  How often (default 5 times).\n  -i  The index (default https://d.example/s/)",
    }
    monkeypatch.setattr(index, "_run_pip", lambda command, _: said[command])
    assert index.indexes() == ["https://d.example/s"]
    monkeypatch.undo()
    assert index._DEFAULT.findall(index._run_pip("download", "--help"))  # what this pip prints


def test_an_environment_without_pip_asks_the_one_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Done:
        stdout = ""

    monkeypatch.setattr(index.importlib.machinery, "PathFinder", SimpleNamespace(find_spec=lambda _: None))
    monkeypatch.setattr(index.shutil, "which", lambda name: f"/elsewhere/{name}")
    monkeypatch.setattr(index.subprocess, "run", lambda command, **_: asked.append(command) or Done)
    index._run_pip("config", "list")
    assert asked == [["/elsewhere/pip", "config", "list"]]
    monkeypatch.setattr(index.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="neither in this environment nor on the path"):
        index._run_pip("config", "list")


def test_asking_for_pip_leaves_setuptools_importable() -> None:
    """A finder of setuptools takes a question for pip as a sign that pip builds a package."""
    program = """if True:
        import importlib.util
        from matrix.repository import index
        index.shutil.which = lambda _: "pip"
        index.subprocess.run = lambda command, **_: index.subprocess.CompletedProcess(command, 0, "")
        index._run_pip("config", "list")
        if importlib.util.find_spec("setuptools"):
            import setuptools
    """
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_what_the_proof_needs_is_in_the_extra() -> None:
    extra = config.read(ROOT / "pyproject.toml")["project"]["optional-dependencies"]["proof"]
    names = {re.match(r"[\w-]+", line)[0] for line in extra}
    assert {*start.PROOF_TOOLS} - {"liger-kernels"} == names - {"transformers"}


def test_the_example_pins_what_is_tested() -> None:
    """In the cell that a test runs from the wheel."""
    example = ROOT / "examples" / "kernel_package"
    here = config.load(example)
    assert {*start.PROOF_TOOLS} == {*here.tools}
    pins = {*(example / "ci" / "cells" / "tf5.23.txt").read_text().splitlines()[1:]}
    tested = {*(ROOT / "constraints.txt").read_text().splitlines()}
    version = re.search('__version__ = "(.*)"', (ROOT / "liger_kernels" / "__init__.py").read_text())[1]
    assert pins - tested == {f"liger-kernels=={version}"}
