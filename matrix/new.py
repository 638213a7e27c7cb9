"""Proposes cells for releases beyond the newest cell, by asking the package index through its own client."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from matrix import cells
from matrix.cells import FOLDER, Cell

WATCHED = ("transformers", "trl")


def versions(package: str) -> list[str]:
    """Every final release of ``package`` that pip finds, the newest first.

    Raises:
        ValueError: pip does not find it, with what it said.
    """
    done = subprocess.run([sys.executable, "-m", "pip", "index", "versions", package], capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("Available versions:")), None)
    if done.returncode or line is None:
        raise ValueError(f"pip index versions {package}: {done.stderr.strip().splitlines()[-1:] or 'no answer'}")
    return [version for version in line.partition(":")[2].replace(" ", "").split(",") if _is_final(version)]


def _is_final(version: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)+", version) is not None


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def newest_cell(known: dict[str, Cell]) -> Cell:
    """The cell with the newest transformers."""
    pairs = [cell for cell in known.values() if all(package in cell.pins for package in WATCHED)]
    return max(pairs, key=lambda cell: number(cell.pins["transformers"]))


def beyond(cell: Cell, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Per watched package, the releases after the one that ``cell`` pins."""
    return {package: [v for v in found[package] if number(v) > number(cell.pins[package])] for package in WATCHED}


def cell_name(pins: dict[str, str]) -> str:
    transformers, trl = (".".join(pins[package].split(".")[:2]) for package in WATCHED)
    return f"tf{transformers}-trl{trl}"


def resolve(cell: Cell, wanted: dict[str, str]) -> dict[str, str]:
    """The pins of ``cell`` with ``wanted`` instead; what these two then ask for beside it, the resolver chooses.

    Raises:
        ValueError: nothing fits together, with what the resolver said.
    """
    free = ("accelerate", "datasets")
    kept = {
        p: v for p, v in cell.pins.items() if p in ("torch", "triton", "numpy", "pytest", "pytest-xdist", "execnet")
    }
    lines = [f"{package}=={version}" for package, version in {**kept, **wanted}.items()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "requirements.in"
        source.write_text("\n".join([*lines, *free]) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{wanted} does not resolve:\n{done.stderr.strip()}")
    pins = dict(line.split("==", 1) for line in done.stdout.splitlines() if "==" in line)
    return {package: version.partition("+")[0] for package, version in pins.items()}


def write(pins: dict[str, str], folder: Path = FOLDER) -> Path:
    path = folder / f"{cell_name(pins)}.txt"
    why = "# A proposal: say here which upstream contract changed.\n"
    path.write_text(
        why + "".join(f"{package}=={version}\n" for package, version in sorted(pins.items())), encoding="utf-8"
    )
    return path


def main() -> int:
    """Write one proposed cell for the newest of both, if there is anything newer; print what was found."""
    cell = newest_cell(cells.load_all())
    later = beyond(cell, {package: versions(package) for package in WATCHED})
    for package, found in later.items():
        print(f"{package}: {', '.join(found) or 'nothing'} beyond {cell.pins[package]} of {cell.name}")
    if not any(later.values()):
        return 0
    wanted = {package: later[package][0] if later[package] else cell.pins[package] for package in WATCHED}
    path = write(resolve(cell, wanted))
    print(f"proposed: {path}; say in it why it exists, add {path.stem} to tox.ini and docs/matrix.md, then run it")
    return 0
