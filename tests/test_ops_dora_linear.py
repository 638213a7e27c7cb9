"""dora_linear: against its reference, against PEFT, and what its length costs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from convergence.judge.tolerance import three_way
from convergence.op.call import check_call
from liger_kernels.ops import LoraAdapter
from liger_kernels.ops.lora.dora_linear import dora_linear, dora_linear_ref
from liger_kernels.ops.lora.dora_norm import dora_norm, dora_norm_ref
from liger_kernels.ops.runtime.tiling import tiled
from tests.ops_checks import DTYPES, randn

ROWS, IN, OUT, RANK = 10, 24, 20, 4


def leaves_of(dtype: torch.dtype, device: torch.device, of_adapter: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x, the base's weight and bias, a, b, the magnitude and the length, which is far from 0."""
    sizes = (2, ROWS // 2, IN), (OUT, IN), (OUT,)
    leaves = [randn(*size, dtype=dtype, device=device) for size in sizes]
    leaves += [randn(*size, dtype=of_adapter, device=device) for size in ((RANK, IN), (OUT, RANK))]
    leaves.append(randn(OUT, dtype=of_adapter, device=device))
    return [*leaves, 0.5 + randn(OUT, dtype=torch.float32, device=device, grad=False).abs()]


def layer(
    op: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    m: torch.Tensor,
    n: torch.Tensor,
    with_bias: bool = True,
) -> torch.Tensor:
    bias = bias if with_bias else None
    return op(x, lambda x: F.linear(x, weight, bias), LoraAdapter(a, b, 0.5), m, n, bias)


@pytest.mark.parametrize("of_adapter", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_with_and_without_a_bias(dtype: torch.dtype, of_adapter: torch.dtype, device: torch.device) -> None:
    leaves = leaves_of(dtype, device, of_adapter)
    check_call(partial(layer, dora_linear), partial(layer, dora_linear_ref), leaves, terms=IN)
    without = partial(layer, with_bias=False)
    leaves[2].requires_grad_(False)
    check_call(partial(without, dora_linear), partial(without, dora_linear_ref), leaves, terms=IN)


def test_vectors_that_lie_apart_or_are_negated_views(device: torch.device) -> None:
    *leaves, norm = leaves_of(torch.float32, device)

    def apart(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t.detach(), torch.full_like(t, torch.nan)], 1)[:, 0]

    leaves[2], leaves[5] = (apart(leaves[i]).requires_grad_() for i in (2, 5))
    for same in (apart(norm), norm[:1].expand(OUT), torch.complex(norm, -norm).conj().imag):
        check_call(partial(layer, dora_linear), partial(layer, dora_linear_ref), [*leaves, same], terms=IN)


def test_gradients_in_parts(device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device)
    shape = {"ROWS": 16, "BLOCK": 16, "num_warps": 4, "num_stages": 2}
    leaves[0] = randn(3, 40, IN, dtype=torch.float32, device=device)
    with tiled(dora_backward=lambda choose, *_: (4, shape)):
        check_call(partial(layer, dora_linear), partial(layer, dora_linear_ref), leaves, terms=120)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (3,), (4,), (5,), (0, 5), (3, 4)], ids=str)
