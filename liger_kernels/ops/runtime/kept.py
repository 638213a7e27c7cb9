"""Parameters that a node of autograd keeps for its backward, without the hooks on saved tensors.

Under activation checkpointing each saved tensor passes through Python three times, which the host feels. Parameters
lie in memory anyway and are never computed again, so a node may hold them itself: the very objects, which a sharding
package frees and fills in place. As with a saved tensor, a change in place before the backward is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_current_graph_is_kept: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def keeps_graph() -> bool:
    """Whether the graph is kept for another backward. Where nobody knows, it may be: in a torch that cannot say, and
    while a program is compiled, for Dynamo cannot trace the question."""
    return torch.compiler.is_compiling() or _current_graph_is_kept()


def keep(ctx: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """Keep ``tensors``, of which none is a result of this node, for :func:`kept`."""
    if any(ctx.needs_input_grad):
        ctx.kept = tensors, _versions(tensors)


def kept(ctx: Any) -> Sequence[torch.Tensor | None]:
    """What :func:`keep` kept.

    Raises:
        RuntimeError: one of them was changed in place since.
    """
    tensors, versions = ctx.kept
    for t, version, now in zip(tensors, versions, _versions(tensors), strict=True):
        if now != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of shape {tuple(t.shape)} is at version {now}, expected version {version}; change it after "
                "backward()"
            )
    result: Sequence[torch.Tensor | None] = tensors
    return result


def _versions(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    with torch._C.DisableTorchFunctionSubclass():  # a class of parameters may take long to answer
        return [None if t is None else t._version for t in tensors]
