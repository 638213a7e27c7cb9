"""Recognise the gate of packed experts, which are many MLPs in few parameters, by what it computes, and fuse it.

transformers multiplies the tokens of all experts at once and calls the module's ``_apply_gate`` between the two
products, on one tensor of gate and up. What that method computes is solved for (limit, offset, factor) and compared.
Whether the module's forward calls it is found by running the forward on small parameters.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops._compiling import left_to_inductor
from liger_kernels.ops.packed_glu import Gate, packed_glu, packed_glu_ref
from liger_kernels.patching import probe
from liger_kernels.patching.glu import parameter_names, skips_watched
from liger_kernels.patching.probe import PLAIN, true_shape
from liger_kernels.patching.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.swap import Recipe, mark_run

# Of transformers (since 5.0), private: what experts compute between their two products.
_GATE = "_apply_gate"
# What the sizes of the probe are. Grouped products take rows of 16 bytes.
_HIDDEN, _INNER = 8, 12


@dataclass(frozen=True)
class ExpertsRecipe(Recipe):
    """Experts whose forward calls ``_apply_gate``, a packed gated linear unit."""

    gate: Gate

    @property
    def kernel(self) -> str:
        return "experts"

    @property
    def detail(self) -> str:
        return str(self.gate)

    def namespace(self, base: Any) -> dict[str, Any]:
        formula = self.gate

        def apply_gate(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = (*args, *kwargs.values())
            if left_to_inductor("experts", x) or type(x) not in PLAIN or skips_watched(self, set()):
                return getattr(base, _GATE)(self, *args, **kwargs)
            mark_run(self)
            return packed_glu(x, formula)

        return {_GATE: apply_gate}


def _cubes(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """The shapes of the parameters of three dimensions."""
    shapes = {name: true_shape(p) for name, p in module._parameters.items() if p is not None}
    return {name: shape for name, shape in shapes.items() if shape is not None and len(shape) == 3}


def is_packed_experts(module: nn.Module) -> bool:
    """Many experts in few parameters of three dimensions, whose sizes are those of gate, up and down."""
    cubes = list(_cubes(module).values())
    if not cubes or isinstance(module, nn.modules.conv._ConvNd):
        return False
    pairs = ((a, b) for a, b in itertools.permutations(cubes, 2) if a[0] == b[0])
    one_of_a_pair = len(parameter_names(module)) > 1 and any("expert" in name for name in vars(module))
    return one_of_a_pair or any(_fit(up[1:], down[1:]) for up, down in pairs)


def _fit(up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether a matrix of gate and up (or of up alone) belongs to the one that leads back, both stored alike."""
    return any(
        hidden == back and hidden != inner and wide in (inner, 2 * inner)
        for (wide, hidden), (back, inner) in ((up, down), (up[::-1], down[::-1]))
    )


def recognise_experts(module: nn.Module) -> Verdict:
    """The recipe for ``module``, or why its experts stay as they are."""
    if getattr(type(module), _GATE, None) is None:
        return ("packed experts: no kernel for them",)
    try:
        with probe.probing():
            called = _calls_gate(module)
            gate = find_gate(module) if called else None
    except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
        return (f"packed experts that cannot be probed ({probe.describe(error)})",)
    if not called:
        how = getattr(getattr(module, "config", None), "_experts_implementation", None)
        hint = "; patch the model with experts_implementation='grouped_mm'" if how == "eager" else ""
        return (f"packed experts: their forward ({how}) calls no {_GATE}{hint}",)
    if gate is None:
        return ("packed experts whose gate is not act(gate) * up with silu or gelu",)
    return ExpertsRecipe(gate)


def find_gate(module: nn.Module) -> Gate | None:
    """What the ``_apply_gate`` of ``module`` computes; None where it is no :class:`Gate`."""
    clone = probe.bare_copy(module)
    clone.__dict__["training"] = True
    apply = getattr(type(module), _GATE)
    for interleaved, gate_first in itertools.product((False, True), (True, False)):
        for gate in _solve(lambda x: apply(clone, x), interleaved, gate_first):
            scales = (2.0, gate.limit or 1.0, 1e3)
            if all(_same(lambda x: apply(clone, x), gate, scale) for scale in scales):
                return gate
    return None


def _same(function: Any, gate: Gate, scale: float) -> bool:
    """Whether values and gradients are those of ``gate`` on numbers of this size."""
    x = (scale * probe.randn(16, 2 * _INNER, dtype=torch.float64)).requires_grad_()
    upstream = probe.randn(16, _INNER, dtype=torch.float64)
    y, expected = function(x), packed_glu_ref(x, gate)
    if probe.relative_difference(y, expected) >= probe.SAME_FORMULA:
        return False
    slopes = (torch.autograd.grad(t, x, upstream.to(t.dtype))[0] for t in (y, expected))
    return probe.relative_difference(*slopes) < probe.SAME_FORMULA


