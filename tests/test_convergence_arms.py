"""What the arms are made of: a truth that is float64 throughout, hard inputs, and a fingerprint that sees a patch."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from convergence.arms.float64 import InFloat64
from convergence.arms.pristine import Fingerprint
from convergence.models.data import IGNORE, steps
from convergence.models.models import MODELS


def test_the_truth_is_not_rounded_to_float32():
    """Upstream asks for float32 by name in its norm, its softmax and its loss; the truth must not follow."""
    model = MODELS["llama-untied"].build(0).double()
    norm = model.model.norm
    x = torch.randn(3, 5, 100, dtype=torch.float64)
    exact = norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    with InFloat64():
        assert float((norm(x) - exact).detach().abs().max()) < 1e-14
        ids = torch.arange(24).view(2, 12)
        outputs = model(input_ids=ids, labels=ids)
    assert outputs.loss.dtype is torch.float64
    logits = outputs.logits[:, :-1].flatten(0, 1)
    exact_loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert abs(float((outputs.loss - exact_loss).detach())) < 1e-13
    assert float((norm(x) - exact).detach().abs().max()) > 1e-9  # without the mode it is rounded: the test can fail


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_truth_is_not_rounded_where_checkpointing_computes_it_again(use_reentrant):
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64)
    seen = []

    def in_float32(x):
        y = x.float() * weight.to(torch.float32)
        seen.append(y.dtype)
        return y.exp()

    with InFloat64():
        torch.utils.checkpoint.checkpoint(in_float32, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [torch.float64] * 2
    assert torch.equal(x.grad, (x * weight).exp().detach() * weight)


def test_the_hard_inputs_are_hard_and_always_the_same():
    first, second = (steps("hard", 3, torch.bfloat16) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.batches, b.batches, strict=True):
            assert torch.equal(x.input_ids, y.input_ids)
            assert torch.equal(x.labels, y.labels)
    masked = first[0].batches[0].labels
    assert bool((masked[-1] == IGNORE).all())
    assert masked[1, -1] == IGNORE
    middle = masked[0]
    assert middle[0] != IGNORE
    assert middle[-1] != IGNORE
    assert bool((middle == IGNORE).any())
    positions = first[1].batches[0].position_ids
    assert not torch.equal(positions[0], positions[1])
    assert bool((positions == 0).sum(1).eq(2).all())
    assert {step.frozen for step in first} == {None, "head", "body"}
    assert {step.num_items for step in first if len(step.batches) > 1} == {True, False}
    assert any(step.scale != 1 for step in first)
    assert any(step.label_smoothing for step in first)
    assert any(step.reads_logits for step in first)


@pytest.fixture
def fingerprint():
    MODELS["llama-untied"].build(0)
    return Fingerprint([MODELS["llama-untied"].model_class()])


def test_the_fingerprint_sees_a_class_a_function_its_code_and_a_registry(fingerprint, monkeypatch):
    from transformers.activations import ACT2CLS
    from transformers.models.llama import modeling_llama as llama

    assert fingerprint.changes() == []
    with monkeypatch.context() as patch:
        patch.setattr(llama.LlamaRMSNorm, "forward", lambda self, x: x)
        patch.setattr(torch.nn.functional, "cross_entropy", lambda *args: None)
        patch.setattr(llama.rotate_half, "__code__", (lambda x: x).__code__)
        patch.setitem(ACT2CLS, "silu", torch.nn.Identity)
        patch.setattr(torch.nn.Module, "patched_by", print, raising=False)
        assert fingerprint.changes() == [
            "torch.nn.functional.cross_entropy",
            "torch.nn.modules.module.Module.patched_by",
            "transformers.activations.ACT2CLS.silu",
            "transformers.models.llama.modeling_llama.LlamaRMSNorm.forward",
            "transformers.models.llama.modeling_llama.rotate_half",
        ]
    assert fingerprint.changes() == []


def test_using_a_model_leaves_the_fingerprint_alone(fingerprint):
    model = MODELS["llama-untied"].build(1)
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    model.eval().generate(ids, max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(ids))
    assert fingerprint.changes() == []


def test_what_the_first_compilation_wraps_is_no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    before = Fingerprint([torch.nn.Linear])
    install_generation_tagging_init()
    assert not before.changes()
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self: None)
    assert before.changes() == ["torch.nn.modules.module.Module.__init__"]
