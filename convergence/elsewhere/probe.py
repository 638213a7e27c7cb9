"""What another Python has: versions, kernels, models, and whether the proof can observe the package there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from convergence import ours
from convergence.elsewhere.origin import file_of
from convergence.models.rows import find
from convergence.report.records import versions


class Found(TypedDict):
    """The answer of a probe.

    ``files`` has the file of each package, "" if there is none. ``absent`` has the reason for each model and dtype,
    joined by a space, that cannot be had. ``lacks`` is empty if the proof can observe the package of this project.
    """

    versions: dict[str, str]
    files: dict[str, str]
    kernels: list[str]
    absent: dict[str, str]
    lacks: list[str]


def probe(packages: Sequence[str], models: Sequence[tuple[str, str]], device: str, patch: str) -> Found:
    """Look around in this process.

    Args:
        packages: top-level packages to find.
        models: names and dtypes of the models to look for.
        patch: of which a record has the version, if it is a peer's.
    """
    lacks = ours.lacks()
    return {
        "versions": versions(device, patch),
        "files": {package: file_of(package) for package in packages},
        "kernels": [] if lacks else ours.kernels(),
        "absent": {f"{name} {dtype}": why for name, dtype in models if (why := find(name).absent(dtype, device))},
        "lacks": lacks,
    }
