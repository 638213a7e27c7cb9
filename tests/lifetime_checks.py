"""What a step leaves behind, for the tests of lifetimes. Call it with Python's collector off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Made(TorchDispatchMode):
    """Inside, the memory of every tensor that is made there: what made it, and of which shape it was."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if type(t) is torch.Tensor}
        for t in tree_iter(out):
            if type(t) is torch.Tensor and t.untyped_storage()._cdata not in given:
                self.made.append((StorageWeakRef(t.untyped_storage()), f"{function} {tuple(t.shape)}"))
        return out

    def alive(self, *known: torch.Tensor | None) -> list[str]:
        """What is still there, and belongs to none of these."""
        theirs = {t.untyped_storage()._cdata for t in known if t is not None}
        return [what for ref, what in self.made if not ref.expired() and ref.cdata not in theirs]


def left_by(step: Callable[[], Any], *known: torch.Tensor | None) -> list[str]:
    """What is left of the second of two steps: the first may find out what is asked once in a process."""
    step()
    with Made() as made:
        step()
    left = made.alive(*known)
    for _ in range(100):  # on a GPU, the engine's own thread lets go of a pass a moment after it
        if not left:
            break
        time.sleep(0.01)
        left = made.alive(*known)
    return left
