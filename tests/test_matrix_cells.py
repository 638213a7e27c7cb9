"""Cells, tox and the documentation name the same set; a cell's file says why, and pins everything."""

from __future__ import annotations

import ast
import configparser
import functools
import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from matrix import __main__ as command
from matrix import cells, new
from matrix.repository import config
from matrix.repository.config import Stage
from tests.import_checks import ROOT, imports

STAGES = config.here().stages
KINDS = ("versions", "torch")


def tox_ini() -> configparser.RawConfigParser:
    tox = configparser.RawConfigParser()
    tox.read(ROOT / "tox.ini")
    return tox


def in_tox() -> list[str]:
    tox = tox_ini()
    (names,) = (s for s in tox.sections() if tox.get(s, "deps", fallback="").endswith("matrix/cells/{env_name}.txt"))
    return names.removeprefix("testenv:{").removesuffix("}").split(", ")


def in_docs() -> list[str]:
    text = (ROOT / "docs" / "reference" / "matrix.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", text.partition("## Cells")[2].partition("\n## ")[0], flags=re.MULTILINE)


def test_cells_tox_and_docs_name_the_same_set() -> None:
    assert in_tox() == in_docs() == list(cells.load_all())


def ci_environments() -> list[str]:
    """What ``.ci/run`` runs two at a time, after the proof and the unit tests."""
    *_, last = (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().splitlines()
    return last.strip().removeprefix("-e ").split(",")


def of_ci(name: str, cell: cells.Cell) -> tuple[set[str], set[str]]:
    """The stages of ``cell`` that the environment of CI runs, and the words of its other commands."""
    environment = dict(tox_ini()[f"testenv:{name}"])
    assert environment["deps"] == f"-r matrix/cells/{cell.name}.txt"
    stages, *others = environment["commands"].strip().splitlines()
    chosen = re.fullmatch(rf"python -m matrix cell {cell.name} --stages (\S+) \{{posargs\}}", stages)
    assert chosen
    assert name in ci_environments()
    return {*chosen[1].split(",")}, {word for other in others for word in other.split()}


def test_what_the_newest_cell_does_not_run_in_ci_runs_in_its_versions() -> None:
    """The proof in ``tox run -e convergence``, which has all of the cell's and more. Of ``models``, every model is
    patched and trained by ``tests/test_patching_zoo.py``, which compares signatures, too."""
    newest, torch = (new.newest_cell(cells.load_all(), kind) for kind in KINDS)
    chosen, others = of_ci("newest", newest)
    assert chosen | {"convergence", "models"} == {stage.name for stage in STAGES[newest.kind]}
    assert not others
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert {f"{package}=={newest.pins[package]}" for package in ("torch", "triton", "transformers")} <= {*constraints}
    assert torch.pins["transformers"] == newest.pins["transformers"]  # whose private names it asks


def test_ci_runs_all_but_two_ranks_of_the_oldest_cell() -> None:
    oldest = next(cell for cell in cells.load_all().values() if cell.kind == "versions")
    chosen, _ = of_ci("oldest", oldest)
    assert chosen | {"setups"} == {stage.name for stage in STAGES[oldest.kind]}


def test_ci_runs_what_needs_a_compiler_in_the_newest_torch() -> None:
    newest = new.newest_cell(cells.load_all(), "torch")
    chosen, others = of_ci("newest-torch", newest)
    stages = {stage.name: stage for stage in STAGES[newest.kind]}
    assert chosen | {"ops"} == {*stages}
    texts = {f"tests/{path.name}": path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*.py")}
    marked = {name for name, text in texts.items() if "\n@pytest.mark.compilers\n" in text}
    assert len(marked) == 4
    assert marked <= others | {*stages["compile"].arguments}
    assert others >= {"tests/test_ops_every.py", "matrix/checks/test_private_names.py"}


def test_a_marked_test_runs_in_the_environment_of_its_mark() -> None:
    """The unit tests leave out what has one of these marks, and nothing else."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    marks, tox = re.findall(r'^    "(\w+): .*; tox run -e \1 runs them",$', project, re.MULTILINE), tox_ini()
    assert tox["testenv:tests"]["quick"] == f'-m "{" and ".join(f"not {mark}" for mark in marks)}"'
    for mark in marks:
        assert tox[f"testenv:{mark}"]["commands"].startswith(f"pytest tests -m {mark} ")
    workflow = (ROOT / ".github" / "workflows" / "matrix.yml").read_text(encoding="utf-8")
    (jobs,) = re.findall(r"run: tox run -e (\S*tests\S*)", workflow)
    assert {*marks, "tests", "convergence"} <= {*jobs.split(",")}
    assert {*marks} - {"compilers"} <= {*ci_environments()}


def test_a_cell_is_called_what_it_pins() -> None:
    for cell in cells.load_all().values():
        latest = cell.name == "latest"
        assert latest or new.cell_name(cell.pins, cell.kind) == cell.name
        expected = {"pytest"} if latest else {"torch", "triton", "pytest"}
        assert cell.pins.keys() & {"torch", "triton", "pytest"} == expected, cell.name


def test_versions_sort_as_numbers() -> None:
    names = ["torch2.10", "torch2.8", "tf5.13-trl1.9", "latest", "tf5.2-trl0.29", "tf4.57-trl0.26"]
    expected = ["tf4.57-trl0.26", "tf5.2-trl0.29", "tf5.13-trl1.9", "latest", "torch2.8", "torch2.10"]
    assert sorted(names, key=cells.order) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tf9.9-trl9.9", "torch==2.13.0\n", "no comment says why"),
        ("tf9.9-trl9.9", "# why\ntorch==2.13.0\ntrl\n", "trl has no exact version"),
        ("tf9.9-trl9.9", "# why\ntorch==2.13.0\ntransformers==9.9\n", "9.9; the axis supports >=4.46,<6"),
        ("other", "# why\ntorch==2.13.0\n", "a cell is called"),
    ],
)
def test_a_bad_cell_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        cells.load(path)


def test_an_unknown_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "tf1.0-trl0.1"]) == 2
    assert "unknown cell tf1.0-trl0.1; allowed are tf4.46-trl0.12" in capsys.readouterr().err


def test_the_job_matrix_has_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ci"]) == 0
    assert [job["cell"] for job in json.loads(capsys.readouterr().out)["include"]] == list(cells.load_all())


def test_what_a_stage_runs_exists() -> None:
    for stages in STAGES.values():
        for stage in stages:
            assert (ROOT / stage.arguments[0]).exists()


DISTRIBUTIONS = metadata.packages_distributions()


@functools.cache  # every cell's stages load the same files
def imports_of(path: Path) -> list[tuple[str, str]]:
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    return [*imports(ast.parse(path.read_text(encoding="utf-8")).body, package)]


def needed_by(path: Path, seen: set[Path]) -> set[str]:
    """The distributions that a file needs as it is imported: it, and the files of this project that it imports."""
    if path in seen:
        return set()
    seen.add(path)
    needed: set[str] = set()
    for base, imported in imports_of(path):
        top = base.partition(".")[0]
        if (ROOT / top).is_dir():
            module = ROOT.joinpath(*base.split("."))
            for found in (module.with_suffix(".py"), module / "__init__.py", module / f"{imported}.py"):
                needed |= needed_by(found, seen) if found.is_file() else set()
        elif top not in sys.stdlib_module_names:
            needed |= {d.lower() for d in DISTRIBUTIONS.get(top, [top])}
    return needed


def files_of(stage: Stage) -> list[Path]:
    """Those that the stage's process loads: the files that it names, and all of a folder of which it ignores none."""
    named = [ROOT / argument for argument in stage.arguments if not argument.startswith("-")]
    whole = not any(argument.startswith("--ignore") for argument in stage.arguments)
    folders = [path for path in named if path.is_dir() and whole]
    return [
        *(path for path in named if path.is_file()),
        *(p for f in folders for pattern in ("test_*.py", "conftest.py") for p in f.rglob(pattern)),
    ]


def test_a_cell_installs_what_its_stages_import() -> None:
    for cell in cells.load_all().values():
        text = (config.here().cells / f"{cell.name}.txt").read_text(encoding="utf-8")
        installs = {name.lower() for name in re.findall(r"^[\w.-]+", text, flags=re.MULTILINE)} | {"torch", "triton"}
        seen: set[Path] = set()
        needed = {
            name: stage.name
            for stage in STAGES[cell.kind]
            for file in files_of(stage)
            for name in needed_by(file, seen)
        }
        assert {*needed} <= installs, (cell.name, {name: needed[name] for name in needed if name not in installs})
        assert "pytest" in needed


def test_what_needs_trl_runs_where_it_is_installed() -> None:
    """The project's own environment has none and skips these files: each is named where there is one."""
    named = {argument for stage in STAGES["versions"] for argument in stage.arguments}
    need_it = {path for path in ROOT.glob("tests/test_*.py") if re.search(r'importorskip\(\s*"trl', path.read_text())}
    assert {str(path.relative_to(ROOT)) for path in need_it} <= named
    assert need_it


@pytest.mark.parametrize("kind", KINDS)
def test_releases_beyond_the_newest_cell(kind: str) -> None:
    newest = new.newest_cell(cells.load_all(), kind)
    first, second = config.here().watched(kind)
    found = {first: ["99.1.0", "99.0.0", newest.pins[first], "1.0.0"], second: [newest.pins[second], "0.12.2"]}
    later = new.beyond(newest, found)
    assert later == {first: ["99.1.0", "99.0.0"], second: []}
    others = {} if kind == "torch" else {second: newest.pins[second]}  # a torch brings its own Triton
    assert new.wanted(later, newest, kind) == {first: "99.1.0", **others}
    assert new.wanted({first: [], second: []}, newest, kind) == {}


@pytest.mark.parametrize(("kind", "name"), [("versions", "tf5.1-trl1.8"), ("torch", "torch3.14")])
def test_a_proposed_cell_is_one(kind: str, name: str, tmp_path: Path) -> None:
    path = new.write({"transformers": "5.1.0", "trl": "1.8.7", "torch": "3.14.1"}, kind, tmp_path)
    assert path.name == f"{name}.txt"
    assert cells.load(path).pins["transformers"] == "5.1.0"
