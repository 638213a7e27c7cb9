"""patch(memory=): the schedule of the fused loss that was chosen is the one that runs, or the report says why not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

import liger_kernels
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.schedules.token_chunks import TokenChunks
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs
from tests.linear_cross_entropy_checks import chunks_of
from tests.patching_checks import DEVICE, UNFUSED, VOCAB, batch, check_same, fallbacks, tiny, train, with_loss


def ran(model, **inputs):
    """The schedules that one training step runs."""
    schedules = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (TokenChunks, VocabularySlabs):

            def forward(self, call, forward=kind.forward):
                if call.hidden.device.type != "meta":  # which foresees a step and computes nothing
                    schedules.append(self)
                return forward(self, call)

            patch.setattr(kind, "forward", forward)
        model(**(inputs or batch())).loss.backward()
    return {"balanced" if isinstance(s, TokenChunks) else "small" if s.slab else "fast" for s in schedules}


def patched(memory, family="llama", **options):
    model = tiny(family)
    liger_kernels.patch(model, memory=memory, **options)
    return model


def smoothed(model):
    """``model``, whose own forward asks for label smoothing."""

    def own(logits, labels):
        loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=-100, label_smoothing=0.1)
        return loss, logits

    return with_loss(model, own)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("memory", [*MEMORY, None])
def test_what_was_chosen_runs_and_is_the_same(memory, family):
    candidate = check_same(tiny(family), train, patch=lambda model: liger_kernels.patch(model, memory=memory))
    with chunks_of(5):  # without a choice, of several chunks
        assert ran(candidate) == {memory or "balanced"}
    assert fallbacks(candidate) == {}


def test_a_compiled_model_runs_it():
    model = tiny("llama", num_hidden_layers=0)
    liger_kernels.patch(model, memory="small")
    assert ran(torch.compile(model, backend="aot_eager")) == {"small"}


def test_it_goes_with_packed_rows_and_token_accuracy():
    inputs = {**batch(), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2, device=DEVICE)}
    asked = {**inputs, "return_token_accuracy": True}
    model, plain = (patched(memory, loss_reduction="sample") for memory in ("small", None))
    assert ran(model, **asked) == {"small"}
    ours, other = model(**asked), plain(**asked)
    torch.testing.assert_close(ours.loss, other.loss)
    assert torch.equal(ours.token_accuracy, other.token_accuracy)


# Steps that the schedule does not go with.


@pytest.mark.parametrize(
    ("memory", "change", "reason"),
    [
        ("small", smoothed, "label smoothing"),
        ("small", lambda model: model.half(), "float16"),
        ("fast", lambda model: model.half(), "float16"),
    ],
)
def test_a_step_that_cannot_take_it_runs_balanced_and_is_counted(memory, change, reason):
    model = change(tiny("llama"))
    liger_kernels.patch(model, memory=memory)
    expected = change(tiny("llama"))
    liger_kernels.patch(expected, memory="balanced")
    assert ran(model) == {"balanced"}
    assert torch.equal(model(**batch()).loss, expected(**batch()).loss)
    report = liger_kernels.status(model)
    counted = f"memory={memory!r} does not go with {reason}: 'balanced' ran"
    assert dict(report.fallbacks) == {counted: 2}
    assert f"2 x {counted}" in str(report)
    assert fallbacks(expected) == {}


def test_autocast_to_float16_is_counted_and_label_smoothing_goes_with_fast():
    model = patched("small")
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        assert ran(model) == {"balanced"}
    assert fallbacks(model) == {"memory='small' does not go with float16: 'balanced' ran": 1}
    assert ran(model) == {"small"}
    model = smoothed(tiny("llama"))
    liger_kernels.patch(model, memory="fast")
    assert ran(model) == {"fast"}
    assert fallbacks(model) == {}


# What remembers it.


def test_the_report_says_it():
    model = patched("small")
    assert liger_kernels.status(model).memory == "small"
    assert "memory='small': the schedule of the fused loss" in str(liger_kernels.status(model))
    report = liger_kernels.status(patched(None))
    assert report.memory is None
    assert "memory" not in str(report)


def test_a_copy_keeps_it():
    assert ran(copy.deepcopy(patched("small"))) == {"small"}


def test_patching_twice_and_unpatch():
    model = patched("small")
    assert liger_kernels.patch(model, memory="small") is liger_kernels.status(model)
    for other in ("fast", None):
        with pytest.raises(ValueError, match=rf"already patched with memory='small', not {other!r}; call unpatch"):
            liger_kernels.patch(model, memory=other)
    assert ran(model) == {"small"}
    liger_kernels.unpatch(model)
    assert ran(model) == set()
    with liger_kernels.patched(model, memory="balanced") as report:
        assert report.memory == "balanced"
        assert ran(model) == {"balanced"}
    assert liger_kernels.status(model) is None
    liger_kernels.patch(model)
    assert ran(model) == {"fast"}  # all 18 rows are one chunk


# Bad input, and a choice without effect.


def everywhere(model, tmp_path):
    """Every door that takes ``memory``."""
    yield lambda **options: liger_kernels.patch(model, **options)
    yield lambda **options: liger_kernels.patched(model, **options).__enter__()
    yield lambda **options: liger_kernels.AutoLigerKernelForCausalLM.from_config(model.config, **options)
    yield lambda **options: liger_kernels.AutoLigerKernelForCausalLM.from_pretrained(tmp_path / "nothing", **options)


def test_bad_input_is_refused_before_anything_happens(tmp_path):
    model = tiny("llama")
    classes = [type(module) for module in model.modules()]
    for door in everywhere(model, tmp_path):
        for wrong in ("tiny", 2, True, ["small"]):
            with pytest.raises(
                (TypeError, ValueError), match=r"memory is .*it must be one of 'fast', 'balanced', 'small', or None"
            ):
                door(memory=wrong)
        with pytest.raises(ValueError, match=r"memory='small' is a schedule of linear_cross_entropy, which is not"):
            door(memory="small", kernels=UNFUSED)
    assert [type(module) for module in model.modules()] == classes
    assert liger_kernels.status(model) is None


def test_a_model_without_a_fused_head_says_that_it_has_no_use_for_it():
    with pytest.warns(UserWarning, match="memory='small' has no effect in this LlamaModel"):
        report = liger_kernels.patch(tiny("llama").model, memory="small")
    assert "memory='small': without effect" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched("small")
        assert liger_kernels.patch(tiny("llama").model).left == []
