"""Compiling programs before they are launched, several at a time.

Where a GPU's programs are compiled one after the other, at the first launch of each, the first step waits for all of
them: 0.4 s each on a machine with an H100, half of it for Triton's own launcher in C. :func:`compile_ahead` runs ops on
tensors without memory (device "meta"). They launch nothing then. What they would have launched is compiled by threads,
and a launch of the same kernel waits for its own thread only. A program that nobody launches afterwards costs nothing
but its compilation, and one that was not foreseen is compiled at its launch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

THREADS = 8
_Launch = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # grid, arguments, and by name


class _Foreseen(threading.local):
    """In the thread that foresees: the device that stands behind "meta", and what would be launched, by kernel."""

    device: torch.device | None = None
    launches: dict[Any, list[_Launch]] | None = None


_foreseen = _Foreseen()
_compiling: dict[Any, Future[None]] = {}  # by kernel
_waking: Future[None] | None = None  # what every compilation needs, begun once in a process


def real_device(device: torch.device) -> torch.device:
    """``device``, or what "meta" stands for while launches are foreseen."""
    return device if device.type != "meta" or _foreseen.device is None else _foreseen.device


def foresees() -> bool:
    """Whether a tensor without memory stands for one on a GPU."""
    return _foreseen.device is not None


@contextlib.contextmanager
def foreseeing(device: torch.device, launches: dict[Any, list[_Launch]] | None) -> Iterator[None]:
    """Inside, tensors of this thread on "meta" stand for those of ``device``. What they would launch is added to
    ``launches``, if there are any."""
    before = _foreseen.device, _foreseen.launches
    _foreseen.device, _foreseen.launches = device, launches
    try:
        yield
    finally:
        _foreseen.device, _foreseen.launches = before


def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """This launch is to be expected."""
    if _foreseen.launches is not None:
        _foreseen.launches.setdefault(kernel, []).append((grid, args, kwargs))


def wait_for(kernel: Any) -> None:
    """Until the programs of ``kernel`` that are being compiled are there, and Triton is ready."""
    if (pending := _compiling.get(kernel, _waking)) is not None:
        pending.result()


def wake(device: torch.device) -> None:
    """Begin what Triton does once in a process before it compiles, in a thread, and return at once: it makes its driver
    and hashes its own files, which takes 0.7 s on a machine with an H100."""
    global _waking
    if _waking is None:
        pool = ThreadPoolExecutor(1, "liger_kernels")
        _waking = pool.submit(_wake, device)
        pool.shutdown(wait=False)


def _wake(device: torch.device) -> None:
    import triton

    @triton.jit
    def nothing():
        pass

    with contextlib.suppress(Exception), torch.cuda.device(device):  # the first launch will raise it
        nothing.warmup(grid=(1,)).run  # noqa: B018  (Triton makes the launcher when it is asked for)


def compile_ahead(calls: Iterable[Callable[[], Any]], device: torch.device) -> None:
    """Compile what ``calls`` would launch on ``device``, in threads; this returns at once.

    Args:
        calls: each calls ops on tensors without memory, forward and backward. What one raises ends that one only: it
            foresees, and the step itself will say what is wrong.
    """
    foreseen: dict[Any, list[_Launch]] = {}
    with foreseeing(device, foreseen):
        for call in calls:
            with contextlib.suppress(Exception):
                call()
    if not foreseen:
        return
    wake(device)  # once, and not by several threads
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "liger_kernels")
    for kernel, launches in foreseen.items():  # one thread a kernel: two would write to the same table
        _compiling[kernel] = pool.submit(_compile, kernel, launches, device, _compiling.get(kernel))
    pool.shutdown(wait=False)


def _compile(kernel: Any, launches: list[_Launch], device: torch.device, before: Future[None] | None) -> None:
    for earlier in (before, _waking):  # that of another model, of an earlier pool: its threads began before these
        if earlier is not None:
            earlier.result()
    with contextlib.suppress(Exception), torch.cuda.device(device):  # the launch itself will raise it
        for grid, args, kwargs in launches:
            like = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            program = kernel.warmup(*like, grid=grid, **kwargs)
            program.run  # noqa: B018  (Triton makes the launcher when it is asked for)
