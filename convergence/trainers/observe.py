"""Trains one arm through a trainer and writes down all that the trainer shows, as a trajectory of the proof.

The proof knows no trainer. Whoever calls it says with an :class:`InTrainer` how the model and its trainer are made.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from convergence import ours
from convergence.arms.candidate import census_of
from convergence.arms.float64 import InFloat64
from convergence.arms.hooks import logged_warnings
from convergence.arms.large import nudged
from convergence.arms.quantities import GRADIENT, GRADIENT_NORM, LOGGED, LOSS, SGD, Moment, Quantity
from convergence.arms.trajectory import Trajectory

# What a trainer logs about the clock and its own progress, not about the model.
_NOT_JUDGED = ("runtime", "per_second", "time", "epoch", "flos", "learning_rate")
# Trainer rounds this one to so many decimals before it logs it.
_ROUNDED = {"loss": 4}


class InTrainer(abc.ABC):
    """How the model of a case and its trainer are made. It is a key of what was trained, and goes to other processes,
    so it can be hashed and pickled."""

    @property
    def zero(self) -> Mapping[Quantity, float]:
        """Quantities that are 0 by construction, because numbers cancel, with the size of these numbers: what is left
        is their rounding."""
        return {}

    @property
    def launches(self) -> tuple[str, ...]:
        """Parts of names of kernels of this package that a patched arm must launch."""
        return ()

    @property
    def options_of_truth(self) -> Mapping[str, Any]:
        """What the truth asks of the trainer's configuration beyond the case's own."""
        return {}

    @abc.abstractmethod
    def model(self) -> Any:
        """A new model as anybody loads it: unpatched, in float32, on the CPU."""

    @abc.abstractmethod
    def trainer(self, model: Any, options: dict[str, Any]) -> Any:
        """A trainer of ``model``, ready to train, whose configuration has these ``options``, too."""


@dataclass(frozen=True)
class Arm:
    """How the model of an arm is made, and what is asked of its trainer.

    Args:
        dtype: what it trains in. float64 is the truth.
        nudge: the seed of a perturbation of every initial weight by one unit in the last place of float32.
        load: returns the patched model, or whatever the trainer takes for one.
        ours: whether what ``load`` returns is patched by this package; trl's head then runs on its kernels, too.
        options: what this arm asks of the trainer's configuration beyond the case's own.
        expects: parts of warnings that belong to what this arm does.
        logs_less: whether the trainer knows that the model is patched, and so may choose not to log some metrics.
    """

    dtype: torch.dtype = torch.float32
    nudge: int | None = None
    load: Callable[[], Any] | None = None
    ours: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    expects: tuple[str, ...] = ()
    logs_less: bool = False

    def model(self, how: InTrainer) -> Any:
        """The model that trains."""
        if self.load is not None:
            return self.load()
        model = how.model()
        generator = torch.Generator().manual_seed(self.nudge or 0)
        for parameter in model.parameters():
            if self.nudge is not None:
                parameter.data = nudged(parameter.data, torch.float32, generator)
            parameter.data = parameter.data.to(self.dtype)
        return model


class Seen(NamedTuple):
    """One arm's outcome: what is judged, the logged values, which kernels ran how often, how often the model's head was
    called while it trained and was evaluated, the report of our patch (None: unpatched, or a patch of others), how many
    calls of trl's own head ran on ours, and of a patched arm how many modules of each class another model of the case
    has otherwise."""

    trajectory: Trajectory
    logged: list[dict[str, float]]
    launches: dict[str, int]
    head_calls: int
    report: Any
    trls_head: int = 0
    census: dict[str, int] = {}  # noqa: RUF012  (of a tuple, which nobody changes)


def run(how: InTrainer, arm: Arm) -> Seen:
    """Train ``arm``, and evaluate it where the trainer has data for that. What the patch or the trainer raises comes as
    it is."""
    # Every trainer collects garbage before it trains. It need not look through what the arms before have left alive.
    gc.collect()
    gc.freeze()
    result = Trajectory()
    mode = InFloat64() if arm.dtype is torch.float64 else contextlib.nullcontext()
    with _warnings(result.warnings):
        torch.manual_seed(0)
        trainer = how.trainer(arm.model(how), dict(arm.options))
        _prepare_reference(trainer, arm.dtype)
        initial = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        calls: list[None] = []
        trainer.model.get_output_embeddings().register_forward_pre_hook(lambda *call: calls.append(None))
        before = ours.launches()
        with mode, _observed(trainer, result), ours.trls_head(patched=arm.load is not None and arm.ours) as taken:
            trainer.train()
            if trainer.eval_dataset is not None:
                trainer.evaluate()
        ran = ours.launched_since(before)
    result.warnings = [text for text in result.warnings if not any(part in text for part in arm.expects)]
    result.record_end(trainer.model.named_parameters(), initial, SGD)
    logged = [
        {k: v for k, v in row.items() if not any(word in k for word in _NOT_JUDGED)}
        for row in trainer.state.log_history
    ]
    for i, row in enumerate(logged):
        for name, value in row.items():
            if name not in (*_ROUNDED, "step") and isinstance(value, (int, float)):
                quantity = GRADIENT_NORM if name == "grad_norm" else Quantity(LOGGED, name)
                result.record(quantity, Moment(SGD, str(i)), torch.tensor(float(value), dtype=torch.float64))
    result.to_cpu()
    model = trainer.accelerator.unwrap_model(trainer.model)
    changed = {} if arm.load is None else census_of(how.model(), model)
    return Seen(result, logged, ran, len(calls), ours.status(model), taken(), changed)


def _prepare_reference(trainer: Any, dtype: torch.dtype) -> None:
    """Move a reference model away from the policy: where both are the same, rewards are differences of equal numbers,
    and whether they are exactly 0 says only whether the same kernels computed both."""
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        generator = torch.Generator().manual_seed(1)
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.data = (parameter.data * (1 + 0.1 * noise)).to(dtype)


@contextlib.contextmanager
def _observed(trainer: Any, result: Trajectory) -> Iterator[None]:
    """Inside, every micro step's loss and, at every optimizer step, every parameter's gradient are recorded."""
    step = trainer.training_step
    losses, steps = itertools.count(), itertools.count()

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        result.record(LOSS, Moment(SGD, str(next(losses))), loss)
        return loss

    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        moment = Moment(SGD, str(next(steps)))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    result.record(Quantity(GRADIENT, names[id(parameter)]), moment, parameter.grad)

    trainer.training_step = training_step
    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
        del trainer.training_step


@contextlib.contextmanager
def _warnings(found: list[str]) -> Iterator[None]:
    """Collects what transformers, trl and Python warn of, but for what the import of a module does: which arm is the
    first to import it says nothing of the arm."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not _is_importing(sys._getframe()):
            found.append(f"{category.__name__}: {message}")

    with logged_warnings(found, "transformers", "trl", "accelerate"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
