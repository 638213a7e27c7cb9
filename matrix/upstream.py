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
from matrix import baseline, cells, new, records, runner
from matrix.baseline import Difference
from matrix.cells import Cell
from matrix.records import CellRecord

NAME = "main"
SOURCES = {
    "transformers": "transformers @ git+https://github.com/huggingface/transformers",
    "trl": "trl @ git+https://github.com/huggingface/trl",
}
NIGHTLY = "nightly"
_NIGHTLY_INDEX = "--extra-index-url https://download.pytorch.org/whl/nightly/cpu"


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
    return Cell(NAME, "upstream's main branches", {}, NAME, digest)


def write_requirements(folder: Path, given: dict[str, str | None]) -> Path:
    """Write what the environment of the cell is made of.

    Args:
        folder: of the records.
        given: by package ("transformers", "trl", "torch"), a folder or a wheel; for torch also a version or "nightly".
            None: the main branch, and for torch the version of the newest cell.

    Raises:
        ValueError: a path is not there, or is no project or wheel of that package.
    """
    start = new.newest_cell(cells.load_all(), "tf")
    lines = [f"{package}=={start.pins[package]}" for package in new.TOOLS if package in start.pins]
    lines += new.FREE
    for package, source in SOURCES.items():
        wanted = given.get(package)
        lines.append(source if wanted is None else _local(package, wanted))
    torch = given.get("torch")
    if torch == NIGHTLY:
        lines += [_NIGHTLY_INDEX, "--pre", "torch", "triton"]
    elif torch is None or re.fullmatch(r"[0-9]+(\.[0-9]+)+", torch):
        lines += [f"torch=={torch or start.pins['torch']}", "triton"]
    else:
        lines += [_local("torch", torch), "triton"]
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
        return runner.canonical(path.name.partition("-")[0])
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        file = path / name
        text = read_text(file) if path.is_dir() and file.exists() else ""
        if found := re.search(r"^\s*name\s*=\s*[\"']?([\w.-]+)", text, flags=re.MULTILINE):
            return runner.canonical(found.group(1))
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
    before, after = baseline.load(), records.load(path)
    start = new.newest_cell(cells.load_all(), "tf").name
    if before is None or start not in before.cells:
        raise ValueError(f"the baseline has no {start} to compare with")
    found = list(differences(before.cells[start], after))
    versions = ", ".join(f"{name} {after.environment.get(name, '-')}" for name in ("transformers", "trl", "torch"))
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
