"""What makes a stage's result stale: a change of what it runs, and of nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from matrix import baseline, records
from matrix.code import Code
from matrix.records import CellRecord, StageResult
from matrix.repository import config
from matrix.repository.config import Stage
from tests.import_checks import ROOT

STAGES = config.here().stages

STAGE = Stage("s", "", ("tests", "--ignore-glob", "tests/test_[!o]*", "--ignore", "tests/test_out.py"), ("tests",))
FILES = {
    "liger_kernels/ops/rope.py": "",
    "liger_kernels/tuned.json": "{}",
    "setup.py": "",
    "pytest.ini": "",
    "convergence/report.html.jinja": "",
    "conftest.py": "",
    "matrix/runner.py": "import matrix.repository.config",
    "matrix/repository/config.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "from tests.of_all import x",
    "tests/of_all.py": "",
    "tests/test_ops_one.py": (
        "from tests import helper, mutants\nfrom tools.deep import x\nRUNS = ('ranks.py', 'tests/other_ranks.py')\n"
        "import beside"
    ),
    "tests/beside.py": "",
    "tests/last_test.py": "",
    "tests/test_out.py": "",
    "tests/test_patching.py": "",
    "tests/helper.py": "def f():\n    from . import inner\nPATCH = 'tests.patches:patch'\nREADS = 'examples'",
    "tests/inner.py": "",
    "tests/patches.py": "",
    "tests/ranks.py": "import tests.of_ranks",
    "tests/of_ranks.py": "",
    "tests/other_ranks.py": "",
    "tests/mutants/__init__.py": "from tests.mutants.rope import x",
    "tests/mutants/rope.py": "",
    "tests/unused.py": "",
    "tools/__init__.py": "",
    "tools/deep.py": "",
    "tools/other.py": "",
    "examples/loop.py": "from tools import other",
    "benchmarks/cases.py": "",
    "matrix/report.py": "",
    "docs/page.md": "",
}
RUNS = {
    *("liger_kernels/ops/rope.py", "convergence/report.html.jinja", "conftest.py", "matrix/runner.py"),
    *("tests/__init__.py", "tests/conftest.py", "tests/of_all.py", "tests/test_ops_one.py", "tests/helper.py"),
    *("tests/inner.py", "tests/patches.py", "tests/ranks.py", "tests/of_ranks.py", "tests/other_ranks.py"),
    *("tests/mutants/__init__.py", "tests/mutants/rope.py", "tools/__init__.py", "tools/deep.py", "examples/loop.py"),
    *("tests/beside.py", "tests/last_test.py", "liger_kernels/tuned.json", "setup.py", "pytest.ini"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("changed", FILES)
def test_what_a_stage_runs_decides_its_digest(changed: str, root: Path) -> None:
    """What it imports, at any depth and in functions, what a text names, and who configures it."""
    before = Code(root).digest(STAGE, on_gpu=False)
    with (root / changed).open("a") as file:
        file.write("\n# A comment.\n")
    assert (Code(root).digest(STAGE, on_gpu=False) != before) == (changed in RUNS)


def test_the_arguments_decide_it_too(root: Path) -> None:
    sources = Code(root)
    other = dataclasses.replace(STAGE, arguments=(*STAGE.arguments, "-q"))
    assert len({sources.digest(STAGE, False), sources.digest(STAGE, True), sources.digest(other, False)}) == 3


def test_a_new_file_decides_it_where_it_is_collected(root: Path) -> None:
    before = Code(root).digest(STAGE, on_gpu=False)
    (root / "tests" / "test_new.py").write_text("")
    assert Code(root).digest(STAGE, on_gpu=False) == before
    (root / "tests" / "test_ops_new.py").write_text("")
    assert Code(root).digest(STAGE, on_gpu=False) != before


@pytest.mark.parametrize(
    ("program", "arguments", "changed"),
    [
        ("bash", ("docs/page.md",), "docs/page.md"),
        ("python", ("-m", "benchmarks.cases"), "benchmarks/cases.py"),
        ("python", ("-m", "convergence", "op", "x:f", "--reference", "tests.unused:f"), "tests/unused.py"),
        ("pytest", ("--patch=tests.unused:f", "tests/test_out.py"), "tests/unused.py"),
        ("pytest", ("-q",), "tests/test_out.py"),
    ],
)
def test_what_the_arguments_name_decides_it(program: str, arguments: tuple[str, ...], changed: str, root: Path) -> None:
    """A script, a module, a function; and pytest without a path runs every test of the configuration."""
    stage = Stage("s", "", arguments, program=program)
    before = Code(root).digest(stage, on_gpu=False)
    with (root / changed).open("a") as file:
        file.write("\n# A comment.\n")
    assert Code(root).digest(stage, on_gpu=False) != before


def test_a_file_that_is_not_python_counts_and_names_nothing(root: Path) -> None:
    """pytest says what is wrong with it."""
    before = Code(root).digest(STAGE, on_gpu=False)
    (root / "tests" / "test_ops_one.py").write_text("def")
    assert Code(root).digest(STAGE, on_gpu=False) != before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cov=tools",),
        ("--cov", "tools"),
        ("--ignore=tests/test_ops_two.py",),
        ("--deselect", "tests/test_ops_two.py::test"),
        ("-k", "tools"),
        ("--basetemp=/",),
        ("-c", "x" * 300),
    ],
    ids=str,
)
def test_the_value_of_an_option_is_nothing_that_pytest_collects(arguments: tuple[str, ...], root: Path) -> None:
    assert root / "tests" / "test_out.py" in Code(root).files(arguments)


def test_what_a_package_runs_and_what_a_star_imports(root: Path) -> None:
    (root / "tools" / "__main__.py").write_text("from tests.star import *")
    (root / "tests" / "star.py").write_text("")
    assert {root / "tools" / "__main__.py", root / "tests" / "star.py"} < Code(root).files(("-m", "tools"), False)
    assert root / "tools" / "__main__.py" in Code(root).files(("tools",), False)


def test_no_cell_of_versions_runs_the_pages_and_the_project_runs_every_test() -> None:
    sources, page = Code(), ROOT / "tests" / "test_docs.py"
    for kind in ("versions", "torch", "main", "two-gpus"):
        for stage in STAGES[kind]:
            assert page not in sources.files(stage.arguments), (kind, stage.name)
    (tests,) = (stage for stage in STAGES["project"] if stage.name == "tests")
    assert set(ROOT.glob("tests/*.py")) <= sources.files(tests.arguments)
    assert sources.files(("tests/test_packing.py",)) >= {ROOT / "tests" / "conftest.py", ROOT / "pyproject.toml"}


def test_a_record_that_says_nothing_of_its_stages_is_of_the_code_that_it_names() -> None:
    stages = [StageResult(stage.name, [], "passed") for stage in STAGES["versions"]]
    record = CellRecord("tf9.9-trl9.9", "", "whole", "", {}, {"gpu": "none"}, "", [], stages, True)
    assert Code().stale(record, "versions", "whole") == []
    assert Code().stale(record, "versions", "other") == [stage.name for stage in stages]


@pytest.mark.parametrize("code", ["whole", "other"])
def test_a_whole_record_that_lacks_a_stage_of_its_cell_is_stale(code: str) -> None:
    """Whatever code it says that it is of. A partial record says itself that it lacks stages."""
    sources, *earlier, last = Code(), *STAGES["versions"]
    ran = [StageResult(s.name, [], "passed", code=sources.digest(s, on_gpu=False)) for s in earlier]
    record = CellRecord("tf9.9-trl9.9", "", code, "", {}, {"gpu": "none"}, "", [], ran, True)
    assert sources.stale(record, "versions", "whole") == [last.name]
    assert sources.stale(dataclasses.replace(record, complete=False), "versions", "whole") == []


def test_records_of_the_schema_before_are_read(tmp_path: Path) -> None:
    accepted = baseline.load()
    assert accepted is not None
    record = accepted.cells["project"]
    for new in (record, dataclasses.replace(record, stages=[dataclasses.replace(s, code="c") for s in record.stages])):
        assert records.load(records.write(new, tmp_path)) == new
    old = json.loads((tmp_path / "project.json").read_text()) | {"schema": 1}
    for stage in old["stages"]:
        del stage["code"]
    assert records.from_dict(old, "old") == record
