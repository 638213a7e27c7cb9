"""rms_norm against its reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_kernels.ops import launches, reset_launches, rms_norm, rms_norm_ref
from liger_kernels.ops.rms_norm import FORMULAS, MAX_HIDDEN
from tests.ops_checks import DTYPES, EXAMPLES, check_op, randn, run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, formula: str = "cast_then_scale", **views):
    view = views.pop("view", lambda x: x)

    def call(op, x, *weight):
        return op(view(x), weight[0] if weight else None, eps, formula=formula)

    return check_op(partial(call, rms_norm), partial(call, rms_norm_ref), [x] if weight is None else [x, weight])


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
    check(randn(rows, 40, dtype=dtype, device=device), randn(40, dtype=dtype, device=device))


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


def test_no_rows(device) -> None:
    x = randn(2, 0, 64, dtype=torch.bfloat16, device=device)
    weight = randn(64, dtype=torch.bfloat16, device=device)
    (y,), (dx, dweight) = run(rms_norm, [x, weight])
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros_like(dweight))


@pytest.mark.parametrize("hidden", [MAX_HIDDEN, MAX_HIDDEN + 1])
def test_very_wide_rows(device, hidden) -> None:
    check(randn(3, hidden, dtype=torch.bfloat16, device=device), randn(hidden, dtype=torch.bfloat16, device=device))


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


def test_frozen_inputs_cost_nothing(device) -> None:
    x, weight = randn(5, 64, dtype=torch.float32, device=device), randn(64, dtype=torch.float32, device=device)
    (whole,), gradients = run(rms_norm, [x, weight])
    for frozen, sums in ((0, 1), (1, 0)):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, weight))]
        reset_launches()
        (y,), (gradient,) = run(rms_norm, leaves)
        assert torch.equal(y, whole)
        assert torch.equal(gradient, gradients[1 - frozen])
        assert launches().get("_sum_parts_kernel", 0) == sums
    reset_launches()
    (y,), _ = run(rms_norm, [x.detach(), weight.detach()])
    assert not y.requires_grad
    assert launches() == {"_rms_norm_fwd_kernel": 1}


def test_twice_is_the_same_bit_for_bit(device) -> None:
    leaves = [randn(3001, 72, dtype=torch.bfloat16, device=device), randn(72, dtype=torch.bfloat16, device=device)]
    first, second = (run(rms_norm, leaves) for _ in range(2))
    assert all(map(torch.equal, first[0] + first[1], second[0] + second[1]))


@pytest.mark.parametrize("formula", FORMULAS)
def test_reference_gradient(formula) -> None:
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm_ref(x, w, 1e-3, formula=formula), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm_ref(x, None, 1e-3, formula=formula), (x,))


def test_float64_runs_the_reference(device) -> None:
    reset_launches()
    x, weight = torch.randn(2, 8, dtype=torch.float64, device=device), torch.randn(8, device=device)
    assert torch.equal(rms_norm(x, weight), rms_norm_ref(x, weight))
    assert torch.equal(rms_norm(x.float(), weight.double()), rms_norm_ref(x.float(), weight.double()))
    assert not launches()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda x, w: ((x, w), {"formula": "gemma"}), ValueError, "formula is 'gemma'; allowed are 'cast_then_scale'"),
        (lambda x, w: ((x.int(), w), {}), TypeError, "x is torch.int32; it must be floating point"),
        (lambda x, w: ((x, w.int()), {}), TypeError, "weight is torch.int32; it must be floating point"),
        (lambda x, w: ((x, w[1:]), {}), ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (lambda x, w: ((x, w[None]), {}), ValueError, r"weight has shape \(1, 8\)"),
        (lambda x, w: ((x[0, 0], None), {}), ValueError, r"x has shape \(\); it must be \[..., hidden\]"),
        (lambda x, w: ((x[:, :0], None), {}), ValueError, r"x has shape \(2, 0\)"),
        (lambda x, w: ((x, w.to("meta")), {}), ValueError, "weight is on meta, x on"),
    ],
)
def test_bad_input(device, arguments, error, message) -> None:
    args, kwargs = arguments(torch.randn(2, 8, device=device), torch.randn(8, device=device))
    with pytest.raises(error, match=message):
        rms_norm(*args, **kwargs)
