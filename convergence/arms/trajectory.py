"""The training of one arm (:class:`Run`), and everything that was observed in it (:class:`Trajectory`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from convergence.arms.large import is_large, nudged, project
from convergence.arms.quantities import (
    ADAMW,
    DISPLACEMENT,
    END,
    GRADIENT,
    GRADIENT_NORM,
    PARAMETER,
    SGD,
    Moment,
    Quantity,
    Remark,
)
from convergence.models.data import Batch, Step

if TYPE_CHECKING:
    from convergence.arms.tasks.task import Task

Form = tuple[torch.Size, torch.dtype]
Values = dict[Quantity, dict[Moment, torch.Tensor]]
Layout = dict[Quantity, dict[Moment, tuple[int, torch.Size]]]


@dataclass
class Run:
    """The training of one arm.

    Args:
        template: the unpatched model, on the CPU in float32. A checkpoint keeps its saved dtype, and a shape of scale
            is on the training device. The template is copied and never changed.
        steps: the steps of the profile.
        evaluation: the batch that is evaluated after SGD.
        dtype: the dtype of the parameters; float64 for the truth. Buffers stay float32, as after ``from_pretrained``,
            unless the task casts them.
        device: the device of the training.
        task: how an arm runs the model.
        patch: the patch, applied before anything runs; None for truth and baseline.
        construct: None if the patch changes one model; the patch then gets the arm's copy of the template. Otherwise
            the patch changes classes. It then gets a copy that is thrown away, and ``construct()`` makes the arm's
            model, which gets the template's weights.
        rounded_to: the dtype to which initial weights are rounded (default: ``dtype``). The truth shares the rounded
            weights.
        nudge: if given, the seed for moving every initial weight by one unit in the last place.
        only: if given, only the steps of these names run, at the initial weights.
        phases: the optimizers that train after the initial steps. Without phases, nothing is decoded either.
        curve: the batches of a long run with AdamW after the phases. The truth has no long run, because it would take
            too long.
    """

    template: nn.Module
    steps: list[Step]
    evaluation: Batch
    dtype: torch.dtype
    device: torch.device
    task: Task
    patch: Callable[[nn.Module], Any] | None = None
    construct: Callable[[], nn.Module] | None = None
    rounded_to: torch.dtype | None = None
    nudge: int | None = None
    only: frozenset[str] | None = None
    phases: tuple[str, ...] = (SGD, ADAMW)
    curve: Sequence[Batch] = ()


class CannotApply(RuntimeError):
    """The patch itself raised before any training. Its exception is the cause."""


@dataclass
class Trajectory:
    """The observations of one arm.

    Attributes:
        values: ``values[quantity][moment]`` is a tensor in its original dtype, on the CPU after training. A large
            tensor is replaced by its projections.
        forms: shape and dtype of the large tensors.
        generated: the greedily generated tokens [batch, tokens]. They come from ``scores`` [tokens, batch, vocab].
        curve: the loss of every step of a long run.
        complaints: problems during the run.
        notes: outputs that the caller did not get.
        alive: the objects that a step left alive, for the first such step.
        model: the trained model.
        unpatched: the model before patch and training, if a set-up makes another model of the template.
        costs: "step, ms" on average, and on a GPU "peak, GiB". They show trends and are not judged.
        measured: in a baseline, the cached figures of comparisons with its values.
    """

    values: Values = field(default_factory=dict)
    forms: dict[tuple[Quantity, Moment], Form] = field(default_factory=dict)
    generated: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    curve: torch.Tensor | None = None
    complaints: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    alive: list[Remark] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    model: Any = None
    unpatched: Any = None
    costs: dict[str, float] = field(default_factory=dict)
    measured: dict[Any, Any] = field(default_factory=dict, repr=False)

    def record(self, quantity: Quantity, at: Moment, value: torch.Tensor) -> None:
        kept = value.detach()
        if is_large(kept):
            self.forms[quantity, at] = kept.shape, kept.dtype
        self.values.setdefault(quantity, {})[at] = project(kept) if is_large(kept) else kept.clone()

    def without(self, quantities: Collection[Quantity]) -> Trajectory:
        """The same, less these ``quantities``."""
        kept = {quantity: steps for quantity, steps in self.values.items() if quantity not in quantities}
        return replace(self, values=kept)

    def form(self, quantity: Quantity, at: Moment) -> Form:
        """Shape and dtype of the observed tensor, even if only its projections were kept."""
        value = self.values[quantity][at]
        return self.forms.get((quantity, at), (value.shape, value.dtype))

    def record_gradients(self, gradients: Iterable[tuple[str, torch.Tensor]], at: Moment) -> None:
        """Record every parameter's gradient, and the norm of all gradients."""
        norms = []
        for name, gradient in gradients:
            self.record(Quantity(GRADIENT, name), at, gradient)
            norms.append(gradient.double().norm())
        if norms:
            here = norms[0].device  # a device map spreads parameters
            self.record(GRADIENT_NORM, at, torch.stack([norm.to(here) for norm in norms]).norm())

    def record_end(
        self, weights: Iterable[tuple[str, torch.Tensor]], start: dict[str, torch.Tensor], phase: str
    ) -> None:
        """Record every parameter at the end of ``phase``, and its displacement from ``start``."""
        for name, weight in weights:
            self.record(Quantity(PARAMETER, name), Moment(phase, END), weight)
            moved = weight.detach() - start[name].to(weight.device)
            self.record(Quantity(DISPLACEMENT, name), Moment(phase, END), moved)

    def to_cpu(self) -> None:
        """Move all values with one copy per dtype. Each copy waits for the GPU, and several processes may share the
        GPU."""
        if any(value.device.type != "cpu" for by_step in self.values.values() for value in by_step.values()):
            layout, flat = _packed(self.values)
            self.values = _unpacked(layout, [tensor.cpu() for tensor in flat])

    def __getstate__(self) -> dict[str, Any]:
        """Pack the values: saving or sending thousands of small tensors takes seconds, but a few large tensors are
        fast."""
        return {**vars(self), "values": _packed(self.values), "measured": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, values=_unpacked(*state["values"]))


