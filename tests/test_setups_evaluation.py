"""Evaluation with labels computes no logits unless somebody reads them."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

import liger_kernels
from tests.patching_checks import VOCAB, batch, fallbacks, tiny


@contextlib.contextmanager
def heads_multiplied(monkeypatch):
    """Counts the products with the head's weight."""
    calls = []
    own = F.linear

    def linear(x, weight, bias=None):
        if weight.shape[0] == VOCAB:
            calls.append(x.shape)
        return own(x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", linear)
        yield calls


@pytest.fixture
def models():
    model = tiny("llama").eval()
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    return model, patched


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_a_forward_with_labels(models, mode, monkeypatch):
    model, patched = models
    with mode(), heads_multiplied(monkeypatch) as calls:
        outputs = patched(**batch())
        assert calls == []
        torch.testing.assert_close(outputs.loss, model(**batch()).loss)
        assert len(calls) == 1  # of the unpatched one
        torch.testing.assert_close(outputs.logits, model(**batch()).logits)
    assert fallbacks(patched) == {}  # whoever reads them there wants them


def evaluate(model, folder, metrics=None, **options):
    arguments = TrainingArguments(str(folder), report_to=[], disable_tqdm=True, per_device_eval_batch_size=2, **options)
    rows = [{name: rows[0] for name, rows in batch(seed=seed, device=torch.device("cpu")).items()} for seed in range(4)]
    trainer = Trainer(model=model, args=arguments, eval_dataset=rows, compute_metrics=metrics)
    return trainer.evaluate()


@pytest.mark.parametrize("options", [{}, {"prediction_loss_only": True}])
def test_a_trainer_that_wants_the_loss_only(models, options, tmp_path, monkeypatch):
    model, patched = models
    expected = evaluate(model, tmp_path, **options)["eval_loss"]
    with heads_multiplied(monkeypatch) as calls:
        assert evaluate(patched, tmp_path, **options)["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert calls == []


def test_a_trainer_with_metrics_gets_the_logits(models, tmp_path):
    def metrics(prediction):
        return {"sum": float(prediction.predictions.sum()), "size": prediction.predictions.size}

    expected, found = (evaluate(model, tmp_path, metrics) for model in models)
    assert found["eval_size"] == expected["eval_size"] == 4 * 9 * VOCAB
    assert found["eval_sum"] == pytest.approx(expected["eval_sum"], rel=1e-5)
