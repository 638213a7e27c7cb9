"""Whoever reads the logits of a patched model gets those of its forward, with their gradient, whenever they read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import liger_kernels
from tests.patching_checks import VOCAB, batch, check_same, gradients, tiny


@pytest.fixture
def model():
    model = tiny("llama")
    liger_kernels.patch(model)
    return model


def test_logits_that_are_kept_over_an_optimizer_step(model):
    expected = tiny("llama")(**batch()).logits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outputs = model(**batch())
    kept = outputs.logits
    outputs.loss.backward()
    optimizer.step()
    torch.testing.assert_close(kept, expected)
    torch.testing.assert_close(outputs.logits, expected)


def test_what_is_written_to_the_logits_stays(model):
    outputs = model(**batch())
    outputs.logits[..., 3] = -30.0
    assert bool((outputs.logits[..., 3] == -30.0).all())
    assert bool((outputs["logits"][..., 3] == -30.0).all())


def test_a_compiled_function_of_the_logits(model):
    @torch.compile(backend="aot_eager")
    def entropy(logits):
        return torch.distributions.Categorical(logits=logits).entropy()

    expected = entropy(tiny("llama")(**batch()).logits)
    torch.testing.assert_close(entropy(model(**batch()).logits), expected)
    lazy = dict(model(**batch()).items())["logits"]
    torch.testing.assert_close(entropy(lazy), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_loss_of_logits_and_the_models_own(family):
    def run(model):
        outputs = model(**batch())
        assert outputs.logits is outputs["logits"] is outputs[1]
        return gradients(model, outputs.loss + outputs.logits.float().square().mean())

    check_same(tiny(family), run)


def test_functional_call():
    def run(model):
        parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        outputs = torch.func.functional_call(model, parameters, kwargs=batch())
        loss = outputs.logits.float().square().mean() + outputs.loss
        found = torch.autograd.grad(loss, list(parameters.values()))
        return {"loss": loss.detach(), **dict(zip(parameters, found, strict=True))}

    check_same(tiny("llama"), run)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_second_derivatives_of_logits(family):
    def run(model):
        logits = model(**batch()).logits
        (first,) = torch.autograd.grad(logits.float().pow(3).mean(), model.lm_head.weight, create_graph=True)
        return gradients(model, first.square().sum())

    # Up to the head: the kernels of norms, RoPE and MLPs have no second derivative.
    model = tiny(family, tie_word_embeddings=False)
    model.model.requires_grad_(False)
    check_same(model, run)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_second_derivative_of_the_fused_loss_is_refused(name):
    """Not taken for zero where it is a part of what is trained."""
    model = tiny("llama", tie_word_embeddings=False).requires_grad_(False)
    liger_kernels.patch(model)
    weight = model.get_parameter(name).requires_grad_()
    loss = model(**batch()).loss
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + first.square().sum()).backward()


def test_two_passes_over_one_graph():
    def run(model):
        loss = model(**batch()).logits.float().square().mean()
        loss.backward(retain_graph=True)
        return gradients(model, loss)

    check_same(tiny("llama"), run)


def test_a_gradient_transform_runs_as_unpatched():
    """The references of the ops, which float64 runs, are operations of torch."""

    def run(model):
        def loss(weight):
            return torch.func.functional_call(model, {"lm_head.weight": weight}, kwargs=batch()).loss

        return torch.func.grad(loss)(model.lm_head.weight.detach())

    model = tiny("llama").double()
    expected = run(model)
    liger_kernels.patch(model)
    torch.testing.assert_close(run(model), expected)


@dataclasses.dataclass
class Answer:
    loss: Any
    logits: Any


CONTAINERS = {
    "a dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda answer: answer["logits"]),
    "a dict of dicts": (lambda loss, logits: {"head": {"logits": logits}}, lambda answer: answer["head"]["logits"]),
    "a dataclass": (Answer, lambda answer: answer.logits),
    "a list": (lambda loss, logits: [loss, logits], lambda answer: answer[1]),
    "a tuple": (lambda loss, logits: (loss, logits), lambda answer: answer[1]),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_own_forward_leaks_nothing(container):
    from transformers import LlamaForCausalLM

    make, read = CONTAINERS[container]

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return make(self.loss_function(logits, labels, VOCAB), logits)

    model = tiny("llama")
    expected = model(**batch()).logits
    model.__class__ = type("Own", (LlamaForCausalLM,), {"forward": forward})
    liger_kernels.patch(model)
    logits = read(model(**batch()))
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_a_spectral_norm_of_the_head_iterates_once_a_step(norm, order):
    vectors = []
    for patched in (False, True):
        model = tiny("llama")
        if patched and order == "before":
            liger_kernels.patch(model)
        torch.manual_seed(0)
        norm(model.lm_head)
        if patched and order == "after":
            liger_kernels.patch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(**batch(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        vectors.append({name: b for name, b in model.lm_head.named_buffers() if name.endswith("_u")})
    (expected,), (found,) = (list(each.values()) for each in vectors)
    torch.testing.assert_close(found, expected)
