"""Ops that end in a product save before it, so that activation checkpointing does not compute it again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import liger_kernels
from liger_kernels.ops import (
    experts,
    geglu,
    geglu_linear,
    launches,
    reset_launches,
    swiglu,
    swiglu_linear,
)
from tests.ops_checks import Products, randn
from tests.patching_checks import batch, tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INNER, EXPERTS = 16, 24, 3


class GatedMLP(nn.Module):
    """``ours`` is a unit with the linear layer behind it; ``theirs`` is the unit alone, as eager would call it."""

    def __init__(self, ours: Any, theirs: Any, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=bias)
        self.ours, self.theirs, self.eager = ours, theirs, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.eager:
            return self.down(self.theirs(gate, up))
        return self.ours(gate, up, self.down.weight, self.down.bias)


class Experts(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        shapes = {"gate_up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER)}
        shapes |= {"gate_up_bias": (EXPERTS, 2 * INNER), "down_bias": (EXPERTS, HIDDEN)} if bias else {}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.3))
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = F.linear(x, self.router).softmax(-1).topk(2)
        biases = getattr(self, "gate_up_bias", None), getattr(self, "down_bias", None)
        return experts(x, ids, weights, self.gate_up, self.down, None, *biases)


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "swiglu": lambda **options: GatedMLP(swiglu_linear, swiglu, **options),
    "geglu": lambda **options: GatedMLP(geglu_linear, geglu, **options),
    "experts": Experts,
}
LINEAR = {"swiglu": swiglu_linear, "geglu": geglu_linear}
MLPS = [*LINEAR]


def made(name: str, frozen: bool = False, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name](bias=bias).to(DEVICE, dtype).requires_grad_(not frozen)


def tokens(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(100 + seed)
    return randn(12, HIDDEN, dtype=dtype, device=DEVICE)


def checkpointed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=False)


def reentrant(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=True)


def saved_on_the_way(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Under hooks that change nothing."""
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return module(x)


