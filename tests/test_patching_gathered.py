"""Log-probabilities that are gathered from the logits of a forward without labels: the same numbers, and no logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels.patching.logits import gathered
from liger_kernels.patching.logits.lazy import LazyTensor
from tests.patching_checks import DEVICE, batch, fallbacks, gathering, tiny

READ = "outputs.logits was read"


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with gathering():
        yield


def by_log_softmax(logits: Any, ids: Any) -> Any:
    return torch.gather(logits.log_softmax(-1), 2, ids.unsqueeze(2)).squeeze(2)


def by_logsumexp(logits: Any, ids: Any) -> Any:
    """As trl's ``selective_log_softmax`` in float32."""
    logits = logits / 0.7
    sums = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return torch.gather(logits, -1, ids.unsqueeze(-1)).squeeze(-1) - sums


def by_rows(logits: Any, ids: Any) -> Any:
    """As trl's ``selective_log_softmax`` in bfloat16."""
    pairs = zip(logits, ids.unsqueeze(-1), strict=True)
    return torch.stack([F.log_softmax(row, dim=-1).gather(-1, index) for row, index in pairs]).squeeze(-1)


def several(logits: Any, ids: Any) -> Any:
    index = torch.stack([ids, ids.flip(0)], -1)
    return logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)


def orpo(logits: Any, ids: Any) -> Any:
    """With the loss of the chosen rows, and the mean that is logged."""
    chosen = logits[:1, :-1].contiguous()
    loss = F.cross_entropy(chosen.view(-1, chosen.shape[-1]), ids[:1, 1:].reshape(-1))
    mean = chosen.detach().mean()
    assert not mean.requires_grad
    return by_log_softmax(logits[:, :-1], ids[:, 1:]).mean(-1) + loss + mean


WAYS = {f.__name__: f for f in (by_log_softmax, by_logsumexp, by_rows, several, orpo)}


def run(model: Any, way: Any) -> dict[str, torch.Tensor]:
    ids = batch()["input_ids"]
    found = way(model(ids).logits, ids)
    found.square().sum().backward()
    return {"result": found.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_equal_and_without_logits(way: Any, family: str, dtype: torch.dtype) -> None:
    plain = tiny(family).to(dtype)
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    liger_kernels.patch(patched)
    ours, theirs, truth = run(patched, way), run(plain, way), run(exact, way)
    assert fallbacks(patched) == {}
    assert gathered.state() == "on, 1 calls ran linear_log_probs"
    for name in truth:
        assert ours[name].dtype == theirs[name].dtype
        three_way(ours[name], theirs[name], truth[name], dtype, name, chain=9)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_under_autocast(way: Any) -> None:
    """A result has the dtype that autocast gives it on this device."""
    plain = tiny("llama")
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    liger_kernels.patch(patched)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        ours, theirs = run(patched, way), run(plain, way)
    truth = run(exact, way)
    assert fallbacks(patched) == {}
    assert gathered.state() == "on, 1 calls ran linear_log_probs"
    for name in truth:
        assert ours[name].dtype == theirs[name].dtype
        three_way(ours[name], theirs[name], truth[name], torch.bfloat16, name, chain=9)


def in_place(logits: Any, ids: Any) -> Any:
    part = logits[:, 1:]
    part.mul_(0.5)
    return by_log_softmax(logits, ids)


def under_another_name(logits: Any, ids: Any) -> Any:
    """A view that was made before, and is used after."""
    part = logits[:, 1:]
    logits.mul_(0.5)
    return by_log_softmax(part, ids[:, 1:])


def hooked(logits: Any, ids: Any) -> Any:
    logits.register_hook(lambda grad: 2 * grad)
    return by_log_softmax(logits, ids)


@pytest.mark.parametrize("way", [in_place, under_another_name, hooked, lambda logits, ids: logits.softmax(-1).square()])
def test_anything_else_gets_real_logits(way: Any) -> None:
    plain = tiny("llama")
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    liger_kernels.patch(patched)
    ours, theirs, truth = run(patched, way), run(plain, way), run(exact, way)
    for name in truth:
        three_way(ours[name], theirs[name], truth[name], torch.float32, name, chain=9)
    assert fallbacks(patched) == {READ: 1}
    assert gathered._Switch.calls == 0


def test_only_where_it_was_asked_for() -> None:
    model = tiny("llama")
    liger_kernels.patch(model)
    ids = batch()["input_ids"]
    assert type(model(ids).logits) is LazyTensor
    with torch.no_grad():
        assert type(model(ids).logits) is torch.Tensor
    assert type(model.eval()(ids).logits) is torch.Tensor
    gathered.uninstall()
    assert type(model.train()(ids).logits) is torch.Tensor
