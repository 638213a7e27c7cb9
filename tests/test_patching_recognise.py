"""Recognition by behaviour: what computes one of our formulas is accepted, everything else is refused with a reason."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from convergence.arms.float64 import InFloat64
from convergence.judge.tolerance import three_way
from liger_kernels.ops import launches, reset_launches
from liger_kernels.ops._norm_rows import MAX_HIDDEN
from liger_kernels.ops.runtime.dispatch import INTERPRET
from liger_kernels.patching.recipes import norms
from liger_kernels.patching.recipes.glu import GluRecipe, is_glu_candidate, recognise_glu
from liger_kernels.patching.recipes.norms import LayerNormRecipe, NormRecipe, is_norm_candidate, recognise_norm
from tests.patching_checks import variant


class Norm(nn.Module):
    """An RMS norm with every step a method, so that a subclass can get one of them wrong."""

    def __init__(self, size=24, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def statistic(self, x):
        return x.pow(2).mean(-1, keepdim=True)

    def scale(self, normed, dtype):
        return self.weight * normed.to(dtype)

    def forward(self, x):
        wide = x.float() if x.dtype != torch.float64 else x
        return self.scale(wide * torch.rsqrt(self.statistic(wide) + self.eps), x.dtype)


class ScaleThenCast(Norm):
    def scale(self, normed, dtype):
        return (self.weight.to(normed.dtype) * normed).to(dtype)


class OnePlus(Norm):
    def scale(self, normed, dtype):
        return ((1.0 + self.weight.to(normed.dtype)) * normed).to(dtype)


class HardCodedEps(Norm):
    def __init__(self):
        super().__init__(eps=1e-5)
        del self.eps
        self.__class__.eps = 1e-5


@pytest.mark.parametrize(
    ("module", "formula", "eps"),
    [
        (Norm(), "cast_then_scale", 1e-6),
        (Norm(size=7, eps=3e-4), "cast_then_scale", 3e-4),
        (ScaleThenCast(eps=1e-12), "scale_then_cast", 1e-12),
        (OnePlus(eps=1e-5), "offset_scale_then_cast", 1e-5),
        (HardCodedEps(), "cast_then_scale", 1e-5),
        (nn.RMSNorm(24, eps=1e-5), "scale_then_cast", 1e-5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_rms_norms_are_recognised_with_their_formula(module, formula, eps):
    assert is_norm_candidate(module)
    assert recognise_norm(module) == NormRecipe(formula, eps, "weight")
    assert torch.equal(module.weight, torch.ones_like(module.weight))


class OfAllRows(nn.Module):
    """A LayerNorm where there is one row."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3)), 1e-5

    def forward(self, x):
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


def norm(**methods):
    return variant(Norm, **methods)


def layer_norm(forward):
    return lambda: variant(nn.LayerNorm, forward=forward)(24)


