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


def kept(key: tuple[str, ...], decides: dict[str, Any], make: Callable[[], Any]) -> Any:
    """What ``make()`` returns, or has returned in any process for this ``key``, wherever ``decides`` was the same."""
    if _folder is None:
        return make()
    digest = hashlib.sha256(f"{sorted(decides.items())} {_sources()}".encode()).hexdigest()[:16]
    file = _folder / f"{'-'.join(key)}-{digest}.pt"
    files.make_once(file, lambda path: torch.save(make(), path))
    return torch.load(file, weights_only=False, mmap=True)


@functools.cache
def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
