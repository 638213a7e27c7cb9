"""gated_rms_norm against its reference."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from liger_kernels.ops import gated_rms_norm, gated_rms_norm_ref, launches, reset_launches
from liger_kernels.ops._norm_rows import MAX_HIDDEN
from liger_kernels.ops.gated_rms_norm import ACTIVATIONS, FORMULAS
from tests.ops_checks import DTYPES, EXAMPLES, check_op, randn, run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = [
    {"activation": activation, "gate_first": gate_first, "formula": formula}
    for activation, gate_first, formula in itertools.product(ACTIVATIONS, (False, True), FORMULAS)
]


def named(options) -> str:
    return f"{options['activation']}-{'first' if options['gate_first'] else 'last'}-{options['formula']}"


every_order = pytest.mark.parametrize("options", OPTIONS, ids=named)


def leaves(device, *shape: int, dtype=torch.float32, scale: float = 1.0, **dtypes) -> list[torch.Tensor]:
    """x and gate of ``shape``, and the weight."""
    x, gate = (
        randn(*shape, dtype=dtypes.get(name, dtype), device=device, scale=factor)
        for name, factor in (("x", scale), ("gate", 2.0))
    )
    return [x, gate, randn(shape[-1], dtype=dtypes.get("weight", dtype), device=device)]


def check(given, eps: float = 1e-6, view=lambda x: x, **options):
    def call(op, x, gate, weight):
        return op(view(x), view(gate), weight, eps, **options)

    return check_op(partial(call, gated_rms_norm), partial(call, gated_rms_norm_ref), given)


@every_order
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "groups"), [(3, 1), (128, 1), (80, 5), (1155, 1)])
def test_matches_reference(device, dtype, hidden, groups, options) -> None:
    check(leaves(device, 3, 5, hidden, dtype=dtype, scale=3.0), 1e-2, groups=groups, **options)


@every_order
def test_gradient_of_the_reference(options) -> None:
    given = [t.detach().double().requires_grad_() for t in leaves(torch.device("cpu"), 3, 12)]
    assert torch.autograd.gradcheck(partial(gated_rms_norm_ref, groups=3, **options), given)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_walk_over_many_tiles(device, dtype, groups) -> None:
    """More rows than two tiles of every program, with a part of a tile at the end."""
    rows = 5001 if device.type == "cpu" else 50001
    check(leaves(device, rows, 40, dtype=dtype), groups=groups)


@EXAMPLES
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    width=st.integers(2, 100),
    groups=st.integers(1, 4),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    options=st.sampled_from(OPTIONS),
    eps=st.sampled_from([1e-6, 1e-2]),
    scale=st.sampled_from([1e-2, 1.0, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_option(shape, width, groups, dtypes, options, eps, scale, seed) -> None:
    torch.manual_seed(seed)
    of = dict(zip(("x", "gate", "weight"), dtypes, strict=True))
    # With few columns and a small eps the norm hardly depends on x: its gradient is what cancellation leaves.
    check(
        leaves(DEVICE, *shape, width * groups, scale=scale, **of),
        eps if width >= 16 else scale**2,
        groups=groups,
        **options,
    )


@every_order
def test_rows_that_are_zero_or_tiny(device, options) -> None:
    """There eps decides; nothing is NaN, and a gate of 0 or far below closes."""
    x, gate, weight = leaves(device, 4, 64)
    scales = torch.tensor([0.0, 1e-4, 1e-3, 1.0], device=device)
    x = (x.detach() * scales[:, None]).requires_grad_()
    check([x, gate, weight], **options)
    closed = gated_rms_norm(x, torch.full_like(x, -200.0), weight, **options)
    assert closed.abs().max() == 0


def test_groups_are_norms_of_their_own(device) -> None:
    x, gate, weight = leaves(device, 6, 96)
    apart = [
        gated_rms_norm(*(t[..., part] for t in (x, gate, weight))) for part in (slice(32), slice(32, 64), slice(64, 96))
    ]
    assert torch.equal(gated_rms_norm(x, gate, weight, groups=3), torch.cat(apart, dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_the_formula_rounds(device, dtype) -> None:
    """ "cast_then_scale" three times with the gate last, twice with the gate first; "scale_then_cast" once."""
    x, gate, weight = (t.detach() for t in leaves(device, 64, 512, dtype=dtype))
    for options in OPTIONS:
        y = gated_rms_norm(x, gate, weight, **options)
        assert (y == gated_rms_norm_ref(x, gate, weight, **options)).float().mean() > 0.99, options
        other = next(formula for formula in FORMULAS if formula != options["formula"])
        assert (y == gated_rms_norm_ref(x, gate, weight, **{**options, "formula": other})).float().mean() < 0.9, options
    norm = gated_rms_norm_ref(x, torch.ones_like(x), weight) / F.silu(torch.ones(()))
    y, once = gated_rms_norm(x, gate, weight), (norm * F.silu(gate.float())).to(dtype)
    assert (y == once).float().mean() < 0.99


@pytest.mark.parametrize(("options", "dtype"), [(OPTIONS[0], torch.bfloat16), (OPTIONS[2], torch.float32)], ids=str)
def test_float32_weights_and_gates_under_bfloat16_input(device, options, dtype) -> None:
    given = leaves(device, 7, 96, dtype=torch.float32, x=torch.bfloat16)
    (y,), (dx, dgate, dweight) = check(given, **options)
    assert (y.dtype, dx.dtype, dgate.dtype, dweight.dtype) == (dtype, torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., 4:68],
        lambda x: x.split(64, dim=-1)[1].unflatten(0, (3, 4)),
        lambda x: x[:64].t()[:, :10].reshape(-1, 10)[:, :8],
        lambda x: x[:, None, :64].expand(-1, 5, -1),
        lambda x: x.unflatten(1, (4, 50))[:, ::2, :32],
    ],
    ids=["columns", "split", "transposed", "expanded", "every_other"],
)
def test_views_are_read_where_they_lie(device, view) -> None:
    for dtype, options in zip(DTYPES, OPTIONS, strict=False):
        x, gate, _ = leaves(device, 12, 200, dtype=dtype)
        check([x, gate, randn(view(x).shape[-1], dtype=dtype, device=device)], view=view, groups=4, **options)


def test_strided_weights_and_strided_upstream_gradient(device) -> None:
    x, gate, _ = leaves(device, 6, 48)
    weights = randn(48, 2, dtype=torch.float32, device=device)

    def call(op, x, gate, weights):
        y = op(x, gate, weights[:, 0])
        return y.t().contiguous().t(), y.sum().expand(3) + 100.0

    check_op(partial(call, gated_rms_norm), partial(call, gated_rms_norm_ref), [x, gate, weights])


@pytest.mark.parametrize("hidden", [MAX_HIDDEN, MAX_HIDDEN + 2])
def test_very_wide_rows(device, hidden) -> None:
    reset_launches()
    check(leaves(device, 2, hidden, dtype=torch.bfloat16))
    assert bool(launches()) == (hidden == MAX_HIDDEN)


def test_rows_beyond_2_to_the_31_elements(device, untouched_memory) -> None:
    """Three rows, 2^30 and 2^31 elements into one buffer."""
    buffer = untouched_memory(2**31 + 2**20, torch.bfloat16)
    x = buffer.as_strided((3, 64), (2**30, 1))
    x.copy_(randn(3, 64, dtype=torch.bfloat16, device=device, grad=False))
    weight = randn(64, dtype=torch.bfloat16, device=device)
    near = x.clone().requires_grad_()
    ours, theirs = (run(gated_rms_norm, [t, t, weight], [x]) for t in (x.requires_grad_(), near))
    for far, close in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert torch.equal(far, close)


@every_order
def test_what_is_frozen_has_no_gradient_and_changes_no_other(device, options) -> None:
    given = leaves(device, 5, 64)
    _, whole = run(partial(gated_rms_norm, **options), given)
    for needed in itertools.product((False, True), repeat=3):
        for leaf, needs in zip(given, needed, strict=True):
            leaf.requires_grad_(needs)
        reset_launches()
        _, gradients = run(partial(gated_rms_norm, **options), given)
        expected = [gradient for gradient, needs in zip(whole, needed, strict=True) if needs]
        assert all(map(torch.equal, gradients, expected))
        assert launches().get("_sum_parts_kernel", 0) == needed[2]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (lambda x, w: (x.int(), x, w), {}, TypeError, "x is torch.int32; it must be floating point"),
        (lambda x, w: (x, x.int(), w), {}, TypeError, "gate is torch.int32; it must be floating point"),
        (lambda x, w: (x, x, w.int()), {}, TypeError, "weight is torch.int32; it must be floating point"),
        (lambda x, w: (x, x[:1], w), {}, ValueError, r"gate has shape \(1, 8\), x \(2, 8\)"),
        (lambda x, w: (x, x, w[1:]), {}, ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (lambda x, w: (x[0, 0], x, w), {}, ValueError, r"x has shape \(\); it must be \[..., hidden\]"),
        (lambda x, w: (x, x.to("meta"), w), {}, ValueError, "gate is on meta, x on"),
        (lambda x, w: (x, x, w), {"groups": 3}, ValueError, "groups is 3; it must be a divisor of the 8 columns"),
        (lambda x, w: (x, x, w), {"groups": 0}, ValueError, "groups is 0"),
        (lambda x, w: (x, x, w), {"activation": "gelu"}, ValueError, "activation is 'gelu'; allowed are 'silu', 'sigm"),
        (lambda x, w: (x, x, w), {"formula": "x"}, ValueError, "formula is 'x'; allowed are 'cast_then_scale'"),
    ],
)
def test_bad_input(device, arguments, options, error, message) -> None:
    with pytest.raises(error, match=message):
        gated_rms_norm(*arguments(torch.randn(2, 8, device=device), torch.randn(8, device=device)), **options)


def test_autocast_changes_nothing(device) -> None:
    given = leaves(device, 7, 96, x=torch.bfloat16)
    without = run(gated_rms_norm, given)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        under = run(gated_rms_norm, given)
    assert all(map(torch.equal, under[0] + under[1], without[0] + without[1]))


def test_compiled(device) -> None:
    """Without a graph break. On a CPU the reference is compiled; tests/test_ops_traced.py traces the kernels."""
    given = leaves(device, 9, 200, dtype=torch.bfloat16)
    check_op(torch.compile(gated_rms_norm, fullgraph=True, backend="aot_eager"), gated_rms_norm_ref, given)