OTHER_NORMS = {
    "centres": (
        norm(forward=lambda self, x: Norm.forward(self, x - x.mean(-1, keepdim=True))),
        "rounds at other places",
    ),
    "sum of squares": (norm(statistic=lambda self, x: x.pow(2).sum(-1, keepdim=True)), "not a norm of ours"),
    "eps outside the root": (
        norm(forward=lambda self, x: self.weight * (x.float() / (self.statistic(x.float()).sqrt() + self.eps)).to(x)),
        "eps|RMS norm of another formula",
    ),
    "rounds early": (
        norm(forward=lambda self, x: self.weight * (x * torch.rsqrt(self.statistic(x.float()) + self.eps).to(x))),
        "rounds at other places",
    ),
    "clamps": (
        norm(forward=lambda self, x: Norm.forward(self, x.clamp(-100, 100))),
        "RMS norm of another formula|not a norm of ours",
    ),
    "stops the gradient": (norm(statistic=lambda self, x: Norm.statistic(self, x).detach()), "gradient"),
    "drops out": (  # in training only
        lambda: norm(forward=lambda self, x: Norm.forward(self, F.dropout(x, 0.5, self.training)))().eval(),
        "not a norm of ours",
    ),
    "has a gate": (
        norm(forward=lambda self, x, gate=None: Norm.forward(self, x if gate is None else x * F.silu(gate))),
        "rounds at other places",
    ),
    "returns float32": (
        norm(scale=lambda self, normed, dtype: self.weight.to(normed.dtype) * normed),
        "returns torch.float32",
    ),
    "raises": (norm(statistic=lambda self, x: x.of_a_gpu), "cannot be probed .*of_a_gpu"),
    "group norm": (lambda: nn.GroupNorm(1, 24), "normalises channels"),
    "of all rows": (OfAllRows, "LayerNorm of another formula"),
    "batch norm": (lambda: nn.BatchNorm1d(24), "normalises channels"),
    "too wide": (lambda: nn.LayerNorm(MAX_HIDDEN + 1), "rows of 65537 are wider than a kernel holds"),
    "of matrices": (lambda: nn.LayerNorm((2, 24)), "its weight is no vector"),
    "rounds before the bias": (
        layer_norm(lambda self, x: F.layer_norm(x.float(), (24,)).to(x) * self.weight + self.bias),
        "rounds at other places",
    ),
    "channels first": (
        layer_norm(lambda self, x: nn.LayerNorm.forward(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
        "cannot be probed",
    ),
}


@pytest.mark.parametrize(("make", "reason"), OTHER_NORMS.values(), ids=OTHER_NORMS)
def test_other_norms_are_refused_with_the_reason(make, reason):
    verdict = recognise_norm(make())
    assert isinstance(verdict, str), verdict
    assert re.search(reason, verdict), verdict


class InFloat32(nn.LayerNorm):
    """Weight and no bias, written out."""

    def forward(self, x):
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)


class ZeroCentred(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Swapped(nn.Module):
    """What is called weight is the bias."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale, self.eps = nn.Parameter(torch.zeros(24)), nn.Parameter(torch.ones(24)), 1e-12

    def forward(self, x):
        return F.layer_norm(x, (24,), self.scale, self.weight, self.eps)


LAYER_NORMS = [
    (nn.LayerNorm(24), LayerNormRecipe(1e-5, "weight", "bias", bare=True)),
    (nn.LayerNorm(7, eps=3e-4), LayerNormRecipe(3e-4, "weight", "bias", bare=True)),
    (nn.LayerNorm(1024, eps=1e-12), LayerNormRecipe(1e-12, "weight", "bias", bare=True)),
    (nn.LayerNorm(24, bias=False), LayerNormRecipe(1e-5, "weight", None, bare=True)),
    (nn.LayerNorm(24, elementwise_affine=False), LayerNormRecipe(1e-5, None, None, bare=True)),
    (InFloat32(24, eps=1e-6, bias=False), LayerNormRecipe(1e-6, "weight", None)),
    (ZeroCentred(24), LayerNormRecipe(1e-5, "weight", "bias", zero_centered=True, mixed=False)),
    (Swapped(), LayerNormRecipe(1e-12, "scale", "weight", bare=True)),
]


@pytest.mark.parametrize(("module", "recipe"), LAYER_NORMS, ids=lambda value: type(value).__name__)
def test_a_layer_norm_is_recognised_computes_and_learns_the_same_and_comes_back(module, recipe):
    assert is_norm_candidate(module)
    assert recognise_norm(module) == recipe
    model = nn.Sequential(copy.deepcopy(module))
    size = next((p.shape[0] for p in model.parameters()), 24)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, upstream = torch.randn(5, size, requires_grad=True), torch.randn(5, size)

    def step(model=model, x=x):
        y = model(x)
        return y, *torch.autograd.grad(y, [x, *model.parameters()], upstream.to(y.dtype))

    before = step()
    with InFloat64():
        truth = step(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    assert liger_kernels.patch(model).counts() == {"layer_norm": 1}
    reset_launches()
    for ours, torchs, true in zip(step(), before, truth, strict=True):
        three_way(ours, torchs, true, torch.float32, "result or gradient")
    assert "_layer_norm_bwd_kernel" in launches() or not INTERPRET
    liger_kernels.unpatch(model)
    assert type(model[0]) is type(module)
    assert all(map(torch.equal, step(), before))


@pytest.mark.parametrize("widens", [False, True])
def test_a_layer_norm_under_autocast_returns_what_torch_does(widens, monkeypatch):
    """On a CPU torch returns the input's dtype, on a GPU float32, which a stand-in does here."""
    model, x = nn.Sequential(nn.LayerNorm(24)), torch.randn(5, 24).bfloat16()
    liger_kernels.patch(model)
    norms._autocast_dtype.cache_clear()
    own = F.layer_norm
    if widens:
        monkeypatch.setattr(F, "layer_norm", lambda x, *args: own(x.float(), *args))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reset_launches()
        y = model(x)
        assert bool(launches()) == INTERPRET
        expected = F.layer_norm(x, (24,), *model.parameters())
    norms._autocast_dtype.cache_clear()
    assert y.dtype == expected.dtype == (torch.float32 if widens else torch.bfloat16)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_more_than_layer_norm_runs_itself_under_autocast(dtype):
    """What autocast does in it depends on the device. In float32 no two dtypes meet, which would be a reason, too."""
    model = nn.Sequential(ZeroCentred(24))
    liger_kernels.patch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reset_launches()
        model(torch.randn(5, 24, dtype=dtype))
    assert not launches()


class Mlp(nn.Module):
    def __init__(self, act=F.silu, hidden=16, inner=24, names=("gate_proj", "up_proj", "down_proj")):
        super().__init__()
        self.names = names
        self.act = act
        for name, shape in zip(names, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
            setattr(self, name, nn.Linear(*shape, bias=False))

    def combine(self, gate, up):
        return self.act(gate) * up

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.combine(gate(x), up(x)))


class JointMlp(nn.Module):
    def __init__(self, gate_first):
        super().__init__()
        self.gate_first = gate_first
        self.w13, self.w2 = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x):
        a, b = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(a) * b if self.gate_first else a * F.silu(b))