def plain(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


Way = Callable[[nn.Module, torch.Tensor], torch.Tensor]
WAYS: list[Way] = [plain, checkpointed, saved_on_the_way]


def gradients(module: nn.Module, x: torch.Tensor, y: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    leaves = [t for t in (x, *module.parameters()) if t.requires_grad]
    torch.manual_seed(200)
    y.backward(torch.randn(y.shape).to(y), **options)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [grad for grad in found if grad is not None]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def counted(module: nn.Module) -> tuple[int, int]:
    """Matrix products of a forward and of a backward, recomputation included."""
    x = tokens()
    with Products() as forward:
        y = checkpointed(module, x + 0).sin()
    with Products() as backward:
        gradients(module, x, y)
    return forward.count, backward.count


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize(("frozen", "bias", "backward"), [(True, False, 5), (False, False, 8), (False, True, 8)])
def test_recomputation_ends_before_the_last_product(name: str, frozen: bool, bias: bool, backward: int) -> None:
    module = made(name, frozen, bias)
    assert counted(module) == (3, backward)
    module.eager = True
    assert counted(module) == (3, backward)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_recomputation_ends_before_the_last_product_of_experts(frozen: bool, bias: bool) -> None:
    """Next to the experts' products there are those of the router, of the gradients of biases, and of the gradient that
    the router's weights have from a bias. A GPU multiplies by all experts in one product."""
    router = (1, 2) if frozen else (1, 3)
    each = 1 if DEVICE.type == "cuda" else EXPERTS
    backward = each * (3 if frozen else 5) + router[1]
    if bias:
        backward += 1 if frozen else 1 + 2 * each
    reset_launches()
    assert counted(made("experts", frozen, bias)) == (2 * each + router[0], backward)
    assert launches()["_experts_sum_kernel"] == 2  # of the results, and of the gradients of tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_the_same_bit_for_bit(name: str, bias: bool, dtype: torch.dtype) -> None:
    module, x = made(name, bias=bias, dtype=dtype), tokens(dtype=dtype)
    expected = gradients(module, x, module(x))
    for way in (checkpointed, reentrant, saved_on_the_way):
        assert equal(gradients(module, x, way(module, x)), expected)


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_of_some_alone(name: str) -> None:
    """Of one leaf, and of all but one."""
    module, x = made(name, bias=True), tokens()
    leaves = [x, *module.parameters()]
    expected = dict(zip(leaves, gradients(module, x, module(x)), strict=True))
    for chosen in itertools.chain(([leaf] for leaf in leaves), (set(leaves) - {leaf} for leaf in leaves)):
        for leaf in leaves:
            leaf.requires_grad_(any(leaf is c for c in chosen))
        found = gradients(module, x, checkpointed(module, x))
        assert equal(found, [expected[leaf] for leaf in leaves if leaf.requires_grad])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", MAKERS)
def test_two_forwards_then_two_backwards(name: str, way: Way) -> None:
    """In either order, each backward has what its own forward saved."""
    module, inputs = made(name), [tokens(seed) for seed in range(2)]
    expected = [gradients(module, x, module(x)) for x in inputs]
    for order in ([0, 1], [1, 0]):
        results = [way(module, x) for x in inputs]
        for i in order:
            assert equal(gradients(module, inputs[i], results[i]), expected[i])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", MAKERS)
def test_a_retained_graph(name: str, way: Way) -> None:
    """Is walked as often as it is asked for, and no more once it was let go."""
    module, x = made(name), tokens()
    y = way(module, x)
    passes = [gradients(module, x, y, retain_graph=retain) for retain in (True, True, False)]
    assert all(equal(found, passes[0]) for found in passes)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(module, x, y)


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_reads_a_saved_tensor_once(name: str) -> None:
    read: Counter[int] = Counter()
    module, x = made(name, bias=True), tokens()
    numbers = itertools.count()
    with saved_tensors_hooks(lambda t: (next(numbers), t), lambda packed: read.update([packed[0]]) or packed[1]):
        y = module(x)
    for number in (1, 2):
        gradients(module, x, y, retain_graph=True)
        assert set(read.values()) == {number}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MLPS)
def test_saves_what_the_caller_has_and_nothing_else(name: str, autocast: bool) -> None:
    """Parameters themselves, not what autocast makes of them, because FSDP frees and refills their memory."""
    op = LINEAR[name]
    gate, up = (randn(12, INNER, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    weight = randn(HIDDEN, INNER, dtype=torch.float32 if autocast else torch.bfloat16, device=DEVICE)
    saved = []
    with (
        saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast),
    ):
        y = op(gate, up, weight)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (gate, up, weight)]
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("name", MLPS)
def test_under_autocast_gradients_are_the_same_bit_for_bit(name: str) -> None:
    module, x = made(name, bias=True), tokens()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        results = [way(module, x) for way in (plain, checkpointed, reentrant)]
    expected, *others = [gradients(module, x, y) for y in results]
    assert all(equal(found, expected) for found in others)
    module.eager = True
    with torch.autocast(DEVICE.type, torch.bfloat16):
        theirs = gradients(module, x, module(x))
    assert equal(expected[1:], theirs[1:])  # x has several


@pytest.mark.parametrize("name", MAKERS)
def test_a_second_derivative_is_refused(name: str) -> None:
    """Not taken for zero, although the gradient goes through two nodes."""
    module, x = made(name), tokens()
    y = saved_on_the_way(module, x)
    for gradient in torch.autograd.grad(y.square().sum(), [x, *module.parameters()], create_graph=True):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward(retain_graph=True)


def test_a_patched_model_computes_as_many_products_as_an_unpatched_one() -> None:
    """In the backward of its checkpointed layers."""
    counts = []
    for patch in (False, True):
        model = tiny("llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if patch:
            liger_kernels.patch(model)
        hidden = model.model(batch()["input_ids"], use_cache=False).last_hidden_state
        with Products() as backward:
            hidden.sum().backward()
        counts.append(backward.count)
    assert counts[0] == counts[1] > 0
