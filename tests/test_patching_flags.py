"""What trl passes into the forward of a model that it knows to be patched."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.utils._pytree as pytree

import liger_kernels
from liger_kernels.ops import launches
from tests.patching_checks import batch, fallbacks, tiny

IGNORE = -100


def expected_accuracy(model, inputs) -> torch.Tensor:
    """As trl computes it from the logits."""
    with torch.no_grad():
        predictions = model(**inputs).logits[..., :-1, :].argmax(-1)
    targets = inputs["labels"][..., 1:]
    counted = targets != IGNORE
    return ((predictions == targets) & counted).sum() / counted.sum()


@pytest.fixture
def model():
    """Its predictions are right now and then: the labels are what it predicts, but for every third one."""
    model = tiny("llama")
    liger_kernels.patch(model)
    return model


@pytest.fixture
def inputs(model):
    inputs = batch()
    with torch.no_grad():
        predictions = model.eval()(input_ids=inputs["input_ids"]).logits.argmax(-1)
    model.train()
    right = torch.arange(predictions.shape[1] - 1, device=predictions.device) % 3 > 0
    labels = inputs["labels"][:, 1:]
    inputs["labels"][:, 1:] = torch.where(right & (labels != IGNORE), predictions[:, :-1], labels)
    return inputs


@pytest.mark.parametrize("training", [True, False])
def test_token_accuracy_comes_from_the_pass_of_the_loss(model, inputs, training):
    expected = expected_accuracy(tiny("llama"), inputs)
    assert 0 < expected < 1
    model.train(training)
    plain = model(**inputs).loss
    before = launches()
    out = model(**inputs, return_token_accuracy=True, use_token_scaling=False, skip_logits=True)
    assert fallbacks(model) == {}
    if launches():  # beside a GPU, tensors on the CPU run references
        assert launches()["_cross_entropy_fwd_kernel"] == before["_cross_entropy_fwd_kernel"] + 1
    assert out.token_accuracy == out["token_accuracy"] == expected
    assert not out.token_accuracy.requires_grad
    torch.testing.assert_close(out.loss, plain)
    assert not hasattr(model(**inputs), "token_accuracy")


def test_skip_logits_in_evaluation_computes_them_only_when_read(model, inputs):
    model.eval()
    expected = model(**inputs).logits
    with torch.no_grad():
        out = model(**inputs, skip_logits=True)
    assert fallbacks(model) == {}
    assert torch.equal(out.logits, expected)
    assert fallbacks(model) == {"outputs.logits was read": 1}
    assert torch.equal(model(**inputs, skip_logits=False).logits, expected)
    assert torch.equal(model(input_ids=inputs["input_ids"], skip_logits=True).logits, expected)


def test_token_accuracy_where_the_loss_is_not_fused(model, inputs):
    """A loss function of the user's own, a tuple, pre-shifted labels: from real logits."""
    expected = expected_accuracy(tiny("llama"), inputs)
    assert model(**inputs, return_token_accuracy=True, return_dict=False)[-1] == expected
    model.loss_function = lambda logits, labels, **kwargs: logits.float().square().mean()
    assert model(**inputs, return_token_accuracy=True).token_accuracy == expected
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=IGNORE)[..., 1:]
    out = model(**inputs, shift_labels=shifted, return_token_accuracy=True)
    assert out.token_accuracy == expected


def test_the_output_with_an_accuracy_survives_traversal(model, inputs):
    with torch.no_grad():
        out = model(**inputs, return_token_accuracy=True)
    leaves, spec = pytree.tree_flatten(out)
    twin = pytree.tree_unflatten(leaves, spec)
    assert type(twin) is type(out)
    assert twin.token_accuracy == out.token_accuracy
    assert fallbacks(model) == {}
    for other in (twin, pickle.loads(pickle.dumps(out))):
        assert type(other) is type(out)
        assert other.token_accuracy == out.token_accuracy
        assert torch.equal(other.logits, out.logits)


def test_a_token_scaling_is_refused(model, inputs):
    with pytest.raises(NotImplementedError, match="use_token_scaling"):
        model(**inputs, use_token_scaling=True)
    assert model(**inputs, use_token_scaling=False).loss > 0
