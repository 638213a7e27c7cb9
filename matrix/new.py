"""Proposes cells for releases beyond the newest cells, by asking the package index through its own client."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from convergence.checked import shown
from convergence.files import Unusable
from matrix import cells
from matrix.cells import FOLDER, Cell

# What the cells of a prefix are about. torch asks for one Triton, exactly: a newer one comes with a newer torch.
WATCHED = {"tf": ("transformers", "trl"), "torch": ("torch", "triton")}
# What a new cell takes over from the newest one, and what the resolver chooses for it; all else, these ask for.
TOOLS = ("numpy", "pytest", "pytest-xdist", "execnet", "hypothesis")
FREE = ("accelerate", "datasets")


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


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def newest_cell(known: dict[str, Cell], prefix: str) -> Cell:
    """The cell of ``prefix`` ("tf" or "torch") with the newest of what it is about.

    Raises:
        Unusable: there is none.
    """
    first, of_prefix = WATCHED[prefix][0], [cell for cell in known.values() if cell.name.startswith(prefix)]
    if not of_prefix:
        raise Unusable(f"{FOLDER}: has no cell {prefix}...; at least one is needed")
    return max(of_prefix, key=lambda cell: number(cell.pins[first]))


def beyond(cell: Cell, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Per package of ``found``, the releases after the one that ``cell`` pins."""
    pinned = {package: number(cell.pins.get(package, "0")) for package in found}
    return {p: [v for v in releases if number(v) > pinned[p]] for p, releases in found.items()}


def cell_name(pins: dict[str, str], prefix: str) -> str:
    """``tf5.23-trl1.16`` or ``torch2.15``.

    Raises:
        Unusable: what is in the name is no release.
    """
    for package in WATCHED[prefix][: 2 if prefix == "tf" else 1]:  # these are in the name
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", pins.get(package, "")):
            raise Unusable(f"{package} is {shown(pins.get(package))}; allowed is a release, such as 2.1.0")
    short = {package: ".".join(version.split(".")[:2]) for package, version in pins.items()}
    return f"tf{short['transformers']}-trl{short['trl']}" if prefix == "tf" else f"torch{short['torch']}"


def wanted(later: dict[str, list[str]], newest: Cell, prefix: str) -> dict[str, str]:
    """What a proposal pins anew, of the releases ``later`` than those of the cell ``newest``."""
    if prefix == "torch":
        return {"torch": later["torch"][0]} if later["torch"] else {}
    return {p: later[p][0] if later[p] else newest.pins[p] for p in WATCHED[prefix]} if any(later.values()) else {}


def resolve(cell: Cell, wanted: dict[str, str]) -> dict[str, str]:
    """The pins of ``cell`` with ``wanted`` instead; what these then ask for in addition, the resolver chooses.

    Raises:
        ValueError: nothing fits together, with what the resolver said.
    """
    of_cell = ("torch", "triton", "transformers", "trl", *TOOLS)
    kept = {package: cell.pins[package] for package in of_cell if package in cell.pins}
    if "torch" in wanted:
        kept.pop("triton", None)
    lines = [f"{package}=={version}" for package, version in {**kept, **wanted}.items()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "requirements.in"
        source.write_text("\n".join([*lines, *FREE]) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{wanted} does not resolve:\n{done.stderr.strip()}")
    pins = dict(line.split("==", 1) for line in done.stdout.splitlines() if "==" in line)
    return {package: version.partition("+")[0] for package, version in pins.items()}


def write(pins: dict[str, str], prefix: str, folder: Path = FOLDER) -> Path:
    path = folder / f"{cell_name(pins, prefix)}.txt"
    why = "# A proposal: say here which upstream contract changed.\n"
    path.write_text(
        why + "".join(f"{package}=={version}\n" for package, version in sorted(pins.items())), encoding="utf-8"
    )
    return path


def main() -> int:
    """Print what is newer than the newest cell of each kind; where anything is, write one proposed cell for it."""
    known = cells.load_all()
    for prefix, packages in WATCHED.items():
        cell = newest_cell(known, prefix)
        later = beyond(cell, {package: versions(package) for package in packages})
        for package, found in later.items():
            pinned = cell.pins.get(package, "none")
            print(f"{package}: {', '.join(found) or 'nothing'} beyond {pinned} of {cell.name}")
        if pins := wanted(later, cell, prefix):
            path = write(resolve(cell, pins), prefix)
            print(
                f"proposed: {path}; say in it why it exists, add {path.stem} to tox.ini and docs/reference/matrix.md, "
                "then run it"
            )
    return 0
