"""Lets a step on the meta device take the code paths of a GPU. Its tensors have no memory.

The kernels of this package launch nothing there. Their results are allocated as usual.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops.runtime.ahead import foreseeing
from liger_kernels.ops.runtime.dispatch import backward_once
from liger_kernels.ops.runtime.tiling import tiled
from liger_kernels.patching import offload

_one_at_a_time = threading.RLock()  # the replacements below affect meta tensors in every thread


class MetaCopyStream:
    """Stands for the stream that copies layer inputs between GPU and host. It copies nothing; ``host`` counts the
    host's bytes."""

    def __init__(self) -> None:
        self.host = 0

    def copy(self, to: Any, source: Any) -> str:
        return "ended"

    def wait(self, event: Any) -> None:
        return None

    def finish(self) -> None:
        return None

    def memory(self, size: int) -> Any:
        self.host += size
        return _HostBytes(size)


class _HostBytes:
    """Stands for host memory and its views."""

    def __init__(self, size: int):
        self.size = size

    @property
    def bytes(self) -> _HostBytes:
        return self

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> _HostBytes:
        return self

    def view(self, dtype: torch.dtype) -> _HostBytes:
        return self


@contextlib.contextmanager
def meta_as_gpu() -> Iterator[MetaCopyStream]:
    """Inside, this thread's meta tensors take a GPU's code paths: this package's kernels, grouped products, fused
    attention, and offload to the host. The meta device has no autocast, so it uses the CPU's."""
    stream = MetaCopyStream()
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def of_cpu(kind: Any) -> Any:
        return "cpu" if kind == "meta" else kind

    class MetaAutocast(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any):
            super().__init__(of_cpu(device_type), *args, **kwargs)

    known: dict[str, Any] = {
        "is_autocast_enabled": lambda *kind: enabled(*map(of_cpu, kind)),
        "get_autocast_dtype": lambda kind: dtype(of_cpu(kind)),
        "autocast": MetaAutocast,
    }
    with _one_at_a_time, contextlib.ExitStack() as stack:
        attention = torch.library.Library("aten", "IMPL")
        stack.callback(attention._destroy)
        attention.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        stack.enter_context(foreseeing(torch.device("cpu"), None))  # noting launches would keep their tensors alive
        for name, value in known.items():
            stack.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, value)
        stack.enter_context(tiled(grouped=lambda native, a, b: a.is_meta or native(a, b)))
        copy_stream_of = offload.copy_stream_of
        stack.callback(setattr, offload, "copy_stream_of", copy_stream_of)
        offload.copy_stream_of = lambda device: stream if device.type == "meta" else copy_stream_of(device)
        yield stream


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = _FusedAttention.apply(q, k, v, mask)
    return result


class _FusedAttention(torch.autograd.Function):
    """Allocates what torch's fused attention allocates: FlashAttention, or with a mask the memory-efficient kernel.

    q: [batch, heads, tokens, features]; k and v may have fewer heads. Results lie in memory as [batch, tokens, heads,
    features]. A boolean mask becomes a mask of q's dtype.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.new_empty(mask.shape, dtype=q.dtype)
        out = _by_tokens(q, q.shape[1], v.shape[3])
        log_sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sums, mask)
        return out

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums, mask = ctx.saved_tensors
        heads = q.shape[1]
        grads = [_by_tokens(t, t.shape[1], t.shape[3]) for t in (q, k, v)]
        if mask is None:
            sums = torch.empty(q.shape, dtype=torch.float32, device=q.device)
            whole = [_by_tokens(t, heads, t.shape[3]) for t in (k, v) if t.shape[1] != heads]
            del sums, whole  # the kernel needs them only while it runs
        del out, log_sums  # checkpointing has no reference to them any more, but the kernel reads them
        return *grads, None


def _by_tokens(like: Tensor, heads: int, features: int) -> Tensor:
    """A new tensor [batch, heads, tokens, features] that lies in memory as [batch, tokens, heads, features]."""
    batch, _, tokens, _ = like.shape
    return like.new_empty((batch, tokens, heads, features)).transpose(1, 2)
