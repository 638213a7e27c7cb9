"""rms_norm and add_rms_norm against their references."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_kernels.ops import add_rms_norm, add_rms_norm_ref, launches, reset_launches, rms_norm, rms_norm_ref
from liger_kernels.ops._norm_rows import MAX_HIDDEN
from liger_kernels.ops.rms_norm import FORMULAS
from tests.ops_checks import DTYPES, EXAMPLES, check_op, randn, run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, formula: str = "cast_then_scale", **views):
    view = views.pop("view", lambda x: x)

    def call(op, x, *weight):
        return op(view(x), weight[0] if weight else None, eps, formula=formula)

    return check_op(partial(call, rms_norm), partial(call, rms_norm_ref), [x] if weight is None else [x, weight])


def check_sum(
    leaves: list[torch.Tensor], eps: float = 1e-6, formula: str = "cast_then_scale", results: slice = slice(2)
):
    """``leaves`` are x, residual and maybe a weight; of y and total, only ``results`` are used."""

    def call(op, *leaves):
        return op(*leaves, eps=eps, formula=formula)[results]

    return check_op(partial(call, add_rms_norm), partial(call, add_rms_norm_ref), leaves)


def eps_for(hidden: int, eps: float, scale: float) -> float:
    """With few columns and a small eps the norm hardly depends on x: its gradient is the difference of almost equal
    numbers, and every formula's is rounding noise. An eps of the size of x^2 leaves something to compare."""
    return eps if hidden >= 16 else scale**2


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 80, 128, 1155])
def test_matches_reference(device, dtype, formula, hidden) -> None:
    x = randn(3, 5, hidden, dtype=dtype, device=device, scale=3.0)
    check(x, randn(hidden, dtype=dtype, device=device), eps_for(hidden, 1e-6, 3.0), formula)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_walk_over_many_tiles(device, dtype) -> None:
    """More rows than two tiles of every program, with a part of a tile at the end."""
    rows = 5001 if device.type == "cpu" else 50001
    weight = randn(40, dtype=dtype, device=device)
    check(randn(rows, 40, dtype=dtype, device=device), weight)
    check_sum([*(randn(rows, 40, dtype=dtype, device=device) for _ in range(2)), weight])


