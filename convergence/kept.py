"""Truth, baseline and replicas of a case, kept in a folder: ``pytest convergence --references DIR``.

Whoever changes a patch and proves it again then waits for the candidate only. A file's name holds a digest of all that
decides a bit of it: versions, processor, threads, precision, and the sources of the proof. Nothing of a patch does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from convergence import files

_folder: Path | None = None


@contextlib.contextmanager
def keep_in(folder: Path) -> Iterator[None]:
    """Inside, references are kept in ``folder``."""
    global _folder
    before, _folder = _folder, folder
    try:
        yield
    finally:
        _folder = before


def kept(key: tuple[str, ...], decides: dict[str, Any], make: Callable[[], Any], kind: type = object) -> Any:
    """What ``make()`` returns, or has returned in any process for this ``key``, wherever ``decides`` was the same.

    Raises:
        Unusable: a file in the folder is damaged, or holds no ``kind``.
    """
    if _folder is None:
        return make()
    digest = hashlib.sha256(f"{sorted(decides.items())} {_sources()}".encode()).hexdigest()[:16]
    file = _folder / f"{'-'.join(key)}-{digest}.pt"
    files.make_once(file, lambda path: torch.save(make(), path))
    found = _load(file)
    if not isinstance(found, kind):
        raise files.Unusable(f"{file}: holds a {type(found).__name__}; delete it, and it is made anew")
    return found


class Kept:
    """To another process goes the file that it was loaded from, where there is one."""

    kept_in: Path | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.kept_in is None else (_load, (self.kept_in,))


def _load(file: Path) -> Any:
    try:
        found = torch.load(file, weights_only=False, mmap=True)
    except Exception as error:  # of bytes that may be anything
        raise files.Unusable(f"{file}: is damaged ({files.reason(error)}); delete it, and it is made anew") from error
    if isinstance(found, Kept):
        found.kept_in = file
    return found


@functools.cache
def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