def _packed(values: Values) -> tuple[Layout, list[torch.Tensor]]:
    """Concatenate all tensors of one dtype and device. The layout says the group and the shape of each tensor."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    layout: Layout = {quantity: {} for quantity in values}
    for quantity, by_step in values.items():
        for step, value in by_step.items():
            groups.setdefault(key := (value.dtype, value.device), []).append(value.flatten())
            layout[quantity][step] = list(groups).index(key), value.shape
    return layout, [torch.cat(group) for group in groups.values()]


def _unpacked(layout: Layout, flat: Sequence[torch.Tensor]) -> Values:
    places = [place for by_step in layout.values() for place in by_step.values()]
    sizes = [[shape.numel() for group, shape in places if group == g] for g in range(len(flat))]
    parts = [iter(tensor.split(size)) for tensor, size in zip(flat, sizes, strict=True)]
    return {
        quantity: {step: next(parts[group]).view(shape) for step, (group, shape) in by_step.items()}
        for quantity, by_step in layout.items()
    }


def build(run: Run) -> Any:
    """The arm's model with its initial weights, on its device and in its dtype. It is an unpatched copy of the
    template, or a model that was constructed after a patch of classes.

    Raises:
        CannotApply: the patch of classes raised.
    """
    model: Any = copy.deepcopy(run.template)
    if run.patch is not None and run.construct is not None:
        apply(run.patch, model)
        model = run.construct()
        model.load_state_dict(run.template.state_dict())
    rounded = run.rounded_to or run.dtype
    generator = torch.Generator().manual_seed(run.nudge or 0)
    for parameter in model.parameters():
        weight = parameter.data.to(run.device if is_large(parameter) else "cpu", rounded)
        if run.nudge is not None:
            weight = nudged(weight, rounded, generator)
        parameter.data = weight.to(run.dtype)
    if run.task.casts_buffers:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(run.dtype)
    return model.to(run.device)


def apply(patch: Callable[[nn.Module], Any], model: Any) -> Any:
    """The patched model: ``model``, or another one that the patch returned, which is no part of it. Some packages make
    models and patch none.

    Raises:
        CannotApply: the patch raised.
    """
    try:
        return patched_by(model, patch(model))
    except Exception as error:
        raise CannotApply(f"{type(error).__name__}: {error}") from error


def patched_by(model: nn.Module, returned: Any) -> Any:
    """The patched model, by what the patch of ``model`` ``returned``."""
    is_another = isinstance(returned, nn.Module) and all(returned is not module for module in model.modules())
    return returned if is_another else model
