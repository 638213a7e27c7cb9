"""packed_glu against its reference; what all ops have in common is in test_ops_every.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st

from convergence.judge.tolerance import three_way
from convergence.op.call import check_call, run
from liger_kernels.ops import GluFormula, geglu, packed_glu, packed_glu_ref, swiglu
from liger_kernels.ops._packed_glu import gradients, product
from tests.ops_checks import DTYPES, EXAMPLES, randn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITED = {
    "clamped": GluFormula(limit=1.5),
    "gpt-oss": GluFormula(alpha=1.702, limit=1.5, offset=1.0, interleaved=True),
    "concatenated gpt-oss": GluFormula(alpha=1.702, limit=1.5, offset=1.0),
    "up first": GluFormula(limit=1.5, interleaved=True, gate_first=False),
}


@EXAMPLES
@given(
    gate=st.builds(
        GluFormula,
        alpha=st.sampled_from([1.0, 1.702]),
        limit=st.sampled_from([None, 0.5, 7.0]),
        offset=st.sampled_from([0.0, 1.0, -0.5]),
        interleaved=st.booleans(),
        gate_first=st.booleans(),
    ),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-3, 1.0, 10.0]),
    strided=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_option(gate, shape, dtype, scale, strided, seed) -> None:
    torch.manual_seed(seed)
    *rows, columns = shape
    x = randn(*rows, 2 * columns + 3 * strided, dtype=dtype, device=DEVICE, scale=scale)

    def call(op, x):
        if not strided:
            return op(x, gate)
        y = op(x[..., 1 : 2 * columns + 1], gate)
        return torch.stack((y, y.detach()), dim=-1)[..., 0]  # the gradient that comes in has gaps, too

    check_call(partial(call, packed_glu), partial(call, packed_glu_ref), [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", LIMITED.values(), ids=LIMITED)
def test_a_number_on_the_limit_is_as_torch_has_it(device, gate, dtype) -> None:
    """Or is not: as ``torch.clamp`` has it, whose gradient ends behind the limit before torch 2.15, and on it since."""
    values = torch.tensor([0.0, 1.0, 1.5, -1.5, 3.0, -3.0, 100.0, -100.0])
    x = torch.cartesian_prod(values, values).reshape(-1, 2)
    x = (x if gate.interleaved else x.t()).reshape(1, -1).to(device, dtype).requires_grad_()
    check_call(partial(packed_glu, gate=gate), partial(packed_glu_ref, gate=gate), [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_options_it_is_swiglu_and_geglu_bit_for_bit(device, dtype) -> None:
    x = randn(17, 2 * 130, dtype=dtype, device=device, scale=2.0)
    upstream = [torch.randn(17, 130).to(device, dtype)]
    for gate, unit in (
        (GluFormula(), swiglu),
        (GluFormula("gelu_tanh"), geglu),
        (GluFormula("gelu"), partial(geglu, approximate="none")),
    ):
        (ours,), (dx,) = run(partial(packed_glu, gate=gate), [x], upstream)
        (theirs,), (their_dx,) = run(lambda x, unit=unit: unit(*x.chunk(2, dim=-1)), [x], upstream)
        assert torch.equal(ours, theirs)
        assert torch.equal(dx, their_dx)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", [GluFormula(), LIMITED["gpt-oss"]], ids=["silu", "gpt-oss"])
def test_rows_times_a_number_of_their_own(device, gate, dtype) -> None:
    """The product with its numbers, which the backward makes again, and the numbers' gradient."""
    x, scale = randn(9, 140, dtype=dtype, device=device), randn(9, dtype=dtype, device=device)

    def truth(x, scale):
        return packed_glu_ref(x.double(), gate) * scale[:, None].double()

    def scaled(x, scale):
        return Scaled.apply(x, scale, gate)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale, gate):
            ctx.save_for_backward(x, scale)
            return product(x, gate) * scale[:, None]

        @staticmethod
        def backward(ctx, dy):
            x, scale = ctx.saved_tensors
            dx, dscale = gradients(y := dy.clone(), x, gate, scale=scale, needs=(True, True), keep_product=True)
            three_way(y, packed_glu_ref(x, gate) * scale[:, None], truth(x, scale), dtype, "product")
            return dx, dscale.to(scale.dtype), None

    check_call(scaled, lambda x, scale: packed_glu_ref(x, gate) * scale[:, None], [x, scale], terms=70)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: packed_glu(torch.ones(2, 4, dtype=torch.int32)), TypeError, "x is torch.int32; it must be floating"),
        (lambda: packed_glu(torch.ones(2, 5)), ValueError, r"x has shape \(2, 5\); it must be \[..., 2 features\]"),
        (lambda: packed_glu(torch.ones(())), ValueError, r"x has shape \(\)"),
        (lambda: GluFormula("relu"), ValueError, "activation is 'relu'; it must be one of 'silu', 'gelu_tanh', 'gelu'"),
        (lambda: GluFormula("gelu", alpha=2.0), ValueError, "alpha is 2.0, and only silu has one"),
        (lambda: GluFormula(limit=-1.0), ValueError, "limit is -1.0; it must be positive, or None"),
    ],
)
def test_bad_input(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_first_call_with_a_limit_is_in_a_checkpoint(device) -> None:
    """What it finds out of torch's clamp is not saved there: a recomputation saves as many tensors."""
    x = randn(3, 8, dtype=torch.float32, device=device)
    gate = GluFormula(limit=1.4375)  # which no other test has
    y = torch.utils.checkpoint.checkpoint(lambda x: packed_glu(x, gate).sin(), x, use_reentrant=False)
    (grad,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(packed_glu(x, gate).sin().sum(), x)
    assert torch.equal(grad, expected)
