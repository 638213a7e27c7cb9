"""lora_linear: what only it has. That it computes what its reference does, of any dtypes and strides, is tested with
every op."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from convergence.op.call import check_call
from liger_kernels import ops
from liger_kernels.ops import LoraAdapter, lora_linear, lora_linear_ref
from liger_kernels.ops.runtime.tiling import tiled
from tests.ops_checks import DTYPES, Products, randn

ROWS, IN, OUT = 10, 24, 20
Op = Callable[..., torch.Tensor]


def leaves_of(
    dtype: torch.dtype, device: torch.device, ranks: tuple[int, ...] = (4,), of_adapter: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """x, the base's weight, and of each adapter a, b and bias."""
    leaves = [randn(2, ROWS // 2, IN, dtype=dtype, device=device), randn(OUT, IN, dtype=dtype, device=device)]
    for rank in ranks:
        leaves += [randn(*size, dtype=of_adapter, device=device) for size in ((rank, IN), (OUT, rank), (OUT,))]
    return leaves


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Each tensor differs by a few roundings of float32, in units of its length."""
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm().detach()) <= 1e-6 * float(theirs.norm().detach())


def layer(
    op: Op,
    x: torch.Tensor,
    weight: torch.Tensor,
    *parameters: torch.Tensor,
    dropping: tuple[int, ...] = (),
    scale: float = 0.5,
) -> torch.Tensor:
    """``op`` with adapters whose scales differ, of which some are ``dropping`` every element above 1, as dropout
    would."""
    adapters = []
    for i in range(len(parameters) // 3):
        a, b, bias = parameters[3 * i : 3 * i + 3]
        dropped = torch.where(x > 1, 0.0, 2 * x).to(x.dtype) if i in dropping else None
        adapters.append(LoraAdapter(a, b, scale + i, bias, dropped))
    return op(x, lambda x: F.linear(x, weight), adapters)


@pytest.mark.parametrize("of_adapter", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_of_every_dtype_on_a_base_of_every_dtype(
    dtype: torch.dtype, of_adapter: torch.dtype, device: torch.device
) -> None:
    leaves = leaves_of(dtype, device, of_adapter=of_adapter)
    check_call(partial(layer, lora_linear), partial(layer, lora_linear_ref), leaves, terms=IN)


@pytest.mark.parametrize("dropping", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_adapters_some_of_which_drop(
    dtype: torch.dtype, dropping: tuple[int, ...], device: torch.device
) -> None:
    """Of other ranks, scales and dtypes, and one of them without a bias."""
    leaves = leaves_of(dtype, device, (3, 16, 5))
    leaves[5] = leaves[5].detach().to(dtype).requires_grad_()
    call = partial(layer, dropping=dropping)
    check_call(partial(call, lora_linear), partial(call, lora_linear_ref), leaves, terms=IN)
    frozen = [t.detach().requires_grad_(i in (0, 3, 6, 7)) for i, t in enumerate(leaves)]
    check_call(partial(call, lora_linear), partial(call, lora_linear_ref), frozen, terms=IN)


def test_float32_adapters_of_a_16_bit_model_lose_next_to_nothing(device: torch.device) -> None:
    """Their gradients, and what they add, are near to float64's. Only a base of float32 shows the latter, because y has
    its dtype."""
    for dtype, of_base in itertools.product(DTYPES[1:], (torch.float32, None)):
        x, _, a, b, _ = leaves_of(dtype, device, (16,))
        dy = randn(*x.shape[:-1], OUT, dtype=of_base or dtype, device=device, grad=False)

        def run(op: Op, *leaves: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, a, b = leaves
            y = op(x, lambda x: torch.zeros_like(dy), [LoraAdapter(a, b, 2.0)])
            return *torch.autograd.grad(y, (a, b), dy), y.detach()

        doubles = [t.detach().double().requires_grad_() for t in (x, a, b)]
        truth = run(lora_linear_ref, *doubles, dy=dy.double())
        results = zip(("da", "db", "y"), run(lora_linear, x, a, b, dy=dy), truth, strict=True)
        for name, ours, exact in results:
            if name != "y" or of_base is not None:
                error = float((ours.double() - exact).norm() / exact.norm())
                assert error < 1e-5, f"{name}, {dtype}: {error}"


@pytest.mark.parametrize("ranks", [(4,), (40,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_in_parts_and_tiles_below_one_another(
    dtype: torch.dtype, ranks: tuple[int, ...], device: torch.device
) -> None:
    """As on a GPU for real sizes: several programs sum over the columns of a row, one program adds to several tiles.
    What the first launch leaves behind does not matter to the next one."""
    leaves = [randn(2, 20, IN, dtype=dtype, device=device), *leaves_of(dtype, device, ranks)[1:]]
    shape = {"ROWS": 16, "BLOCK": 16, "num_warps": 1}
    with tiled(
        lora_rows=lambda *_: (2, {**shape, "num_stages": 2}),
        lora_add=lambda *_: (2, {**shape, "PART": 16, "num_stages": 2}),
    ):
        check_call(partial(layer, lora_linear), partial(layer, lora_linear_ref), leaves, terms=IN)
        first, again = (layer(lora_linear, *leaves) for _ in range(2))
    assert torch.equal(first, again)


def test_more_ranks_than_a_program_holds_and_none(device: torch.device) -> None:
    x, weight, *parameters = leaves_of(torch.bfloat16, device, (200, 57))
    ops.reset_launches()
    y = layer(lora_linear, x, weight, *parameters)
    assert not ops.launches()
    assert torch.equal(y, layer(lora_linear_ref, x, weight, *parameters))
    assert torch.equal(lora_linear(x, lambda x: F.linear(x, weight), []), F.linear(x, weight))


def test_strided_parameters(device: torch.device) -> None:
    """An adapter that is tied to another one's is a transposed view of it."""
    x, weight, a, b, bias = leaves_of(torch.bfloat16, device)

    def tied(op: Op, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return layer(op, x, weight, a.t(), b.t(), bias)

    leaves = [x, weight, *(t.detach().t().contiguous().requires_grad_() for t in (a, b))]
    check_call(partial(tied, lora_linear), partial(tied, lora_linear_ref), leaves, terms=IN)


def test_the_base_is_called_once_and_its_result_stays(device: torch.device) -> None:
    x, weight, *parameters = leaves_of(torch.bfloat16, device)
    made: list[torch.Tensor] = []

    def base(given: torch.Tensor) -> torch.Tensor:
        assert torch.equal(given, x)
        made.append(F.linear(given, weight))
        return made[0]

    a, b, bias = parameters
    y = lora_linear(x, base, [LoraAdapter(a, b, 2.0, bias)])
    assert len(made) == 1
    assert torch.equal(made[0], F.linear(x, weight))
    assert y.data_ptr() != made[0].data_ptr()


def test_a_base_through_which_nothing_comes_back(device: torch.device) -> None:
    """It may run without gradients: x then gets the adapters' alone."""
    x, weight, a, b, _ = leaves_of(torch.float32, device)
    found = []
    for op in (lora_linear, lora_linear_ref):
        y = op(x, lambda x: F.linear(x, weight).detach(), [LoraAdapter(a, b)])
        found.append(torch.autograd.grad(y.sum(), (x, a, b)))
    torch.testing.assert_close(*found)
    inner: list[torch.Tensor] = []
    lora_linear(x, lambda x: inner.append(F.linear(x, weight)) or inner[0], [LoraAdapter(a, b)])
    (dx,) = torch.autograd.grad(inner[0].sum(), x)  # of the base alone
    torch.testing.assert_close(dx, weight.sum(0).expand_as(dx))


@pytest.mark.parametrize("dropping", [(), (0,)])
def test_two_forwards_then_two_backwards_each_twice(dropping: tuple[int, ...], device: torch.device) -> None:
    """Each backward reads the tensors of its own forward, as often as it runs."""
    x, weight, *parameters = leaves_of(torch.float32, device, (3, 4))
    other = randn(*x.shape, dtype=x.dtype, device=device)
    call = partial(layer, dropping=dropping)
    expected: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for op, into in ((lora_linear_ref, expected), (lora_linear, found)):
        ys = [call(op, t, weight, *parameters) for t in (x, other)]
        for t, y in zip((x, other), ys, strict=True):
            for _ in range(2):
                into += torch.autograd.grad(y.square().sum(), (t, *parameters), retain_graph=True)
    assert_near(found, expected)


def test_nothing_lives_on(device: torch.device) -> None:
    """No reference cycle holds the tensors of a call, whether its backward has run or not."""
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            x, weight, *parameters = leaves_of(torch.float32, device)
            hidden = 2 * x
            y = layer(lora_linear, hidden, weight, *parameters)
            if backward:
                y.sum().backward()
            known = weakref.ref(hidden)
            del hidden, y
            assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropping", [(), (0,)])
def test_a_checkpoint_does_not_repeat_the_last_base(
    dropping: tuple[int, ...], reentrant: bool, device: torch.device
) -> None:
    """Of two frozen layers, recomputation runs the first. The other kind of checkpoint knows no end, and runs both."""
    x, weight, *parameters = leaves_of(torch.float32, device)
    weight, back = weight.detach(), weight.detach().t()
    second = [randn(*size, dtype=torch.float32, device=device) for size in ((4, OUT), (IN, 4))]
    trained = [x, *parameters, *second]

    def block(op: Op, x: torch.Tensor) -> torch.Tensor:
        y = layer(op, x, weight, *parameters, dropping=dropping)
        return op(y, lambda y: F.linear(y, back), [LoraAdapter(*second)])

    expected = torch.autograd.grad(block(lora_linear_ref, x).sum(), trained)
    y: Any = checkpoint(block, lora_linear, x, use_reentrant=reentrant)
    ops.reset_launches()
    with Products() as products:
        y.sum().backward()
    assert_near([t.grad for t in trained], list(expected))
    again = 2 if reentrant else 1
    assert products.count == 2 + again  # the gradients of two bases
    assert ops.launches()["_lora_linear_add_kernel"] == 2 + again  # those of two inputs


def test_what_is_saved(device: torch.device) -> None:
    """x once, z in float32, and the parameters themselves."""
    x, weight, a, b, bias = leaves_of(torch.bfloat16, device)
    weight.requires_grad_(False)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        layer(lora_linear, x, weight, a, b, bias)
    pointers = {t.data_ptr() for t in (x, weight, a, b)}
    own = [t for t in kept if t.data_ptr() not in pointers]
    assert [(t.dtype, t.numel()) for t in own] == [(torch.float32, ROWS * len(a))]
    assert sum(t.data_ptr() == x.data_ptr() for t in kept) == 1


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_x_once_and_no_adapter(narrow: torch.dtype, device: torch.device) -> None:
    x, weight, *parameters = leaves_of(torch.float32, device)
    with torch.autocast(device.type, dtype=narrow):
        y = layer(lora_linear, x, weight, *parameters)
    assert y.dtype == narrow
    gradients = torch.autograd.grad(y.sum(), (x, *parameters))
    assert [g.dtype for g in gradients] == [torch.float32] * 4
    cast = x.detach().to(narrow).requires_grad_()
    expected = layer(lora_linear, cast, weight.to(narrow), *parameters)
    assert torch.equal(y, expected)
    assert all(map(torch.equal, gradients[1:], torch.autograd.grad(expected.sum(), parameters)))


def test_a_base_of_another_shape_is_named(device: torch.device) -> None:
    x, _, *parameters = leaves_of(torch.float32, device)
    for base in (lambda x: x, lambda x: None, lambda x: x[..., :OUT].long()):
        for op in (lora_linear, lora_linear_ref):
            with pytest.raises((TypeError, ValueError), match="base returned"):
                op(x, base, [LoraAdapter(*parameters[:2])])


def test_a_compiled_program_has_the_reference() -> None:
    x, weight, *parameters = leaves_of(torch.float32, torch.device("cpu"))
    ops.reset_launches()
    y = torch.compile(partial(layer, lora_linear), backend="aot_eager", fullgraph=True)(x, weight, *parameters)
    assert not ops.launches()
    torch.testing.assert_close(y, layer(lora_linear_ref, x, weight, *parameters))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_autograd_reads_what_is_saved_once(checkpointed: bool, device: torch.device) -> None:
    """It takes saved tensors from each node by itself, so that no node can read another's."""
    leaves = leaves_of(torch.float32, device)

    def loss() -> torch.Tensor:
        y: Any = checkpoint(partial(layer, lora_linear), *leaves, use_reentrant=False) if checkpointed else None
        return (layer(lora_linear, *leaves) if y is None else y).cos().sum()

    expected = torch.autograd.grad(loss(), leaves)
    result = loss()
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        result.backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)
