"""Which source a stage runs, as a digest: what does not run in it may change, and its result is still of today.

A stage runs the product, what its arguments name, by path or as ``module:function``, and what these import of this
project, at any depth. pytest without a path runs the configured tests. A file that a text names counts as imported:
tests start programs by their path, and patches by ``module:function``. The files of a folder that a text names count,
too, without what they import: a test reads them, or copies them.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matrix.records import CellRecord
from matrix.repository import config
from matrix.repository.config import PYTEST, Stage

SUFFIXES = (
    *(".py", ".pyx", ".pxd", ".sh", ".toml", ".ini", ".cfg", ".txt", ".json", ".yaml", ".yml", ".jinja"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".hip", ".metal"),
)
# What decides how any stage runs, next to the configuration: how the package is built, and how pytest is called.
_SETTINGS = ("setup.py", "setup.cfg", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini")
_TESTS = ("test_*.py", "*_test.py")  # what pytest collects of a folder
# Options of pytest whose value is the next word, and no path to collect.
_VALUED = ("-k", "-m", "-c", "-p", "-o", "-W", "-n", "--deselect", "--rootdir", "--confcutdir", "--basetemp")
_MODULE = re.compile(r"(?=.{1,200}$)[A-Za-z_][\w-]*(\.[\w-]+)*")
_PATH = re.compile(r"[\w./-]{1,200}")


class Code:
    """The source below ``root`` as it is now. Every file is read once, so it lives as long as one question."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or config.here().root
        self._digests: dict[Path, str] = {}
        self._needed: dict[Path, tuple[set[Path], set[Path]]] = {}

    def digest(self, stage: Stage, on_gpu: bool) -> str:
        """Of what ``stage`` runs, and of its arguments."""
        program = () if stage.program == PYTEST else (stage.program,)
        digest = hashlib.sha256("\0".join((*program, *stage.given(on_gpu))).encode())
        for name, of_file in self.digests(stage, on_gpu).items():
            digest.update(f"\0{name}\0{of_file}".encode())
        return digest.hexdigest()[:16]

    def digests(self, stage: Stage, on_gpu: bool) -> dict[str, str]:
        """Of each file that ``stage`` reads."""
        paths = sorted(self.files(stage.given(on_gpu), stage.program == PYTEST))
        return {path.relative_to(self._root).as_posix(): self._digest(path) for path in paths}

    def stale(self, record: CellRecord, kind: str, whole: str) -> list[str]:
        """The stages of ``record``, of a cell of this ``kind``, that are not of this code: other code ran, or a
        complete record lacks them. A record that says nothing of its stages is of this code where ``whole``, the digest
        of all source, is its own."""
        stages, on_gpu = {stage.name: stage for stage in config.here().stages[kind]}, record.machine["gpu"] != "none"
        other = []
        for result in record.stages:
            if result.code and result.name in stages:
                is_stale = result.code != self.digest(stages[result.name], on_gpu)
            else:
                is_stale = record.code != whole
            if is_stale:
                other.append(result.name)
        ran = {result.name for result in record.stages}
        # A record's word that it is complete, and of this code, is no proof that it has every stage. A partial record
        # says itself that it lacks some.
        new = [name for name in stages if name not in ran] if record.complete else []
        return other + new

    def files(self, arguments: Sequence[str], collects: bool = True) -> set[Path]:
        """Every file that a program reads where it is given these arguments, and what decides how any stage runs.
        ``collects``: the program is pytest."""
        every = [self._root / name for name in (*config.here().product, config.FILE, *_SETTINGS)]
        found = {path for top in every for path in _below(top)}
        open_ends = [path for path in self._named(arguments, collects) if path not in found]
        open_ends += [path for test in open_ends for path in self._conftests(test) if path not in found]
        all_read: set[Path] = set()
        while open_ends:
            path = open_ends.pop()
            if path not in found:
                found.add(path)
                followed, read = self._needs(path)
                open_ends += followed
                all_read |= read
        return found | all_read

    def _named(self, arguments: Sequence[str], collects: bool) -> Iterator[Path]:
        """What the arguments name: modules, files, and of folders what is source or, for pytest, what it collects.
        Without any test, pytest collects the configured ones."""
        words, named, collected, ignored = iter(arguments), [], [], []
        for word in words:
            option, _, value = word.partition("=")
            if collects and option in ("--ignore", "--ignore-glob"):
                ignored.append(str(self._root / (value or next(words, ""))))
            elif collects and word in _VALUED:
                named.append(next(words, ""))
            elif option.startswith("-"):
                named.append(value)
            else:
                collected.append(word)
        tests = list(self._tests(collected, ignored)) if collects else []
        if collects and not tests and "--pyargs" not in arguments:
            tests = list(self._tests(config.here().tests, ignored))
        yield from tests
        for word in (*named, *collected):
            path = config.place(self._root, word)
            if path is None:
                module = word.partition(":")[0]
                yield from (*self._modules(module), *self._modules(f"{module}.__main__"))
            elif path.is_file() or not collects:
                yield from _below(path)

    def _tests(self, words: Iterable[str], ignored: Sequence[str]) -> Iterator[Path]:
        """The files that pytest collects of these places."""
        for top in filter(None, (config.place(self._root, word) for word in words)):
            for path in (path for path in _below(top) if top.is_file() or any(map(path.match, _TESTS))):
                if not any(fnmatch.fnmatch(str(path), pattern) for pattern in ignored):
                    yield path

    def _conftests(self, test: Path) -> Iterator[Path]:
        above = test.relative_to(self._root).parents
        return (path for folder in above if (path := self._root / folder / "conftest.py").is_file())

    def _needs(self, path: Path) -> tuple[set[Path], set[Path]]:
        """The files that ``path`` imports or names, and those of folders that it names."""
        if path not in self._needed:
            names = set(_names(path, self._root)) if path.suffix == ".py" else set()
            named = {folder / name for name in names for folder in (self._root, path.parent)}
            followed = {place for place in named if place.suffix in SUFFIXES and place.is_file()}
            folders = {self._root / name for name in names if (self._root / name).is_dir()}
            read = {file for folder in folders for file in _below(folder) if file.suffix == ".py"}
            self._needed[path] = followed | {file for name in names for file in self._modules(name)}, read
        return self._needed[path]

    def _modules(self, name: str) -> Iterator[Path]:
        """The files of a module, and of the packages around it."""
        if _MODULE.fullmatch(name):
            for i in range(name.count(".") + 1):
                base = self._root.joinpath(*name.split(".")[: i + 1])
                yield from (file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file())

    def _digest(self, path: Path) -> str:
        if path not in self._digests:
            content = _without_matrix(path) if path == self._root / config.FILE else path.read_bytes()
            self._digests[path] = hashlib.sha256(content).hexdigest()
        return self._digests[path]