@EXAMPLES
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    hidden=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from([*DTYPES, None])),
    formula=st.sampled_from(FORMULAS),
    eps=st.sampled_from([0.0, 1e-12, 1e-5, 0.5]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_option(shape, hidden, dtypes, formula, eps, scale, seed) -> None:
    torch.manual_seed(seed)
    x = randn(*shape, hidden, dtype=dtypes[0], device=DEVICE, scale=scale)
    weight = None if dtypes[1] is None else randn(hidden, dtype=dtypes[1], device=DEVICE)
    check(x, weight, eps_for(hidden, eps, scale), formula)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps_decides_where_a_row_is_tiny_or_zero(device, dtype) -> None:
    x = randn(4, 64, dtype=dtype, device=device).detach()
    scales = torch.tensor([0.0, 1e-4, 1e-2, 1.0], device=device, dtype=dtype)
    x = (x * scales[:, None]).requires_grad_()
    check(x, randn(64, dtype=dtype, device=device), eps=1e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_float32_weight_under_bfloat16_input(device, formula) -> None:
    """As autocast mixes them. What "cast_then_scale" returns is then float32."""
    x, weight = randn(7, 96, dtype=torch.bfloat16, device=device), randn(96, dtype=torch.float32, device=device)
    (y,), (dx, dweight) = check(x, weight, formula=formula)
    assert y.dtype == (torch.float32 if formula == "cast_then_scale" else torch.bfloat16)
    assert (dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)


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
    "view",
    [
        lambda x: x[..., 3:67],
        lambda x: x.split(64, dim=-1)[1].unflatten(0, (3, 4)),
        lambda x: x.t()[:, :10],
        lambda x: x[:, None, :64].expand(-1, 5, -1),
        lambda x: x.unflatten(1, (10, 20))[::2],
        lambda x: x.flip(0)[1:, :1],
    ],
    ids=["columns", "split", "transposed", "expanded", "every_other", "one_column"],
)
def test_views_are_read_where_they_lie(device, view) -> None:
    for dtype in DTYPES:
        x = randn(12, 200, dtype=dtype, device=device)
        hidden = view(x).shape[-1]
        check(x, randn(hidden, dtype=dtype, device=device), eps_for(hidden, 1e-6, 1.0), view=view)


def test_strided_weight_and_strided_upstream_gradient(device) -> None:
    x = randn(6, 48, dtype=torch.float32, device=device)
    weight = randn(96, dtype=torch.float32, device=device)

    def call(op, x, weight):
        return op(x, weight[::2]).t().contiguous().t(), op(x, weight[::2]).sum().expand(3)

    check_op(partial(call, rms_norm), partial(call, rms_norm_ref), [x, weight])


@pytest.mark.parametrize("hidden", [MAX_HIDDEN, MAX_HIDDEN + 1])
def test_very_wide_rows(device, hidden) -> None:
    x, residual, weight = (randn(*shape, hidden, dtype=torch.bfloat16, device=device) for shape in ((3,), (3,), ()))
    for checked in (lambda: check(x, weight), lambda: check_sum([x, residual, weight])):
        reset_launches()
        checked()
        assert bool(launches()) == (hidden == MAX_HIDDEN)


def test_rows_beyond_2_to_the_31_elements(device, untouched_memory) -> None:
    """Three rows, 2^30 and 2^31 elements into one buffer."""
    buffer = untouched_memory(2**31 + 2**20, torch.bfloat16)
    x = buffer.as_strided((3, 64), (2**30, 1))
    x.copy_(randn(3, 64, dtype=torch.bfloat16, device=device, grad=False))
    weight = randn(64, dtype=torch.bfloat16, device=device)
    near = x.clone().requires_grad_()
    ours, theirs = (run(rms_norm, [t, weight], [x]) for t in (x.requires_grad_(), near))
    for far, close in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert torch.equal(far, close)


def test_a_frozen_weight_costs_no_sum_over_the_programs(device) -> None:
    x, weight = randn(5, 64, dtype=torch.float32, device=device), randn(64, dtype=torch.float32, device=device)
    for op, leaves in ((rms_norm, [x]), (add_rms_norm, [x, x.detach()])):
        reset_launches()
        run(op, [*leaves, weight.detach()])
        assert set(launches()) == {"_rms_norm_fwd_kernel", "_rms_norm_bwd_kernel"}


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        (rms_norm, lambda x, w: (x.int(), w), TypeError, "x is torch.int32; it must be floating point"),
        (rms_norm, lambda x, w: (x, w.int()), TypeError, "weight is torch.int32; it must be floating point"),
        (rms_norm, lambda x, w: (x, w[1:]), ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (rms_norm, lambda x, w: (x, w[None]), ValueError, r"weight has shape \(1, 8\)"),
        (rms_norm, lambda x, w: (x[0, 0], None), ValueError, r"x has shape \(\); it must be \[..., hidden\]"),
        (rms_norm, lambda x, w: (x[:, :0], None), ValueError, r"x has shape \(2, 0\)"),
        (rms_norm, lambda x, w: (x, w.to("meta")), ValueError, "weight is on meta, x on"),
        (add_rms_norm, lambda x, w: (x.int(), x, w), TypeError, "x is torch.int32; it must be floating point"),
        (add_rms_norm, lambda x, w: (x, x.int(), w), TypeError, "residual is torch.int32; it must be floating"),
        (add_rms_norm, lambda x, w: (x, x[:1], w), ValueError, r"residual has shape \(1, 8\), x \(2, 8\); they must"),
        (add_rms_norm, lambda x, w: (x[:1], x, w), ValueError, r"residual has shape \(2, 8\), x \(1, 8\); they must"),
        (add_rms_norm, lambda x, w: (x, x.to("meta"), w), ValueError, "residual is on meta, x on"),
        (add_rms_norm, lambda x, w: (x, x, w[1:]), ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (add_rms_norm, lambda x, w: (x, x, w.to("meta")), ValueError, "weight is on meta, x on"),
    ],
)
def test_bad_input(device, op, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        op(*arguments(torch.randn(2, 8, device=device), torch.randn(8, device=device)))


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 80, 1155])
def test_sum_matches_reference(device, dtype, formula, hidden) -> None:
    x, residual = (randn(3, 5, hidden, dtype=dtype, device=device, scale=2.0) for _ in range(2))
    check_sum([x, residual, randn(hidden, dtype=dtype, device=device)], eps_for(hidden, 1e-6, 2.0), formula)


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
    check_sum(leaves, eps_for(hidden, eps, 1.0), formula, results)


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


