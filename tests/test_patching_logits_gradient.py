"""The gradient of a patched model's own loss with respect to ``outputs.logits``: who asks for it gets upstream's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels.patching.logits.linked import COUNTED
from tests.packing_checks import packed, samples
from tests.patching_checks import DEVICE, UNFUSED, VOCAB, batch, built, fallbacks, tiny, with_loss

Found = dict[str, torch.Tensor]


def by_hook(model: Any, inputs: Any) -> Found:
    """Registered on the output's own logits, which nobody keeps."""
    found: Found = {}
    out = model(**inputs)
    out.logits.register_hook(lambda grad: found.update(logits=grad.clone()))
    loss = out.loss
    del out
    loss.backward()
    return found | parameters(model)


def loss_first(model: Any, inputs: Any) -> Found:
    """The loss has been taken out before anybody reads the logits."""
    found: Found = {}
    out = model(**inputs)
    loss, logits = (out[0], out[1]) if isinstance(out, tuple) else (out.loss, out.logits)
    logits.register_hook(lambda grad: found.update(logits=grad.clone()))
    (3 * loss).backward()
    return found | parameters(model)


def retained(model: Any, inputs: Any) -> Found:
    out = model(**inputs)
    out.logits.retain_grad()
    out.loss.backward()
    return {"logits": out.logits.grad} | parameters(model)


def alone(model: Any, inputs: Any) -> Found:
    """Before a backward that nobody asked."""
    out = model(**inputs)
    (grad,) = torch.autograd.grad(out.loss, out.logits, retain_graph=True)
    out.loss.backward()
    return {"logits": grad} | parameters(model)


def with_others(model: Any, inputs: Any) -> Found:
    """Together with gradients that the same pass brings by way of these."""
    out = model(**inputs)
    names, wanted = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    logits, *others = torch.autograd.grad(out.loss, [out.logits, *wanted])
    return {"logits": logits, **dict(zip(names, others, strict=True))}


def into_inputs(model: Any, inputs: Any) -> Found:
    out = model(**inputs)
    logits = out["logits"]
    out.loss.backward(inputs=[logits])
    return {"logits": logits.grad}


def with_a_loss_of_the_users(model: Any, inputs: Any) -> Found:
    """The gradient of both losses together."""
    out = model(**inputs)
    out.logits.retain_grad()
    (out.loss + 0.1 * out.logits.logsumexp(-1).square().mean()).backward()
    return {"logits": out.logits.grad} | parameters(model)


def twice(model: Any, inputs: Any) -> Found:
    """A pass that asks, and one that does not any more."""
    out = model(**inputs)
    found: Found = {}
    handle = out.logits.register_hook(lambda grad: found.update(logits=grad.clone()))
    out.loss.backward(retain_graph=True)
    handle.remove()
    out.loss.backward()
    return found | parameters(model)


def parameters(model: Any) -> Found:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def unsteady(model: Any) -> Any:
    """A model whose loss is a scaled sum of its logits' cross entropy and something else."""

    def own(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1), label_smoothing=0.1, reduction="sum")
        return 0.3 * loss + model.lm_head.weight.square().mean(), logits

    return with_loss(model, own)


def without(name: str) -> Callable[[], Any]:
    def model() -> Any:
        made = tiny("llama", num_hidden_layers=1)
        for parameter in getattr(made, name).parameters():
            parameter.requires_grad_(False)
        return made

    return model


WAYS = (by_hook, loss_first, retained, alone, with_others, into_inputs, with_a_loss_of_the_users, twice)
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny("llama", num_hidden_layers=1),
    "gemma2, whose logits have a soft-cap": lambda: tiny("gemma2", num_hidden_layers=1),
    "gemma3, tied": lambda: tiny("gemma3", num_hidden_layers=1, tie_word_embeddings=True),
    "granite, whose logits have a scale": lambda: built("granite", "GraniteForCausalLM"),
    "mixtral, whose loss has a second term": lambda: built("mixtral", "MixtralForCausalLM"),
    "a head that is frozen": without("lm_head"),
    "all but the head frozen": without("model"),
    "a loss of its own": lambda: unsteady(tiny("llama", num_hidden_layers=0)),
}
PATCHES: dict[str, dict[str, Any]] = {
    "memory='small'": {"memory": "small"},
    "the loss of the head's logits": {"kernels": UNFUSED},
    "no kernel of the loss": {"kernels": ["rms_norm", "swiglu", "geglu"]},
}


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    inputs = batch()
    if getattr(model.config, "output_router_logits", None) is not None:
        inputs["output_router_logits"] = True
    return inputs