def _without_matrix(path: Path) -> bytes:
    """A pyproject.toml without the configuration of the matrix: each stage's own words are in its digest already."""
    data = config.read(path)
    data.get("tool", {}).pop("matrix", None)
    return json.dumps(data, sort_keys=True, default=str).encode()


def _names(path: Path, root: Path) -> Iterator[str]:
    """What may be a module or a path: what is imported, and every text. pytest imports from the folder of a test, and
    of each conftest.py, too. What is no Python of this version names nothing."""
    package = path.relative_to(root).parent.parts
    folders = [package[:i] for i in range(len(package) + 1)]
    try:
        parsed = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # ValueError: a null byte, up to Python 3.11
        return
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (".".join([*above, alias.name]) for alias in node.names for above in folders)
        elif isinstance(node, ast.ImportFrom):
            for above in [package[: len(package) - node.level + 1]] if node.level else folders:
                base = [*above, *([node.module] if node.module else [])]
                yield from (".".join([*base, alias.name]).removesuffix(".*") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(":")[0]
            if _PATH.fullmatch(text) and not text.startswith((".", "/")):
                yield text


def _below(top: Path) -> Iterator[Path]:
    """The source in a folder. A file that is named itself is whatever it is called."""
    if top.is_file():
        return iter([top])
    return (path for path in top.rglob("*") if path.suffix in SUFFIXES and path.is_file())
