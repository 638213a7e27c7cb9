"""Trains the kernels of the page of differences on both sides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from convergence.arms import isolate
from convergence.case import absent, prove
from convergence.elsewhere import candidates
from convergence.elsewhere.alone import PATCH, placed
from convergence.elsewhere.options import origin_at
from convergence.elsewhere.origin import HERE, Origin
from convergence.elsewhere.page import KernelRow, Page
from convergence.judge import bitwise
from convergence.report.records import Case, Outcome

_STATISTICS = ("error ratio", "gain")


def compared(
    paths: tuple[str, str], chosen: Sequence[tuple[str, str]], kernels: Sequence[str], profile: str, device: str
) -> Page:
    """The page of two sides.

    Args:
        paths: of each side, as ``--candidate-from`` takes it; "." is the code of this process.
        chosen: models, each with a dtype.
        kernels: those to train; by default all that a model has a place for.

    Raises:
        Unusable: a side cannot be used.
        ValueError: no side has one of ``kernels``, or a side lacks a model.
    """

    def case(model: str, dtype: str, kernel: str) -> Case:
        return Case(model, dtype, f"{PATCH}:{kernel}", profile, device)

    any_kernel = [case(model, dtype, "any") for model, dtype in chosen]
    is_kept = {path: path != "." and candidates.are_in(Path(os.path.abspath(path))) for path in paths}
    origins = {path: _origin(path, any_kernel) for path in dict.fromkeys(paths) if not is_kept[path]}
    for one in any_kernel:
        for origin in origins.values():
            if why := absent(one) or origin.absent(one):
                raise ValueError(f"--models {one.model}: {why}; leave it out")
    places = {model: _places([*origins.values()], model) for model, _ in chosen}
    known = list(dict.fromkeys(kernel for counts in places.values() for kernel in counts))
    for kernel in kernels:
        if kernel not in known:
            raise ValueError(f"--kernels {kernel!r} is unknown on both sides; allowed are {', '.join(known)}")
    cases = {
        case(model, dtype, kernel): kernel
        for model, dtype in chosen
        for kernel in kernels or known
        if kernels or places[model][kernel]
    }
    origins |= {path: _origin(path, list(cases)) for path in dict.fromkeys(paths) if is_kept[path]}
    sides = [origins[path] for path in paths]
    rows = [
        _row(one, kernel, [prove(one, blames=False, origin=side) for side in sides]) for one, kernel in cases.items()
    ]
    return Page(
        [
            {**side.versions(next(iter(cases), any_kernel[0])), "from": path}
            for side, path in zip(sides, paths, strict=True)
        ],
        rows,
        [kernel for kernel in known if not any(counts[kernel] for counts in places.values())],
        f"On {device}, {profile} inputs.",
    )


def _origin(path: str, cases: Sequence[Case]) -> Origin:
    return HERE if path == "." else origin_at(path, cases)


def _places(origins: Sequence[Origin], model: str) -> dict[str, int]:
    """How many modules of ``model`` each kernel replaces, on the side where it replaces most."""
    found: dict[str, int] = {}
    for origin in origins or [HERE]:
        for kernel, count in origin.run(placed, model, 0, timeout=isolate.TIMEOUT).items():
            found[kernel] = max(count, found.get(kernel, 0))
    return found


def _row(case: Case, kernel: str, sides: Sequence[Outcome]) -> KernelRow:
    stopped = [
        f"{name}: {side.reason}" for name, side in zip("AB", sides, strict=True) if "candidate" not in side.digests
    ]
    differing = [] if stopped else bitwise.differences(sides[0], sides[1], "candidate")
    first = " in ".join(differing[0]) if differing else ""
    numbers = [_number(side, name) for name in _STATISTICS for side in sides]
    return KernelRow(case.model, case.dtype, kernel, first, max(0, len(differing) - 1), numbers, "; ".join(stopped))


def _number(side: Outcome, statistic: str) -> str:
    found = side.worst(statistic)
    if found is None:
        return "-"
    return str(found) if found.passed else f"**{found}**"
