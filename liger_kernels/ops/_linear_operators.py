"""The linear cross entropy as operators of ``torch.library``, which ``torch.compile(fullgraph=True)`` traces through.

In eager, an autograd function calls the same schedules without the cost of the dispatcher. Neither operator writes to
an argument: Inductor would copy it anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops._linear import TENSORS, Call, Needs, Output, Schedule
from liger_kernels.ops._linear_token_chunks import TokenChunks
from liger_kernels.ops._linear_vocabulary_slabs import VocabularySlabs
from liger_kernels.ops._loss_options import LossOptions

# A float or an int of a call is no tensor, and so none of the traced program's.
_ARGUMENTS = (
    "Tensor? hidden, Tensor? weight, Tensor? bias, Tensor? targets, Tensor? class_weight, Tensor? row_weight, "
    "Tensor? denominator, float[] numbers, str reduction, str extras, bool[] needs, str schedule, SymInt[] sizes"
)
_N_ARGUMENTS = _ARGUMENTS.count(",") + 1
_N_ROWS, _N_STATE = 4, 6  # tensors of a result: the loss and what is computed with it; what the backward gets
_SCHEDULES: dict[str, Any] = {schedule.__name__: schedule for schedule in (TokenChunks, VocabularySlabs)}


def _as_arguments(call: Call, schedule: Schedule) -> tuple[Any, ...]:
    sizes: Any = schedule
    options = call.options.as_numbers(), call.options.reduction, " ".join(call.options.extras)
    return *call.tensors(), *options, [*call.needs], type(schedule).__name__, [*sizes]


def _parsed(arguments: Sequence[Any]) -> tuple[Call, Any]:
    *options, needs, schedule, sizes = arguments[TENSORS:]
    return Call.of(arguments[:TENSORS], LossOptions.of_numbers(*options), Needs(*needs)), _SCHEDULES[schedule](*sizes)


def _as_results(output: Output) -> tuple[Tensor, ...]:
    """An operator's schema knows no optional result, but tensors without elements."""
    device, rows = output.loss.device, output.rows
    found = [output.loss, rows.log_probs, rows.entropy, rows.predicted, *output.saved, *output.buffers]
    found += [None] * (_N_ROWS + _N_STATE - len(found))
    return tuple([torch.empty(0, device=device) if t is None else t for t in found])


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> ({', '.join(['Tensor'] * (_N_ROWS + _N_STATE))})",
)
def forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """loss, log_probs, entropy, predicted, and what the backward gets."""
    call, schedule = _parsed(arguments)
    return _as_results(schedule.forward(call))


@forward_op.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call, schedule = _parsed(arguments)
    return _as_results(schedule.allocate(call).fake(call.options.reduction))


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor grad_loss, Tensor[] state, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def backward_op(grad_loss: Tensor, state: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of hidden, weight and bias."""
    call, schedule = _parsed(arguments)
    saved, buffers = schedule.split(state)
    grads = schedule.backward(call, saved, buffers, grad_loss, overwrite=False)
    return _as_needed(grads, call.needs, grad_loss)


@backward_op.register_fake
def _fake_backward(grad_loss: Tensor, state: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    call, schedule = _parsed(arguments)
    return _as_needed(schedule.allocate_gradients(call, schedule.split(state)[1]), call.needs, grad_loss)


def _as_needed(grads: Sequence[Tensor], needs: Needs, like: Tensor) -> tuple[Tensor, ...]:
    return tuple([g if needed else like.new_empty(0) for g, needed in zip(grads, needs, strict=True)])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, schedule = _parsed(inputs)
    ctx.save_for_backward(*call.for_backward(schedule), *output[_N_ROWS:])
    ctx.settings, ctx.needs = inputs[TENSORS:], call.needs
    ctx.set_materialize_grads(False)  # nobody has a gradient for the logits, and zeros would cost their memory again


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * len(ctx.needs)
    if grad_loss is not None:
        tensors, state = ctx.saved_tensors[:TENSORS], list(ctx.saved_tensors[TENSORS:])
        computed = backward_op(grad_loss, state, *tensors, *ctx.settings)
        grads = [grad if needed else None for grad, needed in zip(computed, ctx.needs, strict=True)]
    return *grads, *(None,) * (_N_ARGUMENTS - len(grads))


forward_op.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy_op(call: Call, schedule: Schedule) -> tuple[Tensor, ...]:
    """loss, log_probs, entropy and predicted; without elements what was not asked for."""
    loss, log_probs, entropy, predicted, *_ = forward_op(*_as_arguments(call, schedule))
    return loss, log_probs.detach(), entropy.detach(), predicted.detach()
