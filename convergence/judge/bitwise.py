"""The tier for refactorings: was every observed value, bit for bit, what it was in an earlier run?

A record keeps a digest of every tensor of baseline and candidate. Two runs are comparable when everything that decides
a bit besides our own code is the same: case, device, versions, threads. The baseline runs none of our code, so where
its digests differ the environment is at fault, whatever it says of itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch

from convergence.arms.quantities import END, GENERATED, LOSS, SCORES, SGD, Failure, Finding, Moment
from convergence.arms.trajectory import Trajectory
from convergence.report.records import Case, Digests, Outcome, Record

# 48 bits: two different tensors share a word once in 3e14 comparisons.
_WORD = 12


def digest(trajectory: Trajectory) -> list[Digests]:
    """Digests of everything that ``trajectory`` observed, grouped by the steps at which it was."""
    values = dict(trajectory.values)
    if trajectory.generated is not None and trajectory.scores is not None:
        values[GENERATED] = {Moment(SGD, END): trajectory.generated}
        values[SCORES] = {Moment(SGD, END): trajectory.scores}
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for quantity, steps in values.items():
        groups.setdefault(tuple(map(str, steps)), {})[str(quantity)] = " ".join(map(_word, steps.values()))
    return [{"steps": list(steps), "quantities": quantities} for steps, quantities in groups.items()]


def _word(value: torch.Tensor) -> str:
    kind = f"{value.dtype} {list(value.shape)}".encode()
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(kind + content.tobytes()).hexdigest()[:_WORD]


def earlier(records: Sequence[Record], case: Case, environment: Mapping[str, str]) -> Record:
    """The newest of ``records`` (oldest first) that ``case``, in this ``environment``, can be compared with.

    Raises:
        ValueError: there is none; the message says what the nearest one has and this one has not.
    """
    same = [other for other in records if other.case == case]
    if not same:
        near = min((_other(vars(other.case), vars(case)) for other in records), key=len)
        raise ValueError(f"{case}: not recorded; the nearest record has {', '.join(near)}")
    for other in reversed(same):
        if other.environment == environment:
            if not {"baseline", "candidate"} <= other.digests.keys():
                raise ValueError(f"{other.name}: its candidate was not trained to the end on {other.at[:19]}")
            return other
    others = ", ".join(_other(same[-1].environment, environment))
    raise ValueError(f"{case}: recorded in another environment: {others}")


def _other(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    return [
        f"{name} {there.get(name, 'unknown')} (here {here.get(name, 'unknown')})"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]


def compared(outcome: Outcome, before: Record) -> Outcome:
    """``outcome``, failed for every observed value that is not bit for bit what it was in ``before``, in order of
    time."""
    baseline = differences(outcome, before, "baseline")
    notes = outcome.notes
    if baseline:
        quantity, step = baseline[0]
        value = f"the baseline differs, too, in {len(baseline)} values, and no patch touches it"
        rows = [Failure(quantity, step, Finding.BIT_FOR_BIT, value, "the same environment")]
        note = (
            "The environment, or the proof itself, is another than in the earlier run, or is not deterministic: "
            "nothing follows for the patch."
        )
        notes = [*notes, note]
    else:
        rows = [
            Failure(quantity, step, Finding.BIT_FOR_BIT, "differs", f"as on {before.at[:19]}")
            for quantity, step in differences(outcome, before, "candidate")
        ]
    if not rows:
        return outcome
    failures, reason = [*outcome.failures, *rows], outcome.reason or str(rows[0])
    return dataclasses.replace(outcome, verdict="different", reason=reason, failures=failures, notes=notes)


def differences(outcome: Outcome, before: Outcome, arm: str) -> list[tuple[str, str]]:
    """Quantity and step of what is in only one of the two, or another in each, in order of time."""
    now, then = _words(outcome, arm), _words(before, arm)
    both = {**now, **then}
    return [key for key in sorted(both, key=_time(both)) if now.get(key) != then.get(key)]


def _words(outcome: Outcome, arm: str) -> dict[tuple[str, str], str]:
    return {
        (quantity, step): word
        for group in outcome.digests.get(arm, ())
        for quantity, words in group["quantities"].items()
        for step, word in zip(group["steps"], words.split(), strict=True)
    }


def _time(keys: Mapping[tuple[str, str], str]) -> Callable[[tuple[str, str]], tuple[int, ...]]:
    """A sort key: phases, then their steps, each in the order of the first that was seen; the loss before gradients."""
    moments = {step: Moment.parse(step) for _, step in keys}
    phases = list(dict.fromkeys(at.phase for at in moments.values()))
    steps = list(dict.fromkeys(at.whole() for at in moments.values()))
    quantities = list(dict.fromkeys(quantity for quantity, _ in keys))

    def key(item: tuple[str, str]) -> tuple[int, ...]:
        quantity, at = item[0], moments[item[1]]
        return phases.index(at.phase), steps.index(at.whole()), quantity != str(LOSS), quantities.index(quantity)

    return key


def is_same(one: Trajectory, other: Trajectory) -> bool:
    """Whether all that was observed of ``one`` is, bit for bit, what was observed of ``other``."""
    for quantity, by_step in one.values.items():
        for step, value in by_step.items():
            found = other.values.get(quantity, {}).get(step)
            if found is None or found.dtype is not value.dtype or not torch.equal(found, value):
                return False
    return True
