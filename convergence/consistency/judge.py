"""Decides whether a patch widens the differences of log-probabilities that the unpatched model shows, in float64.

A *comparison* is a difference d per token. One kind compares a path with float64 by the same path. The other kind
compares the training forward with a rollout's path in the same arm. Each comparison has four figures, with the
importance ratio r = exp(d):

- largest difference: max |d|
- mean difference: mean |d|
- KL per token: mean of r - 1 - log r. Trainers report this estimate, which is never negative.
- share outside 1 ± 0.01: the share of tokens with |r - 1| > 0.01

The candidate is measured against the same figure of the honest arms (the baseline and its replicas). Two paths of one
honest arm may not differ at all, because an unpatched model can run the same kernels in both. Then the measure is at
least the error of the two paths against float64.
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

# A trainer's clipping or masking reacts to an importance ratio that is off by more than this.
RATIO = 0.01
_LARGEST, _MEAN, _KL, _SHARE = DIFFERENCES


class Figures(NamedTuple):
    """The judged figures of the differences d of all tokens."""

    largest: float
    mean: float
    kl: float
    share: float

    @classmethod
    def of(cls, d: torch.Tensor) -> Figures:
        d = d.double()
        kl = float((d.expm1() - d).mean())  # roundoff may make a tiny KL negative
        return cls(float(d.abs().max()), float(d.abs().mean()), max(kl, 0.0), share_outside(d))


def share_outside(d: torch.Tensor) -> float:
    """The share of tokens whose importance ratio exp(d) leaves 1 ± :data:`RATIO`."""
    return float((d.double().expm1().abs() > RATIO).double().mean())


def differences(truth: Trajectory, arm: Trajectory) -> dict[str, torch.Tensor]:
    """The differences d of every comparison, by the comparison's name."""
    exact, values = truth.values[LOG_PROBS], arm.values[LOG_PROBS]
    paths = [moment.step for moment in exact]
    found = {_from_truth(path): values[at(path)].double() - exact[at(path)].double() for path in paths}
    training = values[at(TRAINING_FORWARD)].double()
    return found | {_from_training(path): training - values[at(path)].double() for path in paths[1:]}


def add_rollout(engine: str, log_probs: torch.Tensor, pairs: Sequence[Pair], candidate: Trajectory) -> None:
    """Add the engine's ``log_probs`` [batch, length - prompt] to every arm, as a path named ``engine``.

    The engine ran the baseline's weights. A replica has other weights. So a replica gets its own truth plus the
    engine's difference from the baseline's truth.
    """
    exact = [truth.values[LOG_PROBS][at(PREFILL)] for truth, _ in pairs]
    off = log_probs.double() - exact[0].double()
    for (truth, arm), prefill in zip(pairs, exact, strict=True):
        truth.values[LOG_PROBS][at(engine)] = prefill
        arm.values[LOG_PROBS][at(engine)] = (prefill.double() + off).float()
    candidate.values.setdefault(LOG_PROBS, {})[at(engine)] = log_probs


def described(truth: Trajectory, arms: dict[str, Trajectory]) -> dict[str, dict[str, dict[str, float]]]:
    """A record's figures of ``arms``: by comparison, by arm, by figure. An arm that lacks a path, or has a path of
    another shape, has no figures."""
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
        dtype: the dtype of baseline's and candidate's weights.
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
    """The figures of ``d`` that grow linearly with ``d``. KL grows with the square, so its root is taken."""
    figures = Figures.of(d)
    return [figures.largest, figures.mean, math.sqrt(2 * figures.kl)]


def _judge_one(
    name: str, path: str, own: torch.Tensor, honest: list[list[torch.Tensor]], floor: torch.Tensor
) -> Iterator[Evidence]:
    """Judge the differences ``own`` of the comparison ``name``.

    Args:
        path: the compared path.
        honest: for every honest arm the same differences, then the differences that measure them if they are zero.
        floor: [3]: smaller errors are not judged.
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
    # A candidate may be off by ``widest`` times the honest difference, so as many tokens may be outside as that
    # difference puts there.
    most = max(share_outside(widest * d) for arm in honest for d in arm)
    yield from judged(*compared, _SHARE, figures.share, most)
