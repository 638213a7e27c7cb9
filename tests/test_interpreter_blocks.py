"""Large blocks in Triton's interpreter: a load and a store do what Triton's loop does, byte for byte."""

from __future__ import annotations

import inspect
import itertools
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from convergence.arms.interpreter import blocks

DTYPES = {tl.int8: np.int8, tl.bfloat16: np.uint16, tl.float32: np.float32}
SHAPE = (2, 16, 64)
# By the distances of elements in memory: those of a padded tensor, transposed, backwards, one row for all, overlapping.
STRIDES = {
    "contiguous": (1024, 64, 1), "padded": (2000, 100, 1), "transposed": (1024, 1, 16), "backwards": (1024, 64, -1),
    "one row": (1024, 0, 1), "overlapping": (1024, 1, 2), "one element": (0, 0, 0),
}  # fmt: skip


def masks() -> dict[str, Any]:
    block, row, column = np.indices(SHAPE)
    corner = (row < 11) & (column < 50)
    moved = (corner & ((row != 5) | (column != 5))) | ((row == 12) & (column == 55))
    some = np.random.default_rng(0).random(SHAPE) < 0.5
    return {
        "all": block >= 0, "none": block < 0, "corner": corner, "one block": block < 1, "causal": column <= row,
        "last columns": column >= 10, "not the first": row + column > 0, "one moved": moved, "some": some,
    }  # fmt: skip


def loaded(function: Any, ptrs: Any, mask: Any, other: Any) -> Any:
    options = [None] * (len(inspect.signature(blocks._load).parameters) - 4)  # Triton 3.9 has one less
    return function(interpreter.interpreter_builder, ptrs, mask, other, *options)


def store(function: Any, ptrs: Any, value: Any, mask: Any) -> None:
    options = [None] * (len(inspect.signature(blocks._store).parameters) - 4)
    function(interpreter.interpreter_builder, ptrs, value, mask, *options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strides", [*STRIDES, "irregular"])
def test_a_large_block_is_loaded_and_stored_as_by_triton(strides: str, dtype: Any) -> None:
    random = np.random.default_rng(1)
    memory, other, values = (
        random.integers(0, 256, size=n * np.dtype(DTYPES[dtype]).itemsize, dtype=np.uint8).view(DTYPES[dtype])
        for n in (8000, *[np.prod(SHAPE)] * 2)
    )
    other, values = (interpreter.TensorHandle(x.reshape(SHAPE), dtype) for x in (other, values))
    if strides == "irregular":
        places = random.permutation(8000)[: np.prod(SHAPE)].reshape(SHAPE)
    else:
        places = 1000 + sum(i * n for i, n in zip(np.indices(SHAPE), STRIDES[strides], strict=True))

    for (name, where), elsewhere in itertools.product(masks().items(), (places, -(2**40))):
        mask = interpreter.TensorHandle(where, tl.int1)
        lie = np.where(where, places, elsewhere)  # what is not read may lie anywhere
        addresses = (memory.ctypes.data + memory.itemsize * lie).astype(np.uint64)
        ptrs = interpreter.TensorHandle(addresses, tl.pointer_type(dtype))
        for default in (other, None):
            expected = loaded(blocks._load, ptrs, mask, default)
            found = loaded(blocks.load, ptrs, mask, default)
            assert (found.data.dtype, found.data.shape, found.dtype) == (memory.dtype, SHAPE, expected.dtype), name
            assert found.data.tobytes() == expected.data.tobytes(), name
            assert not any(np.shares_memory(found.data, data) for data in (memory, other.data)), name

        before = memory.copy()
        store(blocks._store, ptrs, values, mask)
        expected = memory.copy()
        memory[:] = before
        store(blocks.store, ptrs, values, mask)
        assert memory.tobytes() == expected.tobytes(), name


def test_a_rectangle_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare Triton's loop to itself."""
    memory = np.arange(1024, dtype=np.float32)
    addresses = (memory.ctypes.data + 4 * np.arange(1024).reshape(16, 64)).astype(np.uint64)
    ptrs = interpreter.TensorHandle(addresses, tl.pointer_type(tl.float32))
    mask = interpreter.TensorHandle(np.indices((16, 64))[1] < 50, tl.int1)
    for name in ("_load", "_store"):
        monkeypatch.setattr(blocks, name, create_autospec(getattr(blocks, name), side_effect=AssertionError))
    found = loaded(blocks.load, ptrs, mask, None)
    store(blocks.store, ptrs, found, mask)
    assert np.count_nonzero(found.data) == 16 * 50 - 1
