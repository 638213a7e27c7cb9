"""Small modules that a kernel replaces, ways to change them, and what a call of one gives, for the tests of changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.patching_checks import DEVICE

HIDDEN = 24


class Norm(nn.Module):
    formula = "cast_then_scale"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.eps = 1e-6
        self.config = transformers.LlamaConfig()
        self.options = {"power": [2]}

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(self.options["power"][0]).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.config.use_cache else 2.0
        return self.weight * self._norm(x.float()).to(x.dtype) * scale * getattr(self, "gain", 1.0)


class WithBuffer(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift.to(x.dtype))


class CastsToItsWeight(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype if self.weight.dtype != torch.float32 else x.dtype)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))
        self.offset, self.eps = 1, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight + self.offset).float()
        return F.layer_norm(x.float(), x.shape[-1:], weight, self.bias.float(), self.eps).to(x.dtype)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.eps, self.groups, self.first, self.act = 1e-5, 2, False, F.silu

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype, x, gate = x.dtype, x.float(), self.act(gate.float())
        x = x * gate if self.first else x
        rows = x.view(*x.shape[:-1], self.groups, -1)
        x = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)).view(x.shape)
        x = self.weight * x.to(dtype)
        return (x if self.first else x * gate).to(dtype)


class Swish(nn.Module):
    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.steps = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x) * self.steps[0]


class Mlp(nn.Module):
    def __init__(self, act: Any = None, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 40, bias), nn.Linear(HIDDEN, 40, bias)
        self.down = nn.Linear(40, HIDDEN, bias)
        self.act = Swish() if act is None else act
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.act(self.gate(x)) * self.up(x)))


class Joint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down, self.swapped = nn.Linear(HIDDEN, 80), nn.Linear(40, HIDDEN), False

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(up) * gate if self.swapped else F.silu(gate) * up)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 40, HIDDEN) / 5)
        self.down = nn.Parameter(torch.randn(4, HIDDEN, 20) / 5)
        self.act, self.limit, self.alpha, self.num_experts = nn.SiLU(), 7.0, 1.0, 4
        self.register_parameter("bias", None)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act(self.alpha * gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for k in range(ids.shape[1]):
            row = ids[:, k] % self.num_experts
            x = torch.einsum("th,toh->to", hidden, self.gate_up[row])
            y = torch.einsum("ti,thi->th", self._apply_gate(x), self.down[row])
            y = y if self.bias is None else y + self.bias
            out = out + (y * weights[:, k, None]).to(out.dtype)
        return out


class GateOnly(Experts):
    """Its sum is another one, so that only its gate is replaced."""

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, ids, weights).tanh()


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(DEVICE))


def of_class(name: str, value: Any) -> Callable[[Any], None]:
    """Change an attribute of the class under a patched module, or of an unpatched one."""

    def change(module: Any) -> None:
        setattr(getattr(type(module), "_liger_kernels_base", type(module)), name, value)

    return change


def setting(path: str, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        *way, name = path.split(".")
        setattr(
            functools.reduce(getattr, way, module), name, value() if isinstance(value, functools.partial) else value
        )

    return change


def item(path: str, key: Any, value: Any) -> Callable[[Any], None]:
    return lambda module: functools.reduce(getattr, path.split("."), module).__setitem__(key, value)


def twice(x: Tensor) -> Tensor:
    return 2 * x


def other_forward(self: Any, x: Tensor, *_: Any) -> Tensor:
    return 2 * x * (1 if not self._parameters else next(iter(self._parameters.values())).mean())


def shift_in_place(module: Any) -> None:
    module.shift += 1


def linear(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(inputs, outputs, bias=False).to(DEVICE)


def partial_gelu() -> nn.Module:
    return Mlp(functools.partial(F.gelu))


def other_sizes(module: Any) -> None:
    module.gate, module.up, module.down = linear(HIDDEN, 12), linear(HIDDEN, 12), linear(12, HIDDEN)


def inputs_of(module: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(module, Experts):
        ids = torch.tensor([[0, 1], [1, 3], [2, 2], [3, 0], [1, 2]], device=DEVICE)
        return [torch.randn(5, HIDDEN, generator=generator).to(DEVICE), ids, torch.ones(5, 2, device=DEVICE)]
    x = torch.randn(2, 7, HIDDEN, generator=generator).to(DEVICE)
    return [x, x.flip(0)] if isinstance(module, Gated) else [x]


def run(module: Any, *given: Any) -> dict[str, Tensor] | type:
    """The output and every gradient, or what kind of error a call raises."""
    given = given or tuple(inputs_of(module))
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
    module.zero_grad()
    torch.manual_seed(0)
    try:
        y = module(*leaves)
        y.backward(torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y))
    except Exception as error:
        return type(error)
    found = {"output": y.detach(), **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}
    return {**found, **{f"input {n}": t.grad for n, t in enumerate(leaves) if t.is_floating_point()}}


def same(found: dict[str, Tensor] | type, expected: dict[str, Tensor] | type, **bounds: Any) -> None:
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, type):
        assert found is expected
    else:
        torch.testing.assert_close(found, expected, equal_nan=True, **bounds)


def differ(found: dict[str, Tensor] | type, other: dict[str, Tensor] | type) -> bool:
    try:
        same(found, other)
    except AssertionError:
        return True
    return False
