"""A checkout or an environment, in which a Python of its own trains the candidate."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from convergence.arms import isolate
from convergence.arms.candidate import Candidate
from convergence.arms.quantities import Finding
from convergence.arms.trajectory import CannotApply
from convergence.elsewhere import program
from convergence.elsewhere.origin import Origin, Train, commit, others, subject
from convergence.elsewhere.portable import Portable
from convergence.elsewhere.probe import Found, probe
from convergence.files import Unusable
from convergence.report.records import Case
from convergence.tables import first_line

_PYTHONS = ("bin/python", "Scripts/python.exe")


@dataclasses.dataclass(frozen=True)
class OtherPython(Origin):
    """Another Python, or this one with other code in front of its import path.

    Attributes:
        python: the executable.
        paths: what it imports from, in addition to its standard library.
        behind: whether ``paths`` come after what it has installed. Otherwise they are all that it has.
        path: what the user gave.
        found: what it has.
    """

    python: str = sys.executable
    paths: list[str] = dataclasses.field(default_factory=list)
    behind: bool = False
    path: str = ""
    found: Found | None = None

    def says(self, case: Case) -> dict[str, str]:
        return {"candidate from": self.path, **others(self.versions(case), case)}

    def versions(self, case: Case) -> dict[str, str]:
        assert self.found is not None
        return self.found["versions"] | commit(self.found["files"][subject(case.patch)])

    def absent(self, case: Case) -> str:
        assert self.found is not None
        why = self.found["absent"].get(f"{case.model} {case.dtype}")
        return f"where the candidate is from, {why}" if why else ""

    def candidate(self, train: Train, case: Case, given: Any, timeout: float) -> Candidate:
        try:
            return self.call(train, case, dataclasses.replace(given, pairs=[], more=[]), timeout=timeout)
        except CannotApply as error:  # the model itself cannot be built there
            return Candidate(failure=(Finding.CANNOT_RUN, str(error)))

    def call(self, function: Callable[..., Any], case: Case, given: Any, *args: Any, timeout: float) -> Any:
        sent = dataclasses.replace(given, template=Portable(given.template, case))
        return self.run(function, case, sent, *args, timeout=timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        start = functools.partial(program.start, self.python, self.paths, self.behind)
        return isolate.call(function, *args, timeout=timeout, start=start)


def python_in(path: Path) -> Path | None:
    """The Python that ``path`` is, or that lies in the environment ``path``; None if there is none."""
    if path.is_file():
        return path
    return next((path / name for name in _PYTHONS if (path / name).is_file()), None)


def checkout_in(path: Path, packages: Sequence[str]) -> Path | None:
    """The folder in ``path`` with one of ``packages``: ``path`` itself, or its ``src``; None if there is none."""
    for folder in (path, path / "src"):
        if any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for name in packages):
            return folder
    return None


def environment_of(python: Path) -> OtherPython:
    """The environment of ``python``. What it lacks of this project comes from where it is here."""
    return OtherPython(python=str(python), paths=program.own_paths(), behind=True)


def checkout_of(folder: Path) -> OtherPython:
    """This Python with the packages in ``folder`` in front of all others."""
    return OtherPython(paths=[str(folder), *(path for path in program.all_paths() if path != str(folder))])


def probed(
    other: OtherPython, path: Path, packages: Sequence[str], models: Sequence[tuple[str, str]], device: str, patch: str
) -> OtherPython:
    """``other``, with what its Python has.

    Args:
        path: what the user gave.

    Raises:
        Unusable: its Python cannot run the proof, or has a package of this project that the proof cannot observe.
    """
    try:
        found: Found = other.run(probe, packages, models, device, patch, timeout=isolate.TIMEOUT)
    except OSError as error:
        raise Unusable(f"{path}: {other.python} cannot be started: {error.strerror}; allowed is a Python") from error
    except isolate.ProcessDied as death:
        last = first_line("\n".join(reversed(death.output.splitlines()))) or str(death)
        raise Unusable(
            f"{path}: {other.python} cannot run the proof: {last}; it needs torch, triton and transformers, and what "
            "the patch imports; install them there"
        ) from death
    if found["lacks"]:
        raise Unusable(
            f"{path}: its liger_kernels has no {', '.join(found['lacks'])}, by which this proof observes it; take a "
            "commit that is nearer to this one, or the proof of a commit that is nearer to that one"
        )
    return dataclasses.replace(other, path=str(path), found=found)
