"""``[tool.matrix]`` of a repository's pyproject.toml: axes, stages and kinds of cells, checked.

Each class below that ends in ``Table`` is one table of the configuration, and its fields are the table's keys. A field
without a default must be given. :func:`here` finds the repository from the working directory.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from convergence.checked import checked, cut, shown
from convergence.files import Unusable, read_text

FILE = "pyproject.toml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a cell, a kind, a stage: a file, an environment, a word
_RELEASE = r"[0-9]+(?:\.[0-9]+)*"
_COMPARISON = re.compile(rf"(>=|>|<=|<|==|!=) *({_RELEASE})")
_FIELD = re.compile(r"\{([^{}]*)\}")
PYTEST = "pytest"
GPU = "-gpu"  # of a record that was made on a GPU, after the name of its cell


@dataclass(frozen=True)
class AxisTable:
    """A package whose versions are what cells differ in.

    Attributes:
        versions: what the project supports, such as ">=4.46,<6"; everything when empty.
        of_machine: whether a machine with a GPU brings its own, so that a cell's version does not count there.
        follows: the axis that asks for one exact version of this one.
    """

    versions: str = ""
    of_machine: bool = False
    follows: str = ""


@dataclass(frozen=True)
class StageTable:
    """One process that runs in a cell.

    Attributes:
        command: what runs. ``pytest`` gets its workers and ``--junitxml``; anything else is one case, which passes
            with exit code 0. ``python`` is the cell's.
        name: what records call it; the key of the table when empty.
        does: what it shows, for readers.
        on_gpu: the command on a machine with a GPU; the same when empty.
        alone: whether one process takes all of a GPU: there are no workers then.
        records: whether it must leave a JSON record of a verdict. ``pytest`` gets ``--records DIR``, another command
            the folder where it says ``{records}``.
    """

    command: str
    name: str = ""
    does: str = ""
    on_gpu: str = ""
    alone: bool = False
    records: bool = False


@dataclass(frozen=True)
class KindTable:
    """Cells that run the same stages.

    Attributes:
        stages: keys of ``stages``, in their order.
        does: what these cells show, for readers.
        cells: what the cells are called, such as "tf{transformers}-trl{trl}": major and minor version of axes.
        pins: the axes that each of these cells pins to a release; those of ``cells`` when empty.
        newest: the name of a cell that leaves versions open; there is none when empty.
        here: whether this is one cell without a requirement file, which runs in the environment that is there.
        gpus: of a cell ``here``, how many GPUs it needs.
        branches: requirements from version control by axis. The kind is then one cell, which the gate does not ask
            for.
        of: for ``branches``, the kind whose newest cell this one starts from.
    """

    stages: list[str]
    does: str = ""
    cells: str = ""
    pins: list[str] = field(default_factory=list)
    newest: str = ""
    here: bool = False
    gpus: int = 0
    branches: dict[str, str] = field(default_factory=dict)
    of: str = ""

    @property
    def named(self) -> tuple[str, ...]:
        """The axes in the names of its cells."""
        return tuple(_FIELD.findall(self.cells))

    @property
    def prefix(self) -> str:
        return self.cells.partition("{")[0]


@dataclass(frozen=True)
class MatrixTable:
    """``[tool.matrix]`` itself.

    Attributes:
        product: files and folders that every stage runs: a change of them makes every record stale.
        axes: by package.
        stages: by a name.
        kinds: by a name; cells are listed in this order.
        cells: the folder of the requirement files.
        records: the folder of the records.
        baseline: the file of the accepted records.
        tests: files and folders that some stage may run.
        tools: packages that a new cell pins as the newest cell does.
        free: packages that a new cell pins to what the resolver chooses.
        tox: a tox file of your own that has an environment for each cell; made for each run when empty.
    """

    product: list[str]
    axes: dict[str, Any]
    stages: dict[str, Any]
    kinds: dict[str, Any]
    cells: str = "ci/cells"
    records: str = "build/matrix"
    baseline: str = "ci/baseline.json"
    tests: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    tox: str = ""


@dataclass(frozen=True)
class Stage:
    """A process: ``python -m pytest`` with these arguments, or another program.

    Attributes:
        arguments: the paths and options.
        on_gpu: what replaces them on a machine with a GPU; the same when empty.
        alone: whether one process takes all of a GPU: there are no workers then.
        leaves_records: whether it gets a folder, and must leave at least one record there.
    """

    name: str
    does: str
    arguments: tuple[str, ...]
    on_gpu: tuple[str, ...] = ()
    alone: bool = False
    leaves_records: bool = False
    program: str = PYTEST

    def given(self, on_gpu: bool) -> tuple[str, ...]:
        """The arguments on a machine with a GPU, or without."""
        return self.on_gpu if self.on_gpu and on_gpu else self.arguments


@dataclass(frozen=True)
class Config:
    """A repository.

    Attributes:
        stages: by kind of cell.
        tox: a tox file, or empty.
    """

    root: Path
    cells: Path
    records: Path
    baseline: Path
    tox: str
    product: tuple[str, ...]
    tests: tuple[str, ...]
    tools: tuple[str, ...]
    free: tuple[str, ...]
    axes: dict[str, AxisTable]
    kinds: dict[str, KindTable]
    stages: dict[str, tuple[Stage, ...]]

    @property
    def upstream(self) -> tuple[str, ...]:
        """The axes that a machine with a GPU does not bring itself."""
        return tuple(name for name, axis in self.axes.items() if not axis.of_machine)

    @property
    def prefixes(self) -> dict[str, str]:
        """By what the names of cells begin with, in the order of cells: their kind."""
        found: dict[str, str] = {}
        for name, kind in self.kinds.items():
            found |= {prefix: name for prefix in (kind.prefix, kind.newest) if prefix}
        return found

    def watched(self, kind: str) -> tuple[str, ...]:
        """What a new cell of this kind may be about: the axes in its name, and those that follow them."""
        named = self.kinds[kind].named
        return (*named, *(name for name, axis in self.axes.items() if axis.follows in named and name not in named))


def here() -> Config:
    """The configuration of the repository that the working directory lies in.

    Raises:
        Unusable: no folder above has one, or it is wrong; the message names the file and what is wrong in it.
    """
    return _nearest(Path.cwd())


@functools.cache
def _nearest(start: Path) -> Config:
    for folder in (start, *start.parents):
        if (folder / FILE).is_file() and "matrix" in read(folder / FILE).get("tool", {}):
            return load(folder)
    raise Unusable(f"{start}: no {FILE} there or above has [tool.matrix]; python -m matrix init writes one")


def read(path: Path) -> dict[str, Any]:
    """The TOML in ``path``.

    Raises:
        Unusable: it cannot be read, or is no TOML.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # before Python 3.11
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise Unusable(f"{path}: Python 3.10 reads no TOML; pip install tomli") from None
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise Unusable(f"{path}: is no TOML: {error}") from error
    except RecursionError:
        raise Unusable(f"{path}: is nested too deep") from None


