"""The mean's denominator and the mean, against float64, through several blocks of rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from liger_kernels.ops.loss.mean import mean, mean_denominator, mean_denominator_ref
from liger_kernels.ops.runtime.tiling import tiled

VOCAB, IGNORED = 7, -100


@pytest.fixture(autouse=True, params=[8, 64], ids=["several blocks", "one block"])
def block(request):
    with tiled(mean=lambda choose, n_rows: {"BLOCK": request.param, "num_warps": 1}):
        yield


kernel_and_reference = pytest.mark.parametrize(
    "function", [mean_denominator, mean_denominator_ref], ids=["kernel", "reference"]
)


@pytest.mark.parametrize(("tokens", "dtype"), [(0, torch.int64), (8, torch.int32), (23, torch.int64)], ids=str)
@pytest.mark.parametrize(("by_class", "by_row"), [*itertools.product([False, True], repeat=2)])
@kernel_and_reference
def test_denominator(function, tokens, by_class, by_row, dtype, device):
    """Ignored rows count nothing, whatever their weight; classes that do not exist have no weight."""
    targets = (torch.arange(tokens, device=device, dtype=dtype) * 3) % (VOCAB + 2)
    targets[2::5] = IGNORED
    class_weight = torch.rand(VOCAB, device=device) if by_class else None
    row_weight = torch.rand(tokens, device=device) if by_row else None
    if by_row:
        row_weight[2::5] = math.nan
    counted = [i for i in range(tokens) if targets[i] != IGNORED and not (by_class and targets[i] >= VOCAB)]
    expected = sum(
        (float(class_weight[targets[i]]) if by_class else 1.0) * (float(row_weight[i]) if by_row else 1.0)
        for i in counted
    )
    found = function(targets, class_weight, row_weight, None, IGNORED, VOCAB)
    assert found.dtype == torch.float32
    assert found.shape == ()
    assert float(found) == pytest.approx(expected or math.inf, rel=1e-6)


@kernel_and_reference
def test_no_class_weighs_in_for_ignored_rows(function, device):
    targets, class_weight = torch.tensor([IGNORED, 2], device=device), torch.tensor([math.nan, 1.0, 3.0], device=device)
    assert float(function(targets, class_weight, None, None, IGNORED, 3)) == 3.0


@pytest.mark.parametrize(("given", "divides_by"), [(0.0, math.inf), (2.5, 2.5)])
def test_given_denominator(given, divides_by, device):
    denominator = torch.tensor(given, dtype=torch.float64, device=device)
    found = mean_denominator(torch.zeros(3, dtype=torch.int64, device=device), None, None, denominator, IGNORED, VOCAB)
    assert found.dtype == torch.float32
    assert float(found) == divides_by


@pytest.mark.parametrize("tokens", [0, 8, 23])
def test_mean(tokens, device):
    losses = torch.randn(tokens, device=device)
    found = mean(losses, torch.tensor(3.0, device=device))
    assert float(found) == pytest.approx(float(losses.double().sum()) / 3, rel=1e-6, abs=1e-7)
    assert float(mean(losses, torch.tensor(math.inf, device=device))) == 0.0
