"""Which versions of torch this package was tested with, and a warning where the installed one is newer."""

from __future__ import annotations

import functools
import re
import warnings

import torch

import liger_kernels

TESTED_TORCH = ((2, 8), (2, 15))  # the oldest and the newest of the matrix


def newer_torch() -> str:
    """That this torch is newer than the newest that was tested; empty where it is not."""
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    newest = ".".join(map(str, TESTED_TORCH[1]))
    return (
        f"{torch.__version__} is newer than {newest}, the newest that was tested" if version > TESTED_TORCH[1] else ""
    )


@functools.cache
def warn_of_a_newer_torch() -> None:
    """Once in a process, where this torch is newer than what was tested. It runs all the same."""
    if told := newer_torch():
        warnings.warn(
            f"torch {told} with liger-kernels {liger_kernels.__version__}. It runs; `pytest convergence` shows whether "
            "it is still the same mathematics.",
            stacklevel=4,  # the caller of patch(), past the check of its arguments
        )
