"""Counts the bytes of live tensors while code runs, by purpose."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_storage_holders: Any = torch._C._storage_Use_Count
_LOOKED_THROUGH = ("_fn", "inner")  # frames of Dynamo, between a mode and the caller of the operation


class LiveBytes(TorchDispatchMode):
    """Inside, the memory of every operation's result counts until its last tensor is gone.

    On the meta device, which has no memory, this is the memory that an allocator would hold. Memory that an operation
    takes and frees inside is not seen. A boolean that the host reads from a meta tensor is True. With such booleans,
    transformers asks whether nothing is padded and nothing is packed.

    Args:
        label: the first label.
        rounding: an allocation is a multiple of this many bytes.
        tokens: the tokens of a row.

    Attributes:
        label: the purpose of tensors that are made from now on.
        now: live bytes by label.
        peak, at_peak: the largest sum of ``now``, and ``now`` at that time.
        square: bytes of the largest tensor [batch, heads, ``tokens``, ``tokens``] so far.
    """

    def __init__(self, label: str, rounding: int = 1, tokens: int = 0):
        super().__init__()
        _holders_of_a_gradient()
        self.label, self.rounding, self.tokens = label, rounding, tokens
        self.now: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self.peak = self.square = self._sum = 0
        self._labels: dict[int, str] = {}  # by memory

    def add(self, t: torch.Tensor, label: str | None = None) -> None:
        """Count the memory of ``t``, unless it counts already."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._labels:
            return
        size = -(-storage.nbytes() // self.rounding) * self.rounding
        self._labels[key] = label = self.label if label is None else label
        self.now[label] += size
        self._sum += size
        if t.dim() == 4 and t.shape[2] == t.shape[3] == self.tokens:
            self.square = max(self.square, size)
        if self._sum > self.peak:
            self.peak, self.at_peak = self._sum, self.now.copy()
        weakref.finalize(storage, self._drop, key, size).atexit = False

    def move(self, t: torch.Tensor, label: str) -> None:
        """Count the memory of ``t`` for ``label`` from now on."""
        storage = t.untyped_storage()
        before = self._labels.get(storage._cdata, label)
        if before != label:
            size = -(-storage.nbytes() // self.rounding) * self.rounding
            self._labels[storage._cdata] = label
            self.now[before] -= size
            self.now[label] += size

    def _drop(self, key: int, size: int) -> None:
        self.now[self._labels.pop(key)] -= size
        self._sum -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        if func is _aten.add.Tensor and (summed := _sum_in_place(args, sys._getframe(1))) is not None:
            return summed
        result = _sum_of_product(func, args, kwargs or {})
        result = func(*args, **(kwargs or {})) if result is None else result
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, torch.Tensor):
                self.add(t)
        return result


def _sum_of_product(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What ``func`` returns, if it adds a product of meta matrices: the tensor that it writes to, or a new one; else
    None. torch finds other shapes in C++. For these it runs a decomposition in Python, which takes 0.3 ms."""
    if func not in (_aten.addmm.default, _aten.addmm.out, _aten.addmm_.default) or not args[0].is_meta:
        return None
    c, a, b = args[:3]
    shape = (*a.shape[:1], *b.shape[1:])
    out = c.new_empty(shape) if func is _aten.addmm.default else kwargs.get("out", c)
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and out.shape == shape
    return cast(torch.Tensor, out) if fits and c.shape in (shape, shape[1:]) else None  # torch names what does not fit


def _sum_in_place(args: Any, caller: Any) -> torch.Tensor | None:
    """The summand that autograd would overwrite with the sum of two gradients, because nobody else holds it; else None.

    Autograd overwrites only without a mode. Under a mode it always makes a new tensor.
    """
    if len(args) != 2 or not _is_autograd(caller):
        return None
    held = _holders(args)
    a, b = args
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return None
    return next((t for t, holders in zip(args, held, strict=True) if holders <= _holders_of_a_gradient()), None)


def _is_autograd(frame: Any) -> bool:
    """Whether the backward's C++ code called the operation, not a Python function."""
    while frame is not None and frame.f_code.co_name in _LOOKED_THROUGH:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _holders(args: tuple[Any, ...]) -> list[int]:
    """The number of references to each tensor or its memory, including those of the caller and of autograd."""
    return [
        sys.getrefcount(t) + t._use_count() + _storage_holders(t.untyped_storage()._cdata)  # type: ignore[attr-defined]
        if isinstance(t, torch.Tensor)
        else sys.maxsize
        for t in args
    ]


@functools.cache
def _holders_of_a_gradient() -> int:
    """:func:`_holders` of a gradient that only autograd holds, under a mode."""
    found: list[int] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _aten.add.Tensor and _is_autograd(sys._getframe(1)):
                found.extend(_holders(args))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        x = torch.ones((), device="meta", requires_grad=True)
        y = x * 2
        z = y * 2 + y * 3
    with Look():
        torch.autograd.backward([z])
    return max(found, default=0)
