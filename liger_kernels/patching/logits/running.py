"""What a running forward of a patched model tells its head: a state of that call, in that thread.

Nothing of it is kept on a module, so threads, wrappers, copies and exceptions cannot see each other's.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import CountedTargets
from liger_kernels.patching.logits.packing import Packing


@dataclass
class Forward:
    """One forward of a patched model with labels.

    Attributes:
        heads: the patched linear layers that answer with deferred logits while it runs.
        outer: what the model calls its output embeddings: the head itself, or what wraps it (an adapter, FSDP).
        fallbacks: of the model's report: why real logits had to be computed, or another schedule had to run.
        extras: what the pass of the loss computes in addition, such as "token_accuracy".
        packing: what the rows of the loss weigh, where they do not all weigh the same.
        counted: how many of the labels count, asked for at the beginning.
        gathers: whether there are no labels, and log-probabilities may be gathered from what leaves the forward.
    """

    heads: list[Any]
    outer: nn.Module
    fallbacks: Counter[str]
    extras: tuple[str, ...] = ()
    packing: Packing | None = None
    counted: CountedTargets | None = None
    gathers: bool = False


class _Running(threading.local):
    def __init__(self) -> None:  # runs in each thread; defaults of the class would appear in a guard of Dynamo's
        self.forward: Forward | None = None
        self.request: Any = None  # what the head's own call is to compute right now, in place of its logits
        self.weighted: bool | None = None  # whether the rows of the model's loss have been weighted


running = _Running()


def call_head(outer: nn.Module, hidden: torch.Tensor, request: Any = None) -> Any:
    """``outer(hidden)``, whose answer is what ``request`` asks for, or else its logits."""
    before = running.forward, running.request
    running.forward, running.request = None, request
    try:
        return outer(hidden)
    finally:
        running.forward, running.request = before
