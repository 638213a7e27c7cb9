"""A plugin of pytest, ``-p tests.reach --changed BASE``: the tests that a change can reach by imports.

A test file runs where it imports a changed file, by at most ``--within`` steps. By three or more, every model that is
patched reaches every op, and so does the proof. A package's ``__init__`` is no step: a name that it passes on is
imported from the file that defines it. A changed file of another kind is imported by whose text names it. Where only
ops changed, a test that names ops in its id runs if it names one that the change reaches.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.import_checks import PRODUCT, ROOT, imported_files, reaching, sources

OPS = "liger_kernels.ops"
ALL = 1000  # steps, of which no chain of imports has as many


class Reach(NamedTuple):
    """``tests`` are the paths of the files that run, and ``whole`` of those that a change outside of the ops reaches.
    ``ops`` and ``reached`` are the names of all ops, and of those that the change reaches."""

    tests: set[str]
    whole: set[str]
    ops: set[str]
    reached: set[str]

    def runs(self, file: str, test: str) -> bool:
        """Whether the test of this id runs, whose file does."""
        named = self.ops & set(re.findall(r"\w+", test.partition("[")[2]))
        return file in self.whole or not named or bool(named & self.reached)


def changed_since(base: str) -> list[str]:
    """The files that differ from where this branch left ``base``, and those that git does not know yet.

    Raises:
        ValueError: git knows no such commit.
    """
    try:
        start = _git("merge-base", base, "HEAD")
        return [*_git("diff", "--name-only", *start), *_git("ls-files", "--others", "--exclude-standard")]
    except subprocess.CalledProcessError as error:
        raise ValueError(f"--changed {base}: {error.stderr.strip()}; allowed is a commit or a branch") from error


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def reach_of(changed: Iterable[str], within: int, files: dict[str, tuple[str, str]] | None = None) -> Reach:
    """What runs where these paths ``changed``; ``files`` are the project's by default."""
    files = files or sources((*PRODUCT, "tests"))
    edges = imported_files(files)
    modules = {module for path in changed for module in _modules_of(path, files)}
    outside = {module for module in modules if not module.startswith(OPS)}
    exports = {name: where for name, where in _exports(files).items() if where in edges}
    reached = reaching(edges, modules, ALL)
    tests, whole = (
        {f"{m.replace('.', '/')}.py" for m in reaching(edges, part, within) if m.startswith("tests.test_")}
        for part in (modules, outside)
    )
    return Reach(tests, whole, set(exports), {name for name, where in exports.items() if where in reached})


def _modules_of(path: str, files: dict[str, tuple[str, str]]) -> set[str]:
    """The module of a path, or those whose text names it."""
    if path.endswith(".py"):
        return {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")}
    return {module for module, (_, text) in files.items() if Path(path).name in text}


def _exports(files: dict[str, tuple[str, str]]) -> dict[str, str]:
    """The names of functions that the package of ops passes on, with the modules that define them."""
    _, text = files.get(OPS, ("", ""))
    found = re.findall(r"from (\S+) import (?:\(([^)]*)\)|(.*))", text)
    return {name: base for base, *names in found for name in re.findall(r"\w+", "".join(names)) if name.islower()}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("changed", "the tests that a change can reach by imports")
    group.addoption(
        "--changed", metavar="BASE", help="run what the difference from where this branch left BASE reaches"
    )
    group.addoption("--within", metavar="N", type=int, default=2, help="by at most N imports (default: 2)")


class Selection:
    """The plugin of a run with ``--changed``."""

    def __init__(self, config: pytest.Config) -> None:
        changed = changed_since(config.getoption("--changed"))
        self.reach = reach_of(changed, config.getoption("--within"))
        self.says = f"changed: {len(changed)} files, which {len(self.reach.tests)} test files reach"

    def pytest_report_header(self) -> str:
        return self.says

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """What is ignored is not imported, either."""
        is_test = collection_path.suffix == ".py" and collection_path.is_relative_to(ROOT)
        return True if is_test and collection_path.relative_to(ROOT).as_posix() not in self.reach.tests else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        runs = {item: self.reach.runs(item.nodeid.partition("::")[0], item.nodeid) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not runs[item]])
        items[:] = [item for item in items if runs[item]]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--changed"):
        try:
            config.pluginmanager.register(Selection(config), "changed")
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
