"""Trains one arm of a trainer's case and writes down all that the trainer shows, as a trajectory of the proof."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import liger_kernels
from convergence.arms.candidate import load_patch
from convergence.arms.float64 import InFloat64
from convergence.arms.hooks import logged_warnings
from convergence.arms.quantities import GRADIENT, GRADIENT_NORM, LOGGED, LOSS, SGD, Moment, Quantity
from convergence.arms.trajectory import Trajectory, apply, nudged
from liger_kernels import trl_head
from liger_kernels.ops import launches, reset_launches
from matrix.trainers.cases import CASES

# What a trainer logs about the clock and its own progress, not about the model.
_NOT_JUDGED = ("runtime", "per_second", "time", "epoch", "flos", "learning_rate")
# Trainer rounds this one to so many decimals before it logs it.
_ROUNDED = {"loss": 4}


@dataclass(frozen=True)
class Arm:
    """How a model is loaded and what is done to it before the trainer gets it.

    Args:
        dtype: what it trains in. float64 is the truth.
        nudge: the seed of a perturbation of every initial weight by one unit in the last place of float32.
        load: from a folder to the model (or to whatever the trainer takes for one).
        ours: whether what ``load`` returns is patched by this package; trl's head then runs on its kernels, too.
        options: what this arm asks of the trainer's configuration beyond the case's own.
        expects: parts of warnings that belong to what this arm does.
    """

    dtype: torch.dtype = torch.float32
    nudge: int | None = None
    load: Callable[[Path], Any] | None = None
    ours: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    expects: tuple[str, ...] = ()

    def model(self, folder: Path) -> Any:
        if self.load is not None:
            return self.load(folder)
        model = plain(folder)
        generator = torch.Generator().manual_seed(self.nudge or 0)
        for parameter in model.parameters():
            if self.nudge is not None:
                parameter.data = nudged(parameter.data, torch.float32, generator)
            parameter.data = parameter.data.to(self.dtype)
        return model


def plain(folder: Path) -> Any:
    """The model in ``folder`` as anybody loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


class Seen(NamedTuple):
    """One arm's outcome: what is judged, the logged values, which kernels ran how often, how often the model's head was
    called while it trained and was evaluated, the report of our patch (None: unpatched, or a patch of others), and how
    many calls of trl's own head ran on ours."""

    trajectory: Trajectory
    logged: list[dict[str, float]]
    launches: dict[str, int]
    head_calls: int
    report: Any
    trls_head: int = 0


def run(make: Callable[[Any, dict[str, Any]], Any], arm: Arm, folder: Path, reference_is_another: bool = True) -> Seen:
    """Train the arm: ``make(model, options)`` is its trainer. A reference model is moved away from the policy, unless
    ``reference_is_another`` says that it is not."""
    # Every trainer collects garbage before it trains. It need not look through what the arms before have left alive.
    gc.collect()
    gc.freeze()
    result = Trajectory()
    mode = InFloat64() if arm.dtype is torch.float64 else contextlib.nullcontext()
    with _warnings(result.warnings):
        torch.manual_seed(0)
        trainer = make(arm.model(folder), dict(arm.options))
        _prepare_reference(trainer, arm.dtype, 0.1 if reference_is_another else 0.0)
        initial = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        calls: list[None] = []
        trainer.model.get_output_embeddings().register_forward_pre_hook(lambda *call: calls.append(None))
        reset_launches()
        with mode, _observed(trainer, result), _trls_head(patched=arm.load is not None and arm.ours) as taken:
            trainer.train()
            if trainer.eval_dataset is not None:
                trainer.evaluate()
        ran = launches()
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
    report = liger_kernels.status(trainer.accelerator.unwrap_model(trainer.model))
    return Seen(result, logged, ran, len(calls), report, taken())


def run_foreign(case: str, folder: Path, patch: str, scope: str) -> tuple[Any, ...]:
    """Train ``case`` on a model of ``patch``, which is not ours, in this process; returns the fields of :class:`Seen`.

    With the scope "class" the patch sees a model of that class, and the one that trains is loaded afterwards. What it
    replaces stays replaced, so nothing else may train in this process.

    Raises:
        PatchError: the patch cannot be imported.
        CannotApply: it raised. Whatever the trainer raises comes as it is.
    """
    patched = load_patch(patch)

    def load(folder: Path) -> Any:
        model = plain(folder)
        apply(patched, model)
        return plain(folder) if scope == "class" else model

    make = functools.partial(CASES[case].make, folder, folder / "output")
    return tuple(run(make, Arm(load=load, ours=False), folder))


def _prepare_reference(trainer: Any, dtype: torch.dtype, distance: float) -> None:
    """Move a reference model away from the policy: where both are the same, rewards are differences of equal numbers,
    and whether they are exactly 0 says only whether the same kernels computed both."""
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        generator = torch.Generator().manual_seed(1)
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.data = (parameter.data * (1 + distance * noise)).to(dtype)


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
def _trls_head(patched: bool) -> Iterator[Callable[[], int]]:
    """Inside, trl's head (trl 1.15 and later) runs on our kernels in a ``patched`` arm, and on trl's own in any other;
    a function of how many calls ran on ours."""
    trl_head.uninstall()
    if patched:
        trl_head.install()
    replacements = [trl_head.current(module) for module in (trl_head.LOG_PROBS, trl_head.DIVERGENCE)]
    try:
        yield lambda: sum(0 if replacement is None else replacement.ours for replacement in replacements)
    finally:
        trl_head.install()


@contextlib.contextmanager
def _warnings(found: list[str]) -> Iterator[None]:
    """Collects what transformers, trl and Python warn of."""
    with logged_warnings(found, "transformers", "trl", "accelerate"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found += [f"{w.category.__name__}: {w.message}" for w in caught]
