"""Logits that were not computed yet, given to an autograd.Function or to a checkpoint, or made a leaf of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels.ops import cross_entropy
from tests.patching_checks import DEVICE, VOCAB, batch, gathering, gradients, tiny, with_loss


@pytest.fixture
def installed() -> Iterator[None]:
    with gathering():
        yield


class Square(torch.autograd.Function):
    """The mean square, as a loss of another package has its backward in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x / x.numel()


def log_probs(logits: Any, ids: Any) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).mean()


def leaf(logits: Any, ids: Any) -> Any:
    """A backward in two stages, as torch's reentrant checkpoint has it."""
    own = logits.detach()
    own.requires_grad = True
    assert own.requires_grad
    assert own.is_leaf
    log_probs(own, ids).backward()
    return (logits * own.grad).sum()


WAYS = {
    "function": lambda logits, ids: Square.apply(logits),
    "function of a part": lambda logits, ids: Square.apply(logits[:, :-1].float() / 0.7),
    "function after a read": lambda logits, ids: (logits.argmax(), Square.apply(logits))[1],
    "function and log-probabilities": lambda logits, ids: Square.apply(logits) - log_probs(logits, ids),
    "op of this package": lambda logits, ids: cross_entropy(logits.view(-1, VOCAB), ids.view(-1)),
    "reentrant checkpoint": lambda logits, ids: checkpoint(log_probs, logits, ids, use_reentrant=True),
    "reentrant checkpoint of all classes": lambda logits, ids: checkpoint(
        lambda x: x.logsumexp(-1).mean(), logits, use_reentrant=True
    ),
    "leaf": leaf,
    "flat and contiguous": lambda logits, ids: (
        logits[..., :-1, :].contiguous().view(-1, VOCAB).softmax(-1).square().sum()
    ),
}


def compare(models: list[Any], run: Any) -> None:
    ours, theirs, truth = [gradients(model, run(model)) for model in models]
    assert ours.keys() == theirs.keys(), "which parameters have a gradient"
    for name in truth:
        three_way(ours[name], theirs[name], truth[name], torch.float32, name, chain=9)


def three(plain: Any) -> list[Any]:
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    liger_kernels.patch(patched)
    return [patched, plain, exact]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_of_a_forward_without_labels(way: Any, installed: None) -> None:
    ids = batch()["input_ids"]
    compare(three(tiny("llama")), lambda model: way(model(ids).logits, ids))


def test_a_flat_contiguous_part_inside_a_models_own_forward() -> None:
    def own(logits: Any, labels: Any) -> Any:
        return logits[..., :-1, :].contiguous().view(-1, VOCAB).log_softmax(-1).exp().square().sum(), logits

    compare(three(with_loss(tiny("llama"), own)), lambda model: model(**batch()).loss)


def of_the_product(logits: Any) -> Any:
    return Square.apply(logits)


def of_values(logits: Any) -> Any:
    logits.argmax(-1)
    return Square.apply(logits)


class Cast(Square):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return Square.forward(ctx, x.float())


class WithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return x.square().mean()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable()


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any) -> torch.Tensor:
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def of_a_cast(logits: Any) -> Any:
    logits.argmax(-1)
    return Cast.apply(logits)


@pytest.mark.parametrize("way", [of_the_product, of_values, of_a_cast, WithoutContext.apply, "fused"])
def test_a_function_inside_a_models_own_forward_is_refused(way: Any) -> None:
    """There logits are no tensor, so that autograd would see no edge. A loss with another term would train silently."""

    def own(logits: Any, labels: Any) -> Any:
        loss = Fused.apply(logits, labels) if way == "fused" else way(logits)
        return loss + 1e-3 * torch.ones((), device=DEVICE, requires_grad=True), logits

    model = with_loss(tiny("llama"), own)
    liger_kernels.patch(model)
    with pytest.raises(RuntimeError, match=r"is an autograd.Function .* Give it logits.clone\(\)"):
        model(**batch())


def test_what_the_error_says_helps_and_metrics_without_gradient_stay() -> None:
    def own(logits: Any, labels: Any) -> Any:
        with torch.no_grad():
            hits = (logits.argmax(-1) == labels).float().mean()
        return Square.apply(logits.clone()) + 0 * hits, logits

    compare(three(with_loss(tiny("llama"), own)), lambda model: model(**batch()).loss)
