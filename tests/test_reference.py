"""Lists on the reference pages name what the code has. Pages of evidence say what was not measured."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import liger_kernels
from convergence import plugin
from convergence.arms.setups import SETUPS
from convergence.models.models import CORE, MODELS
from convergence.op import command
from convergence.trainers.cases import CASES
from liger_kernels import ops
from matrix.repository import config
from tests.pages import ROOT
from tools.op_table import FIRST, TABLE, op_of
from tools.op_table.row import BATCH, RUNS

PAGES = ROOT / "docs" / "reference"
EVIDENCE = ROOT / "docs" / "evidence"


def section(page: str, title: str) -> str:
    """The text under a heading, up to the next heading of its level."""
    text = (PAGES / page).read_text(encoding="utf-8")
    assert f"\n{title}\n" in text, f"{page} has no heading {title!r}"
    level = title.partition(" ")[0]
    return text.partition(f"\n{title}\n")[2].partition(f"\n{level} ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines[1:] if not set("".join(line)) <= set("|- ")]


def names(text: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", text)


def options(text: str) -> set[str]:
    return {word for name in names(text) for word in re.findall(r"--[a-z-]+", name)}


class Added:
    """The names of the options that a plugin adds."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def getgroup(self, *_: Any) -> Added:
        return self

    def addoption(self, *names: str, **_: Any) -> None:
        self.names.update(names)


def commands(module: str) -> set[str]:
    """The subcommands of ``python -m MODULE``."""
    source = (ROOT / module / "__main__.py").read_text(encoding="utf-8")
    return set(re.findall(r'\b(?:add|add_parser)\(\s*"([a-z]+)"', source))


def test_the_options_of_the_proof() -> None:
    added, table = Added(), section("convergence.md", "## Options")
    plugin.pytest_addoption(added)
    in_table = options("".join(first for first, *_ in rows(table))) | options(section("convergence.md", "## Set-ups"))
    of_a_checkpoint = options(next(row[1] for row in rows(table) if row[0].startswith("`--checkpoint")))
    assert in_table - {"--patch", "--no-blame"} | of_a_checkpoint == added.names - {"--patch"}


def test_the_models_of_the_proof() -> None:
    (text,) = (row[1] for row in rows(section("convergence.md", "## Options")) if row[0] == "`--models`")
    of_core, of_all = (names(part) for part in text.split("`all`"))
    assert {*of_core, *of_all} - {"core"} == {*MODELS}
    assert {*of_core} - {"core"} == {name for name in MODELS if name.startswith(CORE) and name.split("-")[0] in CORE}


def test_the_set_ups_of_the_proof() -> None:
    found = []
    for plain, checkpointed in rows(section("convergence.md", "## Set-ups")):
        found += names(plain)
        found += [f"{name}-checkpointing" for name in names(plain) if checkpointed == "yes"]
    assert sorted(found) == sorted(SETUPS)


def test_the_options_of_a_single_op() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    command.add_options(parser)
    table = "".join(first for first, *_ in rows(section("convergence.md", "## A single op")))
    assert options(table) == {*re.findall(r"(?<![\w-])--[a-z-]+", parser.format_usage())}


def test_every_command_has_exit_codes() -> None:
    found: dict[str, set[str]] = {"convergence": set(), "matrix": set()}
    for module in found:
        for row in rows((PAGES / "exit-codes.md").read_text(encoding="utf-8")):
            if (whole := names(row[0])) and whole[0].startswith(f"python -m {module}"):
                found[module] |= {whole[0].split()[-1], *whole[1:]}
        assert found[module] == commands(module), module


def test_every_command_of_the_matrix_is_described() -> None:
    text = "".join(row[0] for row in rows(section("matrix.md", "## Commands")))
    assert {*re.findall(r"python -m matrix ([a-z]+)", text)} == commands("matrix")


