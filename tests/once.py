"""What takes long is made by one xdist worker of a run, for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def make_once(file: Path, make: Callable[[Path], object], timeout: float = -1) -> None:
    """``make(path)`` writes what becomes ``file``, unless that is there. While another worker is at it wait, at most
    ``timeout`` seconds.

    Raises:
        filelock.Timeout: when they are over.
    """
    with FileLock(file.with_suffix(".lock"), timeout=timeout):
        if not file.exists():
            make(part := file.with_suffix(".part"))
            part.rename(file)