def _solve(function: Any, interleaved: bool, gate_first: bool) -> list[Gate]:
    """The gates that a function in this layout can be at most: their limit, offset and factor solved from its values.

    Up is a factor, (up + offset), as far as it is not clamped: two points make a line."""

    def at(gate: float, up: float) -> float:
        x = probe.full((1, 2, _INNER), 0.0).double()
        x[:, 0], x[:, 1] = (gate, up) if gate_first else (up, gate)
        x = x.transpose(1, 2) if interleaved else x
        return float(function(x.reshape(1, -1))[0, 0])

    zero, half, far = at(0.5, 0.0), at(0.5, 0.5), at(0.5, 1e6)
    act = 2 * (half - zero)
    if not act > 0 or not math.isfinite(far):
        return []
    offset = _rounded(zero / act)
    top = _rounded(far / act - offset)
    limit = top if 0 < top < 1e5 else None
    known: dict[str, Any] = {
        "limit": limit,
        "offset": offset,
        "interleaved": interleaved,
        "gate_first": gate_first,
    }
    gates = [Gate(activation, **known) for activation in ("gelu", "gelu_tanh")]
    if 0 < 2 * act < 1:  # act is 0.5 * sigmoid(0.5 * alpha)
        gates.append(Gate("silu", alpha=_rounded(2 * math.log(2 * act / (1 - 2 * act))), **known))
    return gates


def _rounded(number: float) -> float:
    """A setting from a result that may have passed through float32."""
    return float(f"{number:.6g}") if abs(number) > 1e-6 else 0.0


def _calls_gate(module: nn.Module) -> bool:
    """Whether the forward, on small parameters, comes to ``_apply_gate``.

    Raises:
        Exception: what the forward raised, where it runs with none of the ways to read its sizes."""
    calls: list[torch.Size] = []
    errors: list[Exception] = []
    copies = _small_copies(module)
    for small, hidden in copies:
        original = getattr(type(module), _GATE)

        def recorded(x: torch.Tensor, small: Any = small, original: Any = original) -> torch.Tensor:
            calls.append(x.shape)
            return original(small, x)

        small.__dict__[_GATE] = recorded
        try:
            with torch.no_grad():
                type(module).forward(small, *_tokens(module, hidden))
        except Exception as error:
            errors.append(error)
    if errors and len(errors) == len(copies):
        raise errors[0]
    return bool(calls)


def _tokens(module: nn.Module, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the experts that each token goes to, and their weights. One token goes to an expert twice."""
    n_experts = next(iter(_cubes(module).values()))[0]
    hidden = probe.randn(5, size)
    ids = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 3], [5, 1]]) % n_experts
    return hidden, ids, probe.randn(5, 2).abs()


def _small_copies(module: nn.Module) -> list[tuple[Any, int]]:
    """A copy of ``module`` with small random parameters in float32, and its hidden size, for each way to read the sizes
    of its own."""
    copies = []
    cubes = _cubes(module)
    for (_, up), (_, down) in itertools.permutations(cubes.items(), 2):
        for transposed in (False, True):
            wide, hidden = up[1:][::-1] if transposed else up[1:]
            back, inner = down[1:][::-1] if transposed else down[1:]
            if hidden != back or wide not in (inner, 2 * inner):
                continue
            # Sizes that are equal stay equal: an attribute may be either.
            small = {inner: _INNER, 2 * inner: 2 * _INNER}
            sizes = {hidden: _HIDDEN, **small}
            copies.append((_small_copy(module, sizes), sizes[hidden]))
    return copies


def _small_copy(module: nn.Module, sizes: dict[int, int]) -> Any:
    parameters = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            first, *rest = true_shape(parameter) or ()
            parameters[name] = nn.Parameter(probe.randn(first, *(sizes.get(size, size) for size in rest)) / 3)
    small: Any = probe.bare_copy(module, **parameters)
    small.__dict__["training"] = True
    for name, value in vars(module).items():
        if type(value) is int and value in sizes and "expert" not in name:
            small.__dict__[name] = sizes[value]
    return small


EXPERTS = Recogniser(
    ("experts",),
    is_packed_experts,
    recognise_experts,
    key=lambda module: fingerprint(
        module, replaced={name: true_shape(p) for name, p in module._parameters.items() if p is not None}
    ),
)
