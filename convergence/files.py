"""Files that are there as a whole or not at all, JSON, and versions of packages. It imports the standard library only
at its top, so that every part of the project may use it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def write(text: str, path: Path) -> None:
    """``text`` in ``path``, complete and on the disk before it gets that name: a killed writer leaves at most a
    ``.tmp``, which nobody reads. The folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    if os.name == "posix":  # the new name is on the disk, too
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def make_once(file: Path, make: Callable[[Path], object], timeout: float = -1) -> None:
    """``make(path)`` writes what becomes ``file``, unless that is there. While another process is at it wait, at most
    ``timeout`` seconds. The folder is made where there is none.

    Raises:
        filelock.Timeout: when they are over.
    """
    from filelock import FileLock  # torch needs it, too

    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f"{file.name}.lock"), timeout=timeout):
        if not file.exists():
            make(part := file.with_name(f"{file.name}.part"))
            part.rename(file)


def write_json(data: Any, path: Path) -> None:
    """``data`` as JSON in ``path``; see :func:`plain` for numbers that JSON does not have."""
    write(json.dumps(plain(data), indent=1, allow_nan=False) + "\n", path)


def read_json(path: Path) -> Any:
    """What ``path`` holds.

    Raises:
        ValueError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error


def plain(value: Any) -> Any:
    """``value`` for JSON: numbers that it does not have become text ("nan", "inf", "-inf")."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def versions(packages: Iterable[str], missing: str = "") -> dict[str, str]:
    """The installed versions by package; ``missing`` of one that is not installed, which is left out without it."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if missing:
                found[package] = missing
    return found