def test_the_stages_of_a_cell() -> None:
    found: dict[str, set[str]] = {}
    for stages, kind, *_ in rows(section("matrix.md", "## What a cell runs")):
        found.setdefault(kind, set()).update(names(stages))
    assert found == {kind: {stage.name for stage in config.here().stages[kind]} for kind in found}
    assert {*found} == {"versions", "torch"}


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("## `[tool.matrix]`", config.MatrixTable),
        ("## `[tool.matrix.axes.PACKAGE]`", config.AxisTable),
        ("## `[tool.matrix.stages.ID]`", config.StageTable),
        ("## `[tool.matrix.kinds.NAME]`", config.KindTable),
    ],
)
def test_the_keys_of_the_configuration(title: str, table: Any) -> None:
    """Each with what it is when nobody gives it, as the validator has them."""
    found = {names(key)[0]: default for key, default, _ in rows(section("matrix-configuration.md", title))}
    expected = {}
    for one in dataclasses.fields(table):
        made = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        shown = made if type(made) is str else str(made).lower()
        expected[one.name] = "must be given" if made is dataclasses.MISSING else f"`{shown}`" if made else "-"
    assert found == expected


def test_every_trainer_that_is_tested_is_listed() -> None:
    listed = ", ".join(row[0] for row in rows(section("trainers.md", "## Who computes the loss")))
    for case in CASES.values():
        assert case.trainer.removesuffix("Trainer") in listed or f"transformers.{case.trainer}" in listed, case.trainer


def test_every_public_name_is_on_a_page() -> None:
    """An op is on the page of all ops, or on its own."""
    api = (PAGES / "api.md").read_text(encoding="utf-8")
    of_ops = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    shown = [name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", api, flags=re.MULTILINE)]
    written = [name.removeprefix("liger_kernels.") for name in names(api)]
    assert {*liger_kernels.__all__} <= {*shown, *written}
    shown = re.findall(r"^::: liger_kernels\.ops\.(\S+)$", of_ops, flags=re.MULTILINE)
    public = {*ops.__all__}
    assert {*shown} == {name for name in public if name.removesuffix("_ref") == name}
    assert {name.removesuffix("_ref") for name in public if name.endswith("_ref")} <= {*shown}


def test_the_promise_of_determinism_is_that_of_the_table() -> None:
    """An op is bitwise in both ways, or a row of the page says in which it is not."""
    text = section("determinism.md", "## What is promised, and why").partition("| cause |")[0]
    every, *others = rows(text)
    assert every == ["every op that no row below names", "bitwise", "bitwise"]
    by_cells: dict[tuple[str, ...], set[str]] = {(): set(), (RUNS,): set(), (RUNS, BATCH): set()}
    for name, op in TABLE.items():
        if op.promised is not None:
            by_cells[op.promised].add(op_of(name))
    alone, with_option, never = ({*names(row[0])} for row in others)
    assert [row[1:] for row in others] == [["bitwise", "no"], ["bitwise", others[1][2]], ["no", "no"]]
    assert alone == by_cells[RUNS,]
    assert by_cells[RUNS, BATCH] & alone <= with_option
    assert by_cells[()] == never - {"class_weight"}


def test_every_kernel_is_among_what_is_recognised() -> None:
    listed = [name for row in rows(section("recognised.md", "## Replaced")) for name in names(row[0])]
    assert sorted(listed) == sorted(liger_kernels.KERNELS)


def test_every_environment_variable_is_listed() -> None:
    read = set()
    for file in Path(liger_kernels.__file__).parent.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        for name in re.findall(r"environ(?:\.get\(|\[)([\w\"]+)", source):
            constant = name.strip('"') if name.startswith('"') else re.findall(rf'^{name} = "(\w+)"', source, re.M)[0]
            read.add(constant)
    table = rows(section("api.md", "## Environment variables"))
    assert {name for row in table for name in names(row[0])} == read


def not_measured(page: Path) -> str:
    """The paragraphs that say it."""
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")
    return "\n".join(text for text in paragraphs if "Not measured: " in text)


def test_every_page_of_evidence_says_what_was_not_measured() -> None:
    """Pages of parts (mutants-norms.md) leave that to the page of the whole."""
    pages = {page.stem: page for page in EVIDENCE.glob("*.md")}
    wholes = {name: page for name, page in pages.items() if name.partition("-")[0] not in {*pages} - {name, "setups"}}
    assert [name for name, page in wholes.items() if not not_measured(page)] == []


@pytest.mark.parametrize("page", ["benchmarks.md", "determinism.md"])
def test_an_op_without_a_measurement_is_known_by_it(page: str) -> None:
    """The page has rows of ops, and says that an op without one was not measured."""
    text = (EVIDENCE / page).read_text(encoding="utf-8")
    assert "every op without a row" in not_measured(EVIDENCE / page)
    measured = {op_of(row[0]).split(" ")[0] for row in rows(text)}
    assert {*FIRST} & measured
