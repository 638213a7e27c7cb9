"""Decides whether a candidate's trajectory is the baseline's mathematics: ratios of errors and gains, in float64.

For a quantity (a gradient, say) at step k, with the truth t_k, a candidate c_k and a baseline b_k:

    error   e_k(c)  = |c_k - t_k| / |t_k|
    gain    g_k(c)  = <c_k, t_k> / <t_k, t_k>

A *replica* is a baseline whose initial weights were moved by one unit in the last place. It has a truth of its own, so
its errors are a fresh sample of rounding noise. The *honest arms* are the baseline and its replicas. Five statistics
judge:

- *Error ratio*: e_k(c) divided by the root mean square of e_k over the honest arms. The root mean square of this ratio
  over the steps of a phase is judged. It sees errors that are larger than PyTorch's own rounding.
- *Largest error ratio*: the same of the largest error of an element. It sees one wrong row among many, which a root
  mean square hides.
- *Row error ratio*: the worst e_k of one token's row, relative to the size of that row and to the honest arms' error in
  it. It sees a wrong row even if the row is small.
- *Gain*: the mean of g_k over all steps that run the same way (training, evaluation, decoding). Each step is weighted
  by the inverse of its measured variance. Noise averages out, so the gain sees a wrong scale that bfloat16's rounding
  hides from the error ratio. One bias remains: a gradient at noisy activations is a smoothed gradient, so the
  baseline's own mean lies up to 0.001 from 1 in bfloat16. A candidate's gain may therefore lie anywhere between 1 and
  the replicas' mean. Its distance from this interval is judged.
- *Gain against the others*: the gain less the step's median over all parameters. Rounding in the loss moves the gains
  of all parameters of a step together. The difference shows a single parameter more sharply.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from convergence.arms.lifetimes import UNTIL_COLLECTED
from convergence.arms.quantities import (
    BY_ELEMENT,
    CALLERS_LOGITS,
    DECODING,
    DISPLACEMENT,
    END,
    EVALUATION,
    EVALUATION_LOGITS,
    GENERATED,
    GRADIENT,
    GRADIENT_NORM,
    HIDDEN,
    HIDDEN_GRADIENT,
    HIDDEN_STATES,
    INITIAL,
    LOGITS,
    LOSS,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER,
    SGD,
    TARGET_LOGIT,
    TRAINING_LOGITS,
    WITHOUT_GRADIENTS,
    Failure,
    Finding,
    Moment,
    Quantity,
)
from convergence.arms.trajectory import Trajectory
from convergence.judge import long_run, tolerance
from convergence.judge.verdict import Evidence, Verdict, judged

# Quantities and kinds that a patch of another package need not have.
_NOT_OBSERVABLE = (LOGITS, BY_ELEMENT, TARGET_LOGIT, TRAINING_LOGITS, HIDDEN_STATES, HIDDEN_GRADIENT, OUTPUT_GRADIENT)
# Quantities and kinds with similar noise. Each group measures the noise of a step together.
_GRADIENTS = (GRADIENT, LOGITS, HIDDEN, OUTPUT_GRADIENT)
_NUMBERS = (LOSS, GRADIENT_NORM)
_OTHERS = ((HIDDEN_GRADIENT,), (EVALUATION_LOGITS, TRAINING_LOGITS, HIDDEN_STATES, OUTPUT), (DISPLACEMENT, PARAMETER))
# Quantities [..., tokens, columns]. A kernel may get a single token's row wrong.
_IN_ROWS = (
    HIDDEN_GRADIENT,
    HIDDEN_STATES,
    LOGITS,
    EVALUATION_LOGITS,
    TRAINING_LOGITS,
    OUTPUT,
    OUTPUT_GRADIENT,
)

Pair = tuple[Trajectory, Trajectory]  # the truth, and the arm that is measured against it


def compare(pairs: Sequence[Pair], candidate: Trajectory, dtype: torch.dtype, foreign: bool = False) -> Verdict:
    """Judge ``candidate`` against ``pairs``: (truth, baseline) first, then each replica's truth and replica.

    Args:
        dtype: the dtype that baseline and candidate trained in.
        foreign: whether the patch is another package's. It may never make logits and never call the head: that is
            noted, and does not fail.
    """
    return Verdict.of(_evidence(pairs, candidate, dtype, foreign))


def _evidence(pairs: Sequence[Pair], candidate: Trajectory, dtype: torch.dtype, foreign: bool) -> Iterator[Evidence]:
    truth, baseline = pairs[0]
    comparable = yield from check_presence(pairs, candidate, foreign)
    yield from _judge_statistics(pairs, candidate, comparable, dtype)
    yield from _judge_generation(truth, baseline, candidate)
    honest = [arm.curve for _, arm in pairs if arm.curve is not None]
    if honest and candidate.curve is not None:
        yield from long_run.judge(honest, candidate.curve)
    for complaint in candidate.complaints:
        if complaint not in baseline.complaints:
            yield Failure.of("what the caller holds", "", Finding.OVERWRITTEN, str(complaint))
    kept = {remark.what for remark in baseline.alive}
    for remark in candidate.alive:
        if remark.what.endswith(UNTIL_COLLECTED) or remark.what in kept:
            yield str(remark)
        else:
            yield Failure.of("what a step made", remark.at, Finding.KEPT_ALIVE, remark.what)
    for note in candidate.notes:
        if foreign:
            yield str(note)
        else:
            yield Failure.of(CALLERS_LOGITS, "", Finding.MISSING, str(note))
    for warning in sorted(set(candidate.warnings) - set(baseline.warnings)):
        yield Failure.of("transformers", "", Finding.NEW_WARNING, warning)


def check_presence(
    pairs: Sequence[Pair], candidate: Trajectory, foreign: bool
) -> Generator[Evidence, None, dict[Quantity, list[Moment]]]:
    """Check names, shapes, dtypes and finiteness, and return the steps that can be judged.

    A value must be zero if the truth is zero. It may be zero only if the truth or an honest arm is: a small step may
    round away in bfloat16."""
    truth, baseline = pairs[0]
    judged: dict[Quantity, list[Moment]] = {}
    for quantity in {**truth.values, **candidate.values}:
        expected, got = truth.values.get(quantity, {}), candidate.values.get(quantity, {})
        if foreign and _need_not_be(quantity) and (unseen := expected.keys() - got.keys()):
            yield f"{quantity}: not observable in {len(unseen)} of {len(expected)} steps"
            expected = {step: value for step, value in expected.items() if step in got}
        elif quantity not in candidate.values:
            yield Failure.of(quantity, "every step", Finding.MISSING, "the candidate never had it")
            continue
        for step in {**expected, **got}:
            if step not in got:
                yield Failure.of(quantity, step, Finding.MISSING, "it never arrived")
            elif step not in expected:
                yield Failure.of(quantity, step, Finding.UNEXPECTED, "the baseline has none")
            elif (shape := candidate.form(quantity, step)[0]) != (wanted := truth.form(quantity, step)[0]):
                if foreign and _is_inside(quantity):
                    yield f"{quantity}: has another layout in {step}, and is not compared"
                else:
                    yield Failure.of(quantity, step, Finding.SHAPE, str(tuple(shape)), str(tuple(wanted)))
            elif not _need_not_be(quantity) and (
                (dtype := candidate.form(quantity, step)[1]) != (own := baseline.form(quantity, step)[1])
            ):
                yield Failure.of(quantity, step, Finding.DTYPE, str(dtype), str(own))
            elif not bool(torch.isfinite(baseline.values[quantity][step]).all()):
                yield Failure.of(quantity, step, Finding.FINITE, "the baseline itself is not")
            elif not bool(torch.isfinite(got[step]).all()):
                bad = int((~torch.isfinite(got[step])).sum())
                yield Failure.of(quantity, step, Finding.FINITE, f"{bad} of {got[step].numel()} elements are not")
            elif not bool(expected[step].any()):
                if bool(got[step].any()):
                    yield Failure.of(quantity, step, Finding.ZERO, f"{float(got[step].abs().max()):.3g}", "0")
            elif not bool(got[step].any()) and all(bool(arm.values[quantity][step].any()) for _, arm in pairs):
                yield Failure.of(quantity, step, Finding.NON_ZERO, "all elements are 0")
            else:
                judged.setdefault(quantity, []).append(step)
    return judged


def _need_not_be(quantity: Quantity) -> bool:
    return quantity in _NOT_OBSERVABLE or quantity.kind in _NOT_OBSERVABLE


def _is_inside(quantity: Quantity) -> bool:
    """Whether it is observed between modules of the model. There another package may store tokens in another layout,
    such as without padding."""
    return quantity.kind in (HIDDEN_STATES, HIDDEN_GRADIENT) and quantity != HIDDEN


@dataclass
class _Measured:
    """One quantity: errors, largest errors, and gains less 1, all [arms, steps]. The candidate is the last arm.

    ``floor`` and ``largest_floor`` [steps] are the cost of one rounding.
    """

    steps: list[Moment]
    error: torch.Tensor
    largest: torch.Tensor
    gain: torch.Tensor
    floor: torch.Tensor
    largest_floor: torch.Tensor
    scalar: bool
    by_element: bool = False

    def of(self, chosen: list[int]) -> _Measured:
        """The same of the steps with these numbers."""
        columns = {name: getattr(self, name)[..., chosen] for name in ("error", "largest", "gain", "floor")}
        steps, floor = [self.steps[k] for k in chosen], self.largest_floor[chosen]
        return dataclasses.replace(self, steps=steps, largest_floor=floor, **columns)


def _measure(
    pairs: Sequence[Pair],
    candidate: Trajectory,
    quantity: Quantity,
    steps: list[Moment],
    dtype: torch.dtype,
    by_element: bool = False,
) -> _Measured:
    columns = []
    for step in steps:
        figures = functools.partial(_figures, quantity=quantity, by_element=by_element)
        columns.append(_of_all_arms(pairs, candidate, quantity, step, figures, "element" if by_element else ""))
    error, largest, gain, peak = torch.stack(columns, 2)
    value = candidate.values[quantity][steps[0]]
    held_in = torch.float32 if quantity in (LOSS, GRADIENT_NORM) else dtype
    floor = torch.full((len(steps),), tolerance.error_floor(held_in), dtype=torch.float64)
    return _Measured(steps, error, largest, gain, floor, floor * peak[-1], value.ndim == 0, by_element)


def _of_all_arms(
    pairs: Sequence[Pair],
    candidate: Trajectory,
    quantity: Quantity,
    step: Moment,
    figures: Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor],
    name: str,
) -> torch.Tensor:
    """The ``figures`` [..., arms, all] of the honest arms and of the candidate, which is the last arm. Those of the
    honest arms are cached under ``name``, because many candidates are compared with the same honest arms."""
    honest = [(truth.values[quantity][step], arm.values[quantity][step]) for truth, arm in pairs]
    own = [(honest[0][0], candidate.values[quantity][step])]
    known, key = pairs[0][1].measured, (quantity, step, name)
    which = [id(tensor) for pair in honest for tensor in pair]
    if key not in known or known[key][0] != which:
        known[key] = which, honest, figures(honest)  # a tensor that is kept keeps its id
    return torch.cat([known[key][-1], figures(own)], 1)


def _figures(arms: Sequence[tuple[torch.Tensor, torch.Tensor]], quantity: Quantity, by_element: bool) -> torch.Tensor:
    """Error, largest error, gain less 1, and the truth's largest element, relative to the truth's size: [4, arms].

    Args:
        arms: the truth's tensor and the arm's, for each arm.
    """
    t, a = (torch.stack([arm[i].double().flatten() for arm in arms]) for i in range(2))
    count: torch.Tensor | int = t.shape[1]
    if quantity == TARGET_LOGIT or by_element:
        # The target's p - 1 spans many orders of magnitude, so each row counts relative to its own size. By element it
        # is p, which is positive. Label smoothing may cancel it: such elements do not count.
        counts = t > 0 if by_element else t != 0
        a = torch.where(counts, (a / t).clamp(0, 2) if by_element else a / t, 0.0)
        t, count = counts.double(), counts.sum(1)
    off, size = a - t, t.square().sum(1)
    unit = (size / count).sqrt()
    error, largest = (off.square().sum(1) / size).sqrt(), off.abs().amax(1) / unit
    return torch.stack([error, largest, (off * t).sum(1) / size, t.abs().amax(1) / unit])


def _judge_statistics(
    pairs: Sequence[Pair],
    candidate: Trajectory,
    comparable: dict[Quantity, list[Moment]],
    dtype: torch.dtype,
) -> Iterator[Evidence]:
    measured = {q: _measure(pairs, candidate, q, steps, dtype, q == BY_ELEMENT) for q, steps in comparable.items()}
    if LOGITS in comparable and BY_ELEMENT not in comparable:  # else the logits are too large to be kept
        measured[BY_ELEMENT] = _measure(pairs, candidate, LOGITS, comparable[LOGITS], dtype, by_element=True)
    yield from _judge_error_ratios("error ratio", measured)
    # If every element counts relative to its own size, the element nearest to 0 has the largest error.
    whole = {q: m for q, m in measured.items() if not m.scalar and q not in (TARGET_LOGIT, BY_ELEMENT)}
    largest = {q: dataclasses.replace(m, error=m.largest, floor=m.largest_floor) for q, m in whole.items()}
    yield from _judge_error_ratios("largest error ratio", largest)
    yield from _judge_rows(pairs, candidate, comparable, dtype)
    for held_in, kinds in ((dtype, _GRADIENTS), (torch.float32, _NUMBERS), *((dtype, kinds) for kinds in _OTHERS)):
        chosen = {q: m for q, m in measured.items() if q in kinds or q.kind in kinds}
        yield from _judge_gains(chosen, "gain", held_in)
    parameters = {q: m for q, m in measured.items() if q.kind == GRADIENT}
    yield from _judge_gains(_against_the_others(parameters), "gain against the others", dtype)


def _judge_error_ratios(name: str, measured: dict[Quantity, _Measured]) -> Iterator[Evidence]:
    """Judge every quantity in every phase. The bound follows from the honest arms' ratios in this phase, over all
    quantities of one kind."""
    lone_step = _is_lone(measured)
    ratios: dict[tuple[str, bool, bool], list[tuple[Quantity, Moment, float]]] = {}
    worst_replica: dict[tuple[str, bool, bool], float] = {}
    for quantity, m in measured.items():
        for phase in dict.fromkeys(step.phase for step in m.steps):
            chosen = [k for k, step in enumerate(m.steps) if step.phase == phase]
            error, floor = m.error[:, chosen], m.floor[chosen]
            honest, kind = error[:-1], (phase, m.scalar, m.by_element)
            ratio = error[-1] / own_error(honest, floor)
            pooled = float(ratio.square().mean().sqrt())
            worst = m.steps[chosen[int(ratio.argmax())]]
            ratios.setdefault(kind, []).append((quantity, worst, pooled))
            worst_replica[kind] = max(worst_replica.get(kind, 0.0), left_out(honest, floor))
    for kind, values in ratios.items():
        phase, scalar, _ = kind
        one_draw = scalar or phase != INITIAL
        bound = tolerance.ratio_bound(worst_replica[kind], one_draw, alone=scalar and lone_step)
        limit = tolerance.ratio_limit(worst_replica[kind])
        for quantity, worst, pooled in values:
            yield from judged(quantity, worst, name, pooled, bound, limit=limit)


def _judge_rows(
    pairs: Sequence[Pair],
    candidate: Trajectory,
    comparable: dict[Quantity, list[Moment]],
    dtype: torch.dtype,
) -> Iterator[Evidence]:
    """Judge the worst row of every quantity in every phase, relative to its size and to the honest arms' error in it.

    A token without a gradient is invisible in the mean over a batch, and need not have the largest error."""
    found: dict[str, dict[Quantity, list[tuple[float, Moment]]]] = {}
    worst_replica: dict[str, float] = {}
    floor = tolerance.error_floor(dtype)
    for quantity, steps in comparable.items():
        if quantity not in _IN_ROWS and quantity.kind not in _IN_ROWS:
            continue
        for step in steps:
            if (quantity, step) in candidate.forms or candidate.values[quantity][step].ndim < 2:  # projections
                continue
            error = _of_all_arms(pairs, candidate, quantity, step, _row_errors, "row")[0]
            honest = error[:-1]
            ratio = float((error[-1] / _row_reference(honest, floor)).max())
            left_out = float((honest / _row_reference(honest[_others(len(honest))], floor)).max())
            found.setdefault(step.phase, {}).setdefault(quantity, []).append((ratio, step))
            worst_replica[step.phase] = max(worst_replica.get(step.phase, 0.0), left_out)
    for phase, by_quantity in found.items():
        bound = tolerance.ratio_bound(worst_replica[phase], one_draw=True)
        for quantity, ratios in by_quantity.items():
            ratio, step = max(ratios, key=lambda found: found[0])
            limit = tolerance.ratio_limit(worst_replica[phase])
            yield from judged(quantity, step, "row error ratio", ratio, bound, limit=limit)


def _row_errors(arms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The error of every row relative to the truth's row, or to the mean row if that is 0: [1, arms, rows]."""
    t, a = (torch.stack([arm[i].double().flatten(0, -2) for arm in arms]) for i in range(2))
    size = t.norm(dim=-1)
    mean = size.square().mean(-1, keepdim=True).sqrt()
    return ((a - t).norm(dim=-1) / torch.where(size > 0, size, mean)).unsqueeze(0)


