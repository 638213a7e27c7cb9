"""Every causal language model of the installed transformers: patched and unpatched train alike, on the fused loss.

No model is named here, as none is named in ``liger_kernels.patching``: ``matrix/checks/classes.py`` finds whatever
transformers has, and ``zoo.py`` builds it. ``test_count`` keeps the zoo and the fused loss from shrinking unnoticed.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers

import liger_kernels
from convergence.arms.float64 import InFloat64
from convergence.judge.tolerance import FLOOR_ROUNDOFFS, REPLICAS, rms, three_way, unit_roundoff
from liger_kernels.ops import launches
from matrix.checks import zoo
from matrix.checks.classes import ModelClass, causal
from matrix.checks.signatures import other_signatures
from tests.patching_checks import DEVICE, unlisted

# How many classes train on the fused loss, by version of transformers; `pytest -rP -k test_count` prints it. A version
# that is not recorded must reach MINIMUM.
RECORDED = {"4.57.6": 138, "5.17.0": 215, "5.23.0": 230}
MINIMUM = 40


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with zoo.quiet():
        yield


def batch(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in zoo.tiny_batch(model).items()}


def train(model: Any) -> dict[str, torch.Tensor]:
    """The loss and every parameter's gradient after one forward and backward; a float64 model is exact."""
    exact = next(model.parameters()).dtype is torch.float64
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    try:
        with InFloat64() if exact else contextlib.nullcontext():
            loss = model(**batch(model)).loss
            loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def noises(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The errors of copies of ``model`` whose weights were moved by one unit in the last place: honest noise."""
    for seed in range(REPLICAS):
        generator = torch.Generator().manual_seed(seed)
        replica = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in replica.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + torch.finfo(torch.float32).eps * sign.to(DEVICE))
        exact = train(copy.deepcopy(replica).double())
        yield {name: value.double() - exact[name] for name, value in train(replica).items()}


def compare(template: Any, ours: dict[str, torch.Tensor]) -> None:
    """The three-way rule for the loss and every gradient of ``template``, which stays untrained.

    One sample of PyTorch's error says little about a gradient that is mathematically zero, about a tensor of eight
    elements, or about a model all of whose gradients share one ill-conditioned factor. Where the rule does not hold
    against that sample, more are taken, and the worst of them is the measure.
    """
    truth = train(copy.deepcopy(template).double())
    own = train(copy.deepcopy(template))
    assert ours.keys() == own.keys() == truth.keys()
    assert any(bool(value.any()) for name, value in truth.items() if name != "loss")
    chain = sum(1 for part in template.modules() if not part._modules)  # each leaf rounds at least once
    noise: list[dict[str, torch.Tensor]] = []
    roundoff = unit_roundoff(torch.float32) * statistics.median(rms(v) for name, v in truth.items() if name != "loss")
    for name, value in truth.items():
        if rms(value) < roundoff:  # zero but for cancellation among terms of the other gradients' size
            assert rms(ours[name]) <= FLOOR_ROUNDOFFS * chain**0.5 * roundoff, name
            continue
        try:
            three_way(ours[name], own[name], value, torch.float32, name, chain)
        except AssertionError:
            noise = noise or list(noises(template))
            worst = max((sample[name] for sample in noise), key=rms)
            three_way(ours[name], value + worst, value, torch.float32, name, chain)


def cross_entropy_launches() -> int:
    return sum(count for name, count in launches().items() if "cross_entropy" in name)


def unfused(report: liger_kernels.PatchReport, launched: int) -> str | None:
    """None when the loss of the forwards since was the fused one; else the reason, as the report gives it."""
    if report.fuses_head and launched and not report.fallbacks:
        return None
    reasons = [*report.fallbacks, *(f"{item.path}: {item.reason}" for item in report.left)]
    return "; ".join(reasons)


FUSED, ABSENT = "fused", "not in the zoo"


@pytest.fixture
def known(once: Callable[..., Any]) -> Callable[..., str]:
    """``known(found, find)``: what ``find`` said of a class, here or in another worker: FUSED, ABSENT or why its loss
    is not fused."""
    return lambda found, find: once(f"zoo-{found.module}.{found.name}", find)


@pytest.mark.parametrize("found", [pytest.param(found, id=found.name) for found in causal()])
def test_patched_equals_unpatched(found, known):
    try:
        baseline = zoo.build(found, DEVICE)
    except zoo.CannotShrink as error:
        known(found, lambda: ABSENT)
        pytest.skip(f"not in the zoo: {error}")
    candidate = copy.deepcopy(baseline)
    report = liger_kernels.patch(candidate)
    assert other_signatures(candidate, baseline) == []  # before the forward: some models swap modules in it
    before = cross_entropy_launches()
    ours = train(candidate)
    reason = unfused(report, cross_entropy_launches() - before)
    assert reason != "", f"the loss was not fused and the report does not say why:\n{report}"
    known(found, lambda: reason or FUSED)
    assert unlisted(candidate, report) == []
    compare(baseline, ours)


def test_count(known):
    """How many classes train on the fused loss: the number of the version's record or more."""

    def find(one: ModelClass) -> str:
        try:
            model = zoo.build(one, DEVICE)
        except zoo.CannotShrink:
            return ABSENT
        report = liger_kernels.patch(model, ["linear_cross_entropy"])
        before = cross_entropy_launches()
        with torch.no_grad():
            model(**batch(model))
        return unfused(report, cross_entropy_launches() - before) or FUSED

    found = [(one.name, known(one, partial(find, one))) for one in causal()]
    fused, absent = ([reason for _, reason in found].count(what) for what in (FUSED, ABSENT))
    print(
        f"transformers {transformers.__version__}: {fused} classes train on the fused loss, {absent} are not in the zoo"
    )
    for name, reason in found:
        if reason not in (FUSED, ABSENT):
            print(f"  {name}: {reason}")
    recorded = RECORDED.get(transformers.__version__, MINIMUM)
    assert fused >= recorded, f"the fused loss is used in {fused} classes, {recorded} are recorded"
