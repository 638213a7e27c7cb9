"""gated_mlp and adapted_linears: they compute what their references do, for every set of adapters, and save, keep and
overwrite what they may."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from convergence.judge.tolerance import three_way
from convergence.op.call import check_call
from liger_kernels import ops
from liger_kernels.ops import (
    LoraAdapter,
    Projection,
    adapted_linears,
    adapted_linears_ref,
    gated_mlp,
    gated_mlp_ref,
)
from liger_kernels.ops.runtime.kept import keeps_graph
from liger_kernels.ops.runtime.tiling import tiled
from tests.ops_checks import DTYPES, Products, randn

ROWS, HIDDEN, INNER, OUT = 10, 24, 40, 20
Shapes = dict[str, tuple[int, int]]
Ranks = dict[str, tuple[int, ...]]
MLP: Shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (OUT, INNER)}
SHARING: Shapes = {"q": (INNER, HIDDEN), "k": (OUT, HIDDEN), "v": (OUT, HIDDEN), "g": (4, HIDDEN)}
Op = Callable[..., Any]


def leaves_of(
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    shapes: Shapes = MLP,
    of_adapter: torch.dtype = torch.float32,
    trained: bool = False,
) -> list[torch.Tensor]:
    """x, and of each projection weight, bias, and of each adapter a, b and bias."""
    leaves = [randn(2, ROWS // 2, HIDDEN, dtype=dtype, device=device)]
    for name, (outputs, inputs) in shapes.items():
        like: dict[str, Any] = {"dtype": dtype, "device": device, "grad": trained}
        leaves += [randn(outputs, inputs, **like, scale=inputs**-0.5), randn(outputs, **like)]
        for rank in ranks.get(name, ()):
            sizes = (rank, inputs), (outputs, rank), (outputs,)
            leaves += [randn(*size, dtype=of_adapter, device=device, scale=0.3) for size in sizes]
    return leaves


def projections_of(leaves: list[torch.Tensor], ranks: Ranks, shapes: Shapes = MLP) -> list[Projection]:
    """With adapters whose scales differ."""
    found, rest = [], [*leaves]
    for name in shapes:
        weight, bias = rest.pop(0), rest.pop(0)
        adapters = []
        for i, _ in enumerate(ranks.get(name, ())):
            a, b, beta = (rest.pop(0) for _ in range(3))
            adapters.append(LoraAdapter(a, b, 0.5 + i, beta))
        found.append(Projection(weight, bias, adapters))
    return found


def mlp(op: Op, x: torch.Tensor, *leaves: torch.Tensor, ranks: Ranks, **options: Any) -> torch.Tensor:
    result: torch.Tensor = op(x, *projections_of([*leaves], ranks), **options)
    return result


def sharing(op: Op, x: torch.Tensor, *leaves: torch.Tensor, ranks: Ranks, shapes: Shapes) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = op(x, projections_of([*leaves], ranks, shapes))
    return result


def check(leaves: list[torch.Tensor], recompute: bool = False, **options: Any) -> None:
    ours = partial(mlp, gated_mlp, recompute=recompute, **options)
    check_call(ours, partial(mlp, gated_mlp_ref, **options), leaves, terms=INNER)


def backward_of(y: torch.Tensor, leaves: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    trained = [t for t in leaves if t.requires_grad]
    return [*torch.autograd.grad(y.float().square().sum(), trained, **options)]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


ALL: Ranks = {"gate": (4,), "up": (4,), "down": (4,)}
RANKS: list[Ranks] = [
    ALL,
    {},
    {"gate": (3,)},
    {"up": (20,)},
    {"down": (5,)},
    {"gate": (4, 7), "up": (3,), "down": (2, 2)},
    {"gate": (2, 2), "up": (3, 40), "down": (17,)},
]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_on_some_and_on_all(dtype: torch.dtype, ranks: Ranks, trained: bool, device: torch.device) -> None:
    check(leaves_of(dtype, device, ranks, trained=trained), ranks=ranks)


@pytest.mark.parametrize("rank", [4, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_below_one_another(dtype: torch.dtype, rank: int, device: torch.device) -> None:
    """As on a GPU for real sizes: a program takes several tiles, the last of which has fewer rows."""
    ranks: Ranks = dict.fromkeys(ALL, (rank,))
    x, *others = leaves_of(dtype, device, ranks)
    leaves = [randn(2, 20, *x.shape[2:], dtype=dtype, device=device), *others]
    with tiled(gated_mlp=lambda *_: (2, {"PART": 16, "ROWS": 16, "BLOCK": 16, "num_warps": 1, "num_stages": 2})):
        check(leaves, ranks=ranks)


@pytest.mark.parametrize("of_adapter", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_of_every_dtype(dtype: torch.dtype, of_adapter: torch.dtype, device: torch.device) -> None:
    check(leaves_of(dtype, device, ALL, of_adapter=of_adapter), ranks=ALL)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_every_activation(activation: str, device: torch.device) -> None:
    check(leaves_of(torch.float32, device, ALL), ranks=ALL, activation=activation)


@pytest.mark.parametrize("missing", range(6))
def test_gradients_of_some_alone(missing: int, device: torch.device) -> None:
    """Every leaf but some, and these alone: x, and of each projection the three of its adapter."""
    leaves = leaves_of(torch.float32, device, ALL)
    for kept in (True, False):
        some = [t.detach().requires_grad_(t.requires_grad and (i % 6 == missing) != kept) for i, t in enumerate(leaves)]
        if any(t.requires_grad for t in some):
            check(some, ranks=ALL)


@pytest.mark.parametrize(
    "ranks",
    [
        {"q": (4,), "k": (4,), "v": (4,)},
        {"q": (4,), "v": (7,)},
        {"k": (3, 5)},
        {"q": (4, 2), "k": (4,), "v": (1,), "g": (16,)},  # more than a kernel reads side by side
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_projections_that_share_x(dtype: torch.dtype, n: int, ranks: Ranks, device: torch.device) -> None:
    shapes = dict([*SHARING.items()][:n])
    leaves = leaves_of(dtype, device, ranks, shapes, trained=n == 2)
    options: dict[str, Any] = {"ranks": ranks, "shapes": shapes}
    calls = [partial(sharing, op, **options) for op in (adapted_linears, adapted_linears_ref)]
    check_call(calls[0], calls[1], leaves, terms=HIDDEN)


def test_results_that_nobody_uses(device: torch.device) -> None:
    """They have no gradient, and the others have theirs."""
    ranks: Ranks = {"q": (4,), "k": (4,), "v": (4,)}
    leaves = leaves_of(torch.float32, device, ranks, SHARING)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    for used in range(3):
        found = []
        for op, given in ((adapted_linears, leaves), (adapted_linears_ref, leaves), (adapted_linears_ref, exact)):
            y = sharing(op, *given, ranks=ranks, shapes=SHARING)[used]
            trained = [t for t in given if t.requires_grad]
            found.append(torch.autograd.grad(y.square().sum(), trained, allow_unused=True))
        for ours, theirs, truth in zip(*found, strict=True):
            if truth is None:
                assert ours is None or not ours.any()
            else:  # a gradient sums over rows, and each y over columns
                three_way(ours, theirs, truth, torch.float32, "gradient", chain=ROWS * HIDDEN)


def test_four_bits_of_a_weight_are_made_dense_once_in_each_direction(device: torch.device) -> None:
    """``dense`` makes the matrix of whatever is kept, here of its transpose in bytes."""
    leaves = leaves_of(torch.bfloat16, device, ALL)
    calls = []

    def dense(packed: torch.Tensor) -> torch.Tensor:
        calls.append(packed)
        return packed.view(torch.bfloat16).t()

    plain = projections_of(leaves[1:], ALL)
    packed = [Projection(one.weight.t().contiguous().view(torch.uint8), one.bias, one.adapters, dense) for one in plain]
    expected = backward_of(gated_mlp(leaves[0], *plain), leaves)
    y = gated_mlp(leaves[0], *packed)
    assert len(calls) == 3
    assert equal(backward_of(y, leaves), expected)
    assert len(calls) == 6
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert equal(backward_of(gated_mlp(leaves[0], *packed), leaves), expected)


def test_strided_parameters(device: torch.device) -> None:
    """An adapter that is tied to another one's is a transposed view of it; and x is any view."""
    leaves = leaves_of(torch.bfloat16, device, ALL)
    turned = [t.detach().mT.contiguous().mT.requires_grad_(t.requires_grad) if t.dim() == 2 else t for t in leaves]
    expected = backward_of(mlp(gated_mlp, *leaves, ranks=ALL), leaves)
    assert equal(backward_of(mlp(gated_mlp, *turned, ranks=ALL), turned), expected)
    x = leaves[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert equal(backward_of(mlp(gated_mlp, x, *leaves[1:], ranks=ALL), [x, *leaves[1:]]), expected)


def plain(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    return call()


def checkpointed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    result: Any = checkpoint(call, use_reentrant=False)
    return result


def test_a_compiled_backward_does_not_ask_whether_the_graph_is_kept() -> None:
    """Dynamo cannot trace the question, and the answer would be that of one graph."""

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy * (3 if keeps_graph() else 2)

    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: Asks.apply(x), fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("way", [plain, checkpointed])
def test_a_graph_is_walked_as_often_as_it_is_kept(way: Any, recompute: bool, device: torch.device) -> None:
    """The unit's gradients lie where its products lay, but for a graph that is kept."""
    leaves = leaves_of(torch.float32, device, ALL)
    y = way(partial(mlp, gated_mlp, *leaves, ranks=ALL, recompute=recompute))
    passes = [backward_of(y, leaves, retain_graph=retain) for retain in (True, True, False)]
    assert equal(passes[1], passes[0])
    assert equal(passes[2], passes[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward_of(y, leaves)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("way", [plain, checkpointed])
def test_two_forwards_then_two_backwards(way: Any, recompute: bool, device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device, ALL)
    other = [randn(*leaves[0].shape, dtype=torch.float32, device=device), *leaves[1:]]
    expected = [backward_of(mlp(gated_mlp, *these, ranks=ALL), these) for these in (leaves, other)]
    results = [way(partial(mlp, gated_mlp, *these, ranks=ALL, recompute=recompute)) for these in (leaves, other)]
    for y, these, theirs in zip(results, (leaves, other), expected, strict=True):
        assert equal(backward_of(y, these), theirs)


@pytest.mark.parametrize(("trained", "products"), [(False, 5), (True, 8)])
def test_recomputation_ends_before_the_last_product(trained: bool, products: int, device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device, ALL, trained=trained)
    with Products() as forward:
        y = checkpointed(partial(mlp, gated_mlp, *leaves, ranks=ALL))
    with Products() as backward:
        backward_of(y, leaves)
    assert (forward.count, backward.count) == (3, products)


IN_THREE_TILES = {"recomputed_mlp": lambda *_: 4}  # of 10 rows


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("ranks", [RANKS[0], RANKS[1], RANKS[4], RANKS[6]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recomputed_in_tiles(dtype: torch.dtype, ranks: Ranks, trained: bool, device: torch.device) -> None:
    """The last tile is shorter than the others."""
    with tiled(**IN_THREE_TILES):
        check(leaves_of(dtype, device, ranks, trained=trained), recompute=True, ranks=ranks)


@pytest.mark.parametrize("missing", range(6))
def test_recomputed_gradients_of_some_alone(missing: int, device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device, ALL)
    some = [t.detach().requires_grad_(t.requires_grad and i % 6 == missing) for i, t in enumerate(leaves)]
    if any(t.requires_grad for t in some):
        with tiled(**IN_THREE_TILES):
            check(some, recompute=True, ranks=ALL)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_tile_has_the_bits_of_what_is_saved(dtype: torch.dtype, trained: bool, device: torch.device) -> None:
    leaves = leaves_of(dtype, device, ALL, trained=trained)
    saved, again = (mlp(gated_mlp, *leaves, ranks=ALL, recompute=recompute) for recompute in (False, True))
    assert torch.equal(again, saved)
    assert equal(backward_of(again, leaves), backward_of(saved, leaves))


@pytest.mark.parametrize(("trained", "products"), [(False, 5), (True, 8)])
@pytest.mark.parametrize("tiles", [1, 3])
def test_recomputed_under_checkpointing_costs_no_product(
    trained: bool, products: int, tiles: int, device: torch.device
) -> None:
    """As many as :func:`test_recomputation_ends_before_the_last_product` counts, for each tile."""
    leaves = leaves_of(torch.float32, device, ALL, trained=trained)
    with tiled(**IN_THREE_TILES if tiles == 3 else {}):
        with Products() as forward:
            y = checkpointed(partial(mlp, gated_mlp, *leaves, ranks=ALL, recompute=True))
        with Products() as backward:
            backward_of(y, leaves)
    assert (forward.count, backward.count) == (3 * tiles, products * tiles)


def test_sums_over_many_tiles_are_rounded_once(device: torch.device) -> None:
    """Weights of bfloat16, over 64 tiles: as near to the truth as in one tile."""
    _, *others = leaves_of(torch.bfloat16, device, ALL, of_adapter=torch.bfloat16, trained=True)
    leaves = [randn(128, HIDDEN, dtype=torch.bfloat16, device=device), *others]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    truth = backward_of(mlp(gated_mlp_ref, *exact, ranks=ALL), exact)
    errors = []
    for rows in (128, 2):
        with tiled(recomputed_mlp=lambda *_, rows=rows: rows):
            found = backward_of(mlp(gated_mlp, *leaves, ranks=ALL, recompute=True), leaves)
        errors.append(
            [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, truth, strict=True)]
        )
    one, many = errors
    # Another kernel of a GPU may round the 800 elements of a weight anew, whose rms then scatters by 1 / sqrt(800), or
    # 3.5%: three of these.
    assert all(many[i] <= 1.1 * one[i] for i in range(len(one)))


def test_what_is_saved(device: torch.device) -> None:
    """x, the products of gate and up, and z in float32; the parameters are kept as they are."""
    leaves = leaves_of(torch.bfloat16, device, ALL)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        mlp(gated_mlp, *leaves, ranks=ALL)
        sharing(adapted_linears, *leaves[:16], ranks={"q": (4,), "k": (4,)}, shapes=dict([*SHARING.items()][:2]))
    sizes = [(t.dtype, t.numel()) for t in saved]
    del saved[:]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        mlp(gated_mlp, *leaves, ranks=ALL, recompute=True)
    assert len(saved) == 1
    assert saved[0] is leaves[0]
    products = [(torch.bfloat16, ROWS * INNER)] * 2
    of_x, of_z = (torch.bfloat16, ROWS * HIDDEN), (torch.float32, ROWS * 8)
    assert sizes == [of_x, *products, of_z, (torch.float32, ROWS * 4), of_x, of_z]


@pytest.mark.parametrize("position", [1, 3, 4])
def test_a_parameter_that_was_changed_before_the_backward_is_refused(position: int, device: torch.device) -> None:
    """As torch refuses it; the weight, A and B."""
    leaves = leaves_of(torch.float32, device, ALL)
    one: Ranks = {"q": (4,)}
    for call in (
        partial(mlp, gated_mlp, *leaves, ranks=ALL),
        partial(sharing, adapted_linears, *leaves[:6], ranks=one, shapes={"q": MLP["gate"]}),
    ):
        result = call()
        y = result[0] if isinstance(result, tuple) else result
        with torch.no_grad():
            leaves[position].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_without_gradients_nothing_is_kept(device: torch.device) -> None:
    with torch.inference_mode():
        leaves = [t.detach() for t in leaves_of(torch.bfloat16, device, ALL)]
        assert not mlp(gated_mlp, *leaves, ranks=ALL).requires_grad


def test_nothing_lives_on(device: torch.device) -> None:
    """No reference cycle holds the tensors of a call, whether its backward has run or not."""
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            leaves = leaves_of(torch.float32, device, ALL)
            hidden = 2 * leaves[0]
            y = mlp(gated_mlp, hidden, *leaves[1:], ranks=ALL)
            if backward:
                y.sum().backward()
            known = weakref.ref(hidden)
            del hidden, y
            assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_x_and_weights_and_no_adapter(narrow: torch.dtype, device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device, ALL, trained=True)
    with torch.autocast(device.type, dtype=narrow):
        y = mlp(gated_mlp, *leaves, ranks=ALL)
    assert y.dtype == narrow
    gradients = backward_of(y, leaves)
    assert {g.dtype for g in gradients} == {torch.float32}
    cast = [t if i % 5 in (3, 4, 0) and i else t.detach().to(narrow).requires_grad_() for i, t in enumerate(leaves)]
    assert torch.equal(y, mlp(gated_mlp, *cast, ranks=ALL))


def test_more_ranks_than_a_program_holds(device: torch.device) -> None:
    ranks: Ranks = {"gate": (200,), "up": (57,)}
    leaves = leaves_of(torch.bfloat16, device, ranks)
    ops.reset_launches()
    y = mlp(gated_mlp, *leaves, ranks=ranks)
    assert torch.equal(y, mlp(gated_mlp_ref, *leaves, ranks=ranks))
    assert not any("glu" in name for name in ops.launches())


def test_a_compiled_program_has_the_reference() -> None:
    leaves = leaves_of(torch.float32, torch.device("cpu"), ALL)
    ops.reset_launches()
    y = torch.compile(partial(mlp, gated_mlp, ranks=ALL), backend="aot_eager", fullgraph=True)(*leaves)
    assert not ops.launches()
    torch.testing.assert_close(y, mlp(gated_mlp_ref, *leaves, ranks=ALL))


@pytest.mark.parametrize("wrapped", [plain, checkpointed])
def test_compiled_autograd_goes_backward(wrapped: Any, device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device, ALL)
    expected = backward_of(mlp(gated_mlp, *leaves, ranks=ALL), leaves)
    result = wrapped(partial(mlp, gated_mlp, *leaves, ranks=ALL)).float().square().sum()
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        result.backward()
    for leaf, gradient in zip([t for t in leaves if t.requires_grad], expected, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)


def test_a_projection_that_cannot_be_is_named(device: torch.device) -> None:
    leaves = leaves_of(torch.float32, device, ALL)
    _, weight, _, a, b, *_ = leaves
    with pytest.raises(ValueError, match="dropped"):
        Projection(weight, None, [LoraAdapter(a, b, dropped=leaves[0])])
    with pytest.raises(ValueError, match="one of adapters has a"):
        Projection(weight, None, [LoraAdapter(a, b), LoraAdapter(a, b[:3])])
    with pytest.raises(ValueError, match="at least"):
        adapted_linears(leaves[0], [])