def _row_reference(honest: torch.Tensor, floor: float) -> torch.Tensor:
    """PyTorch's own error [..., rows] from ``honest`` [..., arms, rows]: half from the row, half from the median."""
    square = honest.square().mean(-2)
    return ((square + square.median(-1, keepdim=True).values) / 2).sqrt().clamp(min=floor)


def _is_lone(measured: dict[Quantity, _Measured]) -> bool:
    """Whether all that was observed is one step."""
    return len({step for m in measured.values() for step in m.steps}) == 1


@functools.cache
def _others(n: int) -> torch.Tensor:
    """The other arms of each of ``n`` arms, [n, n - 1]."""
    return torch.tensor([[other for other in range(n) if other != arm] for arm in range(n)])


def left_out(honest: torch.Tensor, floor: torch.Tensor) -> float:
    """The largest error ratio, pooled over the steps, that one of the ``honest`` arms [arms, steps] has when the others
    judge it."""
    others = honest[_others(len(honest))]
    return float((honest / own_error(others, floor)).square().mean(1).sqrt().max())


def own_error(honest: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """PyTorch's own error [..., steps] from ``honest`` [..., arms, steps]: half from the step, half from its phase."""
    square = honest.square()
    return ((square.mean(-2) + square.mean((-2, -1)).unsqueeze(-1)) / 2).sqrt().maximum(floor)


def _against_the_others(parameters: dict[Quantity, _Measured]) -> dict[Quantity, _Measured]:
    """``parameters`` with the median gain over all parameters subtracted, in every arm and step.

    If there is a single step, it is the median over the other parameters: otherwise the median parameter would have no
    noise at all."""
    steps = {step for m in parameters.values() for step in m.steps}
    common = {
        step: torch.stack([m.gain[:, m.steps.index(step)] for m in parameters.values() if step in m.steps])
        .median(0)
        .values
        for step in steps
    }
    if _is_lone(parameters) and len(parameters) > 1:
        gains = {quantity: m.gain for quantity, m in parameters.items()}
        others = {q: torch.stack([g for other, g in gains.items() if other != q]).median(0).values for q in gains}
        return {q: dataclasses.replace(m, gain=m.gain - others[q]) for q, m in parameters.items()}
    return {
        quantity: dataclasses.replace(m, gain=m.gain - torch.stack([common[step] for step in m.steps], 1))
        for quantity, m in parameters.items()
    }


def _judge_gains(measured: dict[Quantity, _Measured], name: str, dtype: torch.dtype) -> Iterator[Evidence]:
    """Judge the weighted mean gain of every quantity over its steps that run the same way. A mean over all steps would
    hide a fault that is in decoding alone."""
    groups: dict[tuple[str, ...], dict[Quantity, _Measured]] = {}
    for quantity, m in measured.items():
        for way in dict.fromkeys(map(_way, m.steps)):
            chosen = [k for k, step in enumerate(m.steps) if _way(step) == way]
            groups.setdefault(way, {})[quantity] = m if len(chosen) == len(m.steps) else m.of(chosen)
    for group in groups.values():
        yield from _judge_mean_gains(group, name, dtype)


def _way(step: Moment) -> tuple[str, ...]:
    """The way a step runs: training, one of the kinds of evaluation, or the end of one optimizer's steps."""
    if step.step == END:
        return tuple(step[:2])
    return (step.step,) if step.step in (DECODING, EVALUATION, WITHOUT_GRADIENTS) else ()


def _judge_mean_gains(measured: dict[Quantity, _Measured], name: str, dtype: torch.dtype) -> Iterator[Evidence]:
    noise: dict[Moment, list[torch.Tensor]] = {}
    for m in measured.values():
        for k, step in enumerate(m.steps):
            noise.setdefault(step, []).append(m.gain[:-1, k].square().mean())
    for quantity, m in measured.items():
        variance = torch.stack([torch.stack(noise[step]).mean() for step in m.steps])
        weight = 1 / variance.clamp(min=tolerance.unit_roundoff(dtype) ** 2)
        weight = weight / weight.sum()
        gain, honest = float(m.gain[-1] @ weight), m.gain[:-1]
        means = honest @ weight
        centre = float(means.mean())
        value = max(gain - max(centre, 0.0), min(centre, 0.0) - gain, 0.0)
        # Two estimates of the same deviation; the larger counts. The replicas' means are few samples, but include every
        # correlation between steps; the factor is the uncertainty of their centre. Single steps are many samples, and
        # include what the data of a step does to all replicas, but are treated as independent.
        sigma = max(
            float(means.std()) * (1 + 1 / len(means)) ** 0.5,
            float((honest.square().mean(0) @ weight.square()).sqrt()),
        )
        count = 1 / float(weight.square().sum())
        bound = tolerance.gain_bound(sigma, dtype, count, len(m.steps))
        limit = tolerance.gain_limit(float(means.abs().max()), dtype, count, len(m.steps))
        worst = m.steps[int((m.gain[-1].abs() * weight).argmax())]
        yield from judged(quantity, worst, name, value, bound, shown=f"off by {value:.3g}", limit=limit)


def _judge_generation(truth: Trajectory, baseline: Trajectory, candidate: Trajectory) -> Iterator[Evidence]:
    """If a generated token differs from the truth's, their logits must be closer than the baseline's noise."""
    if truth.generated is None or truth.scores is None:
        return
    if candidate.generated is None or candidate.generated.shape != truth.generated.shape:
        yield Failure.of(GENERATED, Moment(SGD, END), Finding.MISSING, "the candidate generated nothing comparable")
        return
    at = Moment(SGD, EVALUATION)
    logits = truth.values[EVALUATION_LOGITS][at].double()
    noise = float((baseline.values[EVALUATION_LOGITS][at].double() - logits).abs().max())
    bound = 2 * tolerance.THREE_WAY_FACTOR * noise  # two logits, each off by at most twice PyTorch's largest error
    for row in range(len(truth.generated)):
        for i, (expected, got) in enumerate(zip(truth.generated[row], candidate.generated[row], strict=True)):
            if expected != got:
                gap = float(truth.scores[i, row, expected] - truth.scores[i, row, got])
                if not gap <= bound:
                    where = f"row {row}, token {i}"
                    yield Failure.of(GENERATED, where, Finding.LOGITS_GAP, f"{gap:.3g}", f"{bound:.3g}")
                break
