"""layer_norm against its reference; what all norms have in common is in test_ops_every.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from convergence.judge.tolerance import three_way
from convergence.op.call import check_call, run
from liger_kernels.ops import layer_norm, layer_norm_ref
from liger_kernels.ops._norm_rows import MAX_HIDDEN
from tests.ops_checks import DTYPES, randn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_torchs_own(device, dtype) -> None:
    leaves = [randn(*shape, dtype=dtype, device=device) for shape in ((9, 200), (200,), (200,))]
    check_call(layer_norm, lambda x, *vectors: F.layer_norm(x, x.shape[-1:], *vectors), leaves)


def test_a_bias_without_a_weight(device) -> None:
    leaves = [randn(*shape, dtype=torch.float32, device=device) for shape in ((9, 200), (200,))]
    check_call(*(lambda x, bias, op=op: op(x, None, bias) for op in (layer_norm, layer_norm_ref)), leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 64])
def test_a_row_of_equal_numbers_is_the_bias(device, dtype, hidden) -> None:
    weight, bias = (randn(hidden, dtype=dtype, device=device) for _ in range(2))
    x = torch.full((5, hidden), 5.0, dtype=dtype, device=device, requires_grad=True)
    (y,), (dx, dweight, dbias) = run(layer_norm, [x, weight, bias])
    assert torch.equal(y, bias.expand(5, -1))
    assert not dweight.any()
    assert bool((dbias == 5.0).all())
    assert hidden > 1 or not dx.any()


@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_a_large_mean_costs_no_variance(device, mean) -> None:
    """mean(x^2) - mean^2 has no digit left of a variance of a millionth of mean^2."""
    x = (randn(16, 512, dtype=torch.float32, device=device) + mean).detach().requires_grad_()
    y = layer_norm(x)
    truth = layer_norm_ref(x.double())
    three_way(y, layer_norm_ref(x), truth, torch.float32, "y", 16)


def test_padding_does_not_count_in_16_bits(device) -> None:
    """Where a row's mean is as large as its deviation, columns beyond the row would."""
    x = (randn(16, 80, dtype=torch.bfloat16, device=device) + 1.0).detach().requires_grad_()
    check_call(layer_norm, layer_norm_ref, [x])


def test_result_of_another_dtype(device) -> None:
    """As under autocast, which casts what goes in: nothing is lost by not casting it."""
    leaves = [randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((7, 96), (96,), (96,))]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    upstream = [randn(7, 96, dtype=torch.float32, device=device, grad=False)]
    ours, theirs = run(partial(layer_norm, dtype=torch.float32), leaves, upstream), run(layer_norm, wide, upstream)
    truth = run(layer_norm_ref, [t.detach().double().requires_grad_() for t in leaves], [upstream[0].double()])
    three_way(ours[0][0], theirs[0][0], truth[0][0], torch.float32, "y")
    for gradient, exact, true in zip(ours[1], theirs[1], truth[1], strict=True):
        three_way(gradient, exact.bfloat16(), true, torch.bfloat16, "gradient")
    for row in (torch.ones(2, dtype=torch.float64), torch.ones(MAX_HIDDEN + 1)):  # the reference runs
        assert layer_norm(row, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_the_formula_rounds(device, dtype) -> None:
    """Once, at the end; a zero-centered weight's 1 is added in the weight's dtype."""
    x, weight, bias = (randn(*shape, dtype=dtype, device=device, grad=False) for shape in ((64, 512), (512,), (512,)))
    norm = layer_norm_ref(x.float())
    twice = (weight * norm.to(dtype)).to(dtype) + bias
    y = layer_norm(x, weight, bias)
    assert (y == layer_norm_ref(x, weight, bias)).float().mean() > 0.99
    assert (y == twice).float().mean() < 0.9
    weight = weight * 0.1
    y = layer_norm(x, weight, zero_centered=True)
    assert (y == layer_norm_ref(x, weight, zero_centered=True)).float().mean() > 0.99
    assert (y == layer_norm_ref(x, weight.float() + 1.0)).float().mean() < 0.9


@pytest.mark.parametrize(
    ("arguments", "dtype", "error", "message"),
    [
        (lambda x, w: (x.int(), w), None, TypeError, "x is torch.int32; it must be floating point"),
        (lambda x, w: (x, w.int()), None, TypeError, "weight is torch.int32; it must be floating point"),
        (lambda x, w: (x, w[1:]), None, ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (lambda x, w: (x, w, w[None]), None, ValueError, r"bias has shape \(1, 8\)"),
        (lambda x, w: (x, w), torch.int32, TypeError, "dtype is torch.int32; it must be floating point"),
    ],
)
def test_bad_input(device, arguments, dtype, error, message) -> None:
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(error, match=message):
        layer_norm(*arguments(x, weight), dtype=dtype)
