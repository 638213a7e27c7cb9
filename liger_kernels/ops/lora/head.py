"""How the fused losses handle a linear head with adapters, or with a weight that is no matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.lora_linear import checked_adapters, lora_linear_ref
from liger_kernels.ops.lora.low_rank import LowRank, low_rank
from liger_kernels.ops.loss.counted_rows import CountedRows
from liger_kernels.ops.loss.schedules.schedule import Needs, Packed, current_observer
from liger_kernels.ops.loss.vocab_parallel import VocabShard, logits_of_all
from liger_kernels.ops.runtime.dispatch import as_autocast


def as_matrix(weight: Tensor, dense: Callable[[Tensor], Tensor], hidden: Tensor) -> tuple[Tensor, Packed]:
    """The matrix that ``weight`` stands for, in the dtype of the product, and the packed weight that it was made of."""
    packed = Packed(weight, dense)
    return packed.matrix(as_autocast(hidden[:0], hidden.device).dtype), packed


def check_head_adapters(
    hidden: Tensor, weight: Tensor, adapters: Sequence[LoraAdapter], shard: VocabShard | None
) -> None:
    """Raise if ``adapters`` do not fit this head.

    Raises:
        TypeError, ValueError: they do not fit.
    """
    if shard is not None:
        raise ValueError(
            "adapters were given with group, which do not go together: compute the logits of all ranks and their "
            "cross_entropy"
        )
    for one in checked_adapters(hidden, adapters):
        if len(one.b) != len(weight):
            raise ValueError(
                f"one of adapters has b of shape {tuple(one.b.shape)}; with weight of shape {tuple(weight.shape)} it "
                f"must be [{len(weight)}, rank]"
            )


def with_adapters(
    hidden: Tensor, adapters: Sequence[LoraAdapter], taken: CountedRows, needs: Needs, invariant: bool = False
) -> tuple[Tensor, LowRank, Needs]:
    """The hidden states of the rows in ``taken``, the adapters' part of the logits, and the tensors that then need a
    gradient. The caller must go on with the returned hidden states."""
    hidden, low = low_rank(hidden, adapters, taken.take, invariant)
    grad = torch.is_grad_enabled()
    return hidden, low, needs._replace(z=grad and low.z.requires_grad, b=grad and low.b.requires_grad)


def has_float64(adapters: Sequence[LoraAdapter]) -> bool:
    """Whether a tensor of ``adapters`` is float64, which no kernel accepts."""
    tensors = [t for one in adapters for t in (one.a, one.b, one.bias, one.dropped)]
    return any(t is not None and t.dtype is torch.float64 for t in tensors)


def reference_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[LoraAdapter],
    shard: VocabShard | None,
    invariant: bool = False,
) -> Tensor:
    """All logits. An observer, if there is one, gets their gradient. With ``invariant``, the bits of the product of
    ``weight`` with a row do not depend on the other rows."""
    logits = logits_of_all(hidden, weight, bias, shard, invariant)
    if adapters:
        logits = lora_linear_ref(hidden, lambda _: logits, adapters)
    if current_observer() is not None and logits.requires_grad:
        logits.register_hook(_observe_all_rows)
    return logits


def _observe_all_rows(grad: Tensor) -> None:
    observer = current_observer()
    if observer is not None:
        observer(0, grad if grad.dtype == torch.float64 else grad.float())
