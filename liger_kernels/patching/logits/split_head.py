"""A head whose classes a tensor parallel plan splits over ranks: whether the fused loss can take its parts.

Such a plan lies around the head's own call: it takes the hidden states to what its layout wants, and gathers the
logits. What it does is not read from it, but tried: where it makes of hidden states that every rank has the logits of
all classes, on every rank, the loss is that of :mod:`liger_kernels.ops.loss.vocab_parallel` over the parts of the
weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_kernels.ops.loss.vocab_parallel import VocabShard, logits_of_all
from liger_kernels.patching.logits.running import call_head
from liger_kernels.patching.recipes.probe import describe, module_of

_PLANS = (
    "torch.distributed.tensor.",
    "transformers.integrations.tensor_parallel",
    "transformers.distributed.tensor_parallel",
)
_COMPUTES = "a tensor parallel plan splits the head's weight: the head computes its logits"

# What trying a head found, for the functions around it that were tried: why it computes its logits, or nothing.
_tried: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], str | None]] = WeakKeyDictionary()


class SplitHead(NamedTuple):
    """This rank's part of a head."""

    weight: Tensor  # [classes of the rank, hidden size], connected to the head's own
    bias: Tensor | None  # [classes of the rank]
    shard: VocabShard


def _around(head: nn.Module) -> list[Any]:
    """What runs around the head's own computation."""
    own = head.__dict__.get("forward")
    return [*([] if own is None else [own]), *head._forward_pre_hooks.values(), *head._forward_hooks.values()]


def has_plan(head: nn.Module) -> bool:
    """Whether a tensor parallel plan lies around ``head``.

    The weight itself does not tell: outside of a forward, that of a model under ``fully_shard`` is a DTensor, too.
    """
    return any(module_of(function).startswith(_PLANS) for function in _around(head))


def why_unfused(head: nn.Module) -> str | None:
    """Why a head with a plan computes its logits; None where it does not, or was not tried yet."""
    return _tried.get(head, ((), None))[1] if _part(head) is not None else _COMPUTES


def split_head(head: nn.Module, outer: nn.Module) -> SplitHead | str:
    """This rank's part of ``head``, which has a plan, or why it has to compute its logits.

    The first time on a head, all ranks try what the plan does; the host waits for them.
    """
    part = None if torch.compiler.is_compiling() or outer is not head else _part(head)
    if part is None:
        return _COMPUTES
    around = tuple([id(function) for function in _around(head)])
    before, why = _tried.get(head, (None, None))
    if before != around:
        why = _try(head, part)
        _tried[head] = around, why
    return why or part


def _part(head: nn.Module) -> SplitHead | None:
    whole: Any = head._parameters.get("weight")
    whole_bias: Any = head._parameters.get("bias")
    mesh = getattr(whole, "device_mesh", None)
    if mesh is None or mesh.ndim != 1 or not all(p is None or _by_rows(p, mesh) for p in (whole, whole_bias)):
        return None
    weight, bias = whole.to_local(), None if whole_bias is None else whole_bias.to_local()
    classes, ranks = len(whole), mesh.size()
    most = -(-classes // ranks)  # as torch.chunk, and so a DTensor, has it
    sizes = [max(0, min(most, classes - rank * most)) for rank in range(ranks)]
    if sizes[mesh.get_local_rank()] != len(weight):
        return None
    return SplitHead(weight, bias, VocabShard(mesh.get_group(), tuple(sizes)))


def _by_rows(parameter: Any, mesh: Any) -> bool:
    placements: Any = getattr(parameter, "placements", ())
    return parameter.device_mesh == mesh and len(placements) == 1 and placements[0].is_shard(0)


@torch.no_grad()
def _try(head: nn.Module, part: SplitHead) -> str | None:
    """Compare what ``head`` makes of a row of hidden states with the logits of all ranks' parts; all ranks together."""
    weight, bias, shard = part
    numbers = torch.randn(1, 1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    hidden = numbers.to(weight.device, weight.dtype)
    why: str | None = None
    try:
        with torch.autocast(hidden.device.type, enabled=False):
            found: Any = call_head(
                head, hidden
            ).clone()  # a collective's result that nobody has waited for becomes a tensor
            expected = logits_of_all(hidden, weight, bias, shard)
        if type(found) is not Tensor or found.shape != expected.shape:
            what = tuple(found.shape) if type(found) is Tensor else f"a {type(found).__name__}"
            why = f"{_COMPUTES} ({what} instead of {tuple(expected.shape)})"
        else:
            off = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
            why = None if bool(off <= 8 * torch.finfo(weight.dtype).eps) else f"{_COMPUTES}, which differ by {off:.1g}"
    except Exception as error:  # a layout that one row does not fit
        why = f"{_COMPUTES} ({describe(error)})"
    failed = torch.tensor(float(why is not None), device=weight.device)
    shard.add(failed)  # one rank's no is everybody's
    return why or (_COMPUTES if bool(failed) else None)


def narrowed(part: SplitHead, classes: int | None) -> SplitHead:
    """The part of the first ``classes``."""
    if classes is None:
        return part
    weight, bias, shard = part
    first = shard.first
    own = slice(0, max(0, classes - first))
    before = [sum(shard.sizes[:rank]) for rank in range(len(shard.sizes))]
    sizes = tuple([max(0, min(size, classes - start)) for size, start in zip(shard.sizes, before, strict=True)])
    return SplitHead(weight[own], None if bias is None else bias[own], VocabShard(shard.group, sizes))
