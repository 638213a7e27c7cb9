"""Whoever kept a method of a patched module gets what the module does at the moment of the call, patched or not."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import liger_kernels
from liger_kernels.ops import launches, reset_launches
from liger_kernels.patching.swap import recipe_of
from matrix.checks import zoo
from tests.patching_checks import DEVICE, VOCAB, batch, built, gradients, tiny

# Each kind of recipe: norms with and without a gate, rotations, MLPs, experts and their unit alone, heads.
MODELS = {
    "llama": None,
    "gemma2": None,
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "phi": "PhiForCausalLM",
}


def family(name: str) -> Any:
    cls = MODELS[name]
    return tiny(name) if cls is None else built(name, cls).train()


def step(model: Any) -> dict[str, torch.Tensor]:
    """Loss, logits and gradients of a training step."""
    given = batch()
    if model.config.vocab_size != VOCAB:
        given = {name: value.to(DEVICE) for name, value in zoo.tiny_batch(model).items()}
    out = model(**{"labels": given["input_ids"], **given}, use_cache=False)
    return {"logits": out.logits.detach().clone(), **gradients(model, out.loss)}


def check_runs_as(model: nn.Module, expected: dict[str, torch.Tensor], patched: bool = False) -> None:
    """Bit for bit, and by no kernel of ours where the model is not ``patched``."""
    reset_launches()
    found = step(model)
    assert bool(launches()) == patched
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def patched_parts(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Every patched module, and the names of the methods that its class has of its recipe."""
    return [
        (part, [n for n, m in recipe_of(part).namespace(type(part).__mro__[1]).items() if callable(m)])
        for part in model.modules()
        if recipe_of(part) is not None
    ]


@pytest.mark.parametrize("name", MODELS)
def test_every_method_of_every_recipe(name):
    """Each bound method that a patched module has stays on its instance: after unpatch, and in a copy made before."""
    model = family(name)
    expected = step(copy.deepcopy(model))
    liger_kernels.patch(model)
    ours = step(model)
    parts = patched_parts(model)
    assert {type(recipe_of(part)).__name__ for part, _ in parts} >= {"ModelRecipe", "HeadRecipe"}
    for part, names in parts:
        for kept in names:
            part.__dict__[kept] = getattr(part, kept)
    check_runs_as(model, ours, patched=True)
    twin = copy.deepcopy(model)
    liger_kernels.unpatch(model)
    check_runs_as(model, expected)
    check_runs_as(twin, ours, patched=True)
    liger_kernels.unpatch(twin)
    check_runs_as(twin, expected)


@pytest.mark.parametrize("name", MODELS)
def test_each_method_alone_is_upstreams(name):
    """What was taken from the class, too: called on a module that is not patched, it does what the module does."""
    model = family(name)
    liger_kernels.patch(model)
    kept = [(part, {name: getattr(type(part), name) for name in names}) for part, names in patched_parts(model)]
    for part, methods in kept:
        for method in methods:  # who asks for a signature or a name is told upstream's
            theirs = getattr(type(part).__mro__[1], method)
            assert inspect.signature(methods[method]) == inspect.signature(theirs)
            assert methods[method].__name__ == theirs.__name__
            # Of a model, accelerate removes every wrapper: it is none.
            assert hasattr(methods[method], "__wrapped__") == (part is not model)
    liger_kernels.unpatch(model)
    assert all(recipe_of(part) is None for part, _ in kept)
    for part, methods in kept:
        part.__class__ = type(
            "StandIn", (type(part),), {name: functools.partialmethod(given, name) for name in methods}
        )
        for method in methods:
            assert methods[method](part, 1, two=2) == (part, method, 1, 2)


def given(self: nn.Module, name: str, one: int, two: int) -> tuple[Any, ...]:
    return self, name, one, two


def in_float32(model: Any) -> None:
    from accelerate.utils.operations import convert_outputs_to_fp32

    model._original_forward = model.forward
    decorated = torch.autocast(DEVICE.type, enabled=False)(model.forward.__func__)
    model.forward = types.MethodType(convert_outputs_to_fp32(decorated), model)


def wrapped(model: Any) -> None:
    inner = model.forward
    model.forward = functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))


