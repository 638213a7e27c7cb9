"""Trains the arms of a case in a set-up, on one rank or on two, and brings back what was observed.

The phases are those of ``train.py`` without AdamW: the steps of the profile at the initial weights, then SGD, then the
loss of a batch without gradients. Observed are losses, every parameter's gradient, and every parameter at the end.
Nothing is hooked: a hook on the head would change what is fused there.
"""

from __future__ import annotations

import contextvars
import copy
import datetime
import functools
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convergence.arms import isolate
from convergence.arms.candidate import Candidate, load_patch, train_candidate
from convergence.arms.hooks import observed_arm
from convergence.arms.large import nudged
from convergence.arms.pristine import remember_upstream
from convergence.arms.process import ProcessState, drawing
from convergence.arms.quantities import EVALUATION, EVALUATION_LOGITS, INITIAL, LOSS, SGD, Moment
from convergence.arms.setup import Setup
from convergence.arms.setups import RANKS, SETUPS
from convergence.arms.train import SGD_LEARNING_RATE
from convergence.arms.trajectory import CannotApply, Run, Trajectory, apply, build
from convergence.judge import tolerance
from convergence.judge.arms import Arms
from convergence.models.data import Batch, Step, evaluation_batch, steps
from convergence.models.models import DTYPES, MODELS
from convergence.models.rows import construct
from convergence.report import progress
from convergence.report.records import Case

# What takes part: enough for every way through a loss, few enough for a dozen set-ups.
STEPS = ("masked", "packed", "accumulated", "label smoothing", "logits read", "padded", "plain 0", "plain 1", "plain 2")
WAIT = datetime.timedelta(seconds=120)  # for the other rank


def train_in_setup(case: Case, timeout: float) -> Arms:
    """Train every arm of ``case`` in processes of their own; no arm is left where a rank died or took too long."""
    ranks = SETUPS[case.setup].ranks
    with tempfile.TemporaryDirectory(prefix="convergence-ranks-") as folder, ThreadPoolExecutor(ranks) as threads:
        call = functools.partial(isolate.call, train_rank, case, timeout=timeout)
        # The first rank says what it is at.
        calls = [threads.submit(contextvars.copy_context().run, call, 0, folder)]
        calls += [threads.submit(call, rank, folder) for rank in range(1, ranks)]
        try:
            results = [Arms(*call.result()) for call in calls]
        except isolate.ProcessDied as death:
            return Arms([], Candidate.died(str(death), death.output))
    first, *others = results
    for other in others:
        both = zip(first.pairs, other.pairs, strict=True)
        first.pairs = [(mine or theirs, baseline) for (mine, baseline), (theirs, _) in both]
        changed = first.candidate.changed
        changed += [change for change in other.candidate.changed if change not in changed]
    return first


def train_rank(case: Case, rank: int, folder: str) -> Iterator[Any]:
    """The :class:`Arms` of ``case`` on ``rank``, field by field. The patch is imported after truths, baseline and
    replicas have left this process, and every other rank."""
    setup = SETUPS[case.setup]
    os.environ |= setup.environment(folder)
    device = torch.device(case.device)
    if setup.ranks > 1:
        _join(rank, folder, device)
    template = setup.template(MODELS[case.model].build(case.seed))
    judged = DTYPES[case.dtype]
    seeds = [case.seed + 100 * other for other in range(1 if setup.same_batch else setup.ranks)]
    wanted = [name for name in STEPS if name not in setup.without]
    chosen = [[setup.fitted(s) for s in steps(case.profile, seed, judged) if s.name in wanted] for seed in seeds]
    evaluation = setup.fitted(Step("evaluation", [evaluation_batch(case.seed)])).batches[0]
    own = chosen[rank % len(chosen)]
    run = Run(template, own, evaluation, judged, device, MODELS[case.model].task)
    plain = replace(run, dtype=torch.float64, rounded_to=judged)
    pairs: list[tuple[Any, Trajectory]] = []
    nudges = None, *range(tolerance.REPLICAS)
    progress.expect(len(nudges[rank :: setup.ranks]) + len(nudges) + 1)
    for number, nudge in enumerate(nudges):
        truth, which = None, "" if nudge is None else f" of replica {nudge + 1}"
        if number % setup.ranks == rank:  # each rank trains its share of the truths
            progress.begin(f"truth{which}")
            truth = train(replace(plain, nudge=nudge), setup.truth(), chosen)
            truth.model = truth.unpatched = None
        progress.begin(f"baseline{which}")
        baseline = train(replace(run, nudge=nudge), setup, [own])
        baseline.model = baseline.unpatched = None
        pairs.append((truth, baseline))
    yield pairs
    if setup.ranks > 1:
        torch.distributed.barrier()
    # By now the set-up has changed what it changes: six arms have trained in it.
    upstream, state, drawn = remember_upstream(), ProcessState(), list[str]()
    patched = replace(run, patch=drawing(load_patch(case.patch), drawn), construct=construct(case))

    def changes() -> list[str]:
        return list(dict.fromkeys([*upstream.changes(), *state.changes(), *drawn]))

    progress.begin("candidate")
    yield train_candidate(patched, changes, lambda run: train(run, setup, [own], case.order))
    if setup.ranks > 1:
        torch.distributed.destroy_process_group()
    yield sum(step.reads_logits for step in own)


