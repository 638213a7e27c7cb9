"""Hooks see what they see unpatched; threads and exceptions see nothing of one another's forward."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch.nn.modules import module as torch_module

import liger_kernels
from liger_kernels.patching.running import running
from tests.patching_checks import VOCAB, batch, check_same, gradients, tiny


def double_input_gradient(module, grad_inputs, grad_outputs):
    assert grad_outputs[0].shape[-1] == VOCAB
    return (2 * grad_inputs[0],)


def half_output_gradient(module, grad_outputs):
    assert grad_outputs[0].shape[-1] == VOCAB
    return (grad_outputs[0] / 2,)


def double_logits(module, inputs, output):
    assert output.shape[-1] == VOCAB
    return 2 * output


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_full_backward_hook", double_input_gradient),
        ("register_full_backward_pre_hook", half_output_gradient),
        ("register_forward_hook", double_logits),
    ],
)
def test_a_hook_on_the_head_that_changes_what_it_sees(register, hook):
    def run(model):
        handle = getattr(model.lm_head, register)(hook)
        try:
            return gradients(model, model(**batch()).loss)
        finally:
            handle.remove()

    check_same(tiny("llama"), run)


@pytest.mark.parametrize("register", ["forward_hook", "full_backward_hook", "forward_pre_hook"])
def test_a_hook_on_all_modules(register):
    """It is called as often, and for the same shapes, as unpatched; kernels that do not call a module step back."""
    model = tiny("llama")
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    seen: dict[bool, list[tuple[str, object]]] = {}
    found = []
    for each in (model, patched):
        calls: list[tuple[str, object]] = []

        def hook(module, *values, calls=calls):
            value = values[-1][0] if isinstance(values[-1], tuple) and values[-1] else values[-1]
            calls.append((type(module).__name__, getattr(value, "shape", None)))

        handle = getattr(torch_module, f"register_module_{register}")(hook)
        try:
            found.append(gradients(each, each(**batch()).loss))
        finally:
            handle.remove()
        seen[each is patched] = calls
    assert seen[True] == seen[False]
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=name)


def test_a_training_and_a_serving_thread():
    model = tiny("llama")
    ids = batch()["input_ids"]
    liger_kernels.patch(model)
    expected = model(**batch()).loss.detach(), model(input_ids=ids).logits.detach()
    wrong: list[object] = []
    ended = threading.Event()

    def serve():
        try:
            while not ended.is_set():
                with torch.no_grad():
                    logits = model(input_ids=ids).logits
                if type(logits) is not torch.Tensor or not torch.equal(logits, expected[1]):
                    wrong.append(logits)
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(20):
        loss = model(**batch()).loss
        loss.backward()
        if not torch.equal(loss, expected[0]):
            wrong.append(loss)
    ended.set()
    thread.join()
    assert wrong == []


def test_three_training_threads():
    model = tiny("llama")
    batches = [batch(seed=seed, length=length) for seed, length in enumerate((5, 9, 14))]
    liger_kernels.patch(model)
    expected = [model(**inputs).loss.detach() for inputs in batches]
    wrong: list[object] = []

    def train(inputs, loss):
        try:
            wrong.extend(found for _ in range(10) if not torch.equal(found := model(**inputs).loss, loss))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=train, args=both) for both in zip(batches, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("where", ["model.norm", "lm_head"])
def test_an_exception_in_a_forward_leaves_nothing_behind(where, monkeypatch):
    """Also one of the fused loss, inside of the head's call: out of memory, for example."""
    model = tiny("llama")
    expected = model(input_ids=batch()["input_ids"]).logits
    liger_kernels.patch(model)
    with monkeypatch.context() as fault:
        if where == "lm_head":
            fault.setattr("liger_kernels.patching.product.linear_cross_entropy", lambda *_, **__: 1 / 0)
        else:
            fault.setattr(model.get_submodule(where), "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch())
    assert running.forward is running.request is None
    found = model(input_ids=batch()["input_ids"]).logits
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)
