r"""The divergence of a student's head from a teacher's, per token over the whole vocabulary, from hidden states.

With z and u the student's and the teacher's logits, each scaled and capped as its own head says and divided by one
temperature, p = softmax(z) and q = softmax(u),

    beta      divergence                                        gradient of z
    0         KL(q || p) = sum_j q_j (log q_j - log p_j)        p - q
    1         KL(p || q) = sum_j p_j (log p_j - log q_j)        p (log p - log q - KL(p || q))
    between   (1 - beta) KL(p || m) + beta KL(q || m)           (1 - beta) p (log p - log m - KL(p || m))

with the mixture m = (1 - beta) p + beta q: the generalised Jensen-Shannon divergence (Agarwal et al.,
arXiv:2306.13649). A term whose p or q is 0 is 0. The teacher has no gradient.

It is a loss of the rows of a head, in the schedules of :func:`linear_cross_entropy`. With T tokens, V classes, hidden
sizes H and G of student and teacher and b bytes an element, they take

    schedule      operations                         memory beyond that of linear_cross_entropy
    "fast"        6 T H V + 2 T G V                  b T V, the teacher's logits
    "balanced"    the same, of "mean" and "sum"      b C V for chunks of C tokens
    "small"       8 T H V + 4 T G V                  b T S for slabs of S classes
      between     10 T H V + 6 T G V                 the same

With reduction "none", or with classes that are split over ranks, "balanced" lies between the others. A mixture needs
both normalisers before its terms. It reads the logits once more where those of all classes are at hand, and else
computes them once more.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops.divergence.rows import Teacher
from liger_kernels.ops.loss.counted_rows import CountedTargets
from liger_kernels.ops.loss.head import checked_head, counted_rows
from liger_kernels.ops.loss.linear_cross_entropy import Memory, run_schedule, uncompiled
from liger_kernels.ops.loss.mean import reduced_ref
from liger_kernels.ops.loss.options import OF_DIVERGENCE, Finite, LossOptions, Positive, Reduction, check_names
from liger_kernels.ops.loss.schedules.chosen import choose_schedule
from liger_kernels.ops.loss.schedules.schedule import NO_GRADIENTS, Call, Needs
from liger_kernels.ops.loss.vocab_parallel import VocabShard, classes_of, logits_of_all
from liger_kernels.ops.runtime.arguments import SHARE, checked, checked_op
from liger_kernels.ops.runtime.dispatch import as_autocast, use_triton

Beta = Annotated[float, SHARE]


class DivergenceOutput(NamedTuple):
    """What was asked for, ``None`` for what was not; 0 for masked rows. All are [tokens], float32.

    Attributes:
        divergence: with gradient; 0-d if it is reduced.
        entropy: of the student, -sum_c p_c log p_c, with gradient if the divergence is not reduced.
        max_abs_difference: max_c |log p_c - log q_c|.
    """

    divergence: Tensor | None = None
    entropy: Tensor | None = None
    max_abs_difference: Tensor | None = None


OUTPUTS = DivergenceOutput._fields


class _Heads(NamedTuple):
    """Both heads, checked."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher: Teacher
    targets: Tensor  # [tokens], 0 for rows that count
    denominator: Tensor | None
    options: LossOptions
    needs: Needs
    shard: VocabShard | None


def _checked_heads(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    bias: Tensor | None,
    mask: Tensor | None,
    outputs: tuple[str, ...],
    denominator: Tensor | None,
    group: Any,
    options: dict[str, Any],
) -> _Heads:
    check_names("outputs", outputs, OUTPUTS)
    if not outputs:
        raise ValueError(f"outputs is empty; it must have at least one name from {', '.join(map(repr, OUTPUTS))}")
    extras = tuple([name for name in ("entropy", OF_DIVERGENCE) if name in outputs])
    o = LossOptions.checked(options)._replace(extras=extras)
    targets = _targets_of(mask, hidden, o.ignore_index)
    given = hidden, weight, targets, bias, o
    hidden, weight, bias, needs, shard = checked_head(*given, denominator=denominator, group=group)
    teacher = _checked_teacher(teacher, hidden, weight)
    if o.reduction != "none" and "divergence" not in outputs:  # no result has a gradient
        needs = NO_GRADIENTS
    return _Heads(hidden, weight, bias, teacher, targets, denominator, o, needs, shard)


def _targets_of(mask: Tensor | None, hidden: Tensor, ignore_index: int) -> Tensor:
    """0 for rows that count, and ``ignore_index`` for the others."""
    if hidden.dim() != 2:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}; it must be [tokens, hidden size]: flatten the leading dimensions"
        )
    tokens = hidden.shape[:1]
    if mask is None:
        return torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}; it must be torch.bool, True for rows that count")
    if mask.shape != tokens:
        raise ValueError(f"mask has shape {list(mask.shape)}; for {tokens[0]} rows it must be [{tokens[0]}]")
    if mask.device != hidden.device:
        raise ValueError(f"mask is on {mask.device}, hidden on {hidden.device}; move the mask there")
    return torch.zeros_like(mask, dtype=torch.int64).masked_fill(~mask, ignore_index)


