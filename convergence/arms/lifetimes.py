"""Whether what a step made is gone when nobody who made it holds it any more.

A patch that keeps the logits of every step in a list computes what it should, and fills the memory. Its tensors may be
aliases, so memory is watched, not tensors. Of a graph nothing is left after its backward but nodes: a hook on the last
one lives as long as that does.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

UNTIL_COLLECTED = "until Python's collector ran"


class _Held:
    """What lives as long as whoever holds it."""


class Lifetimes:
    """Weak references to what one step made. Whoever watches holds nothing."""

    def __init__(self) -> None:
        self._is_gone: dict[str, Callable[[], bool]] = {}

    def watch(self, name: str, value: Any) -> None:
        """Watch the memory of a tensor, or an object. None is nothing to watch."""
        if isinstance(value, torch.Tensor):
            self._is_gone[name] = StorageWeakRef(value.untyped_storage()).expired
        elif value is not None:
            reference = weakref.ref(value)
            self._is_gone[name] = lambda: reference() is None

    def watch_graph(self, loss: torch.Tensor) -> None:
        """Watch the graph that ``loss`` is the end of."""
        if loss.grad_fn is None:
            return
        held = _Held()
        loss.grad_fn.register_hook(lambda *gradients, held=held: None)
        self.watch("the graph of the loss", held)

    def left(self) -> list[str]:
        """What is still there, and for how long: until Python's collector runs, or beyond."""
        left = [name for name, is_gone in self._is_gone.items() if not is_gone()]
        if not left:
            return []
        gc.collect()
        stays = [name for name in left if not self._is_gone[name]()]
        found = [f"{', '.join(stays)} stayed after the step"] if stays else []
        if collected := [name for name in left if name not in stays]:
            found.append(f"{', '.join(collected)} stayed {UNTIL_COLLECTED}")
        return found
