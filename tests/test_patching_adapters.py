"""Adapters on the head, and torch.compile of head and loss: the same loss and gradients, fused where it can be."""

from __future__ import annotations

import copy
import functools
import sys

import peft
import pytest
import torch

import liger_kernels
from liger_kernels.ops import _norm_rows, geglu_linear, rope
from liger_kernels.ops._compiling import INDUCTOR_UP_TO
from liger_kernels.patching.deferred import DeferredLogits
from liger_kernels.patching.running import Forward, running
from tests.patching_checks import DEVICE, batch, check_same, compare, gradients, tiny


def run(model):
    return gradients(model, model(**batch()).loss)


LORA = functools.partial(peft.LoraConfig, r=4, lora_dropout=0.0)


def with_adapter(model, kind=LORA, **options):
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, kind(**options))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name or "ia3_l" in name:  # zero or one at first, so that the adapter would not show
                parameter.normal_(std=0.3)
    return wrapped.train()


ADAPTERS = {
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "factors on the head": {"kind": peft.IA3Config, "target_modules": ["lm_head"], "feedforward_modules": []},
    "lora on the mlp": {"target_modules": ["gate_proj", "down_proj"]},
    "head among modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter, order):
    if order == "adapter first":
        patched = check_same(with_adapter(tiny("llama"), **ADAPTERS[adapter]), run)
        report = liger_kernels.status(patched)
        assert report.fuses_head == (not adapter.endswith("on the head"))
        assert dict(report.fallbacks) == {}
        return
    base = tiny("llama")
    truth, own, ours = (copy.deepcopy(base) for _ in range(3))
    liger_kernels.patch(ours)
    truth, own, patched = (run(with_adapter(m, **ADAPTERS[adapter])) for m in (truth.double(), own, ours))
    compare(base, patched, own, truth)
    fallbacks = dict(liger_kernels.status(ours).fallbacks)
    assert bool(fallbacks) == adapter.endswith("on the head")


def test_adapters_disabled_and_merged():
    model = with_adapter(tiny("llama"), target_modules=["lm_head"])
    expected = run(copy.deepcopy(model))["loss"]
    liger_kernels.patch(model)
    with model.disable_adapter():
        base = model(**batch()).loss.detach()
    assert not torch.allclose(base, expected)
    torch.testing.assert_close(run(model)["loss"], expected)
    liger_kernels.unpatch(model)
    merged = model.merge_and_unload()
    assert liger_kernels.patch(merged).fuses_head
    torch.testing.assert_close(merged(**batch()).loss, expected)  # nothing of it is trainable any more


def test_head_and_loss_compile_without_a_graph_break():
    from torch import nn

    class HeadAndLoss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, hidden, labels):
            head = self.model.lm_head
            running.forward = Forward([head], head, self.model._liger_kernels.fallbacks)
            logits = head(hidden)
            assert isinstance(logits, DeferredLogits)
            loss = self.model.loss_function(logits=logits, labels=labels, vocab_size=self.model.config.vocab_size)
            running.forward = None
            return loss

    for family in ("llama", "gemma2"):
        model = tiny(family)
        labels = batch()["labels"]
        torch.manual_seed(0)
        hidden = torch.randn(2, 9, 32, device=DEVICE, requires_grad=True)
        expected = model.loss_function(logits=model.lm_head(hidden), labels=labels, vocab_size=67)
        expected_gradient = torch.autograd.grad(expected, [hidden, model.lm_head.weight])
        liger_kernels.patch(model)
        compiled = torch.compile(HeadAndLoss(model), fullgraph=True, backend="aot_eager")
        loss = compiled(hidden, labels)
        torch.testing.assert_close(loss, expected)
        for got, want in zip(torch.autograd.grad(loss, [hidden, model.lm_head.weight]), expected_gradient, strict=True):
            torch.testing.assert_close(got, want)
        assert torch._dynamo.utils.counters["graph_break"] == {}


