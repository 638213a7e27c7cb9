"""``--candidate-from`` and ``--keep-candidates``: what PATH leads to, for pytest and for the page of differences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from convergence.elsewhere import candidates, other_python
from convergence.elsewhere.origin import Origin, subject
from convergence.files import Unusable
from convergence.report.records import Case

FROM, KEEP = "--candidate-from", "--keep-candidates"


def add_options(group: object) -> None:
    add = group.addoption  # type: ignore[attr-defined]
    add(FROM, metavar="PATH", default=None, help="take candidates from a checkout, an environment, or a folder of them")
    add(KEEP, metavar="DIR", default=None, help="also write every candidate to DIR, for --candidate-from DIR")


def origin_at(given: str, cases: Sequence[Case]) -> Origin:
    """Where the candidates of ``cases`` are from.

    Args:
        given: the path of a checkout, of an environment, of a Python, or of a folder of kept candidates.

    Raises:
        Unusable: it is none of these, or no candidate can be trained there. The message says what is allowed.
    """
    path = Path(os.path.abspath(given))  # links stay: the Python of an environment is one
    if not path.exists():
        raise Unusable(f"{path}: does not exist; {_allowed(cases)}")
    models = list(dict.fromkeys((case.model, case.dtype) for case in cases))
    device, patch = next(((case.device, case.patch) for case in cases), ("cpu", ""))
    packages = _packages(cases)
    if (python := other_python.python_in(path)) is not None:
        if not os.access(python, os.X_OK):
            raise Unusable(f"{path}: {python} is no program that may run; {_allowed(cases)}")
        found = other_python.environment_of(python)
    elif candidates.are_in(path):
        return candidates.kept_in(path, cases)
    elif (checkout := other_python.checkout_in(path, packages)) is not None:
        found = other_python.checkout_of(checkout)
    else:
        raise Unusable(f"{path}: is none of what is allowed; {_allowed(cases)}")
    return other_python.probed(found, path, packages, models, device, patch)


def _packages(cases: Sequence[Case]) -> list[str]:
    """The top-level packages that a checkout may have. The proof itself is always from here."""
    return list(dict.fromkeys(("liger_kernels", *(subject(case.patch) for case in cases))))


def _allowed(cases: Sequence[Case]) -> str:
    names = " or ".join(f"{name}/" for name in _packages(cases))
    return (
        f"allowed are a checkout (a folder with {names}), an environment (a folder with bin/python), a Python, and a "
        "folder that --keep-candidates wrote"
    )
