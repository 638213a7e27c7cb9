"""Where a candidate is from. :data:`HERE` is this process's own code; other origins are classes of other files."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convergence.arms import isolate
from convergence.arms.candidate import Candidate
from convergence.report.records import Case, versions

Train = Callable[..., Candidate]


class NotHere(RuntimeError):
    """The candidate's patch is not where the call should run. The message says why."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """A separate process with this process's code and versions; the base of all other origins."""

    def says(self, case: Case) -> dict[str, str]:
        """What a record of ``case`` says of the origin, by name; empty for this process's own code."""
        return {}

    def versions(self, case: Case) -> dict[str, str]:
        """The versions, and the commit if git knows it, that a candidate of ``case`` is trained with."""
        return versions(case.device, case.patch) | commit(file_of(subject(case.patch)))

    def absent(self, case: Case) -> str:
        """Why the origin cannot have a candidate of ``case``; empty if it can."""
        return ""

    def candidate(self, train: Train, case: Case, given: Any, timeout: float) -> Candidate:
        """The candidate of ``case``: what ``train(case)`` returns there, on the inputs ``given`` here.

        Raises:
            ProcessDied: its process ended without a result, or took more than ``timeout`` seconds.
            Unusable: a file that it comes from cannot be used.
        """
        return isolate.call(train, case, timeout=timeout)

    def call(self, function: Callable[..., Any], case: Case, given: Any, *args: Any, timeout: float) -> Any:
        """``function(case, given, *args)``, run where the patch is.

        Args:
            given: the references of ``case``. An origin may send them in another form.

        Raises:
            NotHere: the origin has no code to run.
            Exception: as :func:`convergence.arms.isolate.call`.
        """
        return isolate.call(function, case, given, *args, timeout=timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """``function(*args)``, run where the patch is. Raises as :meth:`call`."""
        return isolate.call(function, *args, timeout=timeout)


HERE = Origin()


def others(there: dict[str, str], case: Case) -> dict[str, str]:
    """What a record of ``case`` says of the versions ``there``: those that differ from the versions here, and the
    commit."""
    here = versions(case.device, case.patch)
    return {f"candidate {name}": value for name, value in there.items() if value != here.get(name)}


def subject(patch: str) -> str:
    """The top-level package that ``patch`` (module:function) judges. Patches of the proof judge this project's."""
    package = patch.partition(":")[0].partition(".")[0]
    return "liger_kernels" if package == "convergence" else package


def file_of(package: str) -> str:
    """The file that a top-level package is imported from; "" if there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


@functools.cache
def commit(file: str) -> dict[str, str]:
    """The commit that ``file`` is of, and whether files of its folder differ from it, under the name "commit"; nothing
    if git does not track it."""
    folder = str(Path(file).parent)
    try:
        tracked, found, changed = (
            subprocess.run(["git", "-C", folder, *rest], capture_output=True, text=True, check=True, timeout=60).stdout
            for rest in (
                ("ls-files", "--error-unmatch", file),
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "."),
            )
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": found.strip() + (" and changes" if changed else "")} if tracked else {}
