"""One arm's training: from a :class:`Run` to its :class:`Trajectory`.

Every arm of a case goes through the same three phases from the same initial weights:

1. *initial*: every step of the profile, one after the other, at the initial weights. This is where power comes from: no
   noise has accumulated. Each step's weights differ from the initial ones by one unit in the last place, the same in
   every arm: rounding errors that hang on the weights would otherwise be the same in every step and not average out.
   After each step that trains later, an evaluation at its weights. Then decoding with a cache.
2. *SGD* over the steps that train, then evaluation and generation. SGD decides, because it shows a gradient's scale.
3. *AdamW* over the same steps, because users run it; it hides the scale of a gradient.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from convergence.arms.hooks import observed_arm
from convergence.arms.large import is_large, nudged
from convergence.arms.lifetimes import Lifetimes
from convergence.arms.quantities import (
    ADAMW,
    DECODING,
    EVALUATION,
    INITIAL,
    LOSS,
    SGD,
    Moment,
    Remark,
)
from convergence.arms.tasks.task import Task
from convergence.arms.trajectory import Run, Trajectory, apply, build
from convergence.judge import long_run
from convergence.models.data import Step
from convergence.report import progress

# Small enough that the loss falls: a step that overshoots turns rounding noise into chaos, which hides faults.
SGD_LEARNING_RATE = 0.02
ADAMW_LEARNING_RATE = 2e-3
# With the usual 1e-8, AdamW's first step is the sign of the gradient, and where that is rounding noise an honest
# candidate takes a full step the other way (measured: errors 50 times PyTorch's own). Gradients are near 1e-2 here.
ADAMW_EPS = 1e-3
Weights = Iterable[tuple[str, torch.Tensor]]  # by name, in the model's order


def train(run: Run, model: Any = None) -> Trajectory:
    """Train one arm through all phases: a new one, or ``model``, which was built (and patched) before.

    Raises:
        CannotApply: the patch raised. Whatever is raised after that comes as it is.
    """
    return observed(run, _train, model)


def observed(run: Run, observe: Callable[[Run, Any, Trajectory], None], model: Any = None) -> Trajectory:
    """What ``observe(run, model, trajectory)`` records of one arm; ``model`` and errors as for :func:`train`."""
    on_gpu = run.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with observed_arm(run) as result:
        result.model = model = build(run) if model is None else model
        if run.patch is not None and run.construct is None:
            result.model = model = apply(run.patch, model)
        observe(run, model, result)
    steps = len(result.values.get(LOSS, ()))
    result.costs["step, ms"] = 1e3 * (time.perf_counter() - began) / max(1, steps)
    if on_gpu:
        result.costs["peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def _train(run: Run, model: Any, result: Trajectory) -> None:
    rounded = run.rounded_to or run.dtype
    steps = [step.to(run.device) for step in run.steps]
    # Nothing is lost: they were rounded so when the model was built. Who takes but one step needs no copy of them.
    again = bool(run.phases) or len(steps) > 1
    initial = {
        name: p.detach().to(rounded, copy=True).cpu() if again else p.detach() for name, p in model.named_parameters()
    }

    # Two steps computed alike, bit for bit, would be one sample of noise that counts twice. So no two of them start
    # from the same weights: each from its own, one unit in the last place away.
    def near_initial(seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in initial.items():
            weight = weight.to(run.device if is_large(weight) else "cpu", rounded)
            yield name, nudged(weight, rounded, generator)

    ended, parts = 0, len(steps) + len(run.phases) * sum(step.trains for step in steps)

    def accumulate(step: Step, phase: str) -> None:
        nonlocal ended
        _accumulate(run.task, model, step, result, phase)
        ended += 1
        progress.reach(f"{phase}, {step.name}", ended, parts)

    def asked(name: str) -> bool:
        return run.only is None or name in run.only

    evaluations = 0
    for seed, step in enumerate(steps):
        evaluates = bool(run.phases) and step.trains and asked(EVALUATION)
        if not (asked(step.name) or evaluates):
            continue
        _set_weights(model, near_initial(seed))
        if asked(step.name):
            accumulate(step, INITIAL)
        if evaluates:
            evaluations += 1
            run.task.evaluate(model, run.evaluation, result, Moment(INITIAL, EVALUATION, evaluations), run.device)
    if run.phases and asked(DECODING):
        _set_weights(model, initial.items())
        run.task.decode(model, run.evaluation, result, run.device)
    if run.only is not None:
        return

    optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        SGD: lambda: torch.optim.SGD(model.parameters(), lr=SGD_LEARNING_RATE),
        ADAMW: lambda: torch.optim.AdamW(model.parameters(), lr=ADAMW_LEARNING_RATE, eps=ADAMW_EPS),
    }
    for seed, phase in enumerate(run.phases, start=len(steps)):
        _set_weights(model, near_initial(seed))
        optimizer = optimizers[phase]()
        for step in steps:
            if step.trains:
                accumulate(step, phase)
                optimizer.step()
        for parameter, start in zip(model.named_parameters(), near_initial(seed), strict=True):
            result.record_end([parameter], dict([start]), phase)
        if phase == SGD:
            run.task.evaluate(model, run.evaluation, result, Moment(SGD, EVALUATION), run.device)
            run.task.generate(model, run.evaluation, result, run.device)
    if run.curve and run.rounded_to is None:
        _set_weights(model, initial.items())
        result.curve = long_run.train(model, run.curve, optimizers[ADAMW](), run.device)


def _set_weights(model: Any, weights: Weights) -> None:
    with torch.no_grad():
        for (_, parameter), (_, weight) in zip(model.named_parameters(), weights, strict=True):
            parameter.copy_(weight)


def _accumulate(task: Task, model: Any, step: Step, result: Trajectory, phase: str) -> None:
    """Forward and backward of every micro batch of ``step``; record losses, gradients and, at first, the head's."""
    model.zero_grad(set_to_none=True)
    if step.evaluates:
        model.eval()
    with _frozen(model, step.frozen):
        for i, batch in enumerate(step.batches):
            at = Moment(phase, step.name, i + 1 if len(step.batches) > 1 else None)
            lifetimes = Lifetimes()
            task.train_batch(model, step, batch, result, at, lifetimes)
            if not result.alive:  # once is enough, and Python's collector takes its time
                result.alive += [Remark(at, what) for what in lifetimes.left()]
        gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        result.record_gradients(gradients, Moment(phase, step.name))
    if step.evaluates:
        model.train()


@contextlib.contextmanager
def _frozen(model: Any, part: str | None) -> Iterator[None]:
    """Inside, the head's parameters ("head") or all others ("body") do not train."""
    if part is None:
        yield
        return
    head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    chosen = [p for p in model.parameters() if (id(p) in head) == (part == "head")]
    for parameter in chosen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)
