"""layer_norm against its reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convergence.tolerance import three_way
from liger_kernels.ops import launches, layer_norm, layer_norm_ref, reset_launches
from liger_kernels.ops._norm_rows import MAX_HIDDEN
from tests.ops_checks import DTYPES, EXAMPLES, check_op, randn, run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    view=lambda x: x,
    ref=layer_norm_ref,
    **options,
):
    given = [t is not None for t in (weight, bias)]

    def call(op, x, *vectors):
        rest = iter(vectors)
        return op(view(x), *(next(rest) if has else None for has in given), eps, **options)

    leaves = [t for t in (x, weight, bias) if t is not None]
    return check_op(partial(call, layer_norm), partial(call, ref), leaves)


def eps_for(hidden: int, eps: float, scale: float) -> float:
    """With few columns and a small eps the norm hardly depends on x: its gradient is the difference of almost equal
    numbers, and every formula's is rounding noise. An eps of the size of x^2 leaves something to compare."""
    return eps if hidden >= 16 else scale**2


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [2, 80, 128, 1155])
def test_matches_reference(device, dtype, zero_centered, hidden) -> None:
    x = randn(3, 5, hidden, dtype=dtype, device=device, scale=3.0)
    weight, bias = (randn(hidden, dtype=dtype, device=device) for _ in range(2))
    check(x, weight, bias, eps_for(hidden, 1e-5, 3.0), zero_centered=zero_centered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_torchs_own(device, dtype) -> None:
    x, weight, bias = (randn(*shape, dtype=dtype, device=device) for shape in ((9, 200), (200,), (200,)))
    check(x, weight, bias, ref=lambda x, *rest: F.layer_norm(x, x.shape[-1:], *rest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_walk_over_many_tiles(device, dtype) -> None:
    """More rows than two tiles of every program, with a part of a tile at the end."""
    rows = 5001 if device.type == "cpu" else 50001
    check(*(randn(*shape, dtype=dtype, device=device) for shape in ((rows, 40), (40,), (40,))))


@EXAMPLES
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    hidden=st.integers(2, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), *[st.sampled_from([*DTYPES, None])] * 2),
    zero_centered=st.booleans(),
    eps=st.sampled_from([1e-12, 1e-5, 0.5]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_option(shape, hidden, dtypes, zero_centered, eps, scale, seed) -> None:
    torch.manual_seed(seed)
    x = randn(*shape, hidden, dtype=dtypes[0], device=DEVICE, scale=scale)
    vectors = [None if dtype is None else randn(hidden, dtype=dtype, device=DEVICE) for dtype in dtypes[1:]]
    check(x, *vectors, eps_for(hidden, eps, scale), zero_centered=zero_centered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_zero_tiny_or_all_equal(device, dtype) -> None:
    """There eps decides. A row of equal numbers is the bias."""
    scales = torch.tensor([0.0, 1e-4, 1e-2, 1.0], device=device, dtype=dtype)
    x = (randn(4, 64, dtype=dtype, device=device).detach() * scales[:, None]).requires_grad_()
    weight, bias = (randn(64, dtype=dtype, device=device) for _ in range(2))
    check(x, weight, bias)
    equal = torch.full((3, 64), 5.0, dtype=dtype, device=device)
    assert torch.equal(layer_norm(equal, weight, bias), bias.expand(3, -1))


def test_one_column_is_the_bias(device) -> None:
    x, weight, bias = (randn(*shape, dtype=torch.float32, device=device) for shape in ((5, 1), (1,), (1,)))
    (y,), (dx, dweight, dbias) = run(layer_norm, [x, weight, bias])
    assert torch.equal(y, bias.expand(5, 1))
    assert not dx.any()
    assert not dweight.any()
    assert dbias.tolist() == [5.0]


@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_a_large_mean_costs_no_variance(device, mean) -> None:
    """mean(x^2) - mean^2 has no digit left of a variance of a millionth of mean^2."""
    x = (randn(16, 512, dtype=torch.float32, device=device) + mean).detach().requires_grad_()
    y = layer_norm(x)
    truth = layer_norm_ref(x.double())
    three_way(y, layer_norm_ref(x), truth, torch.float32, "y", 16)


def test_padding_does_not_count_in_16_bits(device) -> None:
    """Where a row's mean is as large as its deviation, columns beyond the row would."""
    check((randn(16, 80, dtype=torch.bfloat16, device=device) + 1.0).detach().requires_grad_())


@pytest.mark.parametrize("zero_centered", [False, True])
def test_float32_weights_under_bfloat16_input(device, zero_centered) -> None:
    x = randn(7, 96, dtype=torch.bfloat16, device=device)
    weight, bias = (randn(96, dtype=torch.float32, device=device) for _ in range(2))
    (y,), (dx, dweight, dbias) = check(x, weight, bias, zero_centered=zero_centered)
    assert y.dtype == dx.dtype == torch.bfloat16
    assert dweight.dtype == dbias.dtype == torch.float32


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
    "view",
    [
        lambda x: x[..., 3:67],
        lambda x: x.split(64, dim=-1)[1].unflatten(0, (3, 4)),
        lambda x: x.t()[:, :10],
        lambda x: x[:, None, :64].expand(-1, 5, -1),
        lambda x: x.unflatten(1, (10, 20))[::2],
    ],
    ids=["columns", "split", "transposed", "expanded", "every_other"],
)
def test_views_are_read_where_they_lie(device, view) -> None:
    for dtype in DTYPES:
        x = randn(12, 200, dtype=dtype, device=device)
        hidden = view(x).shape[-1]
        weight, bias = (randn(hidden, dtype=dtype, device=device) for _ in range(2))
        check(x, weight, bias, eps_for(hidden, 1e-5, 1.0), view=view)


def test_strided_weights_and_strided_upstream_gradient(device) -> None:
    x, vectors = (randn(*shape, dtype=torch.float32, device=device) for shape in ((6, 48), (48, 2)))

    def call(op, x, vectors):
        y = op(x, *vectors.unbind(1))
        return y.t().contiguous().t(), y.sum().expand(3) + 100.0

    check_op(partial(call, layer_norm), partial(call, layer_norm_ref), [x, vectors])


@pytest.mark.parametrize("hidden", [MAX_HIDDEN, MAX_HIDDEN + 1])
def test_very_wide_rows(device, hidden) -> None:
    x, weight, bias = (randn(*shape, hidden, dtype=torch.bfloat16, device=device) for shape in ((3,), (), ()))
    reset_launches()
    check(x, weight, bias)
    assert bool(launches()) == (hidden == MAX_HIDDEN)


def test_rows_beyond_2_to_the_31_elements(device, untouched_memory) -> None:
    """Three rows, 2^30 and 2^31 elements into one buffer."""
    buffer = untouched_memory(2**31 + 2**20, torch.bfloat16)
    x = buffer.as_strided((3, 64), (2**30, 1))
    x.copy_(randn(3, 64, dtype=torch.bfloat16, device=device, grad=False))
    weight, bias = (randn(64, dtype=torch.bfloat16, device=device) for _ in range(2))
    near = x.clone().requires_grad_()
    ours, theirs = (run(layer_norm, [t, weight, bias], [x]) for t in (x.requires_grad_(), near))
    for far, close in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert torch.equal(far, close)


@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_what_is_frozen_costs_no_sum_over_the_programs(device, weight, bias) -> None:
    leaves = [randn(*shape, dtype=torch.float32, device=device, grad=False) for shape in ((5, 64), (64,), (64,))]
    for leaf, needed in zip(leaves, (True, weight, bias), strict=True):
        leaf.requires_grad_(needed)
    reset_launches()
    run(layer_norm, leaves)
    sums = {"_sum_parts_kernel": weight + bias} if weight or bias else {}
    assert launches() == {"_layer_norm_fwd_kernel": 1, "_layer_norm_bwd_kernel": 1, **sums}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda x, w: (x.int(), w), TypeError, "x is torch.int32; it must be floating point"),
        (lambda x, w: (x, w.int()), TypeError, "weight is torch.int32; it must be floating point"),
        (lambda x, w: (x, w, w.int()), TypeError, "bias is torch.int32; it must be floating point"),
        (lambda x, w: (x, w[1:]), ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (lambda x, w: (x, w, w[None]), ValueError, r"bias has shape \(1, 8\)"),
        (lambda x, w: (x[0, 0], None), ValueError, r"x has shape \(\); it must be \[..., hidden\]"),
        (lambda x, w: (x[:, :0], None), ValueError, r"x has shape \(2, 0\)"),
        (lambda x, w: (x, None, w.to("meta")), ValueError, "bias is on meta, x on"),
    ],
)
def test_bad_input(device, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        layer_norm(*arguments(torch.randn(2, 8, device=device), torch.randn(8, device=device)))


def test_a_result_of_integers_is_refused(device) -> None:
    with pytest.raises(TypeError, match=r"dtype is torch.int32; it must be floating point"):
        layer_norm(torch.randn(2, 8, device=device), dtype=torch.int32)


def test_autocast_changes_nothing(device) -> None:
    leaves = [randn(*shape, dtype=torch.float32, device=device) for shape in ((7, 96), (96,), (96,))]
    leaves[0] = leaves[0].detach().bfloat16().requires_grad_()
    without = run(layer_norm, leaves)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        under = run(layer_norm, leaves)
    assert all(map(torch.equal, under[0] + under[1], without[0] + without[1]))


def test_compiled(device) -> None:
    """Without a graph break. On a CPU the reference is compiled; tests/test_ops_traced.py traces the kernels."""
    leaves = [randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((9, 200), (200,), (200,))]
    check_op(torch.compile(layer_norm, fullgraph=True, backend="aot_eager"), layer_norm_ref, leaves)
