"""A head whose classes are split over the ranks of a process group (tensor parallelism): what the ranks exchange.

Every rank has all hidden states and targets, and the weight's rows of its own classes. It sums each row of logits over
its own classes. One all-gather, of at most seven numbers a row, then gives every rank the sums of all ranks. All ranks
add them in the same order, and so get the same bits. The gradient of the weight stays on its rank. The gradient of the
hidden states is summed over the ranks in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from liger_kernels.ops._row_blocks import invariant_linear, rows_of_block
from liger_kernels.ops.loss.rows import Carried

# By weight: its shape, the group, and the VocabShard. The shape alone is no key: when a vocabulary grows, the shapes of
# some ranks stay the same.
_known = WeakTensorKeyDictionary()


class VocabShard(NamedTuple):
    """This rank's part of the classes. Ops accept it as their ``group``, and need not exchange the sizes again.

    Attributes:
        group: the ranks that together have all classes, in the order of the ranks.
        sizes: the number of classes of each rank.
    """

    group: Any
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, group: Any, weight: Tensor) -> VocabShard | None:
        """The part that ``weight`` [classes of this rank, hidden size] has. None without a group, or for one rank.

        In the first call with a weight the ranks exchange their shapes, and the host waits.

        Raises:
            TypeError, ValueError: ``group`` is not a process group, this process is not in it, or the ranks' weights
                differ in hidden size or dtype.
        """
        if group is None or isinstance(group, VocabShard):
            return group
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is a {type(group).__name__}; it must be a torch.distributed.ProcessGroup, or None for a weight "
                "that has all classes"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of group; call it on the ranks that hold the classes")
        if dist.get_world_size(group) == 1:
            return None
        mine = (*weight.shape, weight.dtype.itemsize, int(weight.dtype == torch.bfloat16))
        shape, of, shard = _known.get(weight, (None, None, None))
        if shape == mine and of is group:
            return shard
        every = _gathered(torch.tensor(mine, dtype=torch.int64, device=weight.device), group).tolist()
        if any(theirs[1:] != every[0][1:] for theirs in every):
            shapes = ", ".join(f"[{rows}, {columns}]" for rows, columns, *_ in every)
            raise ValueError(
                f"the ranks of group have weights {shapes}; they must be [classes of the rank, hidden size] of one "
                "hidden size and dtype"
            )
        shard = cls(group, tuple([rows for rows, *_ in every]))
        _known[weight] = mine, group, shard
        return shard

    @property
    def first(self) -> int:
        """The class of this rank's first row of the weight."""
        return sum(self.sizes[: dist.get_rank(self.group)])

    @property
    def classes(self) -> int:
        """The number of classes of all ranks."""
        return sum(self.sizes)

    def merge(self, carry: Tensor, predicted: Tensor | None) -> None:
        """Merge ``carry`` (of a :class:`Slab`) and ``predicted``, int64 [tokens], over all ranks' classes, in place."""
        known = carry if predicted is None else torch.cat([carry, predicted.to(torch.int32).view(torch.float32)[None]])
        target, highest, others, distance, squares, total, *classes = _gathered(known, self.group).unbind(1)
        maximum = highest.amax(0)
        some = highest > float("-inf")
        below = (highest - maximum).where(some, 0.0)
        decay = below.exp().where(some, 0.0)
        carry[Carried.TARGET] = target.sum(0)  # zero except on the rank that has the target
        carry[Carried.MAXIMUM] = maximum
        carry[Carried.OTHERS] = (others * decay).sum(0)
        carry[Carried.DISTANCE] = (distance * decay + below * (others * decay)).sum(0)
        carry[Carried.SQUARES] = (squares * decay.square()).sum(0)
        carry[Carried.TOTAL] = total.sum(0)
        if predicted is not None:
            none = self.classes
            first = classes[0].contiguous().view(torch.int32).where(highest == maximum, none).amin(0)
            predicted.copy_(first.masked_fill(first == none, 0))

    def add(self, *parts: Tensor, invariant: bool = False) -> None:
        """The sum over the ranks, in place. ``invariant``: in the order of the ranks, block by block of rows; an
        all-reduce adds in an order that depends on where a number lies among how many."""
        for part in parts:
            if part.numel() and invariant:
                for block in part.split(rows_of_block()):
                    block.copy_(functools.reduce(torch.add, self.gathered(block).unbind()))
            elif part.numel():
                dist.all_reduce(part, group=self.group)

    def gathered(self, x: Tensor) -> Tensor:
        """Each rank's ``x``, [ranks, ...]."""
        return _gathered(x, self.group)

    def gather(self, columns: Tensor) -> Tensor:
        """[tokens, all classes], from this rank's ``columns``."""
        padded = columns.new_zeros((len(columns), max(self.sizes)))
        padded[:, : columns.shape[1]] = columns
        every = zip(_gathered(padded, self.group), self.sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in every], 1)


def classes_of(weight: Tensor, shard: VocabShard | None) -> int:
    """The number of classes of all ranks."""
    return weight.shape[0] if shard is None else shard.classes


def _gathered(x: Tensor, group: Any) -> Tensor:
    """Each rank's ``x``, [ranks, ...]."""
    every = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(every.unbind()), x.contiguous(), group=group)
    return every


class _Replicated(torch.autograd.Function):
    """``hidden`` unchanged. Every rank multiplies it by its own classes, so its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: VocabShard, invariant: bool) -> Tensor:
        ctx.shard, ctx.invariant = shard, invariant
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        summed = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous()
        ctx.shard.add(summed.flatten(0, -2), invariant=ctx.invariant)
        return summed.to(grad.dtype), None, None


class _Gathered(torch.autograd.Function):
    """The logits of all classes, [tokens, all classes], from this rank's. The gradient is this rank's columns, because
    every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard) -> Tensor:
        ctx.mine = slice(shard.first, shard.first + logits.shape[1])
        return shard.gather(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.mine], None


def logits_of_all(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabShard | None, invariant: bool = False
) -> Tensor:
    """``F.linear(hidden, weight, bias)`` with the weights of all ranks, [..., all classes], on every rank.
    ``invariant``: the bits of a row do not depend on the other rows."""
    linear = invariant_linear if invariant else torch.nn.functional.linear
    if shard is None:
        return linear(hidden, weight, bias)
    logits = linear(_Replicated.apply(hidden, shard, invariant), weight, bias)
    whole = _Gathered.apply(logits.flatten(0, -2), shard)
    return whole.unflatten(0, hidden.shape[:-1])