COMPILED = pytest.mark.parametrize(("family", "dynamic"), [("llama", None), ("gemma2", None), ("gemma2", True)])


def one_or_two_layers(family, dynamic):
    """Two kinds of layers in gemma2. Symbols in place of numbers are four times the work, and the same in each."""
    return tiny(family, num_hidden_layers=1 if dynamic else 2)


@pytest.fixture
def asked(monkeypatch):
    """Which ops have asked whether to launch. A compiled program appends again what it did when it was traced."""
    called = []

    def asks(name, use_triton):
        def asked(x, **how):
            called.append(name)
            return use_triton(x, **how)

        return asked

    monkeypatch.setattr(_norm_rows, "use_triton", asks("rms_norm", _norm_rows.use_triton))
    for op in (rope, geglu_linear):
        monkeypatch.setitem(op.__globals__, "use_triton", asks(op.__name__, op.__globals__["use_triton"]))
    return called


@COMPILED
@pytest.mark.parametrize("order", ["patch first", "compile first"])
def test_a_compiled_model_trains_the_same(dynamic, order, family, asked):
    """Of any length, it launches all but its norms, as a long one does."""
    model = one_or_two_layers(family, dynamic)
    expected = run(copy.deepcopy(model))
    if order == "patch first":
        liger_kernels.patch(model)
        compiled = torch.compile(model, dynamic=dynamic, backend="aot_eager")
    else:
        compiled = torch.compile(model, dynamic=dynamic, backend="aot_eager")
        liger_kernels.patch(model)
    for again in (False, True):  # the second time with the program of the first
        asked.clear()
        with torch._dynamo.config.patch(error_on_recompile=again):
            out = compiled(**batch())
        assert set(asked) == ({"rope", "geglu_linear"} if dynamic else set())
        assert type(out).__name__ == "CausalLMOutputWithPast"
        found = gradients(model, out.loss)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)
    assert out.logits.shape == (2, 9, 67)


def test_a_compiled_model_arms_its_head_in_the_program():
    """What Python still runs of a patched model's forward is where the output changes its class."""
    model = tiny("llama")
    liger_kernels.patch(model)
    compiled = torch.compile(model, backend="aot_eager")
    ran, profiler = set(), sys.getprofile()

    def profile(frame, event, arg):
        if event == "call":
            ran.add(frame.f_code.co_name)

    for again in (False, True):
        with torch._dynamo.config.patch(error_on_recompile=again):
            sys.setprofile(profile if again else profiler)
            try:
                compiled(**batch())
            finally:
                sys.setprofile(profiler)
    assert "_released" in ran
    assert not ran & {"patched_heads", "get_output_embeddings"}


@pytest.mark.parametrize("how", ["short", "long"])
def test_what_a_compiled_model_leaves_to_inductor(how, asked, monkeypatch):
    """Norms, which it fuses with the residuals around them; all but the head where its launches are what counts."""
    if how == "long":
        for kernel in ("rope", "geglu"):
            monkeypatch.setitem(INDUCTOR_UP_TO, kernel, 2 * 9 * 32 - 1)
    model = tiny("gemma2", num_hidden_layers=1)
    expected = run(copy.deepcopy(model))
    liger_kernels.patch(model)
    model(**batch())
    assert set(asked) == {"rms_norm", "rope", "geglu_linear"}
    asked.clear()
    compiled = torch.compile(model, backend="aot_eager")
    found = gradients(model, compiled(**batch()).loss)
    assert set(asked) == (set() if how == "short" else {"rope", "geglu_linear"})
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


@COMPILED
def test_compiled_decoder_layers_train_the_same_without_a_graph_break(dynamic, family):
    model = one_or_two_layers(family, dynamic)
    expected = run(copy.deepcopy(model))
    liger_kernels.patch(model)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found = gradients(model, model(**batch()).loss)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
