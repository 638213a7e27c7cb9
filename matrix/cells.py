"""A cell: a requirement file that pins one set of packages, and the comment in it that says why the set matters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from convergence.checked import cut, shown
from convergence.files import Unusable, read_text
from matrix.repository import config
from matrix.repository.config import NAME, supports

_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*) *== *([0-9]+(?:\.[0-9A-Za-z+]+)*)")


@dataclass(frozen=True)
class Cell:
    """One requirement file.

    Attributes:
        name: the file's stem, which is the name of the tox environment, too.
        why: the comment at the top, as one line.
        pins: package to version, of the exactly pinned requirements.
        kind: of the configuration: which stages run.
        digest: changes with the file.
        open: whether it leaves versions open, which are then the newest.
        gpus: how many it needs to run at all; any other runs without one, too.
    """

    name: str
    why: str
    pins: dict[str, str]
    kind: str
    digest: str
    open: bool = False
    gpus: int = 0

    def version(self, package: str) -> str:
        return self.pins.get(package, "newest" if self.open else "")


def in_place() -> dict[str, Cell]:
    """The cells without a requirement file, by name: they run in the environment that is there. They are judged as the
    others are."""
    kinds = config.here().kinds
    return {name: Cell(name, kind.does, {}, name, "", gpus=kind.gpus) for name, kind in kinds.items() if kind.here}


def made_by(name: str) -> str:
    """The command that makes the record of a cell."""
    return f"python -m matrix cell {name}" if name in in_place() else "python -m matrix run"


def checked_name(name: str, where: str) -> str:
    """``name``, if a cell may be called so; ``where`` it was found.

    Raises:
        Unusable: it may not.
    """
    if not NAME.fullmatch(name):
        raise Unusable(f"{where} names a cell {shown(name)}; allowed are letters, digits, '.', '-' and '_'")
    return name


def load(path: Path) -> Cell:
    """The cell in ``path``.

    Raises:
        Unusable: it is no text, no comment says why it exists, it may not be called so, its name is of no kind, or a
            requirement is not pinned, or to a version that the axis does not support.
    """
    checked_name(path.stem, str(path))
    config.refuse_gpu_name(path.stem, str(path))
    text = read_text(path)
    comments = [line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#")]
    if not comments:
        raise Unusable(f"{path}: no comment says why this cell exists; begin the file with one")
    here, prefixes = config.here(), config.here().prefixes
    kind = next((kind for prefix, kind in prefixes.items() if path.stem.startswith(prefix)), None)
    if kind is None:
        allowed = ", ".join(f"{prefix}..." for prefix in prefixes) or "nothing: no kind has cells"
        raise Unusable(f"{path}: a cell is called {allowed}")
    table, is_open = here.kinds[kind], path.stem == here.kinds[kind].newest
    requirements = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pins = {pin[1]: pin[2] for line in requirements if (pin := _PIN.fullmatch(line))}
    free = [line for line in requirements if not _PIN.fullmatch(line)]
    if free and not is_open:
        only = f"only {table.newest!r} leaves that open" if table.newest else "every requirement needs one"
        raise Unusable(f"{path}: {cut(', '.join(free))} has no exact version; {only}")
    for package in () if is_open else table.pins or table.named:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", version := pins.get(package, "")):
            raise Unusable(f"{path}: pins {package} to {version!r}; allowed is a release, such as {package}==2.1.0")
        if not supports(here.axes[package].versions, version):
            raise Unusable(f"{path}: pins {package} to {version}; the axis supports {here.axes[package].versions}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Cell(path.stem, " ".join(comments), pins, kind, digest, is_open)


def load_all(folder: Path | None = None) -> dict[str, Cell]:
    """Every cell by name, in the order of their versions; of the repository, or in ``folder``."""
    cells = [load(path) for path in (folder or config.here().cells).glob("*.txt")]
    return {cell.name: cell for cell in sorted(cells, key=lambda cell: order(cell.name))}


def order(name: str) -> tuple[object, ...]:
    """Sorts versions as numbers: tf4.46 before tf5.2 before tf5.13, then ``latest``, then torch's."""
    prefixes = config.here().prefixes
    kind = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))
    return kind, *(int(number) for number in re.findall(r"\d+", name)), name


def select(names: list[str], here: bool = False) -> list[Cell]:
    """The named cells, or all that tox makes. ``here`` allows those of :func:`in_place`, too.

    Raises:
        ValueError: for an unknown name, with the allowed ones.
    """
    cells = load_all() | (in_place() if here and names else {})
    unknown = [name for name in names if name not in cells]
    if unknown:
        allowed = ", ".join(cells) or f"none: {config.here().cells} has no requirement file"
        raise ValueError(f"unknown cell {', '.join(unknown)}; allowed are {allowed}")
    return [cells[name] for name in dict.fromkeys(names)] if names else list(cells.values())


def refuse_none(chosen: Collection[Cell]) -> None:
    """
    Raises:
        ValueError: there is no cell, so whatever is asked of every cell would be true.
    """
    if not chosen:
        others = f"; python -m matrix cell runs what needs none: {', '.join(here)}" if (here := in_place()) else ""
        raise ValueError(f"there is no cell: {config.here().cells} has no requirement file{others}")
