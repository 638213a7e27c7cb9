r"""Cross entropy over logits, with every option of the loss, in one read of the logits and one write of their gradient.

With raw logits x[row, c], z = softcap * tanh(logit_scale * x / softcap) / temperature (without a cap
z = logit_scale * x / temperature), lse = log(sum_c exp(z_c)), log p_c = z_c - lse, class weights w, V classes and
smoothing eps, a row with target y costs

    loss = (1 - eps) * w_y * (-log p_y) + eps / V * sum_c w_c * (-log p_c) + z_loss * lse^2
    dloss/dx_c = ((1 - eps) * w_y * (p_c - [c = y]) + eps / V * (W * p_c - w_c) + 2 * z_loss * lse * p_c) * dz_c/dx_c

with W = sum_c w_c. A row weight multiplies the row's loss, all of it. "mean" divides by ``denominator``, or else by the
sum of row weight times w_y over the rows that are not ignored, as ``torch.nn.functional.cross_entropy`` does, whose
label smoothing and class weights these are; the soft cap is Gemma 2's (arXiv:2408.00118), the z-loss PaLM's
(arXiv:2204.02311).

The kernels are in ``rows.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from liger_kernels.ops.loss.mean import mean, mean_denominator, reduced_ref
from liger_kernels.ops.loss.options import EXTRAS, LossOptions, takes_options
from liger_kernels.ops.loss.rows import Rows, backward_rows, forward_rows
from liger_kernels.ops.runtime.arguments import checked, checked_op
from liger_kernels.ops.runtime.dispatch import backward_once, use_triton

__all__ = ["EXTRAS", "CrossEntropyOutput", "cross_entropy", "cross_entropy_ref"]


class CrossEntropyOutput(NamedTuple):
    """The loss and what was asked for with it; ``None`` for what was not. Only the loss is differentiable.

    Attributes:
        loss: float32, 0-d, or [tokens] for reduction "none".
        token_accuracy: float32, 0-d: the share of the rows not ignored whose largest logit is the target's; 0 if
            every row is ignored.
        predicted_tokens: int64 [tokens]: the class of the largest logit, the first one of equals.
        entropy: float32 [tokens]: -sum_c p_c log p_c, for ignored rows too.
        log_probs: float32 [tokens]: log p of the target; 0 for ignored rows.
        is_top1: bool [tokens]: whether the target has the largest logit and no class before it has, too; False for
            ignored rows.
        log_sum_sq_probs: float32 [tokens]: log sum_c p_c^2, for ignored rows too.
        mean_logits, max_logits: float32 [tokens]: of z, for ignored rows too.
    """

    loss: torch.Tensor
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None


@takes_options()
@checked
def cross_entropy_ref(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    denominator: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """What :func:`cross_entropy` computes, in plain torch: in float64 for float64 logits, else in float32."""
    o = LossOptions.checked(options)
    _check(logits, targets, class_weight, row_weight, denominator, o)
    return reference(logits, targets, class_weight, row_weight, denominator, o)


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    o: LossOptions,
) -> torch.Tensor | CrossEntropyOutput:
    """:func:`cross_entropy_ref` of what has been checked."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    z = z * o.logit_scale
    if o.softcap is not None:
        z = o.softcap * torch.tanh(z / o.softcap)
    z = z / o.temperature
    targets = targets.long()
    weights = None if class_weight is None else class_weight.to(z.dtype)
    rows = F.cross_entropy(
        z, targets, weights, ignore_index=o.ignore_index, label_smoothing=o.label_smoothing, reduction="none"
    )
    counted = targets != o.ignore_index
    if o.z_loss:
        rows = rows + torch.where(counted, o.z_loss * torch.logsumexp(z, dim=-1).square(), 0.0)
    if row_weight is not None:
        rows = torch.where(counted, rows * row_weight.to(z.dtype), 0.0)
    # F.cross_entropy of zero rows is cut off from its input: this keeps the graph connected.
    rows = rows + z[:, 0] * 0.0 if not len(rows) else rows
    of_rows = weights, row_weight, denominator
    loss = reduced_ref(rows, o.reduction, targets, *of_rows, o.ignore_index, z.shape[1])
    if not o.extras:
        return loss
    with torch.no_grad():
        log_p = torch.log_softmax(z, dim=-1)
        extras = {
            "log_probs": log_p.gather(1, targets.where(counted, 0)[:, None])[:, 0].where(counted, 0.0),
            "entropy": torch.special.entr(log_p.exp()).sum(dim=-1),
            "predicted_tokens": z.argmax(dim=-1),
            "log_sum_sq_probs": torch.logsumexp(2 * log_p, dim=-1),
            "mean_logits": z.mean(dim=-1),
            "max_logits": z.amax(dim=-1),
        }
    return with_extras(loss, o, targets, extras)


