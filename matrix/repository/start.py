"""``python -m matrix init``: ``[tool.matrix]`` for a repository that has none, and its first cells.

A cell is proposed for the oldest, a middle and the newest supported release of the first axis. Everything else in it is
the newest that existed a day after that release was uploaded, so each cell is a set that a user had.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from convergence.checked import cut
from convergence.files import Unusable, write
from matrix.repository import config, index
from matrix.repository.config import supports
from matrix.repository.resolver import compiled

# Packages that kernels depend on, the most telling first; and how names of cells begin.
AXES = ("transformers", "trl", "torch")
_SHORT = {"transformers": "tf"}
_OF_MACHINE = ("torch", "triton")
# What a cell of the proof needs; a test compares it with the extra "proof".
PROOF_TOOLS = ("liger-kernels", "jinja2", "numpy", "hypothesis", "pytest", "pytest-xdist")
_PROOF = "pytest --pyargs convergence --patch {patch} --models llama-tied"


def main(arguments: argparse.Namespace) -> int:
    """Write the configuration and the cells.

    Raises:
        ValueError: there is no package here, there is a configuration, or no set of packages fits together.
    """
    root = Path.cwd()
    data = _project(root)
    requirements = _requirements(data)
    axes = [*arguments.axes.split(",")] if arguments.axes else [name for name in AXES if name in requirements]
    if not axes:
        raise ValueError(f"{root / config.FILE}: depends on none of {', '.join(AXES)}; name packages with --axes A,B")
    versions = {name: ranges(requirements.get(name, "")) for name in axes}
    patch = arguments.patch
    tools = PROOF_TOOLS if patch else ("pytest", "pytest-xdist")
    text = configuration(_product(root, data), versions, (root / "tests").is_dir(), patch, tools)
    leading = axes[0]
    sets = {}
    for version, day in releases(leading, versions[leading]):
        lines = [f"{leading}=={version}", *(_line(name, requirements) for name in {**requirements, **versions})]
        until = day + timedelta(days=1)
        try:
            lines += [f"{axis}<={newest(axis, until)}" for axis in axes]
            lines += ["liger-kernels[proof]"] if patch else []
            pins = compiled([*lines, *tools], until, of_today=("liger-kernels",))
        except ValueError as error:
            print(f"{leading} {version} of {day:%Y-%m-%d}: {cut(str(error), 600)}")
            continue
        sets[version] = day, pins
    if not sets:
        raise ValueError(f"no set of packages fits together with {leading} {versions[leading]}; see above")
    for version, (day, pins) in sets.items():
        name = f"{_SHORT.get(leading, leading)}{'.'.join(version.split('.')[:2])}"
        why = (
            f"# {leading} {version} of {day:%Y-%m-%d} and what there was a day later. Say here what changed for you.\n"
        )
        body = "".join(f"{package}=={pin}\n" for package, pin in sorted(pins.items()))
        write(why + body, root / "ci" / "cells" / f"{name}.txt")
        print(f"ci/cells/{name}.txt: {leading} {version} of {day:%Y-%m-%d}, {len(pins)} packages")
    file = root / config.FILE
    write(file.read_text(encoding="utf-8").rstrip("\n") + "\n\n" + text, file)
    config.load(root)  # what was written is what is allowed
    print(f"{config.FILE}: [tool.matrix]; say there what else runs, then python -m matrix run")
    return 0


def _project(root: Path) -> dict[str, Any]:
    """``[project]`` of the repository at ``root``."""
    if not (root / config.FILE).is_file():
        raise Unusable(f"{root}: has no {config.FILE}; init writes into the one of a package")
    data = config.read(root / config.FILE)
    if "matrix" in data.get("tool", {}):
        raise Unusable(f"{root / config.FILE}: has [tool.matrix] already; python -m matrix new proposes further cells")
    project = data.get("project")
    if not isinstance(project, dict) or not isinstance(project.get("name"), str):
        raise Unusable(f"{root / config.FILE}: has no [project] with a name; init writes into the one of a package")
    return project


def _requirements(project: dict[str, Any]) -> dict[str, str]:
    """The versions that the package and its extras ask for, by package."""
    extras = project.get("optional-dependencies", {})
    found: dict[str, str] = {}
    for line in [*project.get("dependencies", []), *(line for lines in extras.values() for line in lines)]:
        name = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;@]*)", str(line))
        if name and name[1] != project["name"]:
            key = re.sub(r"[-_.]+", "-", name[1]).lower()
            asked = re.sub(r"[()\s]", "", name[2])
            found[key] = ",".join(filter(None, (found.get(key, ""), asked)))
    return found


def _line(name: str, requirements: dict[str, str]) -> str:
    return f"{name}{requirements.get(name, '')}"


def ranges(asked: str) -> str:
    """``asked``, in the comparisons that an axis takes: ``~=4.46`` is ``>=4.46,<5``, and what has ``*`` is left out."""
    parts = []
    for part in dict.fromkeys(filter(None, asked.split(","))):
        if part.startswith("~="):
            first = [int(n) for n in part[2:].split(".")[:-1]]
            parts += [f">={part[2:]}", f"<{'.'.join(map(str, [*first[:-1], first[-1] + 1]))}"]
        elif "*" not in part and "===" not in part:
            parts.append(part)
    return ",".join(parts)


def releases(package: str, versions: str) -> list[tuple[str, datetime]]:
    """The oldest, a middle and the newest release of ``package`` within ``versions``, the last of each minor version.

    Raises:
        ValueError: no index has one.
    """
    found = {version: day for version, day in index.uploads(package).items() if supports(versions, version)}
    last = {tuple(version.split(".")[:2]): version for version in found}
    chosen = [*last.values()]
    if not chosen:
        raise ValueError(f"the index has no release of {package} {versions}")
    picked = dict.fromkeys((chosen[0], chosen[len(chosen) // 2], chosen[-1]))
    return [(version, found[version]) for version in picked]


def newest(package: str, until: datetime) -> str:
    """The newest release of ``package`` that there was. The resolver knows it of files of an index, but not of those in
    a folder, which have no date.

    Raises:
        ValueError: there was none.
    """
    found = [version for version, day in index.uploads(package).items() if day <= until]
    if not found:
        raise ValueError(f"there was no release of {package} at {until:%Y-%m-%d}")
    return found[-1]


def _product(root: Path, project: dict[str, Any]) -> list[str]:
    """The package's folder or module.

    Raises:
        Unusable: none has its name.
    """
    name = re.sub(r"[-.]+", "_", project["name"])
    for path in (f"src/{name}", name, f"src/{name}.py", f"{name}.py"):
        if (root / path).exists():
            return [path]
    raise Unusable(f"{root}: has no {name}, src/{name} or {name}.py, which the package's name asks for")


def configuration(
    product: Sequence[str], versions: dict[str, str], has_tests: bool, patch: str, tools: Sequence[str]
) -> str:
    """The text of ``[tool.matrix]``.

    Raises:
        ValueError: there is nothing to run.
    """
    leading, stages = next(iter(versions)), [*(["tests"] if has_tests else []), *(["proof"] if patch else [])]
    if not stages:
        raise ValueError("there is nothing to run: no folder tests, and no --patch MODULE:FUNCTION for the proof")

    def quoted(names: Sequence[str]) -> str:
        return "[" + ", ".join(f'"{name}"' for name in names) + "]"

    lines = [
        "# What runs over versions of packages: python -m matrix.",
        "[tool.matrix]",
        f"product = {quoted(product)}",
    ]
    lines += ['tests = ["tests"]'] if has_tests else []
    lines += [f"tools = {quoted(tools)}", "", "[tool.matrix.axes]"]
    for name, asked in versions.items():
        keys = [f'versions = "{asked}"'] if asked else []
        keys += ["of_machine = true"] if name in _OF_MACHINE else []
        lines.append(f"{name} = {{ {', '.join(keys)} }}" if keys else f"{name} = {{}}")
    if "torch" in versions and "triton" not in versions:
        lines.append('triton = { of_machine = true, follows = "torch" }')
    lines += ["", "[tool.matrix.kinds.versions]", f'does = "versions of {leading}, each with packages of its time"']
    lines += [f'cells = "{_SHORT.get(leading, leading)}{{{leading}}}"', f"stages = {quoted(stages)}"]
    if has_tests:
        lines += ["", "[tool.matrix.stages.tests]", 'command = "pytest tests"']
    if patch:
        lines += ["", "[tool.matrix.stages.proof]", 'does = "a patched model is the same mathematics"']
        lines += [f'command = "{_PROOF.format(patch=patch)}"', "records = true"]
    return "\n".join(lines) + "\n"
