"""How ``cross_entropy`` is called: arguments, options, extras, launches, and a second backward pass."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from liger_kernels.ops.loss.cross_entropy import EXTRAS, cross_entropy, cross_entropy_ref
from liger_kernels.ops.loss.linear_cross_entropy import linear_cross_entropy
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.runtime.dispatch import launches, reset_launches
from tests.cross_entropy_checks import every_dtype, every_reduction, make_inputs, run
from tests.linear_cross_entropy_checks import ALL, assert_equal


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean'; it must be one of 'mean', 'sum', 'none'"),
        ({"extras": ("accuracy",)}, ValueError, "names from 'token_accuracy'"),
        ({"extras": "entropy"}, TypeError, "must be a tuple of names"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5; it must be between 0 and 1"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0; it must be positive and finite, or None"),
        ({"z_loss": -1.0}, ValueError, "z_loss is -1.0; it must be 0 or positive"),
        ({"logit_scale": math.inf}, ValueError, "logit_scale is inf; it must be finite"),
        ({"logit_scale": torch.tensor(2.0)}, TypeError, r"logit_scale is a Tensor .*; it must be a Python number"),
        ({"reduce": "mean"}, TypeError, "reduce is no option; the options are ignore_index, label_smoothing, softcap"),
        ({"ignore_index": 1.5}, TypeError, r"ignore_index is a float \(1.5\); it must be an int"),
        ({"class_weight": torch.ones(4)}, ValueError, r"class_weight is torch.float32 of shape \(4,\)"),
        ({"class_weight": torch.ones(5, dtype=torch.long)}, ValueError, "class_weight is torch.int64"),
        ({"class_weight": torch.ones(5, requires_grad=True)}, ValueError, "class_weight requires a gradient"),
        ({"targets": torch.zeros(3)}, TypeError, "targets are torch.float32; they must be int64 or int32"),
        ({"targets": torch.zeros(2, dtype=torch.long)}, ValueError, r"for 3 rows they must be \[3\]"),
        ({"targets": torch.zeros(3, dtype=torch.long, device="meta")}, ValueError, "targets are on meta"),
        ({"logits": torch.zeros(3, 2, 5)}, ValueError, "flatten the leading dimensions"),
        ({"logits": torch.zeros(3, 5, dtype=torch.long)}, ValueError, "logits are torch.int64"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    arguments = {"logits": torch.zeros(3, 5), "targets": torch.zeros(3, dtype=torch.long), **options}
    with pytest.raises(error, match=message):
        cross_entropy(**arguments)


def test_extras_only_on_request_and_without_gradient(device):
    logits, targets, _ = make_inputs(9, 40, torch.float32, device, {})
    assert isinstance(cross_entropy(logits, targets), torch.Tensor)
    for extra in EXTRAS:
        out = cross_entropy(logits, targets, extras=(extra,))
        assert [name for name in EXTRAS if getattr(out, name) is not None] == [extra]
        assert not getattr(out, extra).requires_grad
        assert out.loss.requires_grad
        assert torch.equal(out.loss, cross_entropy(logits, targets))
    out = cross_entropy(logits, targets, extras=EXTRAS)
    assert out.predicted_tokens.dtype == torch.int64
    counted = targets != -100
    assert out.token_accuracy == (logits.argmax(-1) == targets)[counted].float().mean()
    assert torch.equal(out.log_probs[~counted], torch.zeros_like(out.log_probs[~counted]))


def test_one_launch_forward_one_backward_none_without_gradient(device):
    logits, targets, _ = make_inputs(9, 40, torch.float32, device, {})
    reset_launches()
    loss = cross_entropy(logits, targets)
    forward = launches()
    assert forward["_cross_entropy_fwd_kernel"] == 1
    loss.backward()
    assert launches() == forward | {"_cross_entropy_bwd_kernel": 1}
    with torch.no_grad():
        assert torch.equal(cross_entropy(logits, targets), loss)
    assert not cross_entropy(logits.detach(), targets).requires_grad


@every_reduction
@pytest.mark.parametrize("upstream", [1.0, 0.25])
@every_dtype
def test_a_second_backward_pass_computes_the_same_bits_anew(dtype, upstream, reduction, device):
    """The first one hands out what a mean's forward wrote, if the upstream gradient is 1; the second one cannot. And
    nothing that the caller sees is overwritten."""
    logits, targets, options = make_inputs(130, 300, dtype, device, ALL)
    given = logits, targets, options["class_weight"], options["row_weight"]
    before = [t.detach().clone() for t in given]
    loss = cross_entropy(logits, targets, **{**options, "reduction": reduction})
    given_loss = torch.full_like(loss, upstream)
    (first,) = torch.autograd.grad(loss, logits, given_loss, retain_graph=True)
    kept = first.clone()
    first.fill_(float("nan"))  # it is the caller's now
    (second,) = torch.autograd.grad(loss, logits, given_loss)
    assert_equal([second, *given], [kept, *before])


def test_float64_runs_the_reference(device):
    logits, targets, options = make_inputs(9, 40, torch.float64, device, ALL)
    reset_launches()
    assert_equal(*(run(f, logits, targets, **options) for f in (cross_entropy, cross_entropy_ref)))
    assert launches() == {}


@pytest.mark.parametrize("function", [cross_entropy, cross_entropy_ref, linear_cross_entropy])
def test_every_option_is_in_the_signature(function):
    shown = inspect.signature(function).parameters
    for name, default in LossOptions()._asdict().items():
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[name].default == default


def test_options_are_the_same_after_an_operators_schema():
    options = LossOptions(7, 0.1, None, 2.0, 1e-4, 0.5, "sum", ("entropy", "log_probs"))
    assert LossOptions.of_numbers(options.as_numbers(), "sum", "entropy log_probs") == options


def test_second_derivatives_are_refused(device):
    logits, targets, _ = make_inputs(9, 40, torch.float32, device, {})
    upstream = torch.ones((), device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(cross_entropy(logits, targets), logits, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
