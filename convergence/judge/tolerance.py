"""Every number that judges, each derived from a unit roundoff, a count or a measured noise."""

from __future__ import annotations

import torch

# A result computed in one dtype may lose at most this many times what PyTorch's own formula in that dtype loses against
# float64: the customary factor of the three-way comparison. Two correct orders of summation differ by less.
THREE_WAY_FACTOR = 2.0

# Below this many units of roundoff (of the truth's size) nothing is judged: rounding the exact result to the dtype
# costs up to half a unit in the last place, which is one unit of roundoff, for each of input, accumulation and output.
FLOOR_ROUNDOFFS = 4.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next larger number of ``dtype``: the relative error of one correct rounding."""
    return torch.finfo(dtype).eps / 2


def rms(x: torch.Tensor) -> float:
    """Root mean square in float64; 0 for an empty tensor."""
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def three_way(
    ours: torch.Tensor, torchs: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, name: str, chain: int = 1
) -> None:
    """Assert that ``ours`` is as near to the float64 ``truth`` as PyTorch's own result in the same ``dtype``.

    Both the root-mean-square and the largest error may be at most :data:`THREE_WAY_FACTOR` times PyTorch's plus
    :data:`FLOOR_ROUNDOFFS` units of roundoff of the truth's size. A NaN or an infinity in ``ours`` that the truth
    does not have fails, as does another shape. ``chain`` counts the operations that round one after another on the way
    to the result: one for an op, the layers' for a model's gradient. Independent roundings add up like a random walk,
    so the floor grows with its square root.

    Raises:
        AssertionError: with the name, both errors, the bound and the coordinates of the worst element.
    """
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)} instead of {tuple(truth.shape)}"
    assert torchs.shape == truth.shape, f"{name}: PyTorch's shape {tuple(torchs.shape)} is not {tuple(truth.shape)}"
    if not truth.numel():
        return
    truth = truth.detach().double()
    error_ours = (ours.detach().double() - truth).abs()
    error_torch = (torchs.detach().double() - truth).abs()
    assert bool(torch.isfinite(truth).all()), f"{name}: the truth itself is not finite"
    finite = torch.isfinite(error_ours)
    assert bool(finite.all()), f"{name}: {int((~finite).sum())} of {truth.numel()} elements are not finite"
    floor = FLOOR_ROUNDOFFS * unit_roundoff(dtype) * chain**0.5
    for what, err, own, size in (
        ("rms", rms(error_ours), rms(error_torch), rms(truth)),
        ("largest", float(error_ours.max()), float(error_torch.max()), float(truth.abs().max())),
    ):
        bound = THREE_WAY_FACTOR * own + floor * size
        worst = [int(i) for i in torch.unravel_index(error_ours.argmax(), error_ours.shape)]
        assert err <= bound, (
            f"{name} ({dtype}): {what} error {err:.3e} > {bound:.3e} "
            f"(PyTorch's own {own:.3e}, size {size:.3e}); worst at {worst}: "
            f"{float(ours.detach()[tuple(worst)])!r} instead of {float(truth[tuple(worst)])!r}"
        )


def gain_of_one_call(ours: torch.Tensor, torchs: torch.Tensor, truth: torch.Tensor, name: str) -> None:
    """Assert that a 16-bit result is not too large or too small as a whole, which errors of single elements hide: 1% of
    bfloat16, for one. It may be so by a unit of roundoff more than PyTorch's, which is what rounding every element once
    can do, and by another one if it is a single element; what a formula rounds on the way is averaged over more.

    Raises:
        AssertionError: with the name, how far it is off, and the bound.
    """
    truth = truth.detach().double()
    size = float(truth.square().sum())
    our, own = (
        abs(float(((x.detach().double() - truth) * truth).sum())) / size if size else 0.0 for x in (ours, torchs)
    )
    bound = own + unit_roundoff(ours.dtype) * (1 + max(1, truth.numel()) ** -0.5)
    assert our <= bound, f"{name} ({ours.dtype}): off by {our:.3e} as a whole, more than {bound:.3e}"


# How many standard deviations of measured noise a gain may be off. A normal variable is beyond five once in 2e6, and
# the deviation is the larger of two estimates. Measured on plain means over steps (llama, gemma2, 6 seeds): of 1,700
# gains of honest replicas, judged by the five others, the worst was 4.1 deviations off.
SIGMAS = 5.0

# The same where all that was observed is one step: there are six samples of noise then, not six for each step.
# Student's t with five degrees of freedom is beyond 12 once in 14,000, and beyond five once in 240. Measured on a GPU:
# of 842 numbers of 21 honest candidates at real size, two were beyond five.
# A candidate there has up to 60 gains, so by Student's t one honest candidate in 200 would fail. But a bound is the
# larger of two deviations, and what is judged is the distance from an interval. Measured on four shapes divided by 16
# in float32 and bfloat16: of 184,800 gains of 4,800 honest candidates, drawn from 40 unpatched replicas each and judged
# by six others, none was beyond its bound. The largest share was 0.93.
SIGMAS_OF_ONE_STEP = 12.0

# And where it is two or three steps: what Student's t with 6 n - 1 degrees of freedom exceeds with the same chance.
_SIGMAS_OF_FEW_STEPS = {2: 6.2, 3: 5.3}

# Perturbed replicas of the baseline per case. With the baseline itself they are the samples of every noise.
REPLICAS = 5
# As many are trained before a number fails that is near its bound. Of 354 honest candidates on an H200, two were beyond
# a bound of 5 replicas, by a factor of 1.01. The weakest of the mutants is beyond its bound by 1.5.
MANY_REPLICAS, NEAR = 4 * REPLICAS, 1.25

# The same of one call of an op. They are drawn only where a number is off, mostly of tensors of a few elements, whose
# error is a few draws of the noise. With as many samples of it, Student's t is beyond SIGMAS once in 15,000.
REPLICAS_OF_A_CALL = 20


def ratio_bound(worst_replica: float, one_draw: bool, alone: bool = False) -> float:
    """What an error ratio may be: the factor of the three-way rule times ``worst_replica``, the largest ratio that a
    replica of the baseline has when the others judge it. That is near 1.2 where errors are sums of many roundings, and
    several times as much where AdamW turns the sign of a gradient's noise into a step.

    ``alone``: whether a number is all there is of it, in the only step that was observed.

    ``one_draw``: the ratio averages over nothing but is one draw of the noise in standard deviations, and twice the
    largest of a few other draws is no bound on that. It may be as many as a gain may be. A number alone (a loss, a
    gradient norm) is one draw; so is whatever the steps of an optimizer have led to, because they let noise grow along
    few directions, in all tensors at once. Measured: of 2,400 honest runs on a GPU, one was beyond twice the largest
    replica, by 1.08, in the last step of SGD, with 22 of its tensors together; none was in the initial phase.
    """
    bound = THREE_WAY_FACTOR * max(1.0, worst_replica)
    return max(SIGMAS_OF_ONE_STEP if alone else SIGMAS, bound) if one_draw else bound


def sigmas(steps: int) -> float:
    """How many standard deviations of noise a mean over so many ``steps`` may be off, where six arms measure it."""
    return SIGMAS_OF_ONE_STEP if steps == 1 else _SIGMAS_OF_FEW_STEPS.get(steps, SIGMAS)


def gain_bound(sigma: float, dtype: torch.dtype, steps: float, observed: int | None = None) -> float:
    """How far a gain may lie outside of what is honest, when replicas of the baseline scatter by ``sigma``.

    In each of ``steps`` steps an honest candidate may round one common factor that PyTorch does not, such as the
    reciprocal of the number of targets. These roundings are independent of one another, so their mean shrinks with the
    square root of ``steps``, which counts a step by its weight in that mean. ``observed``: how many steps measured
    ``sigma``; None where it is known.
    """
    return (SIGMAS if observed is None else sigmas(observed)) * sigma + unit_roundoff(dtype) / steps**0.5


# One of six honest arms lies at least this many standard deviations from the truth. For none of them to do so has a
# chance of 3e-13: each of six normal variables is that near to 0 with one of 0.008.
_FARTHEST_OF_SIX = 0.01


def ratio_limit(worst_replica: float) -> float:
    """What a bound on error ratios may be at most. Of the honest arms, the one with the largest error has at least the
    others' mean error, so that ``worst_replica`` is at least 1 wherever errors are above their floor, and no rule of
    :func:`ratio_bound` allows more than :data:`SIGMAS_OF_ONE_STEP` times as much."""
    return SIGMAS_OF_ONE_STEP * max(1.0, worst_replica)


def gain_limit(farthest: float, dtype: torch.dtype, steps: float, observed: int) -> float:
    """What a bound on a gain may be at most, where the honest arm that is ``farthest`` from 1 is off by so much. Noise
    of one unit of roundoff is always allowed."""
    roundoff = unit_roundoff(dtype)
    return sigmas(observed) * max(farthest / _FARTHEST_OF_SIX, roundoff) + roundoff / steps**0.5


def error_floor(dtype: torch.dtype) -> float:
    """The relative rms error below which nothing is judged; ``dtype`` is what the value itself is held in. One rounding
    costs 0.4 units of roundoff in rms, three of them (input, accumulation, output) 0.7."""
    return unit_roundoff(dtype)
