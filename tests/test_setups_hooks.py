"""Hooks see what they see unpatched; threads and exceptions see nothing of one another's forward."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.modules import module as torch_module

import liger_kernels
from liger_kernels.patching.logits.running import running
from tests.patching_checks import VOCAB, batch, check_same, tiny, train


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
            return train(model)
        finally:
            handle.remove()

    check_same(tiny("llama"), run)


@pytest.mark.parametrize("register", ["forward_hook", "full_backward_hook", "forward_pre_hook"])
def test_a_hook_on_all_modules(register):
    """It is called as often, and for the same shapes, as unpatched; kernels that do not call a module step back."""

    def watched(model):
        calls = []

        def hook(module, *values):
            value = values[-1][0] if isinstance(values[-1], tuple) and values[-1] else values[-1]
            calls.append((type(module).__name__, getattr(value, "shape", None)))

        handle = getattr(torch_module, f"register_module_{register}")(hook)
        try:
            return train(model), calls
        finally:
            handle.remove()

    patched = tiny("llama")
    liger_kernels.patch(patched)
    (found, seen), (expected, calls) = watched(patched), watched(tiny("llama"))
    assert seen == calls
    torch.testing.assert_close(found, expected)


def test_a_training_and_a_serving_thread():
    model = tiny("llama")
    ids = batch()["input_ids"]
    liger_kernels.patch(model)
    expected = model(**batch()).loss.detach(), model(input_ids=ids).logits.detach()
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            with torch.no_grad():
                logits = model(input_ids=ids).logits
            assert type(logits) is torch.Tensor
            assert torch.equal(logits, expected[1])

    with ThreadPoolExecutor() as threads:
        serving = threads.submit(serve)
        try:
            for _ in range(20):
                loss = model(**batch()).loss
                loss.backward()
                assert torch.equal(loss, expected[0])
        finally:
            ended.set()
        serving.result()


def test_three_training_threads():
    model = tiny("llama")
    batches = [batch(seed=seed, length=length) for seed, length in enumerate((5, 9, 14))]
    liger_kernels.patch(model)
    expected = [model(**inputs).loss.detach() for inputs in batches]

    def same(inputs, loss):
        return all(torch.equal(model(**inputs).loss, loss) for _ in range(10))

    with ThreadPoolExecutor() as threads:
        assert all(threads.map(same, batches, expected))


@pytest.mark.parametrize("where", ["model.norm", "lm_head"])
def test_an_exception_in_a_forward_leaves_nothing_behind(where, monkeypatch):
    """Also one of the fused loss, inside of the head's call: out of memory, for example."""
    model = tiny("llama")
    expected = model(input_ids=batch()["input_ids"]).logits
    liger_kernels.patch(model)
    with monkeypatch.context() as fault:
        if where == "lm_head":
            fault.setattr("liger_kernels.patching.logits.product.linear_cross_entropy", lambda *_, **__: 1 / 0)
        else:
            fault.setattr(model.get_submodule(where), "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch())
    assert running.forward is running.request is None
    found = model(input_ids=batch()["input_ids"]).logits
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)