def check(model: Any, ask: Callable[[Any, Any], Found], inputs: Any, **options: Any) -> Any:
    """What is asked of the patched model is what the unpatched one answers."""
    candidate = copy.deepcopy(model)
    liger_kernels.patch(candidate, **options)
    truth = ask(copy.deepcopy(model).double(), inputs)
    own, ours = ask(copy.deepcopy(model), inputs), ask(candidate, inputs)
    assert ours.keys() == own.keys() == truth.keys()
    for name, value in truth.items():
        three_way(ours[name], own[name], value, torch.float32, name, sum(1 for m in model.modules() if not m._modules))
    return candidate


@pytest.mark.parametrize("ask", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_who_asks_gets_it(name: str, ask: Callable[[Any, Any], Found]) -> None:
    model = MODELS[name]()
    candidate = check(model, ask, inputs_of(model))
    assert fallbacks(candidate)[COUNTED] == 1


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whatever_computes_the_loss(family: str, patch: str) -> None:
    for ask in (by_hook, alone):
        check(tiny(family), ask, batch(), **PATCHES[patch])


def read_on_the_way(model: Any) -> Any:
    """A model that looks at its logits before the loss, and returns them."""

    def own(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = 5.0 * torch.tanh(logits / 5.0)
        assert bool(logits.isfinite().all())
        return F.cross_entropy(logits.view(-1, VOCAB).float(), labels.view(-1)), logits

    return with_loss(model, own)


def test_logits_that_were_computed_on_the_way() -> None:
    check(read_on_the_way(tiny("llama")), by_hook, batch())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_tuple(family: str) -> None:
    candidate = check(tiny(family), loss_first, {**batch(), "return_dict": False})
    assert fallbacks(candidate)[COUNTED] == 1


def test_weighted_rows() -> None:
    """They sum to the loss times its gradient with respect to a scale of the logits, which a difference shows."""
    model = tiny("llama").double()
    liger_kernels.patch(model, loss_reduction="sample")
    inputs = packed(samples(5, 3, 4))
    out = model(**inputs, use_cache=False)
    (grad,) = torch.autograd.grad(out.loss, out.logits)
    losses = []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + step)
            losses.append(float(model(**inputs, use_cache=False).loss))
            model.lm_head.weight.div_(1 + step)
    assert float((grad * out.logits).sum()) == pytest.approx((losses[0] - losses[1]) / 2e-2, rel=1e-3)


def test_autocast() -> None:
    model, candidate = tiny("llama"), tiny("llama")
    liger_kernels.patch(candidate)
    truth = by_hook(tiny("llama").double(), batch())
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        own, ours = by_hook(model, batch()), by_hook(candidate, batch())
    leaves = sum(1 for module in model.modules() if not module._modules)
    for name, value in truth.items():
        assert ours[name].dtype == own[name].dtype
        three_way(ours[name], own[name], value, torch.bfloat16, name, leaves)


def test_who_only_reads_changes_nothing() -> None:
    """No other way for the gradient, and nothing that is counted beyond the read."""
    model = tiny("llama")
    liger_kernels.patch(model)
    model(**batch()).loss.backward()
    expected = parameters(model)
    out = model(**batch())
    assert out.logits.shape == (2, 9, VOCAB)
    out.loss.backward()
    assert all(torch.equal(grad, expected[name]) for name, grad in parameters(model).items())
    assert fallbacks(model) == {"outputs.logits was read": 1}


def test_a_loss_may_be_changed_in_place() -> None:
    model = tiny("llama")
    liger_kernels.patch(model)
    for change in (lambda loss: loss.mul_(0.5), lambda loss: loss.div_(2)):
        loss = model(**batch()).loss
        change(loss)
        loss.backward()
        halved = parameters(model)
        model(**batch()).loss.backward()
        for name, grad in parameters(model).items():
            torch.testing.assert_close(2 * halved[name], grad)


def test_logits_that_were_changed_in_place_have_none() -> None:
    model = tiny("llama")
    liger_kernels.patch(model)
    out = model(**batch())
    logits = out.logits
    logits.retain_grad()
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place since they were read: change a copy"):
        out.loss.backward()


@pytest.mark.slow
def test_a_compiled_forward_says_that_it_has_none() -> None:
    """At the backward that should have brought it."""
    model = tiny("llama", num_hidden_layers=0)
    liger_kernels.patch(model)
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(**batch())
    out.logits.register_hook(lambda grad: None)
    with pytest.raises(RuntimeError, match="computed in a compiled forward, whose graph has no logits"):
        out.loss.backward()
    compiled(**batch()).loss.backward()