def load(root: Path) -> Config:
    """The configuration of the repository at ``root``.

    Raises:
        Unusable: as :func:`here`.
    """
    where = f"{root / FILE}: tool.matrix"
    top: MatrixTable = _table(read(root / FILE).get("tool", {}).get("matrix"), MatrixTable, where)
    for key in ("cells", "records", "baseline", "tox"):
        _inside(getattr(top, key), f"{where}.{key}")
    for key in ("product", "tests"):
        for path in getattr(top, key):
            _inside(path, f"{where}.{key}")
            if not (root / path).exists():
                raise Unusable(f"{where}.{key} names {shown(path)}, which is not there; allowed are files and folders")
    axes: dict[str, AxisTable] = {
        name: _table(table, AxisTable, f"{where}.axes.{name}") for name, table in top.axes.items()
    }
    for name, axis in axes.items():
        comparisons(axis.versions, f"{where}.axes.{name}.versions")
        _known([axis.follows] if axis.follows else [], axes, "axis", f"{where}.axes.{name}.follows")
    stages = {name: _stage(name, table, f"{where}.stages.{name}") for name, table in top.stages.items()}
    for name, stage in stages.items():
        for words in map(stage.given, (False, True)) if stage.program == PYTEST and not top.tests else ():
            if "--pyargs" not in words and not any(place(root, word) for word in words):
                raise Unusable(
                    f"{where}.stages.{name}: pytest is given no path, and {where}.tests is empty; name its tests"
                )
    kinds: dict[str, KindTable] = {
        name: _table(table, KindTable, f"{where}.kinds.{name}") for name, table in top.kinds.items()
    }
    for name, kind in kinds.items():
        _check_kind(name, kind, axes, stages, kinds, f"{where}.kinds.{name}")
    prefixes = [prefix for kind in kinds.values() for prefix in (kind.prefix, kind.newest) if prefix]
    for prefix in prefixes:
        if sum(other.startswith(prefix) for other in prefixes) > 1:
            raise Unusable(
                f"{where}.kinds: names of two kinds begin with {prefix!r}; each needs a beginning of its own"
            )
    return Config(
        root=root,
        cells=root / top.cells,
        records=root / top.records,
        baseline=root / top.baseline,
        tox=top.tox,
        product=tuple(top.product),
        tests=tuple(top.tests),
        tools=tuple(top.tools),
        free=tuple(top.free),
        axes=axes,
        kinds=kinds,
        stages={name: tuple(stages[one] for one in kind.stages) for name, kind in kinds.items()},
    )


