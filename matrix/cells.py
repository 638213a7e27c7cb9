"""A cell: a requirement file that pins one set of packages, and the comment in it that says why the set matters."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from convergence.checked import cut, shown
from convergence.files import Unusable, read_text

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "cells"
# What a name begins with, in the order in which cells are listed, and of which kind the cell is.
_KINDS = {"tf": "versions", "latest": "versions", "torch": "torch"}
# What a cell of that kind pins to a release.
_ABOUT = {"versions": ("torch", "transformers", "trl"), "torch": ("torch",)}
# What a cell may be called: it becomes the name of a file, of a tox environment, and a word on a CI's command line.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*) *== *([0-9]+(?:\.[0-9A-Za-z+]+)*)")


@dataclass(frozen=True)
class Cell:
    """One requirement file.

    Attributes:
        name: the file's stem, which is the name of the tox environment, too.
        why: the comment at the top, as one line.
        pins: package to version, of the exactly pinned requirements.
        kind: which stages run: "versions" (of transformers and trl), "torch" (with its Triton), or its own name.
        digest: changes with the file.
    """

    name: str
    why: str
    pins: dict[str, str]
    kind: str
    digest: str

    def version(self, package: str) -> str:
        return self.pins.get(package, "newest" if self.name == "latest" else "")


# These have no requirement file: they run in the environment that is there. The project's own is judged as the cells
# are: unit tests, the proof in its long form, mutants, packaging.
PROJECT = Cell("project", "unit tests, the proof, mutants and packaging", {}, "project", "")
TWO_GPUS = Cell("two-gpus", "the proof in the set-ups of several processes, over two GPUs", {}, "two-gpus", "")
HERE = {cell.name: cell for cell in (PROJECT, TWO_GPUS)}


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
            requirement is not pinned.
    """
    checked_name(path.stem, str(path))
    text = read_text(path)
    comments = [line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#")]
    if not comments:
        raise Unusable(f"{path}: no comment says why this cell exists; begin the file with one")
    kind = next((kind for prefix, kind in _KINDS.items() if path.stem.startswith(prefix)), None)
    if kind is None:
        raise Unusable(f"{path}: a cell is called {', '.join(f'{prefix}...' for prefix in _KINDS)}")
    requirements = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pins = {pin[1]: pin[2] for line in requirements if (pin := _PIN.fullmatch(line))}
    free = [line for line in requirements if not _PIN.fullmatch(line)]
    if free and path.stem != "latest":
        raise Unusable(f"{path}: {cut(', '.join(free))} has no exact version; only 'latest' leaves that open")
    for package in () if path.stem == "latest" else _ABOUT[kind]:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", version := pins.get(package, "")):
            raise Unusable(f"{path}: pins {package} to {version!r}; allowed is a release, such as {package}==2.1.0")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Cell(path.stem, " ".join(comments), pins, kind, digest)


def load_all(folder: Path = FOLDER) -> dict[str, Cell]:
    """Every cell by name, in the order of their versions."""
    cells = [load(path) for path in folder.glob("*.txt")]
    return {cell.name: cell for cell in sorted(cells, key=lambda cell: order(cell.name))}


def order(name: str) -> tuple[object, ...]:
    """Sorts versions as numbers: tf4.46 before tf5.2 before tf5.13, then ``latest``, then torch's."""
    kind = next((i for i, prefix in enumerate(_KINDS) if name.startswith(prefix)), len(_KINDS))
    return kind, *(int(number) for number in re.findall(r"\d+", name)), name


def select(names: list[str], here: bool = False) -> list[Cell]:
    """The named cells, or all that tox makes. ``here`` allows the names of :data:`HERE`, too.

    Raises:
        ValueError: for an unknown name, with the allowed ones.
    """
    cells = load_all() | (HERE if here and names else {})
    unknown = [name for name in names if name not in cells]
    if unknown:
        raise ValueError(f"unknown cell {', '.join(unknown)}; allowed are {', '.join(cells)}")
    return [cells[name] for name in dict.fromkeys(names)] if names else list(cells.values())
