"""Truth, baseline and replicas of a case, kept in a folder: ``pytest convergence --references DIR``.

Whoever changes a patch and proves it again then waits for the candidate only. A file's name holds a digest of all that
decides a bit of it: versions, processor, threads, precision, and the sources of the proof. Nothing of a patch does.

A patch may write to the folder. So a file is plain data, it is read as a whole, and only where it is, byte for byte,
what was there before the run imported a patch, or what this process has made.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from convergence import border, files

_ANEW = "delete it, and it is made anew"
_folder: Path | None = None
_digests: dict[str, str] = {}  # of the files that this process may read, by name
_trusts = False  # whether it reads any other, too


def kept_key(model: str, dtype: str, profile: str, device: str, seed: int) -> tuple[str, ...]:
    """What the file of a case's references is called by."""
    return model, dtype, profile, device, str(seed)


def digests(folder: Path, keys: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Of every file in ``folder`` that is kept for one of ``keys``, by name; it takes a second per 500 MiB."""
    starts = tuple(f"{'-'.join(key)}-" for key in keys)
    found = (file for file in folder.glob("*.safetensors") if file.name.startswith(starts))
    return {file.name: _digest(file.read_bytes()) for file in sorted(found)}


@contextlib.contextmanager
def keep_in(folder: Path, known: dict[str, str] | None = None) -> Iterator[None]:
    """Inside, references are kept in ``folder``. Of what is there, files with one of the ``known`` digests are read.
    Without them all are, as among tests whose patches are known."""
    global _folder, _digests, _trusts
    before, (_folder, _digests, _trusts) = (_folder, _digests, _trusts), (folder, dict(known or {}), known is None)
    try:
        yield
    finally:
        _folder, _digests, _trusts = before


class Kept(list[Any]):
    """To another process goes the name of the file that it was loaded from, and its digest."""

    def __init__(self, items: Iterable[Any], file: Path, digest: str) -> None:
        super().__init__(items)
        self.file, self.digest = file, digest

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _load, (self.file, self.digest)


def kept(key: tuple[str, ...], decides: dict[str, Any], make: Callable[[], list[Any]]) -> list[Any]:
    """The plain data that ``make()`` returns, or has returned in any process for this ``key``, wherever ``decides`` was
    the same.

    Raises:
        Unusable: a file in the folder is damaged, or has changed since this run began.
    """
    if _folder is None:
        return make()
    file = _folder / _name(key, decides)
    made: list[list[Any]] = []

    def write(path: Path) -> None:
        made.append(make())
        data = border.dumps(list(made[0]))
        _digests[file.name] = "" if _trusts else _digest(data)
        path.write_bytes(data)

    files.make_once(file, write)
    if made:
        return Kept(made[0], file, _digests[file.name])
    if not _trusts and file.name not in _digests:  # another process has made it, and a patch may have run since
        return make()
    return _load(file, _digests.get(file.name, ""))


@contextlib.contextmanager
def watched(changed: list[str]) -> Iterator[None]:
    """Inside runs a patch, elsewhere. What it ``changed`` of the files that this process may read is named, and
    deleted, because the next run would read it."""
    before = _states()
    try:
        yield
    finally:
        for file, state in _states().items():
            if state != before[file]:
                changed.append(str(file))
                _digests.pop(file.name, None)
                file.unlink(missing_ok=True)


def _states() -> dict[Path, tuple[int, ...] | None]:
    """What a file system says of each file; any that is written to gets another time of change."""
    found: dict[Path, tuple[int, ...] | None] = {}
    for file in (_folder / name for name in _digests) if _folder is not None else ():
        try:
            status = file.stat()
        except OSError:
            found[file] = None
        else:
            found[file] = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return found


def _load(file: Path, digest: str) -> Kept:
    """What ``file`` holds, if it has this ``digest``. Without one it is mapped, and not read before it is needed."""
    data: bytearray | mmap.mmap
    try:
        with file.open("rb") as opened:
            if digest:
                opened.readinto(data := bytearray(file.stat().st_size))
            else:
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # nothing of an empty file can be mapped
        raise files.Unusable(f"{file}: cannot be read ({files.reason(error)}); {_ANEW}") from error
    if digest and _digest(data) != digest:
        raise files.Unusable(f"{file}: has changed since this run began; {_ANEW}")
    try:
        found = border.loads(data)
    except border.NotPlain as error:
        raise files.Unusable(f"{file}: is damaged ({files.reason(error)}); {_ANEW}") from error
    if not isinstance(found, list):
        raise files.Unusable(f"{file}: holds a {type(found).__name__}; {_ANEW}")
    return Kept(found, file, digest)


def _name(key: tuple[str, ...], decides: dict[str, Any]) -> str:
    digest = hashlib.sha256(f"{sorted(decides.items())} {_sources()}".encode()).hexdigest()[:16]
    return f"{'-'.join(key)}-{digest}.safetensors"


def _digest(data: bytes | bytearray | mmap.mmap) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
