r"""Log-probabilities and entropy of a linear head, from hidden states, without holding the logits several times.

    a = logit_scale * (hidden @ weight^T + bias)        c = softcap * tanh(a / softcap), or a without a softcap
    z = c / temperature,    L = logsumexp_j z_j,    p = exp(z - L)
    log_prob = z_y - L,     entropy = L - sum_j p_j z_j

With upstream gradients g of log_prob and k of entropy,

    dz_j = g ([j = y] - p_j) - k p_j (log p_j + entropy)

It is :func:`linear_cross_entropy` with reduction "none" (log_prob is minus its loss) in whose backward the entropy has
a gradient, too: the same schedules and the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.projection import as_it_is
from liger_kernels.ops.loss.counted_rows import CountedTargets
from liger_kernels.ops.loss.head import Head, head_of
from liger_kernels.ops.loss.linear_cross_entropy import Memory, run_schedule, uncompiled
from liger_kernels.ops.loss.options import LossOptions, check_names, check_options, takes_options
from liger_kernels.ops.loss.schedules.chosen import choose_schedule
from liger_kernels.ops.loss.schedules.schedule import Call
from liger_kernels.ops.loss.vocab_parallel import classes_of
from liger_kernels.ops.runtime.arguments import checked, checked_op


class LogProbsOutput(NamedTuple):
    """What was asked for, ``None`` for what was not; 0 or False for ignored rows. All but the last are [tokens].

    Attributes:
        log_probs: float32, log p of the target, with gradient.
        entropy: float32, -sum_c p_c log p_c, with gradient.
        is_top1: bool, whether the target has the largest logit and no class before it has, too.
        log_sum_sq_probs: float32, log sum_c p_c^2.
        mean_logits, max_logits: float32, of z.
        id_log_probs: float32 [tokens, K], log p of the classes ``ids``, with gradient; 0 for -1.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    max_logits: Tensor | None = None
    id_log_probs: Tensor | None = None


OUTPUTS = LogProbsOutput._fields[:-1]  # id_log_probs come with ids
MOST_IDS = 256


# The options of other losses that are options here.
_OPTIONS = ("ignore_index", "softcap", "logit_scale", "temperature")


def _checked(options: dict[str, Any], outputs: tuple[str, ...], ids: Tensor | None) -> LossOptions:
    check_options(options, _OPTIONS)
    check_names("outputs", outputs, OUTPUTS)
    if not outputs and ids is None:
        raise ValueError(
            f"outputs is empty; it must have at least one name from {', '.join(map(repr, OUTPUTS))} where no ids are "
            "given"
        )
    extras = tuple([name for name in OUTPUTS[1:] if name in outputs])
    return LossOptions.checked({**options, "reduction": "none", "extras": extras})


def _check_ids(ids: Tensor | None, head: Head) -> None:
    if ids is None:
        return
    tokens, classes, device = len(head.hidden), classes_of(head.weight, head.shard), head.hidden.device
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids are {ids.dtype}; they must be int64 or int32 class indices")
    if ids.dim() != 2 or ids.shape[0] != tokens or not 1 <= ids.shape[1] <= MOST_IDS:
        raise ValueError(
            f"ids have shape {tuple(ids.shape)}; for {tokens} rows they must be [{tokens}, K], K from 1 to {MOST_IDS}"
        )
    if ids.device != device:
        raise ValueError(f"ids are on {ids.device}, the rows on {device}; move the ids there")
    if device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere looking would stall the device
        wrong = ids[(ids < -1) | (ids >= classes)]
        if len(wrong):
            raise ValueError(f"ids have {int(wrong[0])}; there are {classes} classes, and -1 is no class")


@takes_options(*_OPTIONS)
@checked
def linear_log_probs_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    ids: Tensor | None = None,
    adapters: Sequence[LoraAdapter] = (),
    dense: Callable[[Tensor], Tensor] = as_it_is,
    group: Any = None,
    **options: Any,
) -> LogProbsOutput:
    """What :func:`linear_log_probs` computes, in plain torch, holding all logits in the input's dtype."""
    o = _checked(options, outputs, ids)
    head = head_of(hidden, weight, targets, bias, o, adapters=adapters, dense=dense, group=group)
    _check_ids(ids, head)
    return _reference(head.logits(), targets, o, outputs, ids)


