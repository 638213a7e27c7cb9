"""The inputs of checkpointed layers in host memory, copied while the GPU computes.

Activation checkpointing keeps the input of each layer: 262 KB a token of Llama-3 8B, which is most of what a long
sequence takes. Checkpointing saves it as autograd saves any tensor, so that a hook on saved tensors sees it, of both
kinds of checkpointing and of every model.

A layer's input is copied when that of the next layer arrives, and given up one layer later, when the copy has ended:
two are on the GPU at a time. In the backward, asking for one starts the copy of the one before. All copies run on one
stream, so a buffer that is used again is written after it has been read. The newest input is never copied: its
backward comes first.

Buffers have exactly the size of what they held first, and take smaller inputs, too. They come back when autograd drops
what was saved, and stay with the patched model.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from liger_kernels.ops.runtime.arguments import one_of

Offload = Annotated[str, one_of(("layers",))]
INPUTS = "_liger_kernels_inputs"  # where a patched model keeps its own
SMALLEST = 2**20  # bytes; what is smaller stays on the GPU
UNUSED = "offload='layers' without activation checkpointing: nothing was moved"
OTHERS = "offload='layers' inside of other hooks on saved tensors: nothing was moved"
_CHECKPOINT, _FUNCTION = torch.utils.checkpoint.__file__, sys.modules[torch.autograd.Function.__module__].__file__
_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


class Lane:
    """The stream of one GPU on which everything is copied, both ways."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Copy what ``source`` holds when the current stream gets here. Returns the event at the end of the copy."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Whatever the current stream does from here on comes after ``event``."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Wait until nothing is being copied."""
        self.stream.synchronize()

    def memory(self, size: int) -> HostMemory:
        return HostMemory(size)


class HostMemory:
    """Memory of the host that a GPU reads and writes by itself. torch's own pinned memory has powers of two for sizes,
    up to twice as much as is asked for."""

    def __init__(self, size: int):
        memory: Tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
        if int(error):
            raise RuntimeError(
                f"offload='layers' needs {size} bytes more of host memory that can be pinned, and CUDA answers "
                f"{error}; shorten the sequence, raise the limit of locked memory, or patch without offload"
            )
        self.bytes = memory

    def __del__(self) -> None:
        if "bytes" in self.__dict__:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class Buffers:
    """The host memory of one GPU that is not in use, the smallest first."""

    def __init__(self, lane: Any):
        self.lane = lane
        self.free: list[Any] = []

    def take(self, size: int) -> Any:
        """One of at least ``size`` bytes. In place of one that is too small a new one is made, so that there are never
        more than have been in use at a time."""
        i = bisect.bisect_left(self.free, size, key=_size)
        if i < len(self.free):
            return self.free.pop(i)
        if self.free:
            self.lane.finish()
            del self.free[0]
        return self.lane.memory(size)

    def give_back(self, memory: Any) -> None:
        bisect.insort(self.free, memory, key=_size)

    def __del__(self) -> None:
        self.lane.finish()


def _size(memory: Any) -> int:
    return len(memory.bytes)


