"""Proves one case: trains its arms, judges the candidate, and checks that neither arm is what it should not be."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from convergence import kept, ours
from convergence.arms import isolate
from convergence.arms.candidate import Candidate, PatchError, load_patch, train_candidate
from convergence.arms.in_setup import train_in_setup
from convergence.arms.pristine import Bystander, Fingerprint, remember_upstream
from convergence.arms.process import ProcessState, drawing
from convergence.arms.quantities import CONSISTENCY, LOG_PROBS, Failure, Finding
from convergence.arms.setups import SETUPS
from convergence.arms.tasks.causal_lm import PROMPT_TOKENS
from convergence.arms.tasks.task import Task
from convergence.arms.train import train
from convergence.arms.trajectory import Run, Trajectory
from convergence.blame.blame import blame, searched
from convergence.blame.failing import Key
from convergence.consistency import judge as consistency
from convergence.consistency import rollout
from convergence.consistency.paths import at, observe
from convergence.elsewhere.origin import HERE, NotHere, Origin
from convergence.judge import bitwise, tolerance
from convergence.judge.arms import Arms, judge, shown
from convergence.judge.compare import Pair
from convergence.judge.verdict import Verdict
from convergence.models import memory
from convergence.models.checkpoint import Checkpoint
from convergence.models.data import IGNORE, Batch, Step
from convergence.models.models import DTYPES, MODELS, Row
from convergence.models.rows import construct, find
from convergence.patches import BUILT_IN
from convergence.report import progress
from convergence.report.records import TRAINER, Blame, Case, Outcome, environment, outcome
from convergence.trainers import rows

# Between these probabilities a prediction counts as confident, and the hard profile asks for it. Nearer to 1, p - 1
# would have too few digits left in the truth itself: float64 keeps ten of them here.
CONFIDENT = (0.99, 1 - 1e-6)


def _upstream(case: Case) -> Fingerprint:
    """That of the mini models' classes and of the case's own."""
    return remember_upstream([*MODELS.values(), find(case.model)])


@dataclass
class Inputs:
    """What every arm of a case starts from."""

    template: nn.Module
    steps: list[Step]
    evaluation: Batch
    phases: tuple[str, ...]
    curve: list[Batch]
    task: Task

    def run(self, dtype: torch.dtype, device: torch.device, **other: Any) -> Run:
        given = {"phases": self.phases, "curve": self.curve, **other}
        return Run(self.template, self.steps, self.evaluation, dtype, device, self.task, **given)


@dataclass
class References(Inputs):
    """What every candidate of one model and dtype is judged against."""

    pairs: list[Pair]
    more: list[Pair] = field(default_factory=list)  # of more replicas, trained when a candidate needs them


def inputs(model: str, dtype: str, profile: str, seed: int) -> Inputs:
    """The template and what it is trained on, the same in every process."""
    row = find(model)
    template = row.build(seed)
    if profile == CONSISTENCY:  # nothing trains
        return Inputs(template, [], row.prompted(seed), (), [], row.task)
    chosen, evaluation = row.data(profile, seed, DTYPES[dtype])
    if profile == "hard":
        _ask_for_confident_predictions(template, chosen)
    return Inputs(template, chosen, evaluation, row.phases, row.curve(seed), row.task)


@functools.lru_cache(maxsize=1)
def references(model: str, dtype: str, profile: str, device: str, seed: int) -> References:
    """Template, inputs, and (truth, baseline) of the initial weights and of every replica: those that are kept, or else
    trained now."""
    references.cache_clear()  # of the case before: at real size these are much of a GPU's memory
    if device == "cuda":
        gc.collect()
    result = References(**vars(inputs(model, dtype, profile, seed)), pairs=[])
    make = functools.partial(_trained, result, model, dtype, profile, device)
    if find(model).is_long:  # gigabytes, or of weights that may change
        result.pairs = make()
    else:
        decides = {**environment(device), **isolate.settings(), "device": device}
        result.pairs = kept.kept(kept.kept_key(model, dtype, profile, device, seed), decides, make)
    return result


def _arm(profile: str) -> Callable[[Run], Trajectory]:
    """What an arm does with the inputs of ``profile``: it trains, or computes log-probabilities in several ways."""
    return observe if profile == CONSISTENCY else train


def _trained(
    given: Inputs,
    model: str,
    dtype: str,
    profile: str,
    device: str,
    nudges: Iterable[int | None] = (None, *range(tolerance.REPLICAS)),
) -> list[Pair]:
    pairs: list[Pair] = []
    arm = _arm(profile)
    where, judged, exact = torch.device(device), DTYPES[dtype], find(model).truth(dtype, device)
    for nudge in nudges:
        which = "" if nudge is None else f" of replica {nudge + 1}"
        progress.begin(f"truth{which}")
        truth = arm(given.run(exact, where, rounded_to=judged, nudge=nudge))
        truth.model = None  # the next arm may need all the memory there is
        progress.begin(f"baseline{which}")
        baseline = arm(given.run(judged, where, nudge=nudge))
        baseline.model = None
        pairs.append((truth, baseline))
    return pairs


def _references(case: Case) -> References:
    return references(case.model, case.dtype, case.profile, case.device, case.seed)


def more_pairs(known: References, model: str, dtype: str, profile: str, device: str) -> list[Pair]:
    """Truth and baseline of more replicas, trained once for all candidates of ``known``."""
    if not known.more:
        progress.begin("more replicas")
        nudges = range(tolerance.REPLICAS, tolerance.MANY_REPLICAS)
        known.more = _trained(known, model, dtype, profile, device, nudges)
    return known.more


def _arms(case: Case, reference: References, candidate: Candidate, faults: list[Failure]) -> Arms:
    more: Callable[[], list[Pair]] | None = None
    if not find(case.model).is_long and case.profile != CONSISTENCY:
        more = functools.partial(_more_of, case, reference, faults)
    return Arms([*reference.pairs], candidate, faults=faults, more=more, near=tolerance.NEAR)


def _more_of(case: Case, reference: References, faults: list[Failure]) -> list[Pair]:
    before = ours.launches()
    found = more_pairs(reference, case.model, case.dtype, case.profile, case.device)
    if ours.launches() != before:
        faults.append(
            Failure("baseline", "more replicas", Finding.NOT_PRISTINE, "they launched kernels of this package")
        )
    return found


def _ask_for_confident_predictions(template: nn.Module, inputs: list[Step]) -> None:
    """Where the model is confident, make its prediction the label: the gradient at the target is then p - 1 with
    p -> 1, which cancels catastrophically in a kernel that rounds too early."""
    with torch.no_grad():
        for batch in (batch for step in inputs for batch in step.batches):
            logits = template(**replace(batch, attention_mask=None).inputs()).logits  # padding is seen, too
            probability = logits.double().softmax(-1)
            confidence, prediction = probability[:, :-1].max(-1)
            labels, (low, high) = batch.labels[:, 1:], CONFIDENT
            asked = (confidence > low) & (confidence < high) & (labels != IGNORE)
            labels = torch.where(asked, prediction, labels)
            too_sure = (confidence >= high) & (labels == prediction)  # a text that repeats a token, and a tied head
            batch.labels[:, 1:] = torch.where(too_sure, (labels + 1) % logits.shape[-1], labels)


def absent(case: Case) -> str:
    """Why ``case`` cannot be had here; empty where it can."""
    if case.profile == TRAINER:
        return rows.absent(case)
    model = find(case.model)
    missing = model.absent(case.dtype, case.device)
    if missing or case.setup == "plain":
        return missing
    return SETUPS[case.setup].absent(model.build(case.seed), case.dtype, case.device)


def prove(case: Case, timeout: float = isolate.TIMEOUT, blames: bool = True, origin: Origin = HERE) -> Outcome:
    """Train and judge ``case``; the outcome says whether the candidate is the same mathematics, and why not.

    Args:
        timeout: the seconds that a patch of somebody else may take, in its own process, for one candidate.
        blames: whether a failed verdict is explained, by training parts of the patch again.
        origin: where the candidate is from. In a set-up it is from here.
    """
    if case.profile == TRAINER:
        return rows.prove(case, timeout)
    began = time.perf_counter()
    row, upstream = find(case.model), _upstream(case)
    about: dict[str, Any] = {"replicas": tolerance.REPLICAS, "symbols": len(upstream)}
    about["truth"] = memory.describe(row.truth(case.dtype, case.device))
    if changed := upstream.changes():
        verdict = Verdict(failures=[Failure("baseline", "before training", Finding.NOT_PRISTINE, ", ".join(changed))])
    else:
        arms = train_in_setup(case, timeout) if _is_in_setup(case) else _train(case, upstream, timeout, origin)
        if case.profile == CONSISTENCY and arms.candidate.trajectory is not None:
            _add_rollout(case, arms.pairs, arms.candidate.trajectory, timeout)
        verdict = judge(case, arms, _checks(case, arms))
        if not _is_in_setup(case):
            about["replicas"] = len(arms.pairs) - 1
        about |= shown(case, arms, functools.partial(_is_fused, case, arms))
        if blames and not verdict.passed and not _is_in_setup(case) and case.profile != CONSISTENCY:
            about["blame"], note = _blame(case, verdict, arms, timeout, origin)
            verdict += note
    notes = Verdict(notes=row.notes())
    return outcome(notes + verdict, seconds=round(time.perf_counter() - began, 2), **about)


def train_case(case: Case, given: Inputs | None = None) -> Candidate:
    """Train the candidate of ``case`` in this process, on ``given`` inputs (by default on those of the case)."""
    upstream = _upstream(case)
    if given is None:
        given = inputs(case.model, case.dtype, case.profile, case.seed)
    row = find(case.model)
    bystander = Bystander(row.bystander(given.template), given.evaluation, row.task)

    state, drawn = ProcessState(), list[str]()

    def changes() -> list[str]:
        return list(dict.fromkeys([*upstream.changes(), *state.changes(), *drawn, *bystander.changes()]))

    try:
        patch = drawing(load_patch(case.patch), drawn)  # only now: importing it may patch already
    except PatchError as error:
        return Candidate(failure=(Finding.CANNOT_RUN, str(error)), changed=changes())
    run = given.run(DTYPES[case.dtype], torch.device(case.device), patch=patch, construct=construct(case))
    return train_candidate(run, changes, _arm(case.profile))


def _is_isolated(case: Case, origin: Origin) -> bool:
    """Our own patch is known to change one model only, so it saves itself the other process."""
    return origin != HERE or case.patch not in BUILT_IN or case.scope != "instance"


def _blame(case: Case, verdict: Verdict, arms: Arms, timeout: float, origin: Origin) -> tuple[list[Blame], Verdict]:
    """Who made ``verdict`` fail. That changes no verdict, and when it fails itself, that is a note."""
    failed = {failure.key for failure in verdict.failures}
    if not searched(failed):  # no other process need be given all that was observed
        return [], Verdict()
    known = _references(case)  # to another process goes the name of their file, where they are kept
    judged = replace(known, more=arms.pairs[len(known.pairs) :])
    arguments = case, judged, failed, arms.candidate.trajectory
    try:
        found = origin.call(_who, *arguments, timeout=timeout) if _is_isolated(case, origin) else _who(*arguments)
    except NotHere as error:
        return [], Verdict(notes=[f"who did it was not searched: {error}"])
    except Exception as error:
        return [], Verdict(notes=[f"who did it could not be found out: {type(error).__name__}: {error}"])
    return found, Verdict()


def _who(case: Case, reference: References, failed: set[Key], trajectory: Trajectory | None) -> list[Blame]:
    run = reference.run(DTYPES[case.dtype], torch.device(case.device), construct=construct(case), curve=())
    return blame(case.patch, run, [*reference.pairs, *reference.more], failed, trajectory)


def _is_in_setup(case: Case) -> bool:
    return case.setup != "plain"


def _train(case: Case, upstream: Fingerprint, timeout: float, origin: Origin) -> Arms:
    """The arms of a case without a set-up."""
    before = ours.launches()
    reference, faults = _references(case), list[Failure]()
    if ours.launches() != before:
        faults.append(Failure("baseline", "", Finding.NOT_PRISTINE, "it launched kernels of this package"))
    progress.begin("candidate")
    if not _is_isolated(case, origin):
        return _arms(case, reference, train_case(case, reference), faults)
    if case.device == "cuda":  # the other process needs it
        torch.cuda.empty_cache()
    written: list[str] = []
    try:
        with kept.watched(written):
            candidate = origin.candidate(train_case, case, reference, timeout)
    except isolate.ProcessDied as death:
        candidate = Candidate.died(str(death), death.output)
    if written:
        what = f"while the patch ran: {', '.join(written)}"
        faults.append(Failure("baseline", "", Finding.CHANGED_WHERE_KEPT, what))
    if changed := upstream.changes():
        faults.append(Failure("baseline", "after training", Finding.NOT_PRISTINE, ", ".join(changed)))
    return _arms(case, reference, candidate, faults)


def _is_fused(case: Case, arms: Arms, report: Any) -> bool:
    """Whether the loss was computed from hidden states; in a set-up, with logits only for the caller who read them."""
    if not _is_in_setup(case):
        return bool(report.fuses_head)
    others = {reason: n for reason, n in report.fallbacks.items() if reason != "outputs.logits was read"}
    return report.fuses_head and not others and sum(report.fallbacks.values()) <= arms.reads


def _checks(case: Case, arms: Arms) -> Iterator[Failure]:
    """Whether the candidate is a patched model at all."""
    own = _check_foreign if arms.candidate.report is None else _check_ours
    yield from (_check_in_setup if _is_in_setup(case) else own)(case, arms)


def _add_rollout(case: Case, pairs: list[Pair], candidate: Trajectory, timeout: float) -> None:
    """Give every arm the log-probabilities of the rollout engine that is compared with it, where there is one."""
    row = find(case.model)
    if not isinstance(row, Checkpoint) or not row.rollout:
        return
    known = pairs[0][1].values[LOG_PROBS].get(at(row.rollout))  # of an earlier patch
    if known is None:
        if case.device == "cuda":  # the engine needs it
            torch.cuda.empty_cache()
        ids = _references(case).evaluation.input_ids
        known = rollout.log_probs(row.rollout, row.path, ids, case.dtype, timeout)[:, PROMPT_TOKENS - 1 :]
    consistency.add_rollout(row.rollout, known, pairs, candidate)


def _check_in_setup(case: Case, arms: Arms) -> Iterator[Failure]:
    """Nothing is hooked in a set-up, so less can be asked there: something changed, or every kernel ran."""
    candidate = arms.candidate
    if candidate.report is None:
        if not (candidate.census or candidate.changed or candidate.launches):
            yield Failure("candidate", "", Finding.NOT_PATCHED, "no module changed, and no kernel of this package ran")
    else:
        yield from _check_kernels(find(case.model), candidate, SETUPS[case.setup].kernels)


def _check_kernels(model: Row, candidate: Candidate, of_setup: tuple[str, ...] = ()) -> Iterator[Failure]:
    """Every kernel that this architecture, or its set-up, has a place for must have been put there, and must have run;
    where nobody knows of its places, every kernel that the patch says it has put somewhere, and there must be one."""
    report, census = candidate.report, candidate.report.counts()
    loss = "linear_cross_entropy" if "linear_cross_entropy" in report.kernels else "cross_entropy"
    wanted = [*(k for k in (*model.kernels, *of_setup) if k in report.kernels), loss]
    for kernel in wanted if model.kernels else [k for k, n in census.items() if n] or wanted:
        if not census.get(kernel):
            why = "; ".join(f"{left.path}: {left.reason}" for left in report.left) or "no candidate was found"
            yield Failure("candidate", "", Finding.NOT_PATCHED, f"{kernel} replaced nothing: {why}", "at least 1")
        elif not ours.is_launched(kernel, candidate.launches):
            yield Failure("candidate", "", Finding.NOT_LAUNCHED, f"{kernel} was never launched", "at least 1")


def _check_ours(case: Case, arms: Arms) -> Iterator[Failure]:
    """Every kernel that this architecture has a place for must have been put in all such places, and must have run."""
    model, candidate, report = find(case.model), arms.candidate, arms.candidate.report
    yield from _check_kernels(model, candidate)
    listed = {replacement.path for replacement in report.replaced}
    classes = {replacement.was for replacement in report.replaced if replacement.kernel in model.kernels}
    for path, module in _references(case).template.named_modules():
        if type(module).__name__ in classes and path not in listed:
            yield Failure(
                "candidate", "", Finding.NOT_PATCHED, f"{path} is left, though others of its class are replaced"
            )
    root = type(_references(case).template).__name__  # a language model arms its head, and is not listed
    changed = sum(candidate.census.values()) - candidate.census.get(root, 0)
    if changed < len(listed):
        yield Failure(
            "candidate", "", Finding.NOT_PATCHED, f"{changed} modules changed", f"the {len(listed)} that are listed"
        )


def _check_foreign(case: Case, arms: Arms) -> Iterator[Failure]:
    """A patch of somebody else must have changed a class, a forward or a symbol in a module that this model's classes
    come from, or have launched a kernel, or be another by at least one bit of what was observed."""
    candidate = arms.candidate
    assert candidate.trajectory is not None
    classes = {cls for module in _references(case).template.modules() for cls in type(module).__mro__}
    own = tuple(f"{cls.__module__}." for cls in classes)
    same = bitwise.is_same(arms.pairs[0][1], candidate.trajectory)
    reached = any(symbol.startswith(own) for symbol in candidate.changed)
    if same and not (candidate.census or reached or candidate.launches):
        yield Failure("candidate", "", Finding.NOT_PATCHED, "no module changed and every bit is the baseline's")
