"""swiglu and geglu against their references, alone and with a linear layer behind them; what all ops have in common is
in test_ops_every.py."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from convergence.judge.tolerance import FLOOR_ROUNDOFFS, three_way, unit_roundoff
from convergence.op.call import run
from liger_kernels.ops import (
    geglu,
    geglu_linear,
    geglu_linear_ref,
    geglu_ref,
    swiglu,
    swiglu_linear,
    swiglu_linear_ref,
    swiglu_ref,
)
from liger_kernels.ops._glu import ACTIVATIONS, _linear
from liger_kernels.ops.runtime.dispatch import launch
from tests.ops_checks import DTYPES, randn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = {
    "swiglu": (swiglu, swiglu_ref),
    "geglu_tanh": (geglu, geglu_ref),
    "geglu_exact": (partial(geglu, approximate="none"), partial(geglu_ref, approximate="none")),
}
LINEAR_OPS = {
    "swiglu": (swiglu_linear, swiglu_linear_ref),
    "geglu_tanh": (geglu_linear, geglu_linear_ref),
    "geglu_exact": (partial(geglu_linear, approximate="none"), partial(geglu_linear_ref, approximate="none")),
}


@pytest.fixture(params=OPS)
def op(request):
    return OPS[request.param]


@pytest.fixture(params=LINEAR_OPS)
def linear_op(request):
    """The op, its reference, and the op without the linear layer."""
    return *LINEAR_OPS[request.param], OPS[request.param][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_the_activation_forward_and_backward(device, op, dtype) -> None:
    """One rounding less would be nearer to the truth, and another function than upstream's: dL/dup too uses the
    rounded activation. A last bit of exp in float32 tips few roundings; leaving the rounding out changes a third."""
    gate, up = (randn(64, 512, dtype=dtype, device=device) for _ in range(2))
    upstream = [torch.randn(64, 512).to(device, dtype)]
    (ours,), (_, dup) = run(op[0], [gate, up], upstream)
    (theirs,), (_, their_dup) = run(op[1], [gate, up], upstream)
    assert torch.eq(ours, theirs).float().mean() > 0.99
    assert torch.eq(dup, their_dup).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_special_gates(device, op, dtype) -> None:
    """Where exp over- or underflows, and where the cube in the tanh form does: finite, with finite gradients."""
    largest = torch.finfo(dtype).max
    magnitudes = torch.tensor([0.0, 1e-6, 5.0, 11.0, 12.0, 13.0, 50.0, 90.0, 500.0, 6e4, largest / 2, largest])
    gate = torch.cat((magnitudes, -magnitudes)).to(device, dtype).requires_grad_()
    up = torch.full_like(gate, 0.5).requires_grad_()
    (y,), gradients = run(op[0], [gate, up])
    truth, truths = run(op[1], [t.detach().double().clamp(-1e100, 1e100).requires_grad_() for t in (gate, up)])
    # 1 + tanh and 1 + erf round at 1 before the gate multiplies them; beyond a gate of -13 they are exactly 0.
    cancelled = 13 * unit_roundoff(torch.float32)
    for ours, true in zip([y, *gradients], [*truth, *truths], strict=True):
        bound = FLOOR_ROUNDOFFS * unit_roundoff(dtype) * true.abs() + cancelled
        assert bool(((ours.double() - true.to(dtype).double()).abs() <= bound).all())


def test_infinite_gate(device) -> None:
    """An infinity stays one, and what was zero at minus infinity is not a large number."""
    gate = torch.tensor([float("inf")], device=device)
    for ours, ref in OPS.values():
        assert torch.equal(ours(gate, gate), ref(gate, gate))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g, u: (g.int(), u), TypeError, "gate is torch.int32 and up torch.float32; both must be floating"),
        (lambda g, u: (g, u[:1]), ValueError, r"gate has shape \(3, 5\), up \(1, 5\); both must be \[..., features\]"),
        (lambda g, u: (g[0, 0], u[0, 0]), ValueError, r"gate has shape \(\), up \(\)"),
        (lambda g, u: (g, u.to("meta")), ValueError, "up on meta; move one to the other"),
    ],
)
def test_bad_input(device, op, change, error, message) -> None:
    with pytest.raises(error, match=message):
        op[0](*change(torch.randn(3, 5, device=device), torch.randn(3, 5, device=device)))


def test_unknown_approximation(device) -> None:
    x = torch.randn(3, 5, device=device)
    with pytest.raises(ValueError, match="approximate is 'erf'; it must be one of 'tanh', 'none'"):
        geglu(x, x, approximate="erf")


# With the linear layer behind them.


def linear_leaves(device, *shape, out=7, dtype=torch.bfloat16, bias=True) -> list[torch.Tensor]:
    leaves = [randn(*shape, dtype=dtype, device=device, scale=2.0) for _ in range(2)]
    leaves.append(randn(out, shape[-1], dtype=dtype, device=device, scale=shape[-1] ** -0.5))
    return [*leaves, randn(out, dtype=dtype, device=device)] if bias else leaves


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_the_unit_and_the_layer_bit_for_bit(device, linear_op, dtype) -> None:
    """The product of the backward is that of the forward to the last bit, or the gradient of weight would differ."""
    fused, _, unit = linear_op
    leaves = linear_leaves(device, 64, 130, dtype=dtype)
    upstream = [torch.randn(64, 7).to(device, dtype)]
    (out,), gradients = run(fused, leaves, upstream)
    (expected,), theirs = run(lambda gate, up, *rest: F.linear(unit(gate, up), *rest), leaves, upstream)
    assert torch.equal(out, expected)
    y = unit(*(t.detach() for t in leaves[:2]))
    assert torch.equal(gradients[2], torch.mm(upstream[0].t(), y))
    for gradient, their in zip(gradients[:2], theirs[:2], strict=True):
        assert torch.equal(gradient, their)


@pytest.mark.parametrize("frozen", [set(), {0}, {2}], ids=str)
def test_linear_makes_the_product_again_for_its_weight_alone(device, linear_op, monkeypatch, frozen) -> None:
    module, products = importlib.import_module("liger_kernels.ops._glu"), []

    def record(kernel, grid, device, *args, **kwargs):
        products.extend([kwargs["PRODUCT"]] if "PRODUCT" in kwargs else [])
        launch(kernel, grid, device, *args, **kwargs)

    monkeypatch.setattr(module, "launch", record)
    leaves = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(linear_leaves(device, 4, 16))]
    run(linear_op[0], leaves)
    assert products == [2 not in frozen]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_linear_under_autocast(device, linear_op, dtype) -> None:
    """As ``F.linear`` casts them, with gradients in the dtypes of the leaves, and as near to the truth."""
    leaves = [t.detach().to(dtype if i < 2 else torch.float32) for i, t in enumerate(linear_leaves(device, 6, 40))]
    fused, ref, _ = linear_op
    results = []
    for f, cast in ((fused, True), (ref, True), (ref, False)):
        given = [(t.clone() if cast else t.double()).requires_grad_() for t in leaves]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cast):
            out = f(*given)
        out.square().sum(dtype=torch.float64).backward()
        results.append((out, *(t.grad for t in given)))
    for i, (ours, theirs, truth) in enumerate(zip(*results, strict=True)):
        assert ours.dtype == theirs.dtype
        three_way(ours, theirs, truth, torch.bfloat16, f"tensor {i}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, u, w, b: (g, u[:1], w, b), r"gate has shape \(3, 5\), up \(1, 5\)"),
        (lambda g, u, w, b: (g, u, w.t(), b), r"weight has shape \(5, 7\); it must be \[out features, 5\]"),
        (lambda g, u, w, b: (g, u, w[0], b), r"weight has shape \(5,\); it must be \[out features, 5\]"),
        (lambda g, u, w, b: (g, u, w, b[1:]), r"bias has shape \(6,\); it must be \[7\]"),
        (
            lambda g, u, w, b: (g, u, w.half(), b),
            "weight \\(and bias\\) are torch.float16 on .*; the product is torch.float32",
        ),
        (lambda g, u, w, b: (g, u, w, b.bfloat16()), "torch.float32 on .*, torch.bfloat16 on .*: cast or move them"),
    ],
)
def test_bad_linear(device, linear_op, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        linear_op[0](*change(*linear_leaves(device, 3, 5, dtype=torch.float32)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("frozen", [set(), {0}, {1}, {2}], ids=str)
def test_gradients_lie_over_a_gate_and_an_up_that_are_owned(device, activation, frozen) -> None:
    """They are bit for bit those of tensors of their own; over what is kept for another backward they do not lie."""
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(linear_leaves(device, 64, 130))]
    both = {}
    for owned in (False, True):
        gate, up = (t.clone() for t in leaves[:2])
        before = gate.clone(), up.clone()
        y = _linear(gate, up, *leaves[2:], activation, owned=owned)
        wanted = [t for t in leaves if t.requires_grad]
        passes = []
        for retain in (True, False):
            passes.append(torch.autograd.grad(y.square().sum(), wanted, retain_graph=retain))
            changed = [not torch.equal(t, was) for t, was in zip((gate, up), before, strict=True)]
            assert changed == [owned and not retain and i not in frozen for i in (0, 1)]
        both[owned] = passes
        assert all(map(torch.equal, passes[0], passes[1]))
    assert all(map(torch.equal, both[False][0], both[True][0]))
