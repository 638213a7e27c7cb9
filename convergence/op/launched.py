"""Which kernels an op launches, and what in it makes the host wait for a GPU; also where there is none."""

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
    """Inside, kernels by name: on a GPU all that it runs, torch's own, too; on a CPU those that run in Triton's
    interpreter. They are there once the context is left."""
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
    if interpreter is None:  # nobody has written a kernel
        yield
        return
    executor = interpreter.GridExecutor
    start = executor.__call__

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[getattr(self.fn, "__name__", "a kernel")] += 1
        with _Waits.paused():  # on a GPU, nothing of a kernel is the host's
            return start(self, *args, **kwargs)

    executor.__call__ = count
    try:
        yield
    finally:
        executor.__call__ = start


# torch's functions whose result, or its shape, the host has to read.
_READ = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
}


class _Waits(TorchDispatchMode):
    """Notes what would make the host wait if the tensors were a GPU's."""

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
        if _Waits._active and (name in _READ or "unique" in name or (name.startswith("index") and _has_mask(args))):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    """Whether something is indexed with booleans, of which torch looks for those that are true."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else ()
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Inside, what makes the host wait for the GPU: there, it raises; on a CPU, torch's functions that would make it
    wait are noted by name."""
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
