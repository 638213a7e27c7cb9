"""Recognition by behaviour: what computes one of our formulas is accepted, everything else is refused with a reason."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from liger_kernels.patching.glu import GluRecipe, is_glu_candidate, recognise_glu
from liger_kernels.patching.norms import NormRecipe, is_norm_candidate, recognise_norm
from liger_kernels.patching.rotary import Rotation, recognise_rotation


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


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class SumOfSquares(Norm):
    def statistic(self, x):
        return x.pow(2).sum(-1, keepdim=True)


class EpsOutsideTheRoot(Norm):
    def forward(self, x):
        return self.weight * (x.float() / (self.statistic(x.float()).sqrt() + self.eps)).to(x.dtype)


class RoundsEarly(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(self.statistic(x.float()) + self.eps).to(x.dtype))


class Clamped(Norm):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class StopsTheGradient(Norm):
    def statistic(self, x):
        return super().statistic(x).detach()


class Gated(Norm):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * F.silu(gate))


class ReturnsFloat32(Norm):
    def scale(self, normed, dtype):
        return self.weight.to(normed.dtype) * normed


class Raises(Norm):
    def forward(self, x):
        raise NotImplementedError("only on a GPU")


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Centred, "not an RMS norm"),
        (SumOfSquares, "not an RMS norm"),
        (EpsOutsideTheRoot, "eps|not an RMS norm"),
        (RoundsEarly, "rounds at other places"),
        (Clamped, "not an RMS norm"),
        (StopsTheGradient, "gradient"),
        (Gated, "more than one tensor"),
        (ReturnsFloat32, "returns torch.float32"),
        (Raises, "cannot be probed .*only on a GPU"),
    ],
)
def test_other_norms_are_refused_with_the_reason(cls, reason):
    verdict = recognise_norm(cls())
    assert isinstance(verdict, str), verdict
    assert re.search(reason, verdict), verdict


def test_a_norm_with_a_bias_is_no_candidate_for_replacement():
    model = nn.Sequential(Norm(), nn.LayerNorm(24))
    report = liger_kernels.patch(model)
    assert [r.path for r in report.replaced] == ["0"]
    assert type(model[1]) is nn.LayerNorm


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


class WithDropout(Mlp):
    def combine(self, gate, up):
        return F.dropout(super().combine(gate, up), 0.5, self.training)


class Clipped(Mlp):
    def combine(self, gate, up):
        return super().combine(gate.clamp(max=1.0), up)


class PlusOne(Mlp):
    def combine(self, gate, up):
        return super().combine(gate, up + 1)


@pytest.mark.parametrize("module", [Mlp(F.relu), WithDropout(), Clipped(), PlusOne()], ids=lambda m: type(m).__name__)
def test_other_mlps_are_refused(module):
    assert recognise_glu(module.eval()) == "it is not down(act(gate(x)) * up(x)) with silu or gelu"


def test_probing_leaves_no_trace():
    module = Mlp()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    calls = []
    module.gate_proj.register_forward_hook(lambda *args: calls.append(1))
    before = dict(vars(module))
    recognise_glu(module)
    recognise_norm(Norm())
    assert vars(module) == before
    assert calls == []
    assert torch.equal(torch.rand(3), expected), "probing used the global random state"


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def half_casting_back(q, k, cos, sin, unsqueeze_dim=1):
    a, b = half(q, k, cos, sin, unsqueeze_dim)
    return a.to(q.dtype), b.to(k.dtype)


def wrong_sign(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, -sin, unsqueeze_dim)


def only_first_row(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos[:1], sin[:1], unsqueeze_dim)


def queries_only(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim)[0], k


def with_sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim)


def test_rotations_are_recognised():
    assert recognise_rotation("f", half) == Rotation("f", "half", partial=False, casts_back=False)
    assert recognise_rotation("f", half_casting_back) == Rotation("f", "half", partial=False, casts_back=True)


@pytest.mark.parametrize("function", [wrong_sign, only_first_row, queries_only])
def test_other_rotations_are_refused(function):
    assert recognise_rotation("f", function) == "it is none of the rotations that we know"


def test_an_unknown_parameter_of_a_rotation_is_refused():
    assert recognise_rotation("f", with_sections) == "its signature has mrope_section"


def test_rotations_with_heads_after_the_sequence_and_unusual_calls_give_upstreams_result():
    from liger_kernels.patching.rotary import _rotary_function

    ours = _rotary_function(half, Rotation("half", "half", partial=False, casts_back=False))
    torch.manual_seed(0)
    cos, sin = torch.randn(2, 2, 5, 8)
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    for got, expected in zip(ours(q, k, cos, sin, unsqueeze_dim=2), half(q, k, cos, sin, 2), strict=True):
        torch.testing.assert_close(got, expected)
    for got, expected in zip(ours(q, k, cos, sin, 2), half(q, k, cos, sin, 2), strict=True):
        torch.testing.assert_close(got, expected)
    flat = torch.randn(2, 5, 8)  # no heads at all: upstream broadcasts it, so upstream gets it
    for got, expected in zip(ours(flat, flat, cos, sin, 0), half(flat, flat, cos, sin, 0), strict=True):
        assert torch.equal(got, expected)