def _empty_grad(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


_N_ARGUMENTS = 5 + len(LossOptions._fields)  # of CrossEntropyFunction


class CrossEntropyFunction(torch.autograd.Function):
    """Saves the caller's logits and three float32 numbers per row; the gradient is a new tensor.

    For a mean the forward writes the gradient, too, as if the upstream gradient were 1, while each row is still in the
    cache: one read and one write of memory in all. The backward's launch looks at the upstream gradient on the device,
    and computes anew only what another one asks for. A sum is usually divided by the caller, so its forward does not
    guess.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        row_weight: torch.Tensor | None,
        denominator: torch.Tensor | None,
        *flat_options: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        options = LossOptions(*flat_options)
        if logits.stride(1) != 1:
            logits = logits.contiguous()  # the kernels step through a row one element at a time
        tokens, vocab = logits.shape
        rows = Rows.empty(tokens, logits.device, options, stats=ctx.needs_input_grad[0])
        grad = None
        if options.reduction == "mean":
            denominator = mean_denominator(targets, class_weight, row_weight, denominator, options.ignore_index, vocab)
            # What is compiled can be differentiated again and again, and has no place to remember that it was.
            if ctx.needs_input_grad[0] and not torch.compiler.is_compiling():
                grad = _empty_grad(logits)
        else:
            denominator = None
        forward_rows(logits, targets, class_weight, row_weight, options, rows, grad, denominator)
        if denominator is not None:
            loss = mean(rows.loss, denominator)
        else:
            loss = rows.loss if options.reduction == "none" else rows.loss.sum()
        ctx.save_for_backward(logits, targets, class_weight, row_weight, rows.stats, denominator)
        ctx.options, ctx.grad = options, grad
        ctx.set_materialize_grads(False)
        # Tensors only: Dynamo takes every result for one whose gradient it can make contiguous.
        extra_outputs = list(rows.extras.values())
        ctx.mark_non_differentiable(*extra_outputs)
        return loss, *extra_outputs

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * _N_ARGUMENTS
        logits, targets, class_weight, row_weight, stats, denominator = ctx.saved_tensors
        grad, ctx.grad = ctx.grad, None  # whoever gets it may write over it; a second backward pass makes its own
        skip_if_one = None if grad is None else grad_loss
        grad = _empty_grad(logits) if grad is None else grad
        backward_rows(
            logits,
            targets,
            class_weight,
            ctx.options,
            stats,
            grad_loss,
            grad,
            denominator=denominator,
            row_weight=row_weight,
            skip_if_one=skip_if_one,
        )
        return grad, *(None,) * (_N_ARGUMENTS - 1)


def check_targets(
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    tokens: int,
    vocab: int,
    device: torch.device,
) -> None:
    """Raise for targets or class weights that do not fit [tokens, vocab] logits on ``device``."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets are {targets.dtype}; they must be int64 or int32 class indices")
    if targets.shape != (tokens,):
        raise ValueError(f"targets have shape {tuple(targets.shape)}; for {tokens} rows they must be [{tokens}]")
    if targets.device != device:
        raise ValueError(f"targets are on {targets.device}, the rows on {device}; move the targets there")
    if class_weight is not None:
        if class_weight.shape != (vocab,) or not class_weight.is_floating_point():
            raise ValueError(
                f"class_weight is {class_weight.dtype} of shape {tuple(class_weight.shape)}; "
                f"it must be floating point of shape [{vocab}], one weight per class"
            )
        if class_weight.device != device:
            raise ValueError(f"class_weight is on {class_weight.device}, the rows on {device}; move it there")
        if class_weight.requires_grad:
            raise ValueError(
                "class_weight requires a gradient, which the loss does not have; pass class_weight.detach()"
            )
    if device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere looking would stall the device
        wrong = targets[((targets < 0) | (targets >= vocab)) & (targets != ignore_index)]
        if len(wrong):
            raise ValueError(
                f"target {int(wrong[0])} is out of range: there are {vocab} classes, and ignore_index is {ignore_index}"
            )


