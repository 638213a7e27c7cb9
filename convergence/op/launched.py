"""Finds the kernels that an op launches, and the calls that make the host wait for a GPU. Works without a GPU, too."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def counted(device: torch.device) -> Iterator[Counter[str]]:
    """Inside, kernels are counted by name; the counts are complete at the end of the context. A GPU counts all kernels,
    including torch's. A CPU counts the kernels that run in Triton's interpreter."""
    found: Counter[str] = Counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            yield found
            torch.cuda.synchronize(device)
        kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found.update(event.name for event in kernels if not event.name.startswith(("Memcpy", "Memset")))
        return
    with _interpreted(found):
        yield found


@contextlib.contextmanager
def _interpreted(found: Counter[str]) -> Iterator[None]:
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # no kernel was defined
        yield
        return
    executor = interpreter.GridExecutor
    start = executor.__call__

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[getattr(self.fn, "__name__", "a kernel")] += 1
        with _Waits.paused():  # on a GPU, the host runs no part of a kernel
            return start(self, *args, **kwargs)

    executor.__call__ = count
    try:
        yield
    finally:
        executor.__call__ = start


# torch's functions that make the host read a result or its shape.
_READ = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
}


class _Waits(TorchDispatchMode):
    """Notes the functions that would make the host wait if the tensors were on a GPU."""

    _active = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        before, cls._active = cls._active, False
        try:
            yield
        finally:
            cls._active = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if _Waits._active and (name in _READ or "unique" in name or (name.startswith("index") and _reads_a_mask(args))):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def _reads_a_mask(args: Any) -> bool:
    """Whether a tensor is indexed with booleans, of which torch must read how many are true. A number that is written
    where one mask is true needs no count: torch calls masked_fill."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else ()
    given = [i for i in indices if isinstance(i, torch.Tensor)]
    masks = [i for i in given if i.dtype in (torch.bool, torch.uint8)]
    writes_a_number = len(args) == 3 and isinstance(args[2], torch.Tensor) and args[2].dim() == 0
    return bool(masks) and not (writes_a_number and len(given) == 1)


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Inside, a call that makes the host wait for the GPU raises. On a CPU, the names of torch's functions that would
    make the host wait are noted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield []
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    with _Waits() as noted, _interpreted(Counter()):
        yield noted.found