def _checked_teacher(teacher: Teacher, hidden: Tensor, weight: Tensor) -> Teacher:
    """Cast under autocast as the student is, and without a gradient."""
    given = {"teacher_hidden": teacher.hidden, "teacher_weight": teacher.weight, "teacher_bias": teacher.bias}
    for name, t in given.items():
        if t is not None and not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}; it must be floating point")
        if t is not None and t.device != hidden.device:
            raise ValueError(f"{name} is on {t.device}, hidden on {hidden.device}; move it there")
    of_hidden, of_weight = tuple(teacher.hidden.shape), tuple(teacher.weight.shape)
    if len(of_hidden) != 2 or len(of_weight) != 2 or of_hidden[1] != of_weight[1] or of_hidden[0] != len(hidden):
        raise ValueError(
            f"teacher_hidden has shape {of_hidden} and teacher_weight {of_weight}; for {len(hidden)} rows they must be "
            f"[{len(hidden)}, hidden size] and [vocab, hidden size]"
        )
    if of_weight[0] != len(weight):
        raise ValueError(
            f"weight has {len(weight)} classes and teacher_weight {of_weight[0]}; both heads must have one vocabulary: "
            "cut the rows that only one of them has"
        )
    if teacher.bias is not None and teacher.bias.shape != of_weight[:1]:
        raise ValueError(f"teacher_bias has shape {tuple(teacher.bias.shape)}; it must be [{of_weight[0]}]")
    cast: list[Any] = [None if t is None else as_autocast(t.detach(), hidden.device) for t in given.values()]
    dtypes = {str(t.dtype) for t in cast if t is not None}
    if len(dtypes) > 1:
        raise ValueError(
            f"teacher_hidden, teacher_weight and teacher_bias are {', '.join(sorted(dtypes))}; they must have one dtype"
        )
    softcap = None if teacher.softcap is None else float(teacher.softcap)
    of_hidden, of_weight, of_bias = cast
    return Teacher(of_hidden, of_weight, of_bias, float(teacher.beta), softcap, float(teacher.logit_scale))


