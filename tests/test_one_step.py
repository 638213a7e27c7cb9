"""Where only one step is observed, few samples say how large noise is."""

from __future__ import annotations

import torch

from convergence.arms.quantities import GRADIENT, LOSS, Moment, Quantity
from convergence.arms.trajectory import Trajectory
from convergence.judge import compare, tolerance

STEP, NAMES = Moment("initial", "scale"), "abcdefg"


def arm(seed: int, noise: float, off: dict[str, float] | None = None) -> Trajectory:
    """Gradients near a common truth; what is ``off`` has another gain."""
    generator = torch.Generator().manual_seed(seed)
    result = Trajectory()
    for name in NAMES:
        truth = torch.linspace(1, 2, 50, dtype=torch.float64)
        common = 0.1 * noise * torch.randn((), generator=generator, dtype=torch.float64)
        own = noise * torch.randn(50, generator=generator, dtype=torch.float64)
        result.record(Quantity(GRADIENT, name), STEP, truth * (1 + common + (off or {}).get(name, 0.0)) + own)
    result.record(
        LOSS, STEP, torch.tensor(3.0, dtype=torch.float64) * (1 + noise * torch.randn((), generator=generator))
    )
    return result


def failures(candidate: Trajectory, first: int = 0) -> set[tuple[str, str]]:
    pairs = [(arm(0, 0.0), arm(1000 + first + i, 1e-4)) for i in range(1 + tolerance.REPLICAS)]
    return {(row[0], row[2]) for row in compare.compare(pairs, candidate, torch.float32).failures}


def test_no_honest_arm_of_two_hundred_fails() -> None:
    assert not any(failures(arm(seed, 1e-4), 10 * seed) for seed in range(1, 201))


def test_with_five_standard_deviations_some_would(monkeypatch) -> None:
    monkeypatch.setattr(tolerance, "SIGMAS_OF_ONE_STEP", tolerance.SIGMAS)
    assert any(failures(arm(seed, 1e-4), 10 * seed) for seed in range(1, 201))


def test_a_gain_that_is_off_is_still_seen() -> None:
    assert ("gradient of d", "gain against the others") in failures(arm(1, 1e-4, {"d": 0.01}))


def test_the_parameter_in_the_middle_has_noise_too() -> None:
    """It is the median of all of them in every arm, and so would differ from it by nothing."""
    middle = [compare._Measured([STEP], *torch.zeros(5, 1, 1), scalar=False) for _ in NAMES]
    for k, m in enumerate(middle):
        m.gain = torch.full((7, 1), float(k - 3), dtype=torch.float64) + 0.1 * torch.randn(7, 1, dtype=torch.float64)
    found = compare._against_the_others({Quantity(GRADIENT, n): m for n, m in zip(NAMES, middle, strict=True)})
    assert bool((found[Quantity(GRADIENT, "d")].gain != 0).all())
