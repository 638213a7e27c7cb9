"""Proposes cells for releases beyond the newest cells, by asking the package index through its own client."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from convergence.checked import shown
from convergence.files import Unusable
from matrix import cells
from matrix.cells import Cell
from matrix.repository import config
from matrix.repository.config import number, supports
from matrix.repository.resolver import compiled


def versions(package: str) -> list[str]:
    """Every final release of ``package`` that pip finds, the newest first.

    Raises:
        ValueError: pip does not find it, with what it said.
    """
    done = subprocess.run([sys.executable, "-m", "pip", "index", "versions", package], capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("Available versions:")), None)
    if done.returncode or line is None:
        raise ValueError(f"pip index versions {package}: {done.stderr.strip().splitlines()[-1:] or 'no answer'}")
    found = line.partition(":")[2].replace(" ", "").split(",")
    return [version for version in found if re.fullmatch(r"[0-9]+(\.[0-9]+)+", version)]


def newest_cell(known: dict[str, Cell], kind: str) -> Cell:
    """The cell of this kind with the newest of what it is about.

    Raises:
        Unusable: there is none.
    """
    table = config.here().kinds[kind]
    of_kind = [cell for cell in known.values() if cell.kind == kind and not cell.open]
    if not of_kind:
        raise Unusable(f"{config.here().cells}: has no cell {table.prefix}...; at least one is needed")
    return max(of_kind, key=lambda cell: number(cell.pins[table.named[0]]))


def beyond(cell: Cell, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Per package of ``found``, the releases after the one that ``cell`` pins."""
    pinned = {package: number(cell.pins.get(package, "0")) for package in found}
    return {p: [v for v in releases if number(v) > pinned[p]] for p, releases in found.items()}


def cell_name(pins: dict[str, str], kind: str) -> str:
    """What a cell of this kind is called: of versions, the first two numbers.

    Raises:
        Unusable: what is in the name is no release.
    """
    table = config.here().kinds[kind]
    for package in table.named:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", pins.get(package, "")):
            raise Unusable(f"{package} is {shown(pins.get(package))}; allowed is a release, such as 2.1.0")
    short = {package: ".".join(version.split(".")[:2]) for package, version in pins.items()}
    return re.sub(r"\{([^{}]*)\}", lambda axis: short[axis[1]], table.cells)


def wanted(later: dict[str, list[str]], newest: Cell, kind: str) -> dict[str, str]:
    """What a proposal pins anew, of the releases ``later`` than those of the cell ``newest``. What follows an
    axis comes with it, such as torch's Triton."""
    named = config.here().kinds[kind].named
    return {p: later[p][0] if later[p] else newest.pins[p] for p in named} if any(later[p] for p in named) else {}


def resolve(cell: Cell, wanted: dict[str, str]) -> dict[str, str]:
    """The pins of ``cell`` with ``wanted`` instead; what these then ask for in addition, the resolver chooses.

    Raises:
        ValueError: nothing fits together, with what the resolver said.
    """
    here = config.here()
    kept = {package: cell.pins[package] for package in (*here.axes, *here.tools) if package in cell.pins}
    for package, axis in here.axes.items():
        if axis.follows in wanted:
            kept.pop(package, None)
    lines = [f"{package}=={version}" for package, version in {**kept, **wanted}.items()]
    return compiled([*lines, *here.free])


def write(pins: dict[str, str], kind: str, folder: Path | None = None) -> Path:
    path = (folder or config.here().cells) / f"{cell_name(pins, kind)}.txt"
    why = "# A proposal: say here which upstream contract changed.\n"
    path.write_text(
        why + "".join(f"{package}=={version}\n" for package, version in sorted(pins.items())), encoding="utf-8"
    )
    return path


def main() -> int:
    """Print what is newer than the newest cell of each kind; where anything is, write one proposed cell for it."""
    known, here = cells.load_all(), config.here()
    for kind in (name for name, table in here.kinds.items() if table.cells):
        cell = newest_cell(known, kind)
        later = beyond(cell, {package: versions(package) for package in here.watched(kind)})
        for package, found in later.items():
            pinned, allowed = cell.pins.get(package, "none"), here.axes[package].versions
            print(f"{package}: {', '.join(found) or 'nothing'} beyond {pinned} of {cell.name}")
            if outside := [version for version in found if not supports(allowed, version)]:
                print(f"{package}: the axis does not support {', '.join(outside)}: it is {allowed}")
            later[package] = [version for version in found if supports(allowed, version)]
        if pins := wanted(later, cell, kind):
            path = write(resolve(cell, pins), kind)
            added = f", add {path.stem} to {here.tox}" if here.tox else ""
            print(f"proposed: {path}; say in it why it exists{added}, then run it")
    return 0
