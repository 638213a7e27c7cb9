"""Adapters on the head, and torch.compile: the same loss and gradients, fused where it can be."""

from __future__ import annotations

import copy
import functools
import sys

import peft
import pytest
import torch

import liger_kernels
from liger_kernels.ops import _norm_rows, geglu_linear, rope
from liger_kernels.ops.runtime.compiling import INDUCTOR_UP_TO
from tests.patching_checks import batch, check_same, fallbacks, gradients, tiny, train

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
    on_the_head = adapter.endswith("on the head")
    fuses = adapter != "factors on the head"
    if order == "adapter first":
        report = liger_kernels.status(check_same(with_adapter(tiny("llama"), **ADAPTERS[adapter]), train))
        assert report.fuses_head == fuses
        assert report.fallbacks == {}
    else:
        patched = check_same(tiny("llama"), lambda model: train(with_adapter(model, **ADAPTERS[adapter])))
        assert bool(fallbacks(patched)) == on_the_head


def test_adapters_disabled_and_merged():
    model = with_adapter(tiny("llama"), target_modules=["lm_head"])
    expected = train(copy.deepcopy(model))["loss"]
    liger_kernels.patch(model)
    with model.disable_adapter():
        base = model(**batch()).loss.detach()
    assert not torch.allclose(base, expected)
    torch.testing.assert_close(train(model)["loss"], expected)
    liger_kernels.unpatch(model)
    merged = model.merge_and_unload()
    assert liger_kernels.patch(merged).fuses_head
    torch.testing.assert_close(merged(**batch()).loss, expected)  # nothing of it is trainable any more


@pytest.fixture
def asked(monkeypatch):
    """Which ops have asked whether to launch, but for those that foresee a step. A compiled program appends again what
    it did when it was traced."""
    called = []

    def asks(name, use_triton):
        def asked(x, **how):
            if x.device.type != "meta":
                called.append(name)
            return use_triton(x, **how)

        return asked

    monkeypatch.setattr(_norm_rows, "use_triton", asks("rms_norm", _norm_rows.use_triton))
    for op in (rope, geglu_linear):
        monkeypatch.setitem(op.__globals__, "use_triton", asks(op.__name__, op.__globals__["use_triton"]))
    return called


def called_by(function):
    """What ``function()`` returns, and the names of the Python functions that it called."""
    names, profiler = set(), sys.getprofile()
    sys.setprofile(lambda frame, event, arg: names.add(frame.f_code.co_name) if event == "call" else None)
    try:
        return function(), names
    finally:
        sys.setprofile(profiler)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "order"), [("llama", "patch first"), ("gemma2", "compile first")])
def test_a_compiled_model_trains_the_same(family, order, asked):
    """It leaves norms to Inductor, which fuses them with the residuals around them; where a program is short, and
    launches are what counts, all but the head. What Python still runs of a patched model's forward is where the output
    changes its class: the program has armed the head."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny(family, num_hidden_layers=1)
    expected = train(copy.deepcopy(model))
    if order == "patch first":
        liger_kernels.patch(model)
    compiled = torch.compile(model, backend="aot_eager")
    liger_kernels.patch(model)
    for again in (False, True):  # the second time with the program of the first
        asked.clear()
        with torch._dynamo.config.patch(error_on_recompile=again):
            out, ran = called_by(lambda: compiled(**batch())) if again else (compiled(**batch()), {"_released"})
        assert "_released" in ran
        assert not ran & {"patched_heads", "get_output_embeddings"}
        assert not asked
        assert type(out).__name__ == "CausalLMOutputWithPast"
        torch.testing.assert_close(gradients(model, out.loss), expected)
    assert out.logits.shape == (2, 9, 67)
    assert len(torch._dynamo.utils.counters["graph_break"]) == 1  # where the output changes its class
    asked.clear()
    model(**batch())  # not compiled, it leaves none
    assert {"rms_norm", "rope"} <= set(asked)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dynamic"), [("gemma2", None), ("llama", True)], ids=["long", "of any length"])
def test_compiled_decoder_layers_train_the_same_without_a_graph_break(family, dynamic, asked, monkeypatch):
    """Long ones launch all but their norms, and so do those of any length."""
    if not dynamic:
        for kernel in ("rope", "geglu"):
            monkeypatch.setitem(INDUCTOR_UP_TO, kernel, 2 * 9 * 32 - 1)
    torch._dynamo.reset()
    model = tiny(family, num_hidden_layers=1)
    expected = train(copy.deepcopy(model))
    liger_kernels.patch(model)
    model.model.layers[0].compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(train(model), expected)
    assert set(asked) == {"rope", "geglu_linear", "rms_norm"}  # the last norm is not compiled
    assert asked.count("rms_norm") == 1