def test_only_the_gradients_that_are_asked_for(trained: tuple[int, ...], device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device)
    leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(leaves)]
    check_call(partial(layer, dora_linear), partial(layer, dora_linear_ref), leaves, terms=IN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_length_of_a_row(dtype: torch.dtype, device: torch.device) -> None:
    _, weight, _, a, b, *_ = leaves_of(dtype, device)
    adapter, wide = LoraAdapter(a, b, 0.5), LoraAdapter(a.detach().double(), b.detach().double(), 0.5)
    found = dora_norm(weight, adapter)
    assert not found.requires_grad
    truth = dora_norm_ref(weight.detach().double(), wide)
    three_way(found, dora_norm_ref(weight, adapter), truth, torch.float32, "length")


@pytest.mark.parametrize("rank", [3, 20])
def test_the_length_of_a_row_in_parts(rank: int, device: torch.device) -> None:
    weight = randn(70, 300, dtype=torch.bfloat16, device=device).detach()
    a, b = (randn(*size, dtype=torch.float32, device=device).detach() for size in ((rank, 300), (70, rank)))
    with tiled(dora_gram=lambda choose, *_: (4, 32)):
        found = dora_norm(weight, LoraAdapter(a, b.t().contiguous().t(), 0.5))
    truth = dora_norm_ref(weight.double(), LoraAdapter(a.double(), b.double(), 0.5))
    three_way(found, dora_norm_ref(weight, LoraAdapter(a, b, 0.5)), truth, torch.float32, "length")


def test_a_row_that_the_adapter_takes_away_has_no_length(device: torch.device) -> None:
    """Rounding leaves no number that has no root."""
    _, _, _, a, b, *_ = leaves_of(torch.float32, device)
    weight = -(b @ a).detach()
    found = dora_norm(weight, LoraAdapter(a, b))
    assert bool((found < 1e-2 * weight.norm()).all())
    assert bool((found >= 0).all())


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_as_peft_in_float64(bias: bool) -> None:
    peft = pytest.importorskip("peft", reason="some versions of transformers are tested without peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=bias)).double()
    config = peft.LoraConfig(r=RANK, lora_alpha=2, target_modules=["0"], use_dora=True)
    module: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False).base_model.model[0].double()
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    magnitude = module.lora_magnitude_vector["default"].weight
    with torch.no_grad():
        b.normal_()
        magnitude.mul_(1.5)
    x = torch.randn(2, 5, IN, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 5, OUT, dtype=torch.float64)
    leaves = [x, a, b, magnitude]
    adapter, base = LoraAdapter(a, b, module.scaling["default"]), module.base_layer
    ours = dora_linear(x, base, adapter, magnitude, dora_norm(base.weight, adapter), base.bias)
    theirs = module(x)
    for mine, expected in zip(
        [ours, *torch.autograd.grad(ours, leaves, dy)], [theirs, *torch.autograd.grad(theirs, leaves, dy)], strict=True
    ):
        assert float((mine - expected).norm().detach()) <= 1e-13 * float(expected.norm().detach())


def test_float32_adapters_of_a_bfloat16_model_lose_next_to_nothing(device: torch.device) -> None:
    """dA and dB. The base's own rounding decides about the magnitude's gradient."""
    leaves = leaves_of(torch.bfloat16, device)
    dy = randn(2, ROWS // 2, OUT, dtype=torch.bfloat16, device=device, grad=False)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    found, truth = (
        torch.autograd.grad(layer(op, *given), given[3:6], dy.to(given[0].dtype))
        for op, given in ((dora_linear, leaves), (dora_linear_ref, wide))
    )
    errors = [float((mine - exact).norm() / exact.norm()) for mine, exact in zip(found, truth, strict=True)]
    assert max(errors[:2]) < 1e-5
    assert errors[2] < 1e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_gradients_are_the_same(reentrant: bool, device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device)
    dy = randn(2, ROWS // 2, OUT, dtype=torch.float32, device=device, grad=False)
    call = partial(layer, dora_linear)
    expected = torch.autograd.grad(call(*leaves), leaves[:6], dy)
    checkpoint(call, *leaves, use_reentrant=reentrant).backward(dy)
    assert all(torch.equal(t.grad, its) for t, its in zip(leaves, expected, strict=False))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"m": torch.ones(OUT + 1)}, ValueError, r"magnitude has shape \(21,\); with this adapter it must be \(20,\)"),
        ({"n": torch.ones(OUT, dtype=torch.int64)}, TypeError, "norm is torch.int64; it must be floating point"),
        ({"a": torch.ones(RANK, IN + 1)}, ValueError, "one of adapters has a of shape"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    names = ("x", "weight", "bias", "a", "b", "m", "n")
    given = {**dict(zip(names, leaves_of(torch.float32, torch.device("cpu")), strict=True)), **change}
    with pytest.raises(error, match=message):
        layer(dora_linear, **given)


def test_an_adapter_with_a_bias_or_a_weight_of_another_shape() -> None:
    x, weight, _, a, b, m, n = leaves_of(torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="adapter has a bias or a dropout"):
        dora_linear(x, lambda x: F.linear(x, weight), LoraAdapter(a, b, bias=m), m, n)
    with pytest.raises(ValueError, match=r"weight has shape \(20, 23\); with this adapter it must be \(20, 24\)"):
        dora_norm(weight[:, 1:], LoraAdapter(a, b))


def test_without_rows(device: torch.device) -> None:
    leaves = leaves_of(torch.bfloat16, device)
    leaves[0] = leaves[0][:, :0].detach().requires_grad_()
    y = layer(dora_linear, *leaves)
    assert y.shape == (2, 0, OUT)
    gradients = torch.autograd.grad(y, leaves[:6], torch.empty_like(y))
    assert [g.shape for g in gradients] == [t.shape for t in leaves[:6]]
    assert all(not g.any() for g in gradients)
