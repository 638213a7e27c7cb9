"""swiglu and geglu against their references."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convergence.tolerance import FLOOR_ROUNDOFFS, three_way, unit_roundoff
from liger_kernels.ops import (
    geglu,
    geglu_linear,
    geglu_linear_ref,
    geglu_ref,
    launches,
    reset_launches,
    swiglu,
    swiglu_linear,
    swiglu_linear_ref,
    swiglu_ref,
)
from liger_kernels.ops._runtime import launch
from tests.ops_checks import DTYPES, EXAMPLES, check_op, randn, run

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 3, 65), (5, 128), (70001,)], ids=str)
def test_matches_reference(device, op, dtype, shape) -> None:
    check_op(*op, [randn(*shape, dtype=dtype, device=device, scale=2.0) for _ in range(2)])


@EXAMPLES
@given(
    op=st.sampled_from(sorted(OPS)),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    scale=st.sampled_from([1e-3, 1.0, 10.0]),
    frozen=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_option(op, shape, dtypes, scale, frozen, seed) -> None:
    torch.manual_seed(seed)
    leaves = [
        randn(*shape, dtype=dtype, device=DEVICE, scale=scale, grad=frozen != i) for i, dtype in enumerate(dtypes)
    ]
    check_op(*OPS[op], leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 10), (3, 2, 130), (3001, 66)], ids=str)
@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_of_one_projection(device, op, dtype, shape, gate_first) -> None:
    def call(op, x):
        first, second = x.chunk(2, dim=-1)
        return op(first, second) if gate_first else op(second, first)

    check_op(*(partial(call, f) for f in op), [randn(*shape, dtype=dtype, device=device)])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, None].expand(-1, 3, -1),
        lambda x: x[::2, ::3],
        lambda x: x.unflatten(1, (5, 8)).transpose(0, 1),
        lambda x: x[..., :1],
    ],
    ids=["transposed", "expanded", "strided", "swapped", "one_column"],
)
def test_other_views(device, op, view) -> None:
    leaves = [randn(12, 40, dtype=torch.bfloat16, device=device) for _ in range(2)]

    def call(op, gate, up):
        return op(view(gate), view(up)), op(gate[:, 1:], up[:, :-1]), op(gate, up).t()

    check_op(*(partial(call, f) for f in op), leaves)


def test_halves_are_not_copied(device, monkeypatch) -> None:
    launched = []
    module = importlib.import_module("liger_kernels.ops.glu")
    monkeypatch.setattr(module, "launch", lambda kernel, grid, device, *args, **kwargs: launched.extend(args))
    gate, up = randn(2, 3, 64, dtype=torch.bfloat16, device=device).chunk(2, dim=-1)
    swiglu(gate, up)
    assert {gate.data_ptr(), up.data_ptr()} <= {x.data_ptr() for x in launched if isinstance(x, torch.Tensor)}


def test_saves_nothing_but_its_inputs(device, op) -> None:
    saved = []
    gate, up = (randn(5, 8, dtype=torch.bfloat16, device=device) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        op[0](gate, up)
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_the_activation_forward_and_backward(device, op, dtype) -> None:
    """One rounding less would be nearer to the truth, and another function than upstream's: dL/dup too uses the
    rounded activation. A last bit of exp in float32 tips few roundings; leaving the rounding out changes a third."""
    gate, up = (randn(64, 512, dtype=dtype, device=device) for _ in range(2))
    upstream = [torch.randn(64, 512).to(device, dtype)]
    (ours,), (_, dup) = run(op[0], [gate, up], upstream)
    (theirs,), (_, their_dup) = run(op[1], [gate, up], upstream)
    assert (ours == theirs).float().mean() > 0.99
    assert (dup == their_dup).float().mean() > 0.99


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


def test_rows_beyond_2_to_the_31_elements(device, op, untouched_memory) -> None:
    """Three rows, 2^30 elements apart, of gate, up and the upstream gradient."""
    buffers = [untouched_memory(2**31 + 2**20, torch.bfloat16) for _ in range(3)]
    gate, up, upstream = far = [buffer.as_strided((3, 64), (2**30, 1)) for buffer in buffers]
    for t in far:
        t.copy_(randn(3, 64, dtype=torch.bfloat16, device=device, grad=False))
    near = [t.clone() for t in far]
    results = [
        run(op[0], [gate.requires_grad_(), up.requires_grad_()], [upstream]),
        run(op[0], [near[0].requires_grad_(), near[1].requires_grad_()], [near[2]]),
    ]
    assert all(map(torch.equal, results[0][0] + results[0][1], results[1][0] + results[1][1]))


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
    with pytest.raises(ValueError, match="approximate is 'erf'; allowed are 'tanh' and 'none'"):
        geglu(x, x, approximate="erf")


# With the linear layer behind them.


def linear_leaves(device, *shape, out=7, dtype=torch.bfloat16, bias=True) -> list[torch.Tensor]:
    leaves = [randn(*shape, dtype=dtype, device=device, scale=2.0) for _ in range(2)]
    leaves.append(randn(out, shape[-1], dtype=dtype, device=device, scale=shape[-1] ** -0.5))
    return [*leaves, randn(out, dtype=dtype, device=device)] if bias else leaves


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 3, 65), (70, 128)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_matches_reference(device, linear_op, dtype, shape, bias) -> None:
    check_op(*linear_op[:2], linear_leaves(device, *shape, dtype=dtype, bias=bias), terms=shape[-1])


@EXAMPLES
@given(
    op=st.sampled_from(sorted(LINEAR_OPS)),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    out=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    frozen=st.sets(st.integers(0, 3)),
    halves=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_linear_of_any_shape_and_option(op, shape, out, dtype, bias, frozen, halves, seed) -> None:
    torch.manual_seed(seed)
    gate, up, *parameters = linear_leaves(DEVICE, *shape, out=out, dtype=dtype, bias=bias)
    leaves = [torch.cat((gate, up), -1).detach().requires_grad_()] if halves else [gate, up]

    def call(f, *leaves):
        return f(*leaves[0].chunk(2, dim=-1), *leaves[1:]) if halves else f(*leaves)

    leaves = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate([*leaves, *parameters])]
    check_op(*(partial(call, f) for f in LINEAR_OPS[op]), leaves, terms=shape[-1])


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


def test_linear_keeps_no_product(device, linear_op) -> None:
    saved = []
    leaves = linear_leaves(device, 5, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_op[0](*leaves)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in leaves[:3]]


@pytest.mark.parametrize(
    ("frozen", "kernels"),
    [
        ({0, 1}, {"_glu_fwd_kernel": 2}),
        ({2}, {"_glu_fwd_kernel": 1, "_glu_bwd_kernel": 1}),
        ({0, 1, 2}, {"_glu_fwd_kernel": 1}),
        (set(), {"_glu_fwd_kernel": 1, "_glu_bwd_kernel": 1}),
    ],
    ids=str,
)
def test_frozen_parts_of_the_linear_cost_nothing(device, linear_op, monkeypatch, frozen, kernels) -> None:
    module, products = importlib.import_module("liger_kernels.ops.glu"), []

    def record(kernel, grid, device, *args, **kwargs):
        products.append(kwargs.get("PRODUCT"))
        launch(kernel, grid, device, *args, **kwargs)

    monkeypatch.setattr(module, "launch", record)
    leaves = linear_leaves(device, 4, 16)
    reset_launches()
    run(linear_op[0], [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(leaves)])
    assert launches() == kernels
    assert products[1:] == [2 not in frozen] * (len(products) - 1) or frozen == {0, 1}


def test_linear_of_an_expanded_upstream_gradient(device, linear_op) -> None:
    leaves = linear_leaves(device, 3, 2, 40, bias=False)
    check_op(*(partial(lambda f, *leaves: f(*leaves).sum(), f) for f in linear_op[:2]), leaves, terms=6 * 40)


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
