"""How a failure shows in a trajectory: by how much, and in which step and tensor first. Nothing is trained here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from convergence.arms.quantities import (
    ADAMW,
    END,
    EVALUATION,
    FORWARD,
    GRADIENT,
    HEAD,
    HIDDEN_GRADIENT,
    HIDDEN_STATES,
    INITIAL,
    OUTPUT,
    OUTPUT_GRADIENT,
    SGD,
    Finding,
    Moment,
    Quantity,
)
from convergence.arms.trajectory import Trajectory
from convergence.judge.compare import Pair, compare
from convergence.judge.verdict import Verdict

RELATIVE = Finding.GAIN_AGAINST_THE_OTHERS  # also fails for a tensor that is right, when most others are not

Key = tuple[str, str]  # quantity and finding of a failure
Chosen = Callable[[Moment], bool]


@dataclass(frozen=True)
class Shown:
    """How a run shows the failure: the worst share of its bound among the statistics that failed, and what it is."""

    share: float
    words: str

    @property
    def fails(self) -> bool:
        return not self.share <= 1

    def __str__(self) -> str:
        return f"{'different' if self.fails else 'equal'} ({self.words})"


@dataclass(frozen=True)
class Failure:
    """What failed (``keys``), and what it was judged against."""

    keys: frozenset[Key]
    pairs: Sequence[Pair]
    dtype: torch.dtype
    foreign: bool

    def judge(self, trajectory: Trajectory, chosen: Chosen) -> Verdict:
        """The verdict on what happened in ``chosen`` steps, warnings aside: no step is known to have given them."""
        pairs = [(_limited(truth, chosen), _limited(arm, chosen)) for truth, arm in self.pairs]
        return compare(pairs, _limited(trajectory, chosen), self.dtype, self.foreign)

    def found(self, verdict: Verdict) -> set[Key]:
        """What of this failure ``verdict`` has."""
        return {failure.key for failure in verdict.failures} & self.keys

    def shown(self, verdict: Verdict) -> Shown:
        numbers = [(s.quantity, s.statistic) for s in verdict.statistics]
        worst = Shown(0.0, "nothing to compare")
        for s in sorted(verdict.statistics, key=lambda s: s.statistic == RELATIVE):
            if (
                (s.quantity, s.statistic) in self.keys
                and s.share > worst.share
                and not (worst.fails and s.statistic == RELATIVE)
            ):
                worst = Shown(s.share, f"{s.statistic} {s.value:.3g} of {s.bound:.3g} in {s.quantity}")
        for failure in verdict.failures:
            if failure.key in self.keys.difference(numbers):
                return Shown(math.inf, f"{failure.quantity}: {failure.finding}: {failure.value}")
        return worst

    def is_forward(self, verdict: Verdict, at_first: Verdict) -> bool:
        """Whether a forward pass shows it: at the initial weights (``at_first``), or wherever it is shown at all."""
        found = [_is_forward(quantity) for quantity, _ in self.found(verdict)]
        return any(_is_forward(quantity) for quantity, _ in self.found(at_first)) or (bool(found) and all(found))

    def first(self, candidate: Trajectory, arrival: dict[str, int]) -> tuple[str, str]:
        """The first step, and the first tensor in it, of what failed; ``arrival`` numbers the parameters' gradients.

        A single step is judged by few samples of noise. So only what fails over a whole phase is looked for in its
        steps, and a step is named only for such a tensor.
        """

        def failing(keys: set[Key], chosen: Chosen) -> set[Key]:
            failures = self.found(self.judge(candidate, chosen)) & keys
            return {key for key in failures if key[1] != RELATIVE} or failures

        def earliest(keys: Collection[Key]) -> str:
            return min((quantity for quantity, _ in keys), key=lambda quantity: (_order(quantity, arrival), quantity))

        for phase in (INITIAL, SGD, ADAMW):
            failed = failing(set(self.keys), lambda at: at.phase == phase)  # noqa: B023  (called at once)
            for step in self.steps(phase) if failed else ():
                off = failing(failed, lambda at: at.whole() == step)  # noqa: B023
                if off:
                    return str(step), earliest(off)
            if failed:
                return f"{phase}: in the mean of its steps", earliest(failed)
        return "in the mean of all steps", earliest(self.keys)

    def steps(self, phase: str) -> list[Moment]:
        """The steps of ``phase`` in the order in which they are run."""
        moments = [at for values in self.pairs[0][0].values.values() for at in values if at.phase == phase]
        found = dict.fromkeys(at.whole() for at in moments)
        last = [at for at in (Moment(phase, END), Moment(phase, EVALUATION)) if at in found]
        return [at for at in found if at not in last] + last


def _limited(trajectory: Trajectory, chosen: Chosen) -> Trajectory:
    """What ``trajectory`` showed in ``chosen`` steps; text that it generated belongs to SGD's evaluation."""
    values = {
        quantity: kept
        for quantity, by_step in trajectory.values.items()
        if (kept := {at: value for at, value in by_step.items() if chosen(at)})
    }
    complaints, notes = ([r for r in remarks if chosen(r.at)] for remarks in (trajectory.complaints, trajectory.notes))
    result = Trajectory(values, trajectory.forms, complaints=complaints, notes=notes, measured=trajectory.measured)
    if chosen(Moment(SGD, EVALUATION)):
        result.generated, result.scores = trajectory.generated, trajectory.scores
    return result


def _is_forward(quantity: str) -> bool:
    """Whether a forward pass alone computes ``quantity``."""
    found = Quantity.parse(quantity)
    return found in FORWARD or found.kind in (HIDDEN_STATES, OUTPUT)


def _order(text: str, arrival: dict[str, int]) -> tuple[int, int]:
    """When a step computes a quantity: the forward pass, then the backward pass from the loss on, then the rest."""
    quantity = Quantity.parse(text)
    if _is_forward(text):
        return 0, quantity.kind != HIDDEN_STATES
    if quantity in HEAD:
        return 1, HEAD.index(quantity)
    if quantity.kind == OUTPUT_GRADIENT:
        return 1, 0
    if quantity.kind == HIDDEN_GRADIENT:  # after all gradients of the module that they enter
        return 2, max((n for name, n in arrival.items() if name.startswith(f"{quantity.name}.")), default=-1)
    arrived = arrival.get(quantity.name, -1)
    return (2, arrived) if quantity.kind == GRADIENT and arrived >= 0 else (3, arrived)