def _reference(
    z: Tensor, targets: Tensor, o: LossOptions, outputs: tuple[str, ...], ids: Tensor | None
) -> LogProbsOutput:
    """:func:`linear_log_probs_ref` of the logits ``z``."""
    z = o.logit_scale * (z if z.dtype == torch.float64 else z.float())
    if o.softcap is not None:
        z = o.softcap * torch.tanh(z / o.softcap)
    z = z / o.temperature
    counted = targets != o.ignore_index
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    safe = targets.long().where(counted, 0)
    with torch.no_grad():
        found = {
            "is_top1": z.argmax(-1) == safe,
            "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
            "mean_logits": z.mean(-1),
            "max_logits": z.amax(-1),
        }
    found["log_probs"] = log_p.gather(1, safe[:, None])[:, 0]
    found["entropy"] = -(p * log_p.where(p > 0, 0.0)).sum(-1)
    results = {name: found[name].where(counted, False) for name in OUTPUTS if name in outputs}
    if ids is not None:
        of_ids = log_p.gather(1, ids.long().clamp(min=0))
        results["id_log_probs"] = of_ids.where((ids >= 0) & counted[:, None], 0.0)
    return LogProbsOutput(**results)


@takes_options(*_OPTIONS)
@checked_op
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    ids: Tensor | None = None,
    memory: Memory | None = None,
    counted: CountedTargets | int | None = None,
    adapters: Sequence[LoraAdapter] = (),
    dense: Callable[[Tensor], Tensor] = as_it_is,
    group: Any = None,
    invariant: bool = False,
    **options: Any,
) -> LogProbsOutput:
    """The log-probability of each target, and what else is asked for, of ``F.linear(hidden, weight, bias)``.

    Under autocast, hidden, weight and bias are cast as ``F.linear`` casts them. Gradients are summed in float32 and
    rounded once. They are not differentiable themselves.

    Args:
        hidden: [tokens, hidden size], float16, bfloat16, float32, or float64 (which runs the reference).
        weight: [vocab, hidden size], of the same dtype.
        targets: [tokens], int64 or int32.
        bias: [vocab], of the same dtype, or None.
        outputs: the fields of :class:`LogProbsOutput` to compute; it may be empty with ``ids``.
        ids: [tokens, K], int64 or int32, K from 1 to 256: the classes of each row whose log-probabilities are wanted,
            in addition to ``outputs``. -1 is no class: log-probability 0, and no gradient. Equal ids of a row count
            each.
        memory, counted, adapters, dense, group: as for :func:`linear_cross_entropy`.
        invariant: the bits of a row's results and of the gradient of its hidden states depend on this row alone, not on
            how many rows there are, nor on where it stands, nor on whether gradients are computed. Products go in
            blocks of 1024 rows, the last one padded: "fast" keeps all logits, "balanced" those of one chunk, with the
            same bits, and "small" runs wherever a ``group`` is given. In float16 the gradient is in units of the
            batch's largest one, and is not invariant.
        options: ``temperature``, ``softcap``, ``logit_scale`` and ``ignore_index``, as in :class:`LossOptions`. Ignored
            rows have log-probability and entropy 0, and no gradient.

    Returns:
        A :class:`LogProbsOutput`; in float64 for float64 inputs.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, shape, device or range; for targets out of range as
            :func:`cross_entropy` does. An id out of range raises on a CPU; on a GPU its log-probability and the
            gradient of its row are NaN.
    """
    if (group is not None or adapters or dense is not as_it_is) and torch.compiler.is_compiling():
        how: dict[str, Any] = {"outputs": outputs, "memory": memory, "counted": counted, "group": group}
        how |= {"adapters": adapters, "dense": dense, "ids": ids, "invariant": invariant}
        return uncompiled(linear_log_probs, hidden, weight, targets, bias, **how, **options)
    o = _checked(options, outputs, ids)
    head = head_of(hidden, weight, targets, bias, o, adapters=adapters, dense=dense, group=group)
    _check_ids(ids, head)
    rows, taken, low, needs = head.rows(counted, targets, o.ignore_index, (), invariant)
    _, schedule = choose_schedule(rows, head.weight.shape[0], o, needs, None, memory, head.shard, invariant=invariant)
    if not head.runs:
        return _reference(head.logits(invariant), targets, o, outputs, ids)
    ids = None if ids is None else taken.take(ids.contiguous())
    tensors = rows, head.weight, head.bias, taken.targets, None, None, None
    call = Call(*tensors, o, needs, taken, head.shard, low, head.packed, ids)
    loss, found = run_schedule(schedule, call, entropy="entropy" in outputs)
    if "is_top1" in outputs:
        found["is_top1"] = found["predicted_tokens"] == taken.targets
    counts = taken.targets != o.ignore_index
    of_ids = {} if ids is None else {"id_log_probs": taken.spread(found["id_log_probs"])}
    found = {name: taken.spread(found[name].where(counts, False)) for name in o.extras} | of_ids
    if "log_probs" in outputs:
        found["log_probs"] = taken.spread(0.0 - loss)  # 0, not -0, for ignored rows
    return LogProbsOutput(**found)
