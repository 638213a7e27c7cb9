"""Recognise a gated MLP, ``down(act(gate(x)) * up(x))``, by what it computes, and fuse the activation and the product.

The projections themselves stay the modules they are and are called as modules: adapters, hooks and quantised layers
on them keep working. Only where calling ``down`` is ``F.linear`` and nothing else it joins the fused op, which then
keeps no product for the backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from liger_kernels.ops import geglu, geglu_linear, swiglu, swiglu_linear
from liger_kernels.ops._runtime import left_to_inductor
from liger_kernels.patching.probe import SAME_FORMULA, bare_copy, describe, relative_difference, takes_one_tensor
from liger_kernels.patching.swap import Recipe

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


@dataclass(frozen=True)
class GluRecipe(Recipe):
    """An MLP whose forward is ``down(act(gate(x)) * up(x))``.

    ``up`` is None where one projection makes both halves; ``gate_first`` then says which half is the gate.
    """

    activation: str
    gate: str
    up: str | None
    down: str
    gate_first: bool = True

    @property
    def kernel(self) -> str:
        return "swiglu" if self.activation == "silu" else "geglu"

    @property
    def detail(self) -> str:
        halves = "" if self.up is not None else (", gate and up in one" if self.gate_first else ", up and gate in one")
        return f"down({self.activation}(gate) * up){halves}"

    def namespace(self, base: Any) -> dict[str, Any]:
        recipe = self
        ops: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
            "silu": (swiglu, swiglu_linear),
            "gelu_tanh": (partial(geglu, approximate="tanh"), partial(geglu_linear, approximate="tanh")),
            "gelu": (partial(geglu, approximate="none"), partial(geglu_linear, approximate="none")),
        }
        fused, fused_linear = ops[self.activation]

        def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = (*args, *kwargs.values())  # one tensor, by position or by whatever name upstream gave it
            if left_to_inductor(x):
                return base.forward(self, *args, **kwargs)
            gate = getattr(self, recipe.gate)(x)
            if recipe.up is not None:
                up = getattr(self, recipe.up)(x)
            else:
                first, second = gate.chunk(2, dim=-1)
                gate, up = (first, second) if recipe.gate_first else (second, first)
            down = getattr(self, recipe.down)
            if _is_just_linear(down):
                return fused_linear(gate, up, down.weight, down.bias)
            return down(fused(gate, up))

        return {"forward": forward}


def _is_just_linear(module: nn.Module) -> bool:
    """Whether calling ``module`` is ``F.linear`` of its weight and bias, and nobody watches or changes that."""
    return (
        type(module) is nn.Linear
        and type(module.weight) in (nn.Parameter, torch.Tensor)  # not sharded, not quantised
        and "forward" not in module.__dict__
        and not any(getattr(module, hooks) for hooks in _HOOKS)
        and not _has_any_global_hook()
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_glu_candidate(module: nn.Module) -> bool:
    """A function of one tensor with two or three linear-like children whose sizes fit, and no parameters of its own."""
    return not module._parameters and bool(_roles(module)) and takes_one_tensor(type(module).forward)


def recognise_glu(module: nn.Module) -> GluRecipe | str:
    """The recipe for ``module``, or the reason why it is not a gated MLP that we know.

    A copy with small random projections runs in float64, in training mode, so that dropout shows.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            for gate, up, down in _roles(module):
                recipe = _match(module, gate, up, down)
                if recipe is not None:
                    return recipe
            return "it is not down(act(gate(x)) * up(x)) with silu or gelu"
    except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
        return f"it cannot be probed ({describe(error)})"


def _match(module: nn.Module, gate: str, up: str | None, down: str) -> GluRecipe | None:
    hidden, inner = 6, 10
    shapes = {gate: (hidden, inner), down: (inner, hidden)}
    if up is None:
        shapes[gate] = (hidden, 2 * inner)
    else:
        shapes[up] = (hidden, inner)
    small = {name: _random_linear(*shape) for name, shape in shapes.items()}
    clone = bare_copy(module, **small)
    clone.__dict__["training"] = True
    x = 2 * torch.randn(2, 3, hidden, dtype=torch.float64)
    y = type(module).forward(clone, x)
    for activation, gate_first in itertools.product(_ACTIVATIONS, (True, False) if up is None else (True,)):
        act = _ACTIVATIONS[activation]
        if up is None:
            first, second = small[gate](x).chunk(2, dim=-1)
            product = act(first) * second if gate_first else act(second) * first
        else:
            product = act(small[gate](x)) * small[up](x)
        if relative_difference(y, small[down](product)) < SAME_FORMULA:
            return GluRecipe(activation, gate, up, down, gate_first)
    return None


def _random_linear(inputs: int, outputs: int) -> nn.Linear:
    """Random numbers on the CPU, whatever ``from_pretrained`` does meanwhile to torch's initialisation (it switches it
    off) and to the registration of parameters (it sends them to the meta device)."""
    linear = nn.Linear(inputs, outputs, device="meta")
    for name, parameter in list(linear._parameters.items()):
        assert parameter is not None
        numbers = torch.randn(parameter.shape, dtype=torch.float64) / inputs**0.5
        linear._parameters[name] = nn.Parameter(numbers)
    return linear


def _roles(module: nn.Module) -> list[tuple[str, str | None, str]]:
    """Every (gate, up, down) that the sizes of the linear-like children allow; up is None for a joint projection."""
    children: dict[str, Any] = dict(module._modules)
    sizes: dict[str, tuple[int, int]] = {
        name: (child.in_features, child.out_features)
        for name, child in children.items()
        if isinstance(getattr(child, "in_features", None), int)
        and isinstance(getattr(child, "out_features", None), int)
    }
    if len(sizes) == 3:
        return [
            (gate, up, down)
            for gate, up, down in itertools.permutations(sizes)
            if sizes[gate] == sizes[up] == sizes[down][::-1]
        ]
    if len(sizes) == 2:
        return [
            (gate, None, down)
            for gate, down in itertools.permutations(sizes)
            if sizes[gate] == (sizes[down][1], 2 * sizes[down][0])
        ]
    return []