@pytest.mark.parametrize(
    ("module", "recipe"),
    [
        (Mlp(), GluRecipe("silu", "gate_proj", "up_proj", "down_proj")),
        (Mlp(nn.SiLU()), GluRecipe("silu", "gate_proj", "up_proj", "down_proj")),
        (Mlp(names=("w1", "w3", "w2")), GluRecipe("silu", "w1", "w3", "w2")),
        (Mlp(inner=16), GluRecipe("silu", "gate_proj", "up_proj", "down_proj")),
        (Mlp(lambda x: F.gelu(x, approximate="tanh")), GluRecipe("gelu_tanh", "gate_proj", "up_proj", "down_proj")),
        (Mlp(F.gelu), GluRecipe("gelu", "gate_proj", "up_proj", "down_proj")),
        (JointMlp(True), GluRecipe("silu", "w13", None, "w2", True)),
        (JointMlp(False), GluRecipe("silu", "w13", None, "w2", False)),
    ],
    ids=str,
)
def test_gated_mlps_are_recognised(module, recipe):
    weights = {name: id(p) for name, p in module.named_parameters()}
    assert is_glu_candidate(module)
    assert recognise_glu(module) == recipe
    assert {name: id(p) for name, p in module.named_parameters()} == weights


class WithDropoutInside(Mlp):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def combine(self, gate, up):
        return self.dropout(super().combine(gate, up))


def combining(change):
    return variant(Mlp, combine=lambda self, gate, up: change(self, gate, up))


OTHER_MLPS = {
    "relu": lambda: Mlp(F.relu),
    "clipped": combining(lambda self, gate, up: F.silu(gate.clamp(max=1.0)) * up),
    "one more": combining(lambda self, gate, up: F.silu(gate) * (up + 1)),
    "clamps what is large": combining(lambda self, gate, up: F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)),
    "dropout": combining(lambda self, gate, up: F.dropout(F.silu(gate) * up, 0.5, self.training)),
    "dropout in a module": WithDropoutInside,
}


@pytest.mark.parametrize("mlp", OTHER_MLPS)
def test_other_mlps_are_refused(mlp):
    """In whichever mode they are, which stays as it is."""
    module = OTHER_MLPS[mlp]().eval()
    assert recognise_glu(module) == "it is not down(act(gate(x)) * up(x)) with silu or gelu"
    assert not any(part.training for part in module.modules())


@pytest.mark.parametrize("size", [2, 7, 1024])
def test_a_norm_without_weight_is_recognised_at_every_size(size):
    for eps in (1e-5, None):
        recipe = recognise_norm(nn.RMSNorm(size, eps=eps, elementwise_affine=False))
        assert recipe == NormRecipe("cast_then_scale", eps or torch.finfo(torch.float32).eps, None)


class CastsToTheWeightsDtype(Norm):
    """T5's: in 16 bits as Llama's, but with weights in float32 it rounds nothing and answers in float32."""

    def forward(self, x):
        norm = x.float() * torch.rsqrt(self.statistic(x.float()) + self.eps)
        return self.weight * (norm if self.weight.dtype == torch.float32 else norm.to(self.weight.dtype))


def test_a_norm_that_differs_in_two_dtypes_only_is_replaced_where_they_are_one():
    norm = CastsToTheWeightsDtype()
    assert recognise_norm(norm) == NormRecipe("cast_then_scale", 1e-6, "weight", mixed=False)
    patched = copy.deepcopy(norm)
    liger_kernels.patch(nn.ModuleList([patched]))
    for dtype, weights, kernel in (
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
    ):
        x = torch.randn(5, 24, dtype=dtype)
        reset_launches()
        ours, upstreams = patched.to(weights)(x), norm.to(weights)(x)
        assert bool(launches()) == (kernel and INTERPRET)  # on a GPU machine tensors on the CPU run references
        assert ours.dtype == upstreams.dtype
        assert kernel or torch.equal(ours, upstreams)
        three_way(ours, upstreams, copy.deepcopy(norm).double()(x.double()), upstreams.dtype, "y")