def check_weights(
    row_weight: torch.Tensor | None, denominator: torch.Tensor | None, tokens: int, device: torch.device
) -> None:
    """Raise for row weights or a denominator that do not fit [tokens] rows on ``device``."""
    for name, value, shape, what in (
        ("row_weight", row_weight, (tokens,), "one weight per row"),
        ("denominator", denominator, (), "what a mean divides by"),
    ):
        if value is None:
            continue
        if not value.is_floating_point():
            raise TypeError(f"{name} is {value.dtype}; it must be floating point of shape {list(shape)}: {what}")
        if value.shape != shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; it must be {list(shape)}: {what}")
        if value.device != device:
            raise ValueError(f"{name} is on {value.device}, the rows on {device}; move it there")
        if value.requires_grad:
            raise ValueError(f"{name} requires a gradient, which the loss does not have; pass {name}.detach()")
    if denominator is not None and device.type == "cpu" and not torch.compiler.is_compiling():  # as for targets
        number = float(denominator)
        if not number >= 0.0:
            raise ValueError(f"denominator is {number}; it must be 0 or positive: what a mean divides by")


def as_kernel_weight(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Class or row weights as the kernels read them: float32, contiguous."""
    return None if weight is None else weight.to(torch.float32).contiguous()


def with_extras(
    loss: torch.Tensor, options: LossOptions, targets: torch.Tensor, written: dict[str, torch.Tensor]
) -> torch.Tensor | CrossEntropyOutput:
    """What the public functions return: the loss alone, or with what was asked for.

    Args:
        written: at least ``options.written()``.
    """
    if not options.extras:
        return loss
    extras = dict(written)
    if "token_accuracy" in options.extras or "is_top1" in options.extras:
        counted = targets != options.ignore_index
        extras["is_top1"] = (extras["predicted_tokens"] == targets) & counted
        extras["token_accuracy"] = extras["is_top1"].sum().to(torch.float32) / counted.sum().clamp(min=1)
    return CrossEntropyOutput(loss, **{name: extras[name] for name in options.extras})


def _check(
    logits: torch.Tensor,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    options: LossOptions,
) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} of shape {tuple(logits.shape)}; they must be floating point "
            "[tokens, vocab]: flatten the leading dimensions"
        )
    tokens, vocab = logits.shape
    check_targets(targets, class_weight, options.ignore_index, tokens, vocab, logits.device)
    check_weights(row_weight, denominator, tokens, logits.device)


@takes_options()
@checked_op
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    denominator: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of ``logits`` against class indices; the formula stands at the top of this file.

    Args:
        logits: [tokens, vocab], float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        targets: [tokens], int64 or int32; rows with the target ``ignore_index`` have no loss and zero gradient.
        class_weight: [vocab], floating point, constant: the weight w of each class.
        row_weight: [tokens], floating point, constant: a factor on each row's loss, label smoothing and z-loss
            included; :func:`packing_weights` makes those of packed sequences. Rows that are ignored may have any.
        denominator: 0-d, floating point, constant: what "mean" divides by (0 makes the loss 0), by default the sum of
            row weight times class weight over the rows that are not ignored. "sum" and "none" do not divide.
        options: the fields of :class:`LossOptions`, by name.

    Returns:
        The loss in float32 (float64 for float64 logits), 0-d or [tokens] for "none"; with ``extras`` a
        :class:`CrossEntropyOutput`.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, shape, device or range. A target that is neither a class
            nor ``ignore_index`` raises on a CPU; on a GPU, where looking at it would stall the device, its row's loss
            and gradient are NaN.
    """
    o = LossOptions.checked(options)
    _check(logits, targets, class_weight, row_weight, denominator, o)
    if not use_triton(logits):
        return reference(logits, targets, class_weight, row_weight, denominator, o)
    targets = targets.contiguous()
    tensors = targets, as_kernel_weight(class_weight), as_kernel_weight(row_weight), denominator
    loss, *extra_outputs = CrossEntropyFunction.apply(logits, *tensors, *o)
    return with_extras(loss, o, targets, dict(zip(o.written(), extra_outputs, strict=True)))