def _table(given: Any, kind: Any, where: str) -> Any:
    """``given`` as a ``kind``, whose fields are the keys."""
    if type(given) is not dict:
        raise Unusable(f"{where} is {shown(given)}; allowed is a table")
    fields = dataclasses.fields(kind)
    if unknown := [name for name in given if name not in {one.name for one in fields}]:
        allowed = ", ".join(one.name for one in fields)
        raise Unusable(f"{where} has the unknown key {cut(', '.join(map(repr, unknown)))}; allowed are {allowed}")
    defaults: dict[str, Any] = {}
    for one in fields:
        if one.default is not dataclasses.MISSING:
            defaults[one.name] = one.default
        elif one.default_factory is not dataclasses.MISSING:
            defaults[one.name] = one.default_factory()
        elif one.name not in given:
            raise Unusable(f"{where} has no {one.name!r}, which must be given")
    return checked({**defaults, **given}, kind, where)


def _inside(path: str, where: str) -> None:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
        raise Unusable(f"{where} is {shown(path)}; allowed is a path below the repository, with '/'")


def _known(names: Iterable[str], known: Iterable[str], what: str, where: str) -> None:
    if unknown := [name for name in names if name not in known]:
        allowed = ", ".join(known) or "none: there is no such table"
        raise Unusable(f"{where} names the unknown {what} {cut(', '.join(unknown))}; allowed are {allowed}")


def _called(name: str, where: str) -> None:
    if not NAME.fullmatch(name):
        raise Unusable(f"{where} is called {shown(name)}; allowed are letters, digits, '.', '-' and '_'")


def _stage(key: str, given: Any, where: str) -> Stage:
    table: StageTable = _table(given, StageTable, where)
    _called(table.name or key, where)
    words = _words(table.command, f"{where}.command")
    on_gpu = _words(table.on_gpu, f"{where}.on_gpu") if table.on_gpu else [words[0]]
    if on_gpu[0] != words[0]:
        raise Unusable(f"{where}.on_gpu runs {shown(on_gpu[0])}; allowed is the program of command, {words[0]!r}")
    if table.records and words[0] != PYTEST and not all("{records}" in " ".join(w) for w in (words, on_gpu) if w[1:]):
        raise Unusable(f"{where}: a command that leaves records says where, as {{records}}; only pytest need not")
    return Stage(
        table.name or key, table.does, tuple(words[1:]), tuple(on_gpu[1:]), table.alone, table.records, words[0]
    )