class Input:
    """What autograd keeps in place of the input of a layer."""

    def __init__(self, x: Tensor, buffers: Buffers | None, before: Input | None):
        self.tensor: Tensor | None = x.detach()
        self.version: int | None = x._version  # None once it is a copy
        self.buffers = buffers
        self.before = None if before is None else weakref.ref(before)
        self.host: Any = None
        self.event: Any = None  # the end of the copy that is under way
        self.how = x.shape, x.stride(), x.dtype, x.device

    def leave(self) -> None:
        """Begin to copy it to the host."""
        if self.buffers is not None:
            assert self.tensor is not None
            self._check()
            self.host = self.buffers.take(self.tensor.numel() * self.tensor.element_size())
            flat = _flat(self.tensor)
            self.event = self.buffers.lane.copy(self._on_host(flat), flat)

    def left(self) -> None:
        """Give the tensor up; before anything else uses its memory, the copy has ended."""
        if self.host is not None and self.event is not None:
            self._check()
            self.buffers.lane.wait(self.event)  # type: ignore[union-attr]
            self.tensor = self.version = self.event = None

    def come_back(self) -> None:
        """Begin to copy it to the GPU."""
        if self.tensor is None and self.buffers is not None:
            shape, stride, dtype, device = self.how
            self.tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            flat = _flat(self.tensor)
            self.event = self.buffers.lane.copy(flat, self._on_host(flat))

    def value(self) -> Tensor:
        self._check()
        self.come_back()
        tensor = self.tensor
        assert tensor is not None
        if self.version is None:
            self.buffers.lane.wait(self.event)  # type: ignore[union-attr]
            self.tensor = self.event = None  # a graph that is kept copies it again
        if (before := None if self.before is None else self.before()) is not None:
            before.come_back()
        return tensor

    def _on_host(self, flat: Tensor) -> Tensor:
        on_host: Tensor = self.host.bytes[: len(flat) * flat.element_size()].view(flat.dtype)
        return on_host

    def _check(self) -> None:
        if self.version is not None and self.tensor is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of a checkpointed layer, of shape {tuple(self.tensor.shape)}, is at version "
                f"{self.tensor._version}, expected version {self.version}"
            )

    def __del__(self) -> None:
        if self.host is not None and self.buffers is not None:
            if self.event is not None:  # a copy is under way: whoever gets the tensor's memory comes after it
                self.buffers.lane.wait(self.event)
            self.buffers.give_back(self.host)


class LayerInputs:
    """The inputs of one model's checkpointed layers. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Buffers] = {}
        self._here = threading.local()

    def __reduce__(self) -> Any:
        return LayerInputs, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerInputs:
        return LayerInputs()

    @contextlib.contextmanager
    def kept(self, fallbacks: Counter[str]) -> Iterator[None]:
        """Inside, what checkpointing saves of layers goes to the host. ``fallbacks`` counts where nothing does."""
        if getattr(self._here, "inside", False):  # a model inside of another one
            yield
            return
        if _hooks(True) is not None:
            fallbacks[OTHERS] += 1
            yield
            return
        arrived: list[Input] = []  # those on the GPU: the newest, and before it the one that is being copied
        count = 0

        def pack(x: Tensor) -> Any:
            nonlocal count
            if not _is_input():
                return x if x.grad_fn is None else x.detach()  # a result would keep its own node alive
            count += 1
            if not _moves(x):
                return x if x.grad_fn is None else x.detach()
            for other in arrived[:-1]:
                other.left()
            if arrived:
                arrived[-1].leave()
            one = Input(x, self._buffers_of(x.device), arrived[-1] if arrived else None)
            arrived[:] = [*arrived[-1:], one]
            return one

        def unpack(packed: Any) -> Tensor:
            value: Tensor = packed.value() if isinstance(packed, Input) else packed
            return value

        self._here.inside = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._here.inside = False
            for one in arrived[:-1]:
                one.left()
            arrived.clear()
        if not count:
            fallbacks[UNUSED] += 1
            if fallbacks[UNUSED] == 1:
                warnings.warn(
                    "offload='layers' moves what activation checkpointing keeps, and this model trains without it: "
                    "call model.gradient_checkpointing_enable(), or patch without offload",
                    stacklevel=2,
                )

    def _buffers_of(self, device: torch.device) -> Buffers | None:
        """None where tensors stay where they are."""
        if device not in self._buffers:
            if (lane := lane_of(device)) is None:
                return None
            self._buffers[device] = Buffers(lane)
        return self._buffers[device]


def lane_of(device: torch.device) -> Any:
    """What copies between ``device`` and the host; None for the host itself."""
    return Lane(device) if device.type == "cuda" else None


def _is_input() -> bool:
    """Whether torch's checkpointing is what saves a tensor: it does so with the inputs of what it computes again."""
    frame: Any = sys._getframe(2)
    if frame is not None and frame.f_code.co_filename == _FUNCTION:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


def _moves(x: Tensor) -> bool:
    """Whether ``x`` is worth moving: what all layers are given, such as a mask or positions, has no gradient."""
    if not x.requires_grad or isinstance(x, nn.Parameter) or x.numel() * x.element_size() < SMALLEST:
        return False
    return _is_dense(x)


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` fill a range of memory, each at a place of its own."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(x: Tensor) -> Tensor:
    """The memory of ``x`` in one dimension."""
    return x.as_strided((x.numel(),), (1,))
