"""rms_norm and add_rms_norm against their references; what all norms have in common is in test_ops_every.py."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convergence.op.call import check_call, run
from liger_kernels.ops import add_rms_norm, add_rms_norm_ref, launches, reset_launches, rms_norm, rms_norm_ref
from liger_kernels.ops._rms_norm import FORMULAS
from tests.ops_checks import DTYPES, EXAMPLES, eps_for, randn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("formula", FORMULAS)
def test_rounds_where_the_formula_rounds(device, dtype, formula) -> None:
    """Casting at another place changes far more elements than the last bit of rsqrt does."""
    x, weight = (randn(*shape, dtype=dtype, device=device, grad=False) for shape in ((64, 512), (512,)))
    weight = weight * 3.0
    equal = {
        other: rms_norm(x, weight, formula=formula) == rms_norm_ref(x, weight, formula=other) for other in FORMULAS
    }
    assert equal.pop(formula).float().mean() > 0.99
    assert all(other.float().mean() < 0.9 for other in equal.values())


@pytest.mark.parametrize(
    ("op", "arguments", "formula", "error", "message"),
    [
        (rms_norm, lambda x, w: (x.int(), w), FORMULAS[0], TypeError, "x is torch.int32; it must be floating point"),
        (rms_norm, lambda x, w: (x, w.int()), FORMULAS[0], TypeError, "weight is torch.int32; it must be floating"),
        (rms_norm, lambda x, w: (x, w[1:]), FORMULAS[0], ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (
            rms_norm,
            lambda x, w: (x[0, 0], None),
            FORMULAS[0],
            ValueError,
            r"x has shape \(\); it must be \[..., hidden",
        ),
        (rms_norm, lambda x, w: (x[:, :0], None), FORMULAS[0], ValueError, r"x has shape \(2, 0\)"),
        (rms_norm, lambda x, w: (x, w.to("meta")), FORMULAS[0], ValueError, "weight is on meta, x on"),
        (rms_norm, lambda x, w: (x, w), "gemma", ValueError, "formula is 'gemma'; it must be one of 'cast_then_scale'"),
        (add_rms_norm, lambda x, w: (x, x.int(), w), FORMULAS[0], TypeError, "residual is torch.int32; it must be"),
        (add_rms_norm, lambda x, w: (x, x[:1], w), FORMULAS[0], ValueError, r"residual has shape \(1, 8\), x \(2, 8\)"),
        (add_rms_norm, lambda x, w: (x[:1], x, w), FORMULAS[0], ValueError, r"residual has shape \(2, 8\), x \(1, 8\)"),
        (add_rms_norm, lambda x, w: (x, x.to("meta"), w), FORMULAS[0], ValueError, "residual is on meta, x on"),
        (add_rms_norm, lambda x, w: (x, x, w[1:]), FORMULAS[0], ValueError, r"weight has shape \(7,\)"),
        (add_rms_norm, lambda x, w: (x, x, w), "gemma", ValueError, "formula is 'gemma'"),
    ],
)
def test_bad_input(device, op, arguments, formula, error, message) -> None:
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(error, match=message):
        op(*arguments(x, weight), formula=formula)


@EXAMPLES
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    hidden=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from([*DTYPES, None])),
    formula=st.sampled_from(FORMULAS),
    eps=st.sampled_from([0.0, 1e-12, 1e-5, 0.5]),
    results=st.sampled_from([slice(0, 1), slice(1, 2), slice(2)]),
    seed=st.integers(0, 2**32),
)
def test_sum_of_any_shape_and_dtypes_with_either_gradient(shape, hidden, dtypes, formula, eps, results, seed) -> None:
    torch.manual_seed(seed)
    leaves = [randn(*shape, hidden, dtype=dtype, device=DEVICE) for dtype in dtypes[:2]]
    if dtypes[2] is not None:
        leaves.append(randn(hidden, dtype=dtypes[2], device=DEVICE, grad=results != slice(1, 2)))

    def call(op, *leaves):
        return op(*leaves, eps=eps_for(hidden, eps, 1.0), formula=formula)[results]

    check_call(partial(call, add_rms_norm), partial(call, add_rms_norm_ref), leaves)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_total_has_the_bits_of_torchs_sum_and_y_those_of_its_norm(device, dtypes) -> None:
    """Of two dtypes, a GPU may add up y's row in another order than of total's alone."""
    x, residual = (randn(65, 512, dtype=dtype, device=device) for dtype in dtypes)
    weight = randn(512, dtype=dtypes[0], device=device)
    for formula in FORMULAS:
        y, total = add_rms_norm(x, residual, weight, formula=formula)
        assert total.dtype == (x + residual).dtype
        assert torch.equal(total, x + residual)
        if dtypes[0] == dtypes[1] or device.type == "cpu":
            assert torch.equal(y, rms_norm(total, weight, formula=formula))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_two_gradients_are_added_before_they_are_rounded(device, dtype) -> None:
    """Rounding one of them first changes far more elements than the order of a sum does."""
    x, residual = (randn(64, 512, dtype=dtype, device=device) for _ in range(2))
    dy, dtotal = (randn(64, 512, dtype=dtype, device=device, grad=False) for _ in range(2))
    (_, total), (dx, dresidual) = run(add_rms_norm, [x, residual], [dy, dtotal])
    (through_norm,) = run(rms_norm_ref, [total.detach().double().requires_grad_()], [dy.double()])[1]
    once = (through_norm + dtotal.double()).to(dtype)
    twice = through_norm.to(dtype) + dtotal
    for gradient in (dx, dresidual):
        assert (gradient == once).float().mean() > 0.99
        assert (gradient == twice).float().mean() < 0.95


def test_a_sum_of_which_the_norm_is_not_used_costs_no_backward(device) -> None:
    x, residual = randn(5, 64, dtype=torch.bfloat16, device=device), randn(5, 64, dtype=torch.float32, device=device)
    weight = randn(64, dtype=torch.float32, device=device)
    _, total = add_rms_norm(x, residual, weight)
    reset_launches()
    upstream = torch.randn_like(total)
    gradients = torch.autograd.grad(total, [x, residual, weight], upstream, allow_unused=True)
    assert not launches()
    assert torch.equal(gradients[0], upstream.bfloat16())
    assert torch.equal(gradients[1], upstream)
    assert gradients[2] is None


def test_sum_of_a_tensor_with_itself(device) -> None:
    x = randn(6, 48, dtype=torch.bfloat16, device=device)
    check_call(lambda x: add_rms_norm(x, x), lambda x: add_rms_norm_ref(x, x), [x])


@pytest.mark.parametrize("results", [slice(0, 1), slice(1, 2), slice(2)], ids=["y", "total", "both"])
def test_gradients_of_the_two_terms_are_two_tensors(device, results) -> None:
    """The op gives autograd one tensor for both; whoever then changes one gradient must not change the other."""
    leaves = [randn(5, 64, dtype=torch.float32, device=device) for _ in range(2)]
    for _ in range(2):
        outputs = add_rms_norm(*leaves)[results]
        upstream = [torch.ones_like(y) for y in outputs]
        torch.autograd.backward(outputs, upstream)
        assert all(torch.equal(g, torch.ones_like(g)) for g in upstream)
    dx, dresidual = (leaf.grad for leaf in leaves)
    assert torch.equal(dx, dresidual)
    (once,) = {tuple(g.flatten().tolist()) for g in run(lambda *t: add_rms_norm(*t)[results], leaves)[1]}
    assert dx.flatten().tolist() == [2 * g for g in once]
    before = dresidual.clone()
    dx.zero_()
    assert torch.equal(dresidual, before)


def test_total_changed_in_place_makes_the_backward_raise(device) -> None:
    y, total = add_rms_norm(*(randn(5, 64, dtype=torch.float32, device=device) for _ in range(2)))
    total.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("results", [slice(0, 1), slice(1, 2)], ids=["y", "total"])
def test_compiled_sum_with_one_of_its_gradients(device, results) -> None:
    """Without a graph break. On a CPU the reference is compiled; tests/test_ops_traced.py traces the kernels."""

    def call(op, *leaves):
        return op(*leaves)[results]

    leaves = [randn(9, 200, dtype=torch.bfloat16, device=device) for _ in range(2)]
    leaves.append(randn(200, dtype=torch.float32, device=device, grad=results != slice(1, 2)))
    compiled = torch.compile(partial(call, add_rms_norm), fullgraph=True, backend="aot_eager")
    check_call(compiled, partial(call, add_rms_norm_ref), leaves)
