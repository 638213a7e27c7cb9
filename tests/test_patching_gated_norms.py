"""A norm with a gate is recognised by what it computes; anything else that takes two tensors is refused."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels.ops import launches, reset_launches
from liger_kernels.ops._gated_rms_norm import ACTIVATIONS, FORMULAS
from liger_kernels.patching.recipes.gated_norms import GatedNormRecipe
from liger_kernels.patching.recipes.norms import recognise_norm
from tests.patching_checks import DEVICE, variant

Tensor = torch.Tensor


class Gated(nn.Module):
    """A gated norm with every step a method, so that a subclass can get one of them wrong."""

    def __init__(self, size: int = 24, eps: float = 1e-6, groups: int = 1, **options: object) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.n_groups = groups
        self.options = {"activation": "silu", "gate_first": False, "formula": "cast_then_scale"} | options

    def act(self, gate: Tensor) -> Tensor:
        return ACTIVATIONS[self.options["activation"]](gate.float())

    def normalise(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.n_groups, -1))
        return (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)

    def forward(self, states: Tensor, z: Tensor | None = None) -> Tensor:
        dtype, gate = states.dtype, 1.0 if z is None else self.act(z)
        first, cast = self.options["gate_first"], self.options["formula"] == "cast_then_scale"
        norm = self.normalise(states.float() * gate if first else states.float())
        y = self.scale * norm.to(dtype) if cast else self.scale.float() * norm
        if first:
            return y if cast else y.to(dtype)
        return (y * gate).to(dtype)


class OfGroupSize(Gated):
    """As Mamba2 has it: the number of columns of a group."""

    def __init__(self, size: int = 24, **options: object) -> None:
        super().__init__(size, **options)
        self.group_size = size // self.n_groups
        del self.n_groups

    def normalise(self, x: Tensor) -> Tensor:
        parts = x.view(*x.shape[:-1], x.shape[-1] // self.group_size, self.group_size)
        return (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)).view(x.shape)


@pytest.mark.parametrize(("cls", "groups"), [(Gated, 1), (OfGroupSize, 3)])
@pytest.mark.parametrize(("activation", "first", "formula"), [*itertools.product(ACTIVATIONS, (False, True), FORMULAS)])
def test_every_order_is_recognised(cls, groups, activation, first, formula) -> None:
    norm = cls(groups=groups, eps=1e-5, activation=activation, gate_first=first, formula=formula)
    assert recognise_norm(norm) == GatedNormRecipe(formula, 1e-5, "scale", activation, first, groups)


class HasABias(Gated):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(24))


REFUSED = {
    "gelu": (variant(Gated, act=lambda self, gate: F.gelu(gate.float())), "more than one tensor: states, z"),
    "half of the gate detached": (
        variant(Gated, act=lambda self, gate: F.silu((gate + gate.detach()).float() / 2)),
        "its gradient is not that of its formula",
    ),
    "rounds the gate": (variant(Gated, act=lambda self, gate: F.silu(gate)), "rounds at other places"),
    "eps outside the root": (
        variant(Gated, normalise=lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)),
        "eps|more than one tensor",
    ),
    "centres": (
        variant(Gated, normalise=lambda self, x: Gated.normalise(self, x - x.mean(-1, keepdim=True))),
        "more than one tensor",
    ),
    "gate of the first row": (
        variant(Gated, act=lambda self, gate: Gated.act(self, gate[..., :1, :].expand_as(gate))),
        "more than one tensor",
    ),
    "result of the gate's dtype": (
        variant(Gated, forward=lambda self, states, z: Gated.forward(self, states, z).to(z.dtype)),
        "it returns torch.float32, not torch.bfloat16",
    ),
    "adds the second": (
        variant(Gated, forward=lambda self, states, z: Gated.forward(self, states + z, None)),
        "more than one tensor",
    ),
    "takes a third": (
        variant(Gated, forward=lambda self, states, z, scale=1.0: Gated.forward(self, states, z) * scale),
        "more than one tensor: states, z, scale",
    ),
    "by keyword only": (
        variant(Gated, forward=lambda self, states, *, z: Gated.forward(self, states, z)),
        "more than one tensor",
    ),
    "has a bias": (HasABias, "more than one tensor"),
}


@pytest.mark.parametrize(("cls", "reason"), REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused(cls, reason) -> None:
    model = nn.ModuleList([cls()])
    with pytest.warns(UserWarning, match="replaced nothing"):
        (left,) = liger_kernels.patch(model).left
    assert (left.path, left.what) == ("0", cls.__name__)
    assert re.search(reason, left.reason), left.reason


def runs(call: Callable[[Gated, Tensor, Tensor], Tensor], norm: Gated, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = call(norm, *leaves)
    found = torch.autograd.grad(y.square().sum(), (*leaves, norm.scale), allow_unused=True)
    return y, *(gradient for gradient in found if gradient is not None)


def both(call: Callable[[Gated, Tensor, Tensor], Tensor], shape: tuple[int, ...] = (5, 7, 24)) -> int:
    """The launches of a patched norm, which answers as the unpatched one does."""
    norm = Gated(groups=2, gate_first=True).to(DEVICE)
    with torch.no_grad():
        norm.scale.add_(0.3 * torch.randn_like(norm.scale))
    patched = copy.deepcopy(norm)
    liger_kernels.patch(nn.ModuleList([patched]))
    x, gate = torch.randn(5, 7, 24, device=DEVICE), torch.randn(shape, device=DEVICE)
    reset_launches()
    ours = runs(call, patched, x, gate)
    launched = launches().get("_gated_rms_norm_fwd_kernel", 0)
    own, truth = runs(call, norm, x, gate), runs(call, copy.deepcopy(norm).double(), x.double(), gate.double())
    for got, its, true in zip(ours, own, truth, strict=True):
        three_way(got, its, true, torch.float32, "patched", 35)
    return launched


@pytest.mark.parametrize(
    "call",
    [lambda n, x, g: n(x, g), lambda n, x, g: n(x, z=g), lambda n, x, g: n(z=g, states=x)],
    ids=["by position", "gate by name", "both by name"],
)
def test_a_patched_norm_runs_the_kernel(call) -> None:
    assert both(call) == 1


def test_a_call_of_another_form_runs_the_norm_itself() -> None:
    assert both(lambda n, x, g: n(x)) == 0
    assert both(lambda n, x, g: n(x, None)) == 0
    assert both(lambda n, x, g: n(x, g), shape=(5, 1, 24)) == 0


def test_a_wrong_call_raises_what_upstream_raises() -> None:
    norm = Gated()
    liger_kernels.patch(nn.ModuleList([norm]))
    with pytest.raises(TypeError, match="states"):
        norm()
    with pytest.raises(TypeError, match="gates"):
        norm(torch.zeros(1, 24), gates=torch.zeros(1, 24))
