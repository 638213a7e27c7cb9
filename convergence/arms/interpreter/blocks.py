"""Loads and stores of large blocks in Triton's interpreter, which reads and writes one element after another through
an array of pointers. Most blocks are a rectangle of memory, and NumPy copies a large rectangle 10 times as fast."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from triton.runtime import interpreter

_builder: Any = interpreter.InterpreterBuilder
_load, _store = _builder.create_masked_load, _builder.create_masked_store
_SMALL = 1024  # for fewer elements, looking for a rectangle takes longer than Triton's loop


def install() -> None:
    """Let the interpreter of this process use the functions of this file."""
    _builder.create_masked_load, _builder.create_masked_store = load, store


def load(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any) -> Any:
    """Replaces ``create_masked_load``."""
    dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
    found = _rectangle(ptrs.data, mask.data, dtype) if _is_large(ptrs, mask) else None
    if found is None or (other is not None and (other.data.shape, other.data.dtype) != (ptrs.data.shape, dtype)):
        return _load(self, ptrs, mask, other, *options)
    place, memory, _ = found
    values = np.zeros(ptrs.data.shape, dtype) if other is None else other.data.copy()
    values[place] = memory
    return interpreter.TensorHandle(values, ptrs.get_element_ty())


def store(self: Any, ptrs: Any, value: Any, mask: Any, *options: Any) -> None:
    """Replaces ``create_masked_store``."""
    found = _rectangle(ptrs.data, mask.data, value.data.dtype) if _is_large(ptrs, mask, value) else None
    if found is None or not found[2]:  # of two values for one place, Triton stores the last
        _store(self, ptrs, value, mask, *options)
        return
    place, memory, _ = found
    memory[...] = value.data[place]


def _is_large(ptrs: Any, *others: Any) -> bool:
    return ptrs.data.size >= _SMALL and all(other.data.shape == ptrs.data.shape for other in others)


def _rectangle(pointers: Any, mask: Any, dtype: Any) -> tuple[Any, Any, bool] | None:
    """Where ``mask`` is true, the memory that ``pointers`` point to there, and whether its elements lie apart. None
    unless the mask is true in the first rows and columns alone, and these lie at equal distances in memory."""
    corner = (0,) * mask.ndim
    lines = [(*corner[:axis], slice(None), *corner[axis + 1 :]) for axis in range(mask.ndim)]
    lengths = tuple([int(np.count_nonzero(mask[line])) for line in lines])
    place = tuple([slice(length) for length in lengths])
    count = np.count_nonzero(mask)
    if count == 0 or math.prod(lengths) != count or not mask[place].all():
        return None
    pointers = pointers[place]
    first = int(pointers[corner])
    seconds = [(*corner[:axis], min(1, length - 1), *corner[axis + 1 :]) for axis, length in enumerate(lengths)]
    strides = tuple([int(pointers[second]) - first for second in seconds])
    distances, apart = _distances(lengths, strides, dtype.itemsize)
    if not (pointers - pointers[corner] == distances).all():
        return None
    return place, np.asarray(_Memory(first, lengths, strides, dtype)), apart


@functools.lru_cache(maxsize=64)
def _distances(lengths: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[Any, bool]:
    """How many bytes each element lies behind the first, and whether no two have a byte in common."""
    distances = np.zeros((), np.int64)
    for length, stride in zip(lengths, strides, strict=True):
        distances = np.add.outer(distances, np.arange(length) * stride)
    end = itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, lengths, strict=True) if n > 1):
        if stride < end:
            return distances.view(np.uint64), False
        end = stride * length
    return distances.view(np.uint64), True


class _Memory:
    """What NumPy asks for memory of any owner."""

    def __init__(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> None:
        data = (start, False)  # not read-only
        interface = {"version": 3, "data": data, "shape": shape, "strides": strides, "typestr": dtype.str}
        self.__array_interface__ = interface
