"""``patch(offload="layers")``: moves the inputs of checkpointed layers to host memory while the GPU computes.

Activation checkpointing keeps the input of each layer: 262 KB a token of Llama-3 8B. That is most of the memory of a
long sequence. Both kinds of checkpointing save the inputs through autograd, so a hook on saved tensors sees them in
every model.

The copy of an input starts when the next layer's input arrives. One layer later the copy has ended, and the GPU's
memory is freed. So two inputs are on the GPU at a time. In the backward, a layer that takes its input starts the copy
of the previous layer's input. All copies run on one stream, so a reused buffer is written only after it was read. The
newest input is never copied, because its backward comes first.

A host buffer has the size of its first input and may hold smaller inputs later. The buffer returns to the patched
model's pool when autograd drops the saved tensor.
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
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from liger_kernels.ops.runtime.anchor import saved_tensors_hooks
from liger_kernels.ops.runtime.arguments import one_of

Offload = Annotated[str, one_of(("layers",))]
INPUTS = "_liger_kernels_inputs"  # the attribute of a patched model with its LayerInputs
SMALLEST = 2**20  # bytes; smaller tensors stay on the GPU
UNUSED = "offload='layers' without activation checkpointing: nothing was moved"
OTHERS = "offload='layers' inside of other hooks on saved tensors: nothing was moved"
_CHECKPOINT, _FUNCTION = torch.utils.checkpoint.__file__, sys.modules[torch.autograd.Function.__module__].__file__


class CopyStream:
    """The stream of one GPU for all copies, in both directions."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Copy ``source`` after the work that the current stream has now. Returns the event at the end of the copy."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for ``event``."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Wait until nothing is being copied."""
        self.stream.synchronize()

    def memory(self, size: int) -> PinnedMemory:
        return PinnedMemory(size)


class PinnedMemory:
    """Host memory that a GPU reads and writes directly. torch's pinned memory would round each size up to a power of
    two."""

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


class PinnedPool:
    """The unused host buffers of one GPU, smallest first."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.free: list[Any] = []

    def acquire(self, size: int) -> Any:
        """A buffer of at least ``size`` bytes. If all buffers are too small, a new buffer replaces the smallest. So the
        number of buffers never exceeds the largest number in use at a time."""
        i = bisect.bisect_left(self.free, size, key=_size)
        if i < len(self.free):
            return self.free.pop(i)
        if self.free:
            self.stream.finish()
            del self.free[0]
        return self.stream.memory(size)

    def release(self, memory: Any) -> None:
        bisect.insort(self.free, memory, key=_size)

    def __del__(self) -> None:
        self.stream.finish()


def _size(memory: Any) -> int:
    return len(memory.bytes)


class Saved:
    """The object that autograd keeps in place of a tensor. torch checks for changes in place only without hooks."""

    __slots__ = ("tensor", "version")
    tensor: Tensor | None
    version: int | None  # None once ``tensor`` is a copy

    def __init__(self, x: Tensor):
        self.tensor = kept = x if x.grad_fn is None else x.detach()  # a result would keep its autograd node alive
        self.version = kept._version

    def unpack(self) -> Tensor:
        self._check()
        assert self.tensor is not None
        return self.tensor

    def _check(self) -> None:
        if self.version is not None and self.tensor is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a saved tensor of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}, expected "
                f"version {self.version}"
            )


class Input(Saved):
    """The object that autograd keeps in place of a layer's input."""

    def __init__(self, x: Tensor, pool: PinnedPool | None, before: Input | None):
        super().__init__(x.detach())
        self.pool = pool
        self.before = None if before is None else weakref.ref(before)
        self.host: Any = None
        self.event: Any = None  # the end of the copy that is running
        self.how = x.shape, x.stride(), x.dtype, x.device

    def start_offload(self) -> None:
        """Start the copy to the host."""
        if self.pool is not None:
            assert self.tensor is not None
            self._check()
            self.host = self.pool.acquire(self.tensor.numel() * self.tensor.element_size())
            flat = _flat(self.tensor)
            self.event = self.pool.stream.copy(self._on_host(flat), flat)

    def finish_offload(self) -> None:
        """Free the tensor. The current stream waits for the copy before it reuses the tensor's memory."""
        if self.host is not None and self.event is not None:
            self._check()
            self.pool.stream.wait(self.event)  # type: ignore[union-attr]
            self.tensor = self.version = self.event = None

    def prefetch(self) -> None:
        """Start the copy to the GPU."""
        if self.tensor is None and self.pool is not None:
            shape, stride, dtype, device = self.how
            self.tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            flat = _flat(self.tensor)
            self.event = self.pool.stream.copy(flat, self._on_host(flat))

    def unpack(self) -> Tensor:
        self._check()
        self.prefetch()
        tensor = self.tensor
        assert tensor is not None
        if self.version is None:
            self.pool.stream.wait(self.event)  # type: ignore[union-attr]
            self.tensor = self.event = None  # a retained graph copies the input again
        if (before := None if self.before is None else self.before()) is not None:
            before.prefetch()
        return tensor

    def _on_host(self, flat: Tensor) -> Tensor:
        on_host: Tensor = self.host.bytes[: len(flat) * flat.element_size()].view(flat.dtype)
        return on_host

    def __del__(self) -> None:
        if self.host is not None and self.pool is not None:
            if self.event is not None:  # a copy is running, and the next user of the tensor's memory must wait for it
                self.pool.stream.wait(self.event)
            self.pool.release(self.host)


