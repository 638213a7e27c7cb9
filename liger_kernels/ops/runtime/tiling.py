"""How work is cut into tiles, chunks and slabs: what the choices share, and where a test replaces them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from liger_kernels.ops.runtime.dispatch import INTERPRET

_Choice = TypeVar("_Choice", bound=Callable[..., Any])

_names: set[str] = set()
_replaced: dict[str, Callable[..., Any]] = {}


def choice(name: str) -> Callable[[_Choice], _Choice]:
    """The decorated function decides how something is cut, unless :func:`tiled` replaces what it decides."""

    def decorate(choose: _Choice) -> _Choice:
        _names.add(name)

        @functools.wraps(choose)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if name in _replaced:
                return _replaced[name](choose, *args, **kwargs)
            return choose(*args, **kwargs)

        return chosen  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def tiled(**choices: Callable[..., Any]) -> Iterator[None]:
    """Inside, these functions make the choices of these names, in every thread. Results may differ by roundoff only.

    Args:
        choices: for each name a function of the original choice and its arguments.

    Raises:
        ValueError: there is no choice of that name.
    """
    unknown = sorted(set(choices) - _names)
    if unknown:
        raise ValueError(f"no choice is called {unknown[0]!r}; there are {', '.join(sorted(_names))}")
    before = dict(_replaced)
    _replaced.update(choices)
    try:
        yield
    finally:
        _replaced.clear()
        _replaced.update(before)


def tile(n_rows: int, n_cols: int, rows: int, block: int, widest: int = 65536) -> tuple[int, int]:
    """``rows`` and ``block``, the columns of a program. In the interpreter, where every program costs about a
    millisecond whatever its size, a program takes 65536 elements instead, in at most ``widest`` columns."""
    if not INTERPRET:
        return rows, block
    block = min(next_power_of_2(n_cols), widest)
    return min(max(1, 65536 // block), next_power_of_2(n_rows)), block


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` [..., columns] as rows with unit stride along a row, and the stride between them: a view wherever one
    exists, and ``x`` itself, which costs the host less, where it is contiguous."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up. Triton's own, which also runs inside kernels, takes the host 2 microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for ``n`` of 0)."""
    return 1 << max(n - 1, 0).bit_length()
