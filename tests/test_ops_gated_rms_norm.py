"""gated_rms_norm against its reference; what all norms have in common is in test_ops_every.py."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convergence.op.call import check_call
from liger_kernels.ops import gated_rms_norm, gated_rms_norm_ref
from liger_kernels.ops._gated_rms_norm import ACTIVATIONS, FORMULAS
from tests.ops_checks import DTYPES, EXAMPLES, eps_for, randn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = [
    {"activation": activation, "gate_first": gate_first, "formula": formula}
    for activation, gate_first, formula in itertools.product(ACTIVATIONS, (False, True), FORMULAS)
]


def leaves(device, *shape: int, dtype=torch.float32, scale: float = 1.0, **dtypes) -> list[torch.Tensor]:
    """x and gate of ``shape``, and the weight."""
    x, gate = (
        randn(*shape, dtype=dtypes.get(name, dtype), device=device, scale=factor)
        for name, factor in (("x", scale), ("gate", 2.0))
    )
    return [x, gate, randn(shape[-1], dtype=dtypes.get("weight", dtype), device=device)]


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
    given = leaves(DEVICE, *shape, width * groups, scale=scale, **of)
    chosen = {"eps": eps_for(width, eps, scale), "groups": groups, **options}
    check_call(partial(gated_rms_norm, **chosen), partial(gated_rms_norm_ref, **chosen), given)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gate_of_zero_or_far_below_closes(device, options) -> None:
    x, _, weight = leaves(device, 4, 64)
    assert not gated_rms_norm(x, torch.full_like(x, -200.0), weight, **options).any()


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


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (lambda x, w: (x.int(), x, w), {}, TypeError, "x is torch.int32; it must be floating point"),
        (lambda x, w: (x, x.int(), w), {}, TypeError, "gate is torch.int32; it must be floating point"),
        (lambda x, w: (x, x, w.int()), {}, TypeError, "weight is torch.int32; it must be floating point"),
        (lambda x, w: (x, x[:1], w), {}, ValueError, r"gate has shape \(1, 8\), x \(2, 8\)"),
        (lambda x, w: (x, x, w[1:]), {}, ValueError, r"weight has shape \(7,\); .* must be \[8\]"),
        (lambda x, w: (x, x.to("meta"), w), {}, ValueError, "gate is on meta, x on"),
        (lambda x, w: (x, x, w), {"groups": 3}, ValueError, "groups is 3; it must be a divisor of the 8 columns"),
        (lambda x, w: (x, x, w), {"groups": 0}, ValueError, "groups is 0"),
        (
            lambda x, w: (x, x, w),
            {"activation": "gelu"},
            ValueError,
            "activation is 'gelu'; it must be one of 'silu', 'sigm",
        ),
        (lambda x, w: (x, x, w), {"formula": "x"}, ValueError, "formula is 'x'; it must be one of 'cast_then_scale'"),
    ],
)
def test_bad_input(device, arguments, options, error, message) -> None:
    with pytest.raises(error, match=message):
        gated_rms_norm(*arguments(torch.randn(2, 8, device=device), torch.randn(8, device=device)), **options)
