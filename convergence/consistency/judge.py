"""Decides whether a patch widens what the unpatched model shows: differences of log-probabilities, in float64.

A *comparison* is a difference d per token: of one path from float64's by the same path, or of the training forward from
a rollout's path, in the same arm. Of each there are four figures, with the importance ratio r = exp(d):

- largest difference: max |d|
- mean difference: mean |d|
- KL per token: mean of r - 1 - log r, the estimate that trainers report. It is never negative.
- share outside 1 ± 0.01: of tokens with |r - 1| > 0.01

The measure of the candidate is what the honest arms (the baseline and its replicas) show in the same figure. Between
two paths of one arm this may be nothing, where an unpatched model runs the same kernels in both. There, the measure is
at least the error of the two paths against float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from convergence.arms.quantities import COMPARED, DIFFERENCES, LOG_PROBS, PREFILL, TRAINING_FORWARD, Moment, Quantity
from convergence.arms.trajectory import Trajectory
from convergence.consistency.paths import at
from convergence.judge import tolerance
from convergence.judge.compare import Pair, check_presence, left_out, own_error
from convergence.judge.verdict import Evidence, Verdict, judged

# What an importance ratio may be off before a trainer's clipping or masking sees it.
RATIO = 0.01
_LARGEST, _MEAN, _KL, _SHARE = DIFFERENCES


class Figures(NamedTuple):
    """What is judged of the differences d of all tokens."""

    largest: float
    mean: float
    kl: float
    share: float

    @classmethod
    def of(cls, d: torch.Tensor) -> Figures:
        d = d.double()
        kl = float((d.expm1() - d).mean())  # below a unit of roundoff it may come out negative
        return cls(float(d.abs().max()), float(d.abs().mean()), max(kl, 0.0), share_outside(d))


def share_outside(d: torch.Tensor) -> float:
    """The share of tokens whose importance ratio exp(d) leaves 1 ± :data:`RATIO`."""
    return float((d.double().expm1().abs() > RATIO).double().mean())


def differences(truth: Trajectory, arm: Trajectory) -> dict[str, torch.Tensor]:
    """The differences d of every comparison, by its name."""
    exact, values = truth.values[LOG_PROBS], arm.values[LOG_PROBS]
    paths = [moment.step for moment in exact]
    found = {_from_truth(path): values[at(path)].double() - exact[at(path)].double() for path in paths}
    training = values[at(TRAINING_FORWARD)].double()
    return found | {_from_training(path): training - values[at(path)].double() for path in paths[1:]}


def add_rollout(engine: str, log_probs: torch.Tensor, pairs: Sequence[Pair], candidate: Trajectory) -> None:
    """Add what ``engine`` computed, ``log_probs`` [batch, length - prompt], to every arm as a path of that name.

    It ran the weights of the baseline. A replica has other weights, so it gets what the engine would show if it were
    off from the replica's truth as it is from the baseline's.
    """
    exact = [truth.values[LOG_PROBS][at(PREFILL)] for truth, _ in pairs]
    off = log_probs.double() - exact[0].double()
    for (truth, arm), prefill in zip(pairs, exact, strict=True):
        truth.values[LOG_PROBS][at(engine)] = prefill
        arm.values[LOG_PROBS][at(engine)] = (prefill.double() + off).float()
    candidate.values.setdefault(LOG_PROBS, {})[at(engine)] = log_probs


def described(truth: Trajectory, arms: dict[str, Trajectory]) -> dict[str, dict[str, dict[str, float]]]:
    """What a record holds of ``arms``: the figures of every comparison, by its name and that of the arm. There are none
    of an arm that lacks a path, or has one of another shape."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    shapes = _shapes(truth)
    for arm, trajectory in arms.items():
        if _shapes(trajectory) == shapes:
            for name, d in differences(truth, trajectory).items():
                found.setdefault(name, {})[arm] = dict(zip(DIFFERENCES, Figures.of(d), strict=True))
    return found


def _shapes(arm: Trajectory) -> dict[Moment, torch.Size]:
    return {moment: value.shape for moment, value in arm.values.get(LOG_PROBS, {}).items()}


def _from_truth(path: str) -> str:
    return f"{path} against float64"


def _from_training(path: str) -> str:
    return f"{TRAINING_FORWARD} against {path}"


def judge(pairs: Sequence[Pair], candidate: Trajectory, dtype: torch.dtype) -> Verdict:
    """Judge ``candidate`` against ``pairs``: (truth, baseline) first, then each replica's truth and replica.

    Args:
        dtype: that of the weights of baseline and candidate.
    """
    return Verdict.of(_evidence(pairs, candidate, dtype))


def _evidence(pairs: Sequence[Pair], candidate: Trajectory, dtype: torch.dtype) -> Iterator[Evidence]:
    present = yield from check_presence(pairs, candidate, foreign=False)
    exact = pairs[0][0].values[LOG_PROBS]
    if len(present.get(LOG_PROBS, ())) < len(exact):
        return
    honest, own = [differences(*pair) for pair in pairs], differences(pairs[0][0], candidate)
    paths = [moment.step for moment in exact]
    for path in paths:
        size = exact[at(path)].double()
        floor = tolerance.error_floor(dtype) * torch.tensor([float(size.abs().max()), *[tolerance.rms(size)] * 2])
        name = _from_truth(path)
        yield from _judge_one(name, path, own[name], [[d[name]] for d in honest], floor)
    for path in paths[1:]:
        name = _from_training(path)
        against = (_from_truth(TRAINING_FORWARD), _from_truth(path))
        errors = [[_errors(d[other]) for other in against] for d in honest]
        floor = torch.tensor(errors).square().mean(0).sqrt().amax(0)
        yield from _judge_one(name, path, own[name], [[d[which] for which in (name, *against)] for d in honest], floor)


def _errors(d: torch.Tensor) -> list[float]:
    """The figures of ``d`` that grow with it as an error does; KL is half of its square."""
    figures = Figures.of(d)
    return [figures.largest, figures.mean, math.sqrt(2 * figures.kl)]


def _judge_one(
    name: str, path: str, own: torch.Tensor, honest: list[list[torch.Tensor]], floor: torch.Tensor
) -> Iterator[Evidence]:
    """Judge the differences ``own`` of one comparison, of that ``name``.

    Args:
        path: the one that is compared.
        honest: of every honest arm the same differences, and those that measure them where they are nothing.
        floor: [3], below which no error is judged.
    """
    errors = torch.tensor([_errors(first) for first, *_ in honest], dtype=torch.float64)
    figures, widest, compared = Figures.of(own), 0.0, (Quantity(COMPARED, name), at(path))
    for i, statistic in enumerate((_LARGEST, _MEAN, _KL)):
        one, least = errors[:, i : i + 1], floor[i : i + 1].double()
        unit, worst_replica = float(own_error(one, least)), left_out(one, least)
        ratios = tolerance.ratio_bound(worst_replica, one_draw=False), tolerance.ratio_limit(worst_replica)
        bound, limit = ((ratio * unit) ** 2 / 2 if statistic == _KL else ratio * unit for ratio in ratios)
        yield from judged(*compared, statistic, figures[i], bound, limit=limit)
        widest = max(widest, ratios[0])
    # Who may be off by so many times as much may have as many tokens outside as that would put there.
    most = max(share_outside(widest * d) for arm in honest for d in arm)
    yield from judged(*compared, _SHARE, figures.share, most)