def partial(model: Any) -> None:
    model.forward = functools.partial(model.forward, use_cache=False)


def compiled(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_call(model: Any) -> None:
    model.compile(backend="eager")


HOLDERS = (in_float32, wrapped, partial, compiled, compiled_call)


@pytest.mark.slow
@pytest.mark.parametrize("hold", HOLDERS, ids=lambda hold: hold.__name__)
def test_a_model_whose_forward_somebody_kept(hold):
    """Patched, unpatched, patched again with other options, and unpatched."""
    torch._dynamo.reset()
    is_compiled = hold in (compiled, compiled_call)
    model = tiny("llama", num_hidden_layers=0 if is_compiled else 1)
    plain = copy.deepcopy(model)
    if is_compiled:  # which adds gradients up in another order
        hold(plain)
    expected = step(plain)
    with liger_kernels.patched(model):
        ours = step(model)
        hold(model)
        torch.testing.assert_close(step(model), ours)
    check_runs_as(model, expected)
    model.eval()
    generated = model.generate(input_ids=batch()["input_ids"], max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 12)
    model.train()
    with liger_kernels.patched(model, ["rms_norm", "cross_entropy"]) as report:
        torch.testing.assert_close(step(model), expected)
        if not is_compiled:  # whose forwards have no note
            assert report.counts() == {"rms_norm": 3, "cross_entropy": 1}
            assert not liger_kernels.status(model).left
            assert not report.fallbacks.keys() - {"outputs.logits was read"}
    check_runs_as(model, expected)


def test_the_call_of_a_model_with_weighted_rows():
    model = tiny("llama")
    expected = model(**batch()).loss
    with liger_kernels.patched(model, loss_reduction="sample"):
        call = model.__call__
        weighted = call(**batch(), position_ids=torch.arange(9, device=DEVICE).expand(2, 9)).loss
    assert torch.equal(call(**batch()).loss, expected)
    assert not torch.equal(weighted, expected)


def test_another_head_through_a_kept_method():
    model = tiny("llama")
    liger_kernels.patch(model)
    kept = model.set_output_embeddings
    liger_kernels.unpatch(model)
    head = nn.Linear(32, VOCAB, bias=False, device=DEVICE)
    kept(head)
    assert model.lm_head is head
    assert type(head) is nn.Linear


def test_logits_and_gradients_of_a_forward_that_ended_before_unpatch():
    """What left the forward is read, and goes back, when the model is its own again."""
    model = tiny("llama")
    expected = step(copy.deepcopy(model))
    with liger_kernels.patched(model):
        out = model(**batch(), use_cache=False)
    found = {"logits": out.logits.detach(), **gradients(model, out.loss)}
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_trainer_in_the_block_and_the_model_after_it(precision, tmp_path):
    model = tiny("llama").cpu()
    ids = batch(device=torch.device("cpu"))
    rows = [{name: value[0] for name, value in ids.items()}] * 2
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, learning_rate=0.0, bf16=precision == "bf16",
    )  # fmt: skip
    with liger_kernels.patched(model) as report:
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        if precision == "fp16":  # which transformers refuses on a CPU; accelerate wraps the forward in the same way
            in_float32(model)
        trainer.train()
        assert report.forwards == 1
        assert liger_kernels.status(model).left == []
        patched = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(patched, rel=1e-3)
    assert model.generate(input_ids=ids["input_ids"], max_new_tokens=2).shape == (2, 11)
    trainer.train()
    plain = tiny("llama").cpu()
    if precision == "bf16":
        model = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        with liger_kernels.patched(model) as report:  # a wrapper that went leaves the method that it ran around
            assert report.fuses_head
            assert liger_kernels.status(model).left == []
    reset_launches()
    torch.testing.assert_close(model(**ids).loss.float(), plain(**ids).loss, rtol=0, atol=0)
    assert launches() == {}


def test_a_pickle_of_a_kept_method():
    model = tiny("llama")
    expected = model(**batch()).loss
    liger_kernels.patch(model)
    twin = pickle.loads(pickle.dumps(model.forward)).__self__  # a bound method is its module and a name
    liger_kernels.unpatch(twin)
    assert torch.equal(twin(**batch()).loss, expected)
