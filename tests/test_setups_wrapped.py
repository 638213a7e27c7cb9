"""A wrapper and what it wraps share one state; patch() is atomic; a head that is swapped stays fused, or is said."""

from __future__ import annotations

import copy
import types
import warnings

import accelerate
import peft
import pytest
import torch
from torch import nn

import liger_kernels
from liger_kernels.patching import modules
from tests.patching_checks import DEVICE, VOCAB, batch, compare, fallbacks, tiny, train


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def patched_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(type(module), "_liger_kernels_recipe")]


def with_saved_head(model):
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model, config)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)


@pytest.mark.parametrize("wrap", [with_saved_head, Wrapper], ids=["peft", "a module"])
@pytest.mark.parametrize("order", ["inner first", "wrapper first", "patched, then wrapped"])
def test_one_state(wrap, order):
    inner = tiny("llama")
    before = {id(module): type(module) for module in inner.modules()}
    if order == "patched, then wrapped":
        liger_kernels.patch(inner)
    wrapper = wrap(inner)
    first, second = (wrapper, inner) if order == "wrapper first" else (inner, wrapper)
    report = liger_kernels.patch(first)
    assert liger_kernels.status(wrapper) is liger_kernels.status(inner) is report
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert liger_kernels.patch(second) is report
    with pytest.raises(ValueError, match="already patched with kernels"):
        liger_kernels.patch(second, kernels=["rope"])
    with pytest.raises(ValueError, match="already patched with memory"):
        liger_kernels.patch(second, memory="small")
    wrapper(**batch()).loss.backward()
    assert report.fuses_head
    assert report.fallbacks == {}
    liger_kernels.unpatch(second)
    assert patched_modules(wrapper) == []
    assert all(type(module) is before.get(id(module), type(module)) for module in wrapper.modules())
    assert liger_kernels.status(wrapper) is liger_kernels.status(inner) is None


def test_a_deep_copy_of_what_was_patched_by_its_wrapper():
    inner = tiny("llama")
    wrapper = Wrapper(inner)
    liger_kernels.patch(wrapper)
    twin = copy.deepcopy(inner)
    liger_kernels.unpatch(wrapper)
    assert liger_kernels.status(twin).fuses_head
    twin(**batch()).loss.backward()
    assert fallbacks(twin) == {}


def test_an_interruption_undoes_everything(monkeypatch):
    model = tiny("llama")
    before, own = classes(model), modules.replace
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(modules, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        liger_kernels.patch(model)
    assert len(calls) == 5
    assert classes(model) == before
    assert liger_kernels.status(model) is None
    assert not any(name.startswith("_liger_kernels") for module in model.modules() for name in vars(module))


def test_a_class_that_refuses_to_be_subclassed_is_left():
    model = tiny("llama")

    class Final(type(model.model.norm)):
        def __init_subclass__(cls, **kwargs):
            raise TypeError("this class is final")

    model.model.norm.__class__ = Final
    report = liger_kernels.patch(model)
    assert [(left.path, left.what) for left in report.left] == [("model.norm", "Final")]
    assert "this class is final" in report.left[0].reason
    assert report.counts()["rms_norm"] == 4
    assert report.fuses_head


def test_a_model_whose_head_cannot_be_looked_up_is_left():
    model = tiny("llama")

    def get_output_embeddings(self):
        raise RuntimeError("no head today")

    model.__class__ = type("Odd", (type(model),), {"get_output_embeddings": get_output_embeddings})
    report = liger_kernels.patch(model)
    assert "no head today" in {left.path: left.reason for left in report.left}[""]
    assert report.counts()["rms_norm"] == 5
    model(**batch()).loss.backward()


@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings_stay_fused(tied):
    """The model gets another head where it is not tied."""

    def resized(model):
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + 9, mean_resizing=False)
        return model

    model = tiny("llama", tie_word_embeddings=tied)
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    expected, found = train(resized(model)), train(resized(patched))
    torch.testing.assert_close(found, expected)
    report = liger_kernels.status(patched)
    assert report.fuses_head
    assert (report.left, report.fallbacks) == ([], {})
    liger_kernels.unpatch(patched)
    assert patched_modules(patched) == []


def test_a_head_that_is_assigned_is_said_and_healed():
    model = tiny("llama")
    report = liger_kernels.patch(model)
    model.lm_head = nn.Linear(32, VOCAB, bias=False, device=DEVICE)
    model(**batch()).loss.backward()
    reason = "the head was replaced after patch(): call patch(model) again"
    assert report.fallbacks == {reason: 1}
    assert not liger_kernels.status(model).fuses_head
    assert "call patch(model) again" in report.left[0].reason
    assert liger_kernels.patch(model) is report
    assert report.fuses_head
    assert report.left == []
    model(**batch()).loss.backward()
    assert sum(report.fallbacks.values()) == 1


def test_accelerate_unwraps_to_the_patched_forward():
    """Removing its own wrappers, it removes every one that names what it wraps."""
    from accelerate.utils import extract_model_from_parallel
    from accelerate.utils.operations import convert_outputs_to_fp32

    model = tiny("llama")
    report = liger_kernels.patch(model)
    model._original_forward = model.forward
    model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    model(**batch()).loss.backward()
    assert report.fallbacks == {}
    assert report.forwards == 1


def test_what_others_replace_after_the_patch_is_said(monkeypatch):
    model = tiny("llama")
    liger_kernels.patch(model)
    cls = type(model.model.norm).__mro__[1]
    monkeypatch.setattr(cls, "forward", lambda self, hidden_states: hidden_states)
    report = liger_kernels.status(model)
    assert len(report.left) == 5
    assert "replaced the forward of its class after patch()" in report.left[0].reason
    assert "rms_norm" not in report.counts()
    monkeypatch.undo()
    model.model.norm.forward = types.MethodType(lambda self, x: x, model.model.norm)
    report = liger_kernels.status(model)
    assert [left.path for left in report.left] == ["model.norm"]
    assert "replaced its forward on the instance after patch(), and this package's has not been seen to run" in (
        report.left[0].reason
    )
    assert report.counts()["rms_norm"] == 4


# accelerate's hooks: a device map, and offload.


@pytest.mark.parametrize("order", ["hooks first", "patched first"])
@pytest.mark.parametrize("hooks_go", [False, True], ids=["hooks stay", "hooks go"])
def test_kernels_run_inside_accelerates_hooks_until_unpatch(order, hooks_go):
    model, plain = tiny("llama"), tiny("llama")
    own, truth = train(plain), train(copy.deepcopy(plain).double())
    if order == "patched first":
        liger_kernels.patch(model)
    accelerate.dispatch_model(model, {"": DEVICE}, force_hooks=True)
    report = liger_kernels.patch(model)
    assert report.fuses_head
    assert not report.left
    compare(plain, train(model), own, truth)
    assert not liger_kernels.status(model).never_ran
    assert not report.fallbacks
    if hooks_go:
        accelerate.hooks.remove_hook_from_submodules(model)
        compare(plain, train(model), own, truth)
    liger_kernels.unpatch(model)
    assert not patched_modules(model)
    torch.testing.assert_close(train(model), own, rtol=0, atol=0)  # upstream's own forwards, inside the hooks or not


def test_an_offloaded_head_computes_its_logits():
    model, plain = tiny("llama"), tiny("llama")
    accelerate.cpu_offload(model, execution_device=torch.device(DEVICE))
    report = liger_kernels.patch(model)
    assert not report.left
    torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss)
    assert [*report.fallbacks] == ["accelerate loads the head's weight for its forward only (offload)"]
