"""Files that are there as a whole or not at all, JSON, and versions of packages. It imports the standard library only
at its top, so that every part of the project may use it."""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# No JSON file that this project reads is nearly as large; a tokenizer's with a quarter of a million tokens has 33 MiB.
LARGEST_JSON = 256 * 2**20
_DEEPEST = 64  # nor as deep


class Unusable(ValueError):
    """A file that comes from elsewhere cannot be used. The message names the file, what is wrong in it, and what is
    allowed. It is the user's error: commands show the message and no traceback."""


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


def reason(error: BaseException) -> str:
    """What ``error`` says, on one line of readable length, after its type: for whoever reads no traceback."""
    name, text = type(error).__name__, " ".join(str(error).split())
    return f"{name}: {text if len(text) <= 300 else text[:297] + '...'}" if text else name


def print_anything() -> None:
    """From now on, what the encoding of the terminal lacks is printed as Python writes it, and each line at once."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


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


def read_text(path: Path, largest: int = LARGEST_JSON) -> str:
    """The text in ``path``.

    Raises:
        Unusable: it cannot be read, has more than ``largest`` bytes, or is not UTF-8.
    """
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise Unusable(f"{path}: cannot be read: {'it is no file' if path.exists() else 'there is no such file'}")
        if (size := path.stat().st_size) > largest:
            raise Unusable(f"{path}: has {size:,} bytes; allowed are at most {largest:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unusable(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Unusable(f"{path}: cannot be read: byte {error.start} is no UTF-8 ({error.reason})") from error


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """What ``path`` holds.

    Raises:
        Unusable: it cannot be read, has more than ``largest`` bytes, or is no JSON in UTF-8.
    """
    text = read_text(path, largest)
    too_deep = Unusable(f"{path}: is nested too deep; allowed are at most {_DEEPEST} levels")
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False).encode()  # what is escaped may be half a character, which nobody can write
    except RecursionError:
        raise too_deep from None
    except ValueError as error:  # or a whole number of thousands of digits
        raise Unusable(f"{path}: cannot be read as JSON: {error}; allowed is JSON in UTF-8") from error
    level = [data]
    for _ in range(_DEEPEST):
        level = [item for value in level for item in _items(value)]
    if level:
        raise too_deep
    return data


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


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