class LayerInputs:
    """The inputs of one model's checkpointed layers. Copies and pickles of this object are empty."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, PinnedPool] = {}
        self._here = threading.local()

    def __reduce__(self) -> Any:
        return LayerInputs, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerInputs:
        return LayerInputs()

    @contextlib.contextmanager
    def offloaded(self, fallbacks: Counter[str]) -> Iterator[None]:
        """Inside, the layer inputs that checkpointing saves go to the host. ``fallbacks`` counts calls in which nothing
        moved."""
        if getattr(self._here, "inside", False):  # a model inside another model
            yield
            return
        if saved_tensors_hooks(True) is not None:
            fallbacks[OTHERS] += 1
            yield
            return
        on_gpu: list[Input] = []  # the inputs on the GPU: the one that is being copied, then the newest
        count = 0

        def pack(x: Tensor) -> Saved:
            nonlocal count
            if not _is_input():
                return Saved(x)
            count += 1
            if not _moves(x):
                return Saved(x)
            for other in on_gpu[:-1]:
                other.finish_offload()
            if on_gpu:
                on_gpu[-1].start_offload()
            one = Input(x, self._pool_of(x.device), on_gpu[-1] if on_gpu else None)
            on_gpu[:] = [*on_gpu[-1:], one]
            return one

        self._here.inside = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.unpack()):
                yield
        finally:
            self._here.inside = False
            for one in on_gpu[:-1]:
                one.finish_offload()
            on_gpu.clear()
        if not count:
            fallbacks[UNUSED] += 1
            if fallbacks[UNUSED] == 1:
                warnings.warn(
                    "offload='layers' moves what activation checkpointing keeps, and this model trains without it: "
                    "call model.gradient_checkpointing_enable(), or patch without offload",
                    stacklevel=2,
                )

    def _pool_of(self, device: torch.device) -> PinnedPool | None:
        """The pool for tensors of ``device``, or None if such tensors are not moved."""
        if device not in self._pools:
            if (stream := copy_stream_of(device)) is None:
                return None
            self._pools[device] = PinnedPool(stream)
        return self._pools[device]


def copy_stream_of(device: torch.device) -> Any:
    """The stream that copies between ``device`` and the host; None for the host itself."""
    return CopyStream(device) if device.type == "cuda" else None


def _is_input() -> bool:
    """Whether torch's checkpointing saves the tensor. Checkpointing saves only the inputs of a function that it
    recomputes."""
    frame: Any = sys._getframe(2)
    if frame is not None and frame.f_code.co_filename == _FUNCTION:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


def _moves(x: Tensor) -> bool:
    """Whether ``x`` is worth moving. Tensors that all layers share, such as a mask or positions, have no gradient and
    stay."""
    if not x.requires_grad or isinstance(x, nn.Parameter) or x.numel() * x.element_size() < SMALLEST:
        return False
    return _is_dense(x)


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` fill a range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(x: Tensor) -> Tensor:
    """The memory of ``x`` as a vector."""
    return x.as_strided((x.numel(),), (1,))
