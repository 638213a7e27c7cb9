"""A linear head, as the losses of hidden states take it: its arguments, checked, and the rows that they multiply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._row_blocks import as_canonical
from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.head import as_matrix, check_head_adapters, has_float64, reference_logits, with_adapters
from liger_kernels.ops.lora.low_rank import LowRank
from liger_kernels.ops.lora.projection import as_it_is
from liger_kernels.ops.loss.counted_rows import CountedRows, CountedTargets, checked_count, rows_to_take
from liger_kernels.ops.loss.cross_entropy import check_targets, check_weights
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.schedules.chosen import unsharded_because
from liger_kernels.ops.loss.schedules.schedule import Needs, Packed
from liger_kernels.ops.loss.vocab_parallel import VocabShard, classes_of
from liger_kernels.ops.runtime.dispatch import as_autocast, use_triton


def checked_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor, Tensor | None, Needs, VocabShard | None]:
    """Check the arguments of a head.

    Returns:
        hidden, weight and bias, cast under autocast as ``F.linear`` casts them; which of them need a gradient; and this
        rank's classes.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, shape, dtype or device.
    """
    for name, t in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if t is not None and not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}; it must be floating point")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they must be "
            "[tokens, hidden size] and [vocab, hidden size]: flatten hidden's leading dimensions"
        )
    tokens, vocab = hidden.shape[0], weight.shape[0]
    shard = VocabShard.of(group, weight)
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [{vocab}], one number per row of weight")
    check_targets(targets, class_weight, options.ignore_index, tokens, classes_of(weight, shard), hidden.device)
    check_weights(row_weight, denominator, tokens, hidden.device)
    hidden, weight, bias = (as_autocast(t, hidden.device) for t in (hidden, weight, bias))
    parameters = [weight] if bias is None else [weight, bias]
    if any(p.dtype != hidden.dtype or p.device != hidden.device for p in parameters):
        given = ", ".join(f"{t.dtype} on {t.device}" for t in (hidden, *parameters))
        raise ValueError(f"hidden, weight and bias are {given}; they must have one dtype and device: cast or move them")
    if shard is not None:
        _check_sharded(options, hidden.dtype)
    grad = torch.is_grad_enabled()
    needs = Needs(
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    return hidden, weight, bias, needs, shard


def _check_sharded(options: LossOptions, dtype: torch.dtype) -> None:
    reason = unsharded_because(dtype, options.label_smoothing)
    if reason is not None:
        raise ValueError(
            f"group was given with {reason}, which does not go with it: use bfloat16 or float32 without label "
            "smoothing, or compute the logits of all ranks and their cross_entropy"
        )


# These extras are zero for an ignored row, or have no rows. The others describe every row.
_OF_COUNTED_ROWS = ("token_accuracy", "log_probs", "is_top1")


def counted_rows(
    counted: CountedTargets | int | None,
    hidden: Tensor,
    classes: int,
    targets: Tensor,
    ignore_index: int,
    extras: tuple[str, ...] = (),
) -> CountedRows:
    """The rows to multiply: all of them if one of ``extras`` describes every row, otherwise those that count.

    Raises:
        TypeError, ValueError: as :func:`checked_count`.
    """
    at_most = checked_count(counted, targets, ignore_index)
    targets = targets.contiguous()
    plain = type(hidden) in (Tensor, torch.nn.Parameter)
    if at_most is None or not plain or not use_triton(hidden) or any(name not in _OF_COUNTED_ROWS for name in extras):
        return CountedRows(targets)
    taken = rows_to_take(len(targets), at_most)
    return CountedRows.first(targets, ignore_index, classes, taken) if taken < len(targets) else CountedRows(targets)


class Head(NamedTuple):
    """A head whose arguments have been checked, and cast under autocast as ``F.linear`` casts them.

    Attributes:
        hidden, weight, bias: of all tokens, and of this rank's classes.
        needs: which of the three need a gradient.
        shard: which classes this rank has; None: all of them.
        adapters: those of the head.
        packed: what ``weight`` was made of; None: it came as a matrix.
        runs: whether kernels compute it, else the reference.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    needs: Needs
    shard: VocabShard | None
    adapters: Sequence[LoraAdapter]
    packed: Packed | None
    runs: bool

    def logits(self, invariant: bool = False) -> Tensor:
        """All logits, as the reference computes them."""
        return reference_logits(self.hidden, self.weight, self.bias, self.adapters, self.shard, invariant)

    def rows(
        self,
        counted: CountedTargets | int | None,
        targets: Tensor,
        ignore_index: int,
        extras: tuple[str, ...],
        invariant: bool,
    ) -> tuple[Tensor, CountedRows, LowRank | None, Needs]:
        """The hidden states to multiply, which rows they are, what the adapters add, and what needs a gradient."""
        classes = classes_of(self.weight, self.shard)
        taken = counted_rows(counted, self.hidden, classes, targets, ignore_index, extras)
        rows = as_canonical(taken.take(self.hidden)) if invariant else taken.take(self.hidden)
        if not self.adapters or not self.runs:
            return rows, taken, None, self.needs
        rows, low, needs = with_adapters(rows, self.adapters, taken, self.needs, invariant)
        return rows, taken, low, needs


def head_of(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    *,
    adapters: Sequence[LoraAdapter],
    dense: Callable[[Tensor], Tensor],
    group: Any,
) -> Head:
    """The head of these arguments.

    Raises:
        TypeError, ValueError: as :func:`checked_head`, and for adapters that do not fit.
    """
    packed = None
    if dense is not as_it_is:
        weight, packed = as_matrix(weight, dense, hidden)
    weights = class_weight, row_weight, denominator
    hidden, weight, bias, needs, shard = checked_head(hidden, weight, targets, bias, options, *weights, group)
    if adapters:
        check_head_adapters(hidden, weight, adapters, shard)
    runs = use_triton(hidden, opaque=True) and not (adapters and has_float64(adapters))
    return Head(hidden, weight, bias, needs, shard, adapters, packed, runs)
