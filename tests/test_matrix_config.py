"""``[tool.matrix]``: what is allowed, what a wrong table says, and which edit of it makes which record stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from matrix import __main__ as command
from matrix.code import Code
from matrix.repository import config
from matrix.runner import code_digest

GOOD = """
[tool.matrix]
product = ["kernels"]

[tool.matrix.axes]
torch = { of_machine = true }
triton = { of_machine = true, follows = "torch" }
trl = { versions = ">=1.0,<2" }

[tool.matrix.stages.tests]
command = "pytest kernels/tests.py"

[tool.matrix.stages.speed]
command = "python -m kernels --to {records}"
records = true

[tool.matrix.kinds.old]
cells = "trl{trl}"
newest = "latest"
stages = ["tests", "speed"]

[tool.matrix.kinds.here]
here = true
stages = ["tests"]
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "tests.py").write_text("def test_a(): pass\n")
    (tmp_path / "pyproject.toml").write_text(GOOD)
    (tmp_path / "ci" / "cells").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config._nearest.cache_clear()
    return tmp_path


def test_the_nearest_folder_above_that_has_one_counts(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = repository / "kernels" / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[tool.ruff]\n")  # without a matrix
    monkeypatch.chdir(inner)
    found = config.here()
    assert found.root == repository
    assert (found.cells, found.baseline) == (repository / "ci" / "cells", repository / "ci" / "baseline.json")
    assert {kind: [stage.name for stage in stages] for kind, stages in found.stages.items()} == {
        "old": ["tests", "speed"],
        "here": ["tests"],
    }
    assert found.stages["old"][1].program == "python"
    assert found.upstream == ("trl",)
    assert found.prefixes == {"trl": "old", "latest": "old"}


def test_no_configuration_is_an_error_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("list", "run", "report", "gate", "new", "ci", "moved"):
        assert command.main([name]) == 2
        assert "has [tool.matrix]; python -m matrix init writes one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('product = ["kernels"]', "", "tool.matrix has no 'product', which must be given"),
        ('product = ["kernels"]', 'product = "kernels"', "['product'] is 'kernels' (str); allowed is a list"),
        ('["kernels"]', '["nowhere"]', "tool.matrix.product names 'nowhere' (str), which is not there"),
        ('["kernels"]', '["../kernels"]', "allowed is a path below the repository"),
        ('["kernels"]', '["kernels"]\ncell = "x"', "tool.matrix has the unknown key 'cell'; allowed are product, axes"),
        (
            '["kernels"]',
            '["kernels"]\nrecords = "/tmp"',
            "tool.matrix.records is '/tmp' (str); allowed is a path below",
        ),
        ('">=1.0,<2"', '"~=1.0"', "tool.matrix.axes.trl.versions has '~=1.0' (str); allowed are >=, >, <=, <"),
        ('follows = "torch"', 'follows = "tensorflow"', "names the unknown axis tensorflow; allowed are torch, triton"),
        ("of_machine = true }\ntri", 'of_machine = "yes" }\ntri', "['of_machine'] is 'yes' (str); allowed is true or"),
        ("of_machine = true }\ntri", "machine = true }\ntri", "axes.torch has the unknown key 'machine'; allowed are"),
        ('"pytest kernels/tests.py"', '""', "tool.matrix.stages.tests.command is empty; allowed is a command"),
        ('"pytest kernels/tests.py"', '"pytest -q"', "stages.tests: pytest is given no path, and"),
        ('"pytest kernels/tests.py"', '"pytest \'x"', "which no shell could split"),
        (
            '"pytest kernels/tests.py"',
            '"pytest"\non_gpu = "make x"',
            "on_gpu runs 'make' (str); allowed is the program",
        ),
        ("--to {records}", "", "a command that leaves records says where, as {records}"),
        ('stages = ["tests", "speed"]', 'stages = ["test"]', "names the unknown stage test; allowed are tests, speed"),
        ('stages = ["tests", "speed"]', "stages = []", "kinds.old.stages is empty; allowed are tests, speed"),
        ('stages = ["tests", "speed"]', 'stages = ["tests", "tests"]', "has two that are called tests"),
        ('"trl{trl}"', '"tr{transformers}"', "names the unknown axis transformers; allowed are torch, triton, trl"),
        ('"trl{trl}"', '"{trl}"', "allowed are letters, and an axis in braces"),
        ('"trl{trl}"', '"trl{trl"', "allowed are letters, and an axis in braces"),
        ('"trl{trl}"', '"la{trl}"', "names of two kinds begin with 'la'"),
        ("here = true", "", "kinds.here has to have one of cells, here and branches"),
        ("here = true", "here = true\ngpus = -1", "gpus is -1; allowed is a count"),
        (
            "here = true",
            'branches = { trl = "git+x" }\nof = "new"',
            "of is 'new' (str); allowed are kinds of cells with",
        ),
        ("[tool.matrix.kinds.here]", "[tool.matrix.kinds.'a b']", "is called 'a b' (str); allowed are letters, digits"),
        ("[tool.matrix]", "[tool.matrix", "is no TOML"),
    ],
)
def test_a_wrong_configuration_is_named(
    old: str, new: str, message: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["list"]) == 0
    assert old in GOOD
    (repository / "pyproject.toml").write_text(GOOD.replace(old, new, 1))
    config._nearest.cache_clear()
    assert command.main(["list"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(repository / "pyproject.toml") in said


@pytest.mark.parametrize(
    ("edit", "whole", "tests", "speed"),
    [
        (("kernels/tests.py", "kernels/tests.py -q"), True, True, False),
        (("python -m kernels", "run -m kernels"), True, False, True),
        (('newest = "latest"', ""), True, False, False),
        (("[tool.matrix]", "[tool.ruff]\nline-length = 100\n[tool.matrix]"), True, True, True),
    ],
    ids=["a stage", "a program", "a kind", "another tool"],
)
def test_an_edit_of_a_stage_is_one_of_that_stage(
    edit: tuple[str, str], whole: bool, tests: bool, speed: bool, repository: Path
) -> None:
    def digests() -> list[str]:
        config._nearest.cache_clear()
        here = config.here()
        return [code_digest(), *(Code().digest(stage, on_gpu=False) for stage in here.stages["old"])]

    before = digests()
    (repository / "pyproject.toml").write_text(GOOD.replace(*edit, 1))
    assert [a != b for a, b in zip(before, digests(), strict=True)] == [whole, tests, speed]


@pytest.mark.parametrize(
    ("versions", "inside", "outside"),
    [
        (">=4.46,<6", ("4.46", "4.46.3", "5.99.1"), ("4.45.9", "6", "6.0.0", "6.1")),
        ("==2.8", ("2.8", "2.8.0"), ("2.8.1",)),
        (">2,!=2.1,<=2.2", ("2.0.1", "2.2.0"), ("2.0", "2.1.0", "2.2.1")),
        ("", ("0", "99"), ()),
    ],
)
def test_the_versions_of_an_axis(versions: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    assert [version for version in (*inside, *outside) if config.supports(versions, version)] == [*inside]


def test_every_key_is_explained() -> None:
    """In the docstring of its table, from which the reference is written."""
    for table in (config.MatrixTable, config.AxisTable, config.StageTable, config.KindTable):
        explained = re.findall(r"^        (\w+): ", table.__doc__, flags=re.MULTILINE)
        assert explained == [*table.__dataclass_fields__], table
