"""The linear cross entropy as operators of ``torch.library``, which ``torch.compile(fullgraph=True)`` traces through.

In eager, an autograd function calls the same schedules without the cost of the dispatcher. Neither operator writes to
an argument: Inductor would copy it anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops.loss.options import WRITTEN, LossOptions
from liger_kernels.ops.loss.schedules.schedule import TENSORS, Call, Needs, Output, Schedule, Upstream
from liger_kernels.ops.loss.schedules.token_chunks import TokenChunks
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs

# A float or an int of a call is no tensor, and so none of the traced program's.
_ARGUMENTS = (
    "Tensor? hidden, Tensor? weight, Tensor? bias, Tensor? targets, Tensor? class_weight, Tensor? row_weight, "
    "Tensor? denominator, Tensor? ids, Tensor? teacher_hidden, Tensor? teacher_weight, Tensor? teacher_bias, "
    "float[] numbers, float[] teacher, str reduction, str extras, bool[] needs, str schedule, SymInt[] sizes"
)
_UPSTREAM = "Tensor grad_loss, Tensor? entropy, Tensor? grad_entropy, Tensor? grad_ids"
_N_ARGUMENTS = _ARGUMENTS.count(",") + 1
# Tensors of a result: the loss, the rows' extras and the chosen classes; what the backward gets.
_N_ROWS, _N_STATE = 2 + len(WRITTEN), 6
_N_GRADIENTS = 3  # of hidden, weight and bias: a call with adapters runs outside of a compiled program
_ENTROPY = 1 + list(WRITTEN).index("entropy")
_SCHEDULES: dict[str, Any] = {schedule.__name__: schedule for schedule in (TokenChunks, VocabularySlabs)}


def _as_arguments(call: Call, schedule: Schedule) -> tuple[Any, ...]:
    sizes: Any = schedule
    teacher = [] if call.teacher is None else call.teacher.as_numbers()
    options = call.options.as_numbers(), teacher, call.options.reduction, " ".join(call.options.extras)
    numbers = [size + 0 for size in sizes]  # a dynamic program takes no bool
    return *call.tensors(), *options, [*call.needs], type(schedule).__name__, numbers


def _parsed(arguments: Sequence[Any]) -> tuple[Call, Any]:
    numbers, teacher, reduction, extras, needs, schedule, sizes = arguments[TENSORS:]
    options = LossOptions.of_numbers(numbers, reduction, extras)
    return Call.of(arguments[:TENSORS], options, Needs(*needs), teacher or None), _SCHEDULES[schedule](*sizes)


def _as_results(output: Output) -> tuple[Tensor, ...]:
    """An operator's schema knows no optional result, but tensors without elements."""
    device, rows = output.loss.device, output.rows
    found = [output.loss, *[rows.extras.get(name) for name in WRITTEN], rows.ids, *output.saved, *output.buffers]
    found += [None] * (_N_ROWS + _N_STATE - len(found))
    return tuple([torch.empty(0, device=device) if t is None else t for t in found])


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> ({', '.join(['Tensor'] * (_N_ROWS + _N_STATE))})",
)
def forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """The loss, the rows' extras, and what the backward gets."""
    call, schedule = _parsed(arguments)
    return _as_results(schedule.forward(call))


@forward_op.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call, schedule = _parsed(arguments)
    return _as_results(schedule.allocate(call).fake(call.options.reduction))


@torch.library.custom_op(
    "liger_kernels::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"({_UPSTREAM}, Tensor[] state, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def backward_op(
    grad_loss: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    grad_ids: Tensor | None,
    state: Sequence[Tensor],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """The gradients of hidden, weight and bias."""
    call, schedule = _parsed(arguments)
    saved, buffers = schedule.split(state)
    upstream = Upstream(grad_loss, entropy, grad_entropy, grad_ids)
    grads = schedule.backward(call, saved, buffers, upstream, overwrite=False)
    return _as_needed(grads, call.needs, grad_loss)


@backward_op.register_fake
def _fake_backward(
    grad_loss: Tensor, entropy: Any, grad_entropy: Any, grad_ids: Any, state: Sequence[Tensor], *arguments: Any
) -> tuple[Tensor, ...]:
    call, schedule = _parsed(arguments)
    return _as_needed(schedule.allocate_gradients(call, schedule.split(state)[1]), call.needs, grad_loss)


def _as_needed(grads: Sequence[Tensor], needs: Needs, like: Tensor) -> tuple[Tensor, ...]:
    return tuple([g if needed else like.new_empty(0) for g, needed in zip(grads, needs[:_N_GRADIENTS], strict=True)])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, schedule = _parsed(inputs)
    entropy = output[_ENTROPY] if "entropy" in call.options.extras else None
    ctx.save_for_backward(*call.for_backward(schedule), entropy, *output[_N_ROWS:])
    ctx.like_loss = output[0].shape, output[0].device
    ctx.settings, ctx.needs = inputs[TENSORS:], call.needs
    ctx.set_materialize_grads(False)  # nobody has a gradient for the logits, and zeros would cost their memory again


def _backward(ctx: Any, grad_loss: Tensor | None, *of_extras: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * _N_GRADIENTS
    grad_entropy, grad_ids = of_extras[_ENTROPY - 1], of_extras[_N_ROWS - 2]
    if any(grad is not None for grad in (grad_loss, grad_entropy, grad_ids)):
        entropy, *state = ctx.saved_tensors[TENSORS:]
        shape, device = ctx.like_loss
        grad_loss = torch.zeros(shape, device=device) if grad_loss is None else grad_loss
        entropy = None if grad_entropy is None else entropy
        incoming = grad_loss, entropy, grad_entropy, grad_ids
        computed = backward_op(*incoming, state, *ctx.saved_tensors[:TENSORS], *ctx.settings)
        grads = [grad if needed else None for grad, needed in zip(computed, ctx.needs[:_N_GRADIENTS], strict=True)]
    return *grads, *(None,) * (_N_ARGUMENTS - len(grads))


forward_op.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy_op(call: Call, schedule: Schedule, entropy: bool) -> tuple[Tensor, ...]:
    """The loss and the extras of ``options.written()``, of which the entropy has a gradient if ``entropy`` says so; and
    the log-probabilities of chosen classes, if there are any."""
    if isinstance(schedule, TokenChunks):
        schedule = schedule._replace(holds=False)  # the backward may not overwrite what an operator kept
    results = forward_op(*_as_arguments(call, schedule))
    extras = dict(zip(WRITTEN, results[1 : _N_ROWS - 1], strict=True))
    written = [extras[n] if entropy and n == "entropy" else extras[n].detach() for n in call.options.written()]
    return results[0], *written, *(() if call.ids is None else results[_N_ROWS - 1 : _N_ROWS])
