"""Memory that reveals wrong reads and writes of an op: it begins as NaN, and inputs lie in gaps of NaN."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, ``torch.empty`` returns NaN (the largest integer for integers), so that an unwritten element shows. torch
    fills memory only while it chooses deterministic algorithms."""
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = True
    try:
        with deterministic(True), warnings.catch_warnings():
            # A GPU without deterministic products warns.
            for message in (".*does not have a deterministic implementation.*", "Deterministic behavior was enabled.*"):
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        settings.fill_uninitialized_memory = fill


@contextlib.contextmanager
def deterministic(chosen: bool) -> Iterator[None]:
    """Inside, torch chooses deterministic algorithms if ``chosen`` and if it has some. Most training runs do not ask
    for them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(chosen, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class _Zeroed(TorchDispatchMode):
    MAKES = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function.overloadpacket.__name__ in self.MAKES else made


def zeroed() -> contextlib.AbstractContextManager[Any]:
    """Inside, ``torch.empty`` and similar functions return zeros."""
    return _Zeroed()


def shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    if not (one.numel() and other.numel()) or one.device != other.device:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both have the same numbers, or both are None. A NaN equals another NaN."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


class Placed(NamedTuple):
    """A tensor in a layout: ``buffer`` is all memory of the layout, and ``view`` the tensor in it."""

    buffer: torch.Tensor
    view: torch.Tensor


def _rows_apart(t: torch.Tensor, i: int) -> Placed:
    """Parts of longer rows that begin at an odd address. The rows' length differs from input to input."""
    return _within(t, (*t.shape[:-1], t.shape[-1] + 5 + 2 * i), lambda b: b[..., 3 : 3 + t.shape[-1]])


def _every_other_column(t: torch.Tensor, i: int) -> Placed:
    return _within(t, (*t.shape[:-1], 2 * t.shape[-1]), lambda b: b[..., ::2])


def _every_other_row(t: torch.Tensor, i: int) -> Placed:
    return _within(t, (2 * t.shape[0], *t.shape[1:]), lambda b: b[::2])


def _transposed(t: torch.Tensor, i: int) -> Placed:
    return _rows_apart(t, i) if t.ndim < 2 else _within(t, t.mT.shape, lambda b: b.mT)


def _expanded(t: torch.Tensor, i: int) -> Placed:
    """The first row or number in every place. Integers are not expanded, because they may be indices that must
    differ."""
    if not t.is_floating_point():
        return _rows_apart(t, i)
    buffer = t[:1].clone()
    return Placed(buffer, buffer.expand(t.shape))


def _within(t: torch.Tensor, shape: tuple[int, ...], see: Callable[[torch.Tensor], torch.Tensor]) -> Placed:
    # An integer may be an index, and most numbers would crash as an index.
    buffer = t.new_full(shape, float("nan") if t.is_floating_point() else 0)
    view = see(buffer)
    view.copy_(t)
    return Placed(buffer, view)


# The layouts. Each function takes a tensor and the number of the input.
LAYOUTS: dict[str, Callable[[torch.Tensor, int], Placed]] = {
    "rows apart": _rows_apart,
    "every other column": _every_other_column,
    "every other row": _every_other_row,
    "transposed": _transposed,
    "expanded": _expanded,
}


def placed(t: torch.Tensor, layout: str, i: int = 0) -> Placed:
    """The values of ``t`` in a layout. In "expanded", every row has the values of the first row."""
    source = t.detach()
    where = LAYOUTS[layout](source, i) if source.ndim and source.numel() else Placed(source.clone(), source.clone())
    where.view.requires_grad_(t.requires_grad)
    return where
