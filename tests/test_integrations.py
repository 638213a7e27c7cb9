"""The names that users know: doors to the same mechanism."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import liger_kernels
from liger_kernels.integrations import apply_liger_kernel_to_instance
from tests.patching_checks import DEVICE, SIZES, batch, tiny, upstream_symbols

FAMILIES = ("llama", "gemma", "gemma2", "gemma3", "mistral", "mixtral", "qwen2", "qwen3", "phi3")


@pytest.fixture(autouse=True)
def _reverted():
    yield
    liger_kernels.revert_liger_kernel()


@pytest.mark.parametrize("family", FAMILIES)
def test_signature(family):
    door = getattr(liger_kernels, f"apply_liger_kernel_to_{family}")
    activation = "geglu" if family.startswith("gemma") else "swiglu"
    names = ["rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", activation, "model", "memory"]
    parameters = inspect.signature(door).parameters
    assert list(parameters) == names
    assert {n: p.default for n, p in parameters.items()} == {
        **dict.fromkeys(names, True),
        "cross_entropy": False,
        "model": None,
        "memory": None,
    }
    assert parameters["memory"].kind is inspect.Parameter.KEYWORD_ONLY  # upstream's own come by position, too
    assert door.__name__ == f"apply_liger_kernel_to_{family}"


def test_a_door_patches_the_model_it_is_given_and_nothing_else():
    model, other = tiny("gemma"), tiny("gemma")
    before = upstream_symbols(model)
    report = liger_kernels.apply_liger_kernel_to_gemma(rope=False, model=model)
    assert set(report.counts()) == {"rms_norm", "geglu", "linear_cross_entropy"}
    assert upstream_symbols(model) == before
    assert liger_kernels.status(other) is None


def test_both_losses_are_refused():
    with pytest.raises(ValueError, match="cannot both be True"):
        liger_kernels.apply_liger_kernel_to_llama(cross_entropy=True, model=tiny("llama"))
    report = liger_kernels.apply_liger_kernel_to_llama(
        cross_entropy=True, fused_linear_cross_entropy=False, model=tiny("llama")
    )
    assert "cross_entropy" in report.counts()


def test_without_a_model_every_later_one_is_patched_as_it_is_built(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, LlamaModel

    plain = tiny("llama")
    plain.save_pretrained(tmp_path)
    before = upstream_symbols(plain)
    assert liger_kernels.apply_liger_kernel_to_llama() is None
    built = tiny("llama")
    assert liger_kernels.status(built).fuses_head
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE).train()
    assert liger_kernels.status(loaded).fuses_head
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), loaded.parameters(), strict=True))
    torch.testing.assert_close(loaded(**batch()).loss, plain(**batch()).loss)
    assert liger_kernels.status(LlamaModel(plain.config)).counts() == {"rms_norm": 5, "rope": 2, "swiglu": 2}
    assert liger_kernels.status(LlamaForSequenceClassification(plain.config).model).counts()["rms_norm"] == 5
    with torch.device("meta"):
        assert liger_kernels.status(tiny("llama")).fuses_head
    assert liger_kernels.status(plain) is None
    assert liger_kernels.status(tiny("gemma")) is None
    liger_kernels.revert_liger_kernel()
    assert upstream_symbols(plain) == before
    assert liger_kernels.status(tiny("llama")) is None
    assert liger_kernels.status(built).fuses_head


def test_a_constructor_that_somebody_kept_patches_as_long_as_it_was_asked_to():
    """``deepspeed.zero.Init`` puts back the constructors that it found when it began."""
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.__init__
    liger_kernels.apply_liger_kernel_to_llama(rope=False)
    kept = LlamaForCausalLM.__init__
    liger_kernels.revert_liger_kernel()
    try:
        LlamaForCausalLM.__init__ = kept
        assert liger_kernels.status(tiny("llama")) is None
    finally:
        LlamaForCausalLM.__init__ = original


@pytest.mark.parametrize(("family", "activation"), [("llama", "silu"), ("gemma", "gelu_tanh")])
def test_a_model_that_is_built_without_initialisation(family, activation, monkeypatch):
    """``from_pretrained`` switches torch's initialisation off while it builds a model, and memory holds what it held.

    With next to nothing in them, projections make every activation look like every other: act(x) is x / 2 to all of
    them. The probe's own must not depend on it.
    """
    for name in ("kaiming_uniform_", "uniform_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor.detach().fill_(1e-7))
    report = liger_kernels.patch(tiny(family))
    assert {r.formula for r in report.replaced if r.was.endswith("MLP")} == {f"down({activation}(gate) * up)"}


@pytest.mark.parametrize(("family", "activation"), [("llama", "silu"), ("gemma", "gelu_tanh")])
def test_a_model_that_is_built_while_every_parameter_goes_to_the_meta_device(family, activation):
    """As transformers 4.49 to 4.57 loads one: not by a default device, by what registers parameters."""
    from accelerate import init_empty_weights

    getattr(liger_kernels, f"apply_liger_kernel_to_{family}")()
    with init_empty_weights(include_buffers=False):
        model = _built(family)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    formulas = {r.formula for r in liger_kernels.status(model).replaced if r.was.endswith("MLP")}
    assert formulas == {f"down({activation}(gate) * up)"}


def _built(family):
    import transformers as tf

    config, cls = {
        "llama": (tf.LlamaConfig(**SIZES), tf.LlamaForCausalLM),
        "gemma": (tf.GemmaConfig(**SIZES, head_dim=8), tf.GemmaForCausalLM),
    }[family]
    return cls(config)


def test_auto_class(tmp_path):
    plain = tiny("gemma2")
    plain.save_pretrained(tmp_path)
    auto = liger_kernels.AutoLigerKernelForCausalLM
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").to(DEVICE).train()
    assert type(loaded).__name__ == "Gemma2ForCausalLM"
    assert loaded.config._attn_implementation == "eager"
    torch.testing.assert_close(loaded(**batch()).loss, plain(**batch()).loss)
    assert liger_kernels.status(loaded).fuses_head
    built = auto.from_config(plain.config, kernels=["rms_norm"])
    assert set(liger_kernels.status(built).counts()) == {"rms_norm"}
    model, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert liger_kernels.status(model).fuses_head
    assert not info["missing_keys"]


def test_a_family_that_the_installed_transformers_lacks(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers.models.qwen3.modeling_qwen3", None)
    with pytest.raises(ValueError, match="the installed transformers has no qwen3"):
        liger_kernels.apply_liger_kernel_to_qwen3()


# The schedule of the fused loss.


def test_memory_through_the_doors(tmp_path):
    plain = tiny("gemma2")
    plain.save_pretrained(tmp_path)
    auto = liger_kernels.AutoLigerKernelForCausalLM
    doors = (
        lambda: auto.from_pretrained(tmp_path, memory="small"),
        lambda: auto.from_config(plain.config, memory="small"),
    )
    assert [liger_kernels.status(door()).memory for door in doors] == ["small", "small"]
    assert liger_kernels.apply_liger_kernel_to_gemma2(model=tiny("gemma2"), memory="small").memory == "small"
    assert liger_kernels.apply_liger_kernel_to_llama(model=tiny("llama"), memory="fast").memory == "fast"
    liger_kernels.apply_liger_kernel_to_llama(memory="small")
    assert liger_kernels.status(tiny("llama")).memory == "small"
    liger_kernels.apply_liger_kernel_to_llama()
    assert liger_kernels.status(tiny("llama")).memory is None


@pytest.mark.parametrize("memory", ["tiny", "small"])
def test_a_bad_memory_is_refused_at_the_door(memory):
    before = upstream_symbols(tiny("llama"))
    options = {"memory": memory, "fused_linear_cross_entropy": memory != "small"}
    for door in (
        liger_kernels.apply_liger_kernel_to_llama,
        lambda **options: liger_kernels.apply_liger_kernel_to_llama(model=tiny("llama"), **options),
        lambda **options: apply_liger_kernel_to_instance(tiny("llama"), **options),
    ):
        with pytest.raises(ValueError, match=r"memory is 'tiny'; it must be|memory='small' is a schedule of"):
            door(**options)
    assert upstream_symbols(tiny("llama")) == before


def test_memory_in_a_trainers_configuration():
    """``TrainingArguments(use_liger_kernel=True, liger_kernel_config={"memory": "small"})`` ends here."""
    model = tiny("llama")
    report = apply_liger_kernel_to_instance(model, memory="small")
    assert report.memory == "small"
    assert apply_liger_kernel_to_instance(model, memory="small") is report
    assert apply_liger_kernel_to_instance(model) is report  # the flag alone asks for no other
    with pytest.raises(ValueError, match=r"already patched with memory='small', not 'fast'"):
        apply_liger_kernel_to_instance(model, memory="fast")
    weighted = tiny("llama")
    report = liger_kernels.patch(weighted, loss_reduction="sample", memory="small")
    assert apply_liger_kernel_to_instance(weighted, rope=False) is report


@pytest.mark.parametrize(("name", "value"), [("offload", "layers"), ("recompute", "mlp")])
def test_less_memory_through_every_entry_point_and_in_a_trainers_configuration(
    name: str, value: str, tmp_path: Path
) -> None:
    plain, given = tiny("gemma2"), {name: value}
    plain.save_pretrained(tmp_path)
    auto = liger_kernels.AutoLigerKernelForCausalLM
    for model in (auto.from_pretrained(tmp_path, **given), auto.from_config(plain.config, **given)):
        assert getattr(liger_kernels.status(model), name) == value
    model = tiny("llama")
    report = apply_liger_kernel_to_instance(model, **given)
    assert getattr(report, name) == value
    for options in (given, {}):  # the flag alone asks for no other
        assert apply_liger_kernel_to_instance(model, **options) is report
    other = tiny("llama")
    liger_kernels.patch(other)
    with pytest.raises(ValueError, match=f"already patched with {name}=None, not '{value}'"):
        apply_liger_kernel_to_instance(other, **given)