def _words(command: str, where: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise Unusable(f"{where} is {shown(command)}, which no shell could split: {error}") from error
    if not words:
        raise Unusable(f"{where} is empty; allowed is a command, such as 'pytest tests'")
    return words


def place(root: Path, word: str) -> Path | None:
    """The file or folder below ``root`` that a word of a command names, if it names one."""
    path = root / word.partition("::")[0]
    try:
        return path if word and path.exists() and path.resolve().is_relative_to(root.resolve()) else None
    except (OSError, ValueError):  # a word that is too long for a name, or has a null byte
        return None


def refuse_gpu_name(name: str, where: str) -> None:
    """
    Raises:
        Unusable: no cell may be called ``name``, because records of GPUs are.
    """
    if name.endswith(GPU):
        raise Unusable(f"{where} is called {shown(name)}; what ends in {GPU!r} is the record of a cell on a GPU")


def _check_kind(
    name: str,
    kind: KindTable,
    axes: dict[str, AxisTable],
    stages: dict[str, Stage],
    kinds: dict[str, KindTable],
    where: str,
) -> None:
    _called(name, where)
    refuse_gpu_name(name, where)
    if not kind.stages:
        raise Unusable(f"{where}.stages is empty; allowed are {', '.join(stages) or 'none: there is no stage'}")
    _known(kind.stages, stages, "stage", f"{where}.stages")
    names = [stages[one].name for one in kind.stages]
    if twice := {one for one in names if names.count(one) > 1}:
        raise Unusable(f"{where}.stages has two that are called {', '.join(sorted(twice))}; give one another name")
    if sum(map(bool, (kind.cells, kind.here, kind.branches))) != 1:
        raise Unusable(f"{where} has to have one of cells, here and branches, and no two of them")
    if kind.cells:
        if not kind.named or not NAME.fullmatch(_FIELD.sub("1", kind.cells)) or not kind.prefix:
            raise Unusable(
                f"{where}.cells is {shown(kind.cells)}; allowed are letters, and an axis in braces, such as 'tf{{trl}}'"
            )
        _known(kind.named, axes, "axis", f"{where}.cells")
    _known([*kind.pins, *kind.branches], axes, "axis", f"{where}.{'pins' if kind.pins else 'branches'}")
    if kind.newest:
        _called(kind.newest, f"{where}.newest")
        refuse_gpu_name(kind.newest, f"{where}.newest")
    if kind.gpus < 0 or (kind.gpus and not kind.here):
        raise Unusable(f"{where}.gpus is {kind.gpus}; allowed is a count, and only with here = true")
    if kind.branches and (kind.of not in kinds or not kinds[kind.of].cells):
        allowed = ", ".join(one for one, other in kinds.items() if other.cells)
        raise Unusable(f"{where}.of is {shown(kind.of)}; allowed are kinds of cells with versions: {allowed}")


def number(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, for comparisons; (2, 8) for "2.8.0rc1" and "2.8"."""
    found = re.match(_RELEASE, version)
    parts = [int(part) for part in found[0].split(".")] if found else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def comparisons(versions: str, where: str) -> list[tuple[str, tuple[int, ...]]]:
    """What ``versions`` asks for, such as [(">=", (4, 46)), ("<", (6,))].

    Raises:
        Unusable: it is none.
    """
    found = []
    for part in filter(None, (part.strip() for part in versions.split(","))):
        comparison = _COMPARISON.fullmatch(part)
        if comparison is None:
            raise Unusable(
                f"{where} has {shown(part)}; allowed are >=, >, <=, <, == and != with a release: '>=4.46,<6'"
            )
        found.append((comparison[1], number(comparison[2])))
    return found


def supports(versions: str, version: str) -> bool:
    """Whether ``version`` is one of ``versions``."""
    this = number(version)
    return all(
        {"==": this == n, "!=": this != n, ">=": this >= n, ">": this > n, "<=": this <= n, "<": this < n}[sign]
        for sign, n in comparisons(versions, "versions")
    )