def test_a_sum_that_only_the_norm_uses_has_the_norms_gradient(device) -> None:
    x, residual = (randn(33, 200, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight, dy = (randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((200,), (33, 200)))
    y, total = add_rms_norm(x, residual, weight)
    ours = torch.autograd.grad(y, [x, residual, weight], dy)
    leaf = total.detach().requires_grad_()
    dtotal, dweight = torch.autograd.grad(rms_norm(leaf, weight), [leaf, weight], dy)
    assert all(map(torch.equal, ours, (dtotal, dtotal, dweight)))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_of_sums_as_in_a_model(device, dtype) -> None:
    """Every total is used twice: it is normalised, and it is the next one's residual."""

    def layers(op, x, residual, first, second, third):
        y, total = op(x, residual, first)
        y, total = op(y * 0.5, total, second)
        return op(y, total, third)

    leaves = [randn(40, 72, dtype=dtype, device=device) for _ in range(2)]
    leaves += [randn(72, dtype=dtype, device=device) for _ in range(3)]
    check_op(partial(layers, add_rms_norm), partial(layers, add_rms_norm_ref), leaves)


def test_sum_of_a_tensor_with_itself(device) -> None:
    for dtype in DTYPES:
        x = randn(6, 48, dtype=dtype, device=device)
        check_op(lambda x: add_rms_norm(x, x), lambda x: add_rms_norm_ref(x, x), [x])


@pytest.mark.parametrize(
    "use",
    [lambda y, total: torch.cat((total, y), dim=-1), lambda y, total: (y.sum() + 100.0, total.sum() + 100.0)],
    ids=["halves", "sums"],
)
@pytest.mark.parametrize("view", [lambda x: x[:, 3:67], lambda x: x.view(70, 12).t()[:, :64]], ids=["columns", "t"])
def test_sum_of_views_with_strided_gradients(device, view, use) -> None:
    """The gradients that come in are the halves of one tensor, or one number in every place. It is they that count: a
    sum near zero would be compared by its noise, hence the 100."""

    def call(op, x, residual, weight):
        return use(*op(x.split(64, dim=-1)[1], view(residual), weight[::2]))

    for dtype in DTYPES:
        leaves = [randn(*shape, dtype=dtype, device=device) for shape in ((12, 200), (12, 70), (128,))]
        check_op(partial(call, add_rms_norm), partial(call, add_rms_norm_ref), leaves)


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


def test_sum_under_autocast_is_the_sum_without(device) -> None:
    """Autocast casts neither an addition nor a norm."""
    leaves = [randn(*shape, dtype=torch.float32, device=device) for shape in ((7, 96), (7, 96), (96,))]
    leaves[0] = leaves[0].detach().bfloat16().requires_grad_()
    without = run(add_rms_norm, leaves)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        under = run(add_rms_norm, leaves)
        (reference, _) = run(add_rms_norm_ref, leaves)
    assert all(map(torch.equal, under[0] + under[1], without[0] + without[1]))
    assert [t.dtype for t in under[0]] == [t.dtype for t in reference]


@pytest.mark.parametrize("results", [slice(0, 1), slice(1, 2), slice(2)], ids=["y", "total", "both"])
def test_compiled_sum_with_either_gradient(device, results) -> None:
    """Without a graph break. On a CPU the reference is compiled; tests/test_ops_traced.py traces the kernels."""

    def call(op, *leaves):
        return op(*leaves)[results]

    leaves = [randn(9, 200, dtype=torch.bfloat16, device=device) for _ in range(2)]
    leaves.append(randn(200, dtype=torch.float32, device=device, grad=results != slice(1, 2)))
    compiled = torch.compile(partial(call, add_rms_norm), fullgraph=True, backend="aot_eager")
    check_op(compiled, partial(call, add_rms_norm_ref), leaves)


@pytest.mark.parametrize(("op", "terms"), [(rms_norm, 1), (add_rms_norm, 2)])
def test_unknown_formula(device, op, terms) -> None:
    with pytest.raises(ValueError, match="formula is 'gemma'; allowed are 'cast_then_scale'"):
        op(*[torch.randn(2, 8, device=device)] * terms, formula="gemma")