def _join(rank: int, folder: str, device: torch.device) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=WAIT,
    )


def train(run: Run, setup: Setup, batches: list[list[Step]], order: str = "before") -> Trajectory:
    """Train one arm in ``setup`` on the steps of each rank in ``batches``: its own, or for the truth those of all. The
    patch comes "before" or "after" the model is wrapped.

    Raises:
        CannotApply: the patch raised.
    """
    with observed_arm(run) as result:
        _train(run, setup, batches, result, order)
    return result


def _train(run: Run, setup: Setup, batches: list[list[Step]], result: Trajectory, order: str) -> None:
    rounded = run.rounded_to or run.dtype
    first = setup.loaded(build(run), rounded)
    setup.cast(first)
    result.unpatched = first
    initial = {name: p.detach().cpu().clone() for name, p in setup.named(first, first)}
    patch = run.patch if run.construct is None else None
    model: Any = None
    wrapped: Any = None

    def begin(seed: int) -> dict[str, torch.Tensor]:
        """Let the model, patched and wrapped, have weights near the initial ones, which are returned."""
        nonlocal model, wrapped
        generator = torch.Generator().manual_seed(seed)
        start = {name: nudged(weight, rounded, generator) for name, weight in initial.items()}
        anew = setup.sharded or model is None
        if anew:
            result.model = model = copy.deepcopy(first)
        with torch.no_grad():
            for name, parameter in setup.named(model, model):
                parameter.copy_(start[name])
        if anew:
            if patch is not None and order == "before":
                result.model = model = apply(patch, model)
            wrapped = setup.wrap(model, run.device)
            if patch is not None and order == "after" and apply(patch, wrapped) is not wrapped:
                raise CannotApply("the patch returned another model than the wrapped one, which is the set-up's")
        return start

    ranked = [[step.to(run.device) for step in steps] for steps in batches]
    ended, parts = 0, len(ranked[0]) + sum(step.trains for step in ranked[0])

    def end(step: Step, phase: str) -> None:
        nonlocal ended
        ended += 1
        progress.reach(f"{phase}, {step.name}", ended, parts)

    for seed, step_of_ranks in enumerate(zip(*ranked, strict=True)):
        begin(seed)
        _accumulate(model, wrapped, setup, step_of_ranks, result, INITIAL)
        end(step_of_ranks[0], INITIAL)
    start = begin(len(ranked[0]))
    optimizer = setup.optimizer(wrapped, lambda parameters: torch.optim.SGD(parameters, lr=SGD_LEARNING_RATE))
    for step_of_ranks in zip(*ranked, strict=True):
        if step_of_ranks[0].trains:
            _accumulate(model, wrapped, setup, step_of_ranks, result, SGD)
            optimizer.step()
            wrapped.zero_grad()
            end(step_of_ranks[0], SGD)
    result.record_end(setup.weights(model, wrapped), start, SGD)
    _evaluate(wrapped, setup, run, result)


def _accumulate(
    model: nn.Module, wrapped: Any, setup: Setup, step_of_ranks: tuple[Step, ...], result: Trajectory, phase: str
) -> None:
    """Forward and backward of a step: of this rank's own, or, for the truth, the mean over all ranks'."""
    wrapped.zero_grad()
    count, first = len(step_of_ranks), step_of_ranks[0]
    for i in range(len(first.batches)):
        losses = []
        for step in step_of_ranks:
            with setup.running(step.batches[i].input_ids.device):
                loss = _loss(wrapped, setup, step, step.batches[i])
            setup.backward(wrapped, loss * step.scale / count)
            losses.append(loss.detach())
        at = Moment(phase, first.name, i + 1 if len(first.batches) > 1 else None)
        result.record(LOSS, at, _over_ranks(torch.stack(losses).mean(), setup))
    setup.reduce(model)
    result.record_gradients(setup.gradients(model, wrapped), Moment(phase, first.name))


def _loss(wrapped: Any, setup: Setup, step: Step, batch: Batch) -> torch.Tensor:
    if step.label_smoothing is not None:
        return step.smoothed_loss(wrapped(**batch.inputs()).logits, batch)
    outputs = wrapped(**setup.inputs(step.labelled(batch)))
    loss = step.loss(outputs)
    if step.reads_logits:  # and trains on them
        loss = loss + outputs.logits.float().square().mean()
    return loss


def _over_ranks(loss: torch.Tensor, setup: Setup) -> torch.Tensor:
    """The sum or the mean of the ranks' losses."""
    if setup.ranks == 1:
        return loss
    loss = loss.clone()
    torch.distributed.all_reduce(loss)
    return loss if setup.sums else loss / setup.ranks


def _evaluate(wrapped: Any, setup: Setup, run: Run, result: Trajectory) -> None:
    ids, labels = run.evaluation.input_ids.to(run.device), run.evaluation.labels.to(run.device)
    wrapped.eval()
    with torch.no_grad(), setup.running(run.device):
        outputs = wrapped(**setup.inputs({"input_ids": ids, "labels": labels, "use_cache": False}))
        loss = _over_ranks(outputs.loss, setup) if setup.sums else outputs.loss  # all ranks have this batch
        result.record(LOSS, Moment(SGD, EVALUATION), loss)
        result.record(EVALUATION_LOGITS, Moment(SGD, EVALUATION), setup.logits(outputs.logits))
    wrapped.train()