def _scaled(logits: Tensor, o: LossOptions) -> Tensor:
    z = o.logit_scale * (logits if logits.dtype == torch.float64 else logits.float())
    if o.softcap is not None:
        z = o.softcap * torch.tanh(z / o.softcap)
    return z / o.temperature


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of rows."""
    p = log_p.exp()
    return (p * (log_p - log_q).where(p > 0, 0.0)).sum(-1)


def _reference(h: _Heads, outputs: tuple[str, ...]) -> DivergenceOutput:
    """:func:`linear_divergence_ref` of what has been checked."""
    teacher, counted = h.teacher, h.targets != h.options.ignore_index
    log_p = _scaled(logits_of_all(h.hidden, h.weight, h.bias, h.shard), h.options).log_softmax(-1)
    with torch.no_grad():
        of_teacher = logits_of_all(teacher.hidden, teacher.weight, teacher.bias, h.shard)
        log_q = _scaled(of_teacher, teacher.options(h.options.temperature)).log_softmax(-1)
    log_q = log_q.to(torch.promote_types(log_p.dtype, log_q.dtype))
    beta = teacher.beta
    if beta in (0.0, 1.0):
        divergence = _kl(log_q, log_p) if beta == 0.0 else _kl(log_p, log_q)
    else:
        shares = torch.tensor([1.0 - beta, beta], dtype=torch.float64).log().tolist()
        log_m = torch.logaddexp(log_p + shares[0], log_q + shares[1])
        divergence = (1.0 - beta) * _kl(log_p, log_m) + beta * _kl(log_q, log_m)
    p = log_p.exp()
    apart = (log_p - log_q).detach().abs()
    found = {
        "divergence": divergence,
        "entropy": -(p * log_p.where(p > 0, 0.0)).sum(-1),
        "max_abs_difference": apart.nan_to_num(nan=0.0, posinf=torch.inf).amax(-1),
    }
    found = {name: found[name].where(counted, 0.0) for name in OUTPUTS if name in outputs}
    o = h.options
    if "divergence" in found:
        classes = classes_of(h.weight, h.shard)
        given = found["divergence"], o.reduction, h.targets, None, None, h.denominator
        found["divergence"] = reduced_ref(*given, o.ignore_index, classes)
    if "entropy" in found and o.reduction != "none":
        found["entropy"] = found["entropy"].detach()
    return DivergenceOutput(**found)


@checked
def linear_divergence_ref(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    beta: Beta,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    temperature: Positive = 1.0,
    softcap: Positive | None = None,
    logit_scale: Finite = 1.0,
    teacher_softcap: Positive | None = None,
    teacher_logit_scale: Finite = 1.0,
    mask: Tensor | None = None,
    outputs: tuple[str, ...] = ("divergence",),
    reduction: Reduction = "none",
    denominator: Tensor | None = None,
    group: Any = None,
) -> DivergenceOutput:
    """What :func:`linear_divergence` computes, in plain torch, holding all logits of both heads."""
    teacher = Teacher(teacher_hidden, teacher_weight, teacher_bias, beta, teacher_softcap, teacher_logit_scale)
    options = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale, "reduction": reduction}
    h = _checked_heads(hidden, weight, teacher, bias, mask, outputs, denominator, group, options)
    return _reference(h, outputs)


@checked_op
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    beta: Beta,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    temperature: Positive = 1.0,
    softcap: Positive | None = None,
    logit_scale: Finite = 1.0,
    teacher_softcap: Positive | None = None,
    teacher_logit_scale: Finite = 1.0,
    mask: Tensor | None = None,
    outputs: tuple[str, ...] = ("divergence",),
    reduction: Reduction = "none",
    denominator: Tensor | None = None,
    summed: bool = False,
    memory: Memory | None = None,
    counted: CountedTargets | int | None = None,
    group: Any = None,
) -> DivergenceOutput:
    """The divergence of ``F.linear(hidden, weight, bias)`` from ``F.linear(teacher_hidden, teacher_weight,
    teacher_bias)``, per token; the formulas stand at the top of this file.

    Under autocast, both heads are cast as ``F.linear`` casts them. Gradients are summed in float32 and rounded once.
    They are not differentiable themselves, and the teacher's tensors have none.

    Args:
        hidden: [tokens, hidden size], float16, bfloat16, float32, or float64 (which runs the reference).
        weight: [vocab, hidden size], of the same dtype.
        teacher_hidden: [tokens, the teacher's hidden size], of any of these dtypes.
        teacher_weight: [vocab, the teacher's hidden size], of the dtype of teacher_hidden.
        beta: between 0 and 1: 0 is KL(teacher || student), 1 is KL(student || teacher).
        bias, teacher_bias: [vocab], of the dtype of their head, or None.
        temperature: divides the logits of both heads, after the cap.
        softcap, logit_scale: of the student's head, as in :class:`LossOptions`.
        teacher_softcap, teacher_logit_scale: of the teacher's.
        mask: [tokens], bool: the rows that count. The others' results are 0, and they have no gradient. None: all.
        outputs: the fields of :class:`DivergenceOutput` to compute.
        reduction: "none", "mean" over the rows that count, or "sum". With the last two, "balanced" computes the
            gradients of each chunk of rows in the forward, while it has their logits.
        denominator: 0-d, of any float dtype: what a mean divides the sum by, instead of the number of rows that count.
        summed: whether ``out.divergence.sum()`` is what the caller differentiates. With reduction "none", the schedule
            is then chosen as for "sum", and "balanced" computes the gradients in the forward, but not with counted rows
            or a group. Any other upstream gradient, such as that of ``.mean()``, is right, too, and takes longer.
        memory: as for :func:`linear_cross_entropy`; its chunks are smaller.
        counted: at most how many rows count: an int, or :class:`CountedTargets` of labels with the ignore_index -100
            that ``mask`` was made of. If they are at most 15/16 of the rows, only they are multiplied.
        group: the process group over whose ranks the classes of both heads are split in the same way, as for
            :func:`linear_cross_entropy`.

    Returns:
        A :class:`DivergenceOutput`; in float64 for float64 inputs.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, shape, device or range.
    """
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    options["reduction"] = reduction
    if group is not None and torch.compiler.is_compiling():
        of_teacher = {"teacher_softcap": teacher_softcap, "teacher_logit_scale": teacher_logit_scale}
        how: dict[str, Any] = {"mask": mask, "outputs": outputs, "memory": memory, "counted": counted, "group": group}
        how |= {"denominator": denominator, "summed": summed}
        heads = hidden, weight, teacher_hidden, teacher_weight, beta, bias, teacher_bias
        return uncompiled(linear_divergence, *heads, **options, **of_teacher, **how)
    given = Teacher(teacher_hidden, teacher_weight, teacher_bias, beta, teacher_softcap, teacher_logit_scale)
    h = _checked_heads(hidden, weight, given, bias, mask, outputs, denominator, group, options)
    o, teacher = h.options, h.teacher
    taken = counted_rows(counted, h.hidden, classes_of(h.weight, h.shard), h.targets, o.ignore_index)
    rows = taken.take(h.hidden)
    head = rows, h.weight.shape[0], o, h.needs, None, memory, h.shard
    summed = summed and "divergence" in outputs and taken.rows is None
    _, schedule = choose_schedule(*head, heads=2, summed=summed)
    if not (use_triton(h.hidden, opaque=True) and use_triton(teacher.hidden, opaque=True)):
        return _reference(h, outputs)
    teacher = teacher._replace(hidden=taken.take(teacher.hidden))
    tensors = rows, h.weight, h.bias, taken.targets, None, None, h.denominator
    call = Call(*tensors, o, h.needs, taken, h.shard, teacher=teacher)
    per_row = reduction == "none"
    divergence, found = run_schedule(schedule, call, entropy=per_row and "entropy" in outputs)
    found = {name: taken.spread(extra) for name, extra in found.items()}
    if "divergence" in outputs:
        found["divergence"] = taken.spread(divergence) if per_row else divergence
    return DivergenceOutput(**found)
