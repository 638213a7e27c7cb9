"""``cross_entropy_ref`` is the formula, and PyTorch's own loss where PyTorch has the option."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from liger_kernels.ops.loss.cross_entropy import EXTRAS, cross_entropy_ref
from tests.cross_entropy_checks import every_reduction, make_inputs, plain_and_all
from tests.linear_cross_entropy_checks import ALL


@every_reduction
def test_reference_is_the_formula(reduction):
    """Written out once more, element by element, from the formula at the top of the op's file."""
    logits, targets, options = make_inputs(7, 5, torch.float64, torch.device("cpu"), ALL)
    w = options["class_weight"] = options["class_weight"].double()
    by_row = options["row_weight"] = options["row_weight"].double()
    eps, cap, scale = options["label_smoothing"], options["softcap"], options["logit_scale"]
    temperature = options["temperature"]
    out = cross_entropy_ref(logits, targets, reduction=reduction, extras=EXTRAS, **options)
    losses, weights, hits = [], [], []
    for row, y in enumerate(targets.tolist()):
        z = [cap * math.tanh(scale * x / cap) / temperature for x in logits[row].tolist()]
        lse = math.log(sum(math.exp(v) for v in z))
        log_p = [v - lse for v in z]
        assert out.entropy[row].item() == pytest.approx(-sum(math.exp(v) * v for v in log_p))
        assert out.log_sum_sq_probs[row].item() == pytest.approx(math.log(sum(math.exp(2 * v) for v in log_p)))
        assert out.mean_logits[row].item() == pytest.approx(sum(z) / 5)
        assert out.max_logits[row].item() == pytest.approx(max(z))
        assert out.predicted_tokens[row] == z.index(max(z))
        if y == options["ignore_index"]:
            losses.append(0.0)
            assert out.log_probs[row] == 0
            continue
        smooth = sum(w[c].item() * -log_p[c] for c in range(5))
        loss = (1 - eps) * w[y].item() * -log_p[y] + eps / 5 * smooth + options["z_loss"] * lse**2
        losses.append(by_row[row].item() * loss)
        weights.append(by_row[row].item() * w[y].item())
        hits.append(z.index(max(z)) == y)
        assert out.log_probs[row].item() == pytest.approx(log_p[y])
    expected = {"none": losses, "sum": sum(losses), "mean": sum(losses) / sum(weights)}[reduction]
    assert out.loss.tolist() == pytest.approx(expected)
    assert out.token_accuracy.item() == pytest.approx(sum(hits) / len(hits))


@every_reduction
@plain_and_all
def test_reference_gradient(options, reduction):
    logits, targets, options = make_inputs(5, 7, torch.float64, torch.device("cpu"), options)
    assert torch.autograd.gradcheck(lambda x: cross_entropy_ref(x, targets, reduction=reduction, **options), logits)


@every_reduction
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"class_weight": True, "label_smoothing": 0.3}])
def test_reference_is_torchs_where_torch_has_the_option(options, reduction):
    logits, targets, options = make_inputs(5, 7, torch.float64, torch.device("cpu"), options)
    weight = options.pop("class_weight", None)
    weight = None if weight is None else weight.double()
    expected = F.cross_entropy(logits, targets, weight, reduction=reduction, **options)
    torch.testing.assert_close(cross_entropy_ref(logits, targets, class_weight=weight, reduction=reduction, **options),
                               expected)  # fmt: skip
