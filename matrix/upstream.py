"""The cell ``main``: the newest version cell with upstream's main branches, or with checkouts and wheels of your own.

It is no release's cell: the gate does not ask for it. ``python -m matrix cell main`` makes its environment and runs it;
``python -m matrix moved`` says what is different from the accepted records of the cell that it started from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from convergence.files import read_text
from convergence.tables import literal
from matrix import baseline, cells, new, records
from matrix.baseline import Difference
from matrix.cells import Cell
from matrix.records import CellRecord
from matrix.repository import config
from matrix.repository.config import KindTable

NAME = "main"
NIGHTLY = "nightly"
_NIGHTLY_INDEX = "--extra-index-url https://download.pytorch.org/whl/nightly/cpu"


def kind() -> KindTable:
    """What the configuration says of it.

    Raises:
        ValueError: it says nothing.
    """
    found = config.here().kinds.get(NAME)
    if found is None or not found.branches:
        raise ValueError(f"{config.here().root / config.FILE}: has no tool.matrix.kinds.{NAME} with branches")
    return found


def others(kind: KindTable) -> list[str]:
    """The axes that it takes from the newest cell: no branch is named, and no other axis asks for a version."""
    return [name for name, axis in config.here().axes.items() if name not in kind.branches and not axis.follows]


def requirement_file(folder: Path) -> Path:
    return folder / NAME / "requirements.txt"


def cell(folder: Path) -> Cell:
    """The cell, of the requirements that were written last.

    Raises:
        ValueError: none were.
    """
    path = requirement_file(folder)
    if not path.exists():
        raise ValueError(f"{path} is not there: run python -m matrix cell {NAME} outside of tox, which writes it")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Cell(NAME, kind().does, {}, NAME, digest)


def write_requirements(folder: Path, given: dict[str, str | None]) -> Path:
    """Write what the environment of the cell is made of.

    Args:
        folder: of the records.
        given: by package ("transformers", "trl", "torch"), a folder or a wheel; for torch also a version or "nightly".
            None: the main branch, and for torch the version of the newest cell.

    Raises:
        ValueError: a path is not there, or is no project or wheel of that package.
    """
    this, here = kind(), config.here()
    start = new.newest_cell(cells.load_all(), this.of)
    lines = [f"{package}=={start.pins[package]}" for package in here.tools if package in start.pins]
    lines += here.free
    for package, source in this.branches.items():
        wanted = given.get(package)
        lines.append(f"{package} @ {source}" if wanted is None else _local(package, wanted))
    for package in others(this):
        wanted = given.get(package)
        if wanted == NIGHTLY:
            lines += [_NIGHTLY_INDEX, "--pre", package]
        elif wanted is None or re.fullmatch(r"[0-9]+(\.[0-9]+)+", wanted):
            lines.append(f"{package}=={wanted or start.pins[package]}")
        else:
            lines.append(_local(package, wanted))
    lines += [name for name, axis in here.axes.items() if axis.follows and name not in this.branches]
    path = requirement_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _local(package: str, given: str) -> str:
    path = Path(given).resolve()
    if not path.exists():
        raise ValueError(f"--{package} {given}: is not there; it takes a checkout or a wheel of {package}")
    found = _project(path)
    if found != package:
        what = f"of {found}" if found else "neither a wheel nor a Python project"
        raise ValueError(f"--{package} {given}: is {what}; it takes a checkout or a wheel of {package}")
    return f"{package} @ {path.as_uri()}"


def _project(path: Path) -> str:
    """Whose checkout or wheel lies at ``path``; empty where it is neither."""
    if path.suffix == ".whl":
        return records.canonical(path.name.partition("-")[0])
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        file = path / name
        text = read_text(file) if path.is_dir() and file.exists() else ""
        if found := re.search(r"^\s*name\s*=\s*[\"']?([\w.-]+)", text, flags=re.MULTILINE):
            return records.canonical(found.group(1))
    return ""


def moved(folder: Path) -> int:
    """``python -m matrix moved``: print, as Markdown, in what the record of ``main`` differs from the accepted one of
    the newest version cell; 1 where it does.

    Raises:
        ValueError: there is no such record, or nothing was ever accepted.
    """
    path = folder / f"{NAME}.json"
    if not path.exists():
        raise ValueError(f"{path} is not there: python -m matrix cell {NAME} makes it")
    this, before, after = kind(), baseline.load(), records.load(path)
    start = new.newest_cell(cells.load_all(), this.of).name
    if before is None or start not in before.cells:
        raise ValueError(f"the baseline has no {start} to compare with")
    found = list(differences(before.cells[start], after))
    versions = ", ".join(f"{name} {after.environment.get(name, '-')}" for name in (*this.branches, *others(this)))
    title = f"{'Something moved' if found else 'Nothing moved'}: {literal(versions)}"
    print(f"## {title}\n\nCompared with {start}, {literal(after.at)}.\n")
    print("\n".join(f"- {literal(difference)}" for difference in found))
    return int(bool(found))


def differences(before: CellRecord, after: CellRecord) -> Iterator[Difference]:
    """What of ``after`` failed, and what fell short of ``before``, in the stages that ran."""
    ran = {stage.name for stage in after.stages}
    if not after.complete:
        yield Difference(after.cell, "partial record", after.cell, f"not every stage has run, only {', '.join(ran)}")
    for stage in after.stages:
        yield from baseline.failed(after.cell, stage)
    same = dataclasses.replace(before, stages=[stage for stage in before.stages if stage.name in ran])
    for difference in baseline.worse(same, after):
        if difference.kind != "upstream moved":  # that is what it is for
            yield dataclasses.replace(difference, note=False)
