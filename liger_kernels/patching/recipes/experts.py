"""Recognise packed experts, many MLPs in few parameters, by the function that they compute, and run them on kernels.

The whole module is replaced if ``forward(hidden, ids, weights)`` is a sum of experts weighted by the router. It must
have one parameter for gate and up, and one for down. Otherwise, for example with a norm behind each expert, only the
unit between the products is replaced. transformers multiplies the rows of all experts at once and calls the module's
``_apply_gate`` for this unit. The settings of that method (limit, offset, factor) are solved from its results, and the
formula is compared. The forward is probed with small parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_kernels.ops import GluFormula, experts, experts_ref, packed_glu, packed_glu_ref
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.ops.runtime.dispatch import autocast_dtype
from liger_kernels.patching.reads import reads_of
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.glu import skips_watched
from liger_kernels.patching.recipes.probe import PLAIN, PROBED, true_shapes
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.report import is_invariant
from liger_kernels.patching.swap import Recipe, mark_run
from liger_kernels.patching.watch import unchanged

# transformers' private method (since 5.0) for the unit between the experts' two products.
_GATE = "_apply_gate"
# The attribute of a configuration that says how experts are multiplied. Each call reads it.
_IMPLEMENTATION = "_experts_implementation"
# The ways to multiply that the kernels replace. Any other way is the user's choice.
_REPLACED = (None, "eager", "grouped_mm")
# The sizes of the probe. Grouped products need rows of a multiple of 16 bytes, also in 16 bits.
_HIDDEN, _INNER = 8, 16
# Largest relative difference of sums of 32 products in float32. Grouped products do not support float64.
_SAME_IN_FLOAT32 = 2e-5


@dataclass(frozen=True)
class Parameters:
    """The names of the parameters of experts, and whether the first two are [experts, in, out]."""

    gate_up: str
    down: str
    transposed: bool = False
    gate_up_bias: str | None = None
    down_bias: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.gate_up, self.down, self.gate_up_bias, self.down_bias)))

    def of(self, module: Any) -> dict[str, Any]:
        """The parameters as keyword arguments of the op."""
        gate_up, down = getattr(module, self.gate_up), getattr(module, self.down)
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return {"gate_up": gate_up, "down": down, **{k: getattr(module, name) for k, name in biases.items() if name}}


@dataclass(frozen=True)
class ExpertsRecipe(Recipe):
    """Experts with a recognised unit.

    Attributes:
        gate: the unit between the two products.
        whole: the names of the parameters. With None only ``_apply_gate`` is replaced.
        mixed: whether the kernel also runs if the router's weights are float32 and all other tensors have 16 bits.
    """

    gate: GluFormula
    whole: Parameters | None = None
    mixed: bool = True

    @property
    def live(self) -> tuple[str, ...]:  # type: ignore[override]
        names = () if self.whole is None else self.whole.names
        return (*names, _IMPLEMENTATION, f"{_IMPLEMENTATION}_internal")

    @property
    def kernel(self) -> str:
        return "experts"

    @property
    def detail(self) -> str:
        return str(self.gate) if self.whole is None else f"sum of weight * down({self.gate})"

    def changed(self, module: nn.Module) -> str | None:
        implementation = _implementation(module)
        if self.whole is not None and implementation not in _REPLACED:
            return f"its configuration asks for experts_implementation={implementation!r}, which runs"
        return super().changed(module)

    def namespace(self, base: Any) -> dict[str, Any]:
        recipe = self

        def apply_gate(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = (*args, *kwargs.values())
            if (
                left_to_inductor("experts", x)
                or type(x) not in PLAIN
                or not unchanged(self)
                or skips_watched(self, set())
            ):
                return getattr(base, _GATE)(self, *args, **kwargs)
            mark_run(self)
            return packed_glu(x, recipe.gate)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            given = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
            if len(given) == len(args) + len(kwargs) == 3 and recipe.whole is not None:
                parameters = recipe.whole.of(self)
                if _takes(self, recipe.mixed, *given, *parameters.values()):
                    mark_run(self)
                    return experts(*given, gate=recipe.gate, **parameters, invariant=is_invariant(self))
            return base.forward(self, *args, **kwargs)

        names = probe.parameter_names(base.forward)
        gate = {_GATE: apply_gate} if getattr(base, _GATE, None) is not None else {}
        return gate if self.whole is None else {**gate, "forward": forward}


def _takes(module: nn.Module, mixed: bool, hidden: Any, ids: Any, weights: Any, *parameters: Any) -> bool:
    """Whether the kernels compute this call as probed, and no hook watches a part that they skip."""
    tensors = (hidden, ids, weights, *parameters)
    return (
        all(type(t) in PLAIN for t in tensors)
        and not left_to_inductor("experts", hidden)
        and hidden.dtype in PROBED
        and hidden.dim() == ids.dim() == 2
        and ids.shape == weights.shape
        and all(t.dtype == hidden.dtype for t in parameters)
        and (weights.dtype == hidden.dtype or (mixed and weights.dtype == torch.float32))
        and all(t.device == hidden.device for t in tensors)
        # Under autocast upstream's loop casts, but its grouped products do not. If all tensors have autocast's dtype,
        # neither casts.
        and autocast_dtype(hidden.device) in (None, hidden.dtype)
        and _implementation(module) in _REPLACED
        and unchanged(module)
        and not skips_watched(module, set())
    )


def _implementation(module: nn.Module) -> str | None:
    """The way to multiply experts in transformers' configuration."""
    return getattr(getattr(module, "config", None), _IMPLEMENTATION, None)


def _cubes(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """The shapes of all parameters with three dimensions."""
    return {name: shape for name, shape in true_shapes(module).items() if shape is not None and len(shape) == 3}


def is_packed_experts(module: nn.Module) -> bool:
    """Whether ``module`` has many experts in few parameters of three dimensions, with the sizes of gate, up and
    down."""
    cubes = list(_cubes(module).values())
    if not cubes or isinstance(module, nn.modules.conv._ConvNd):
        return False
    pairs = ((a, b) for a, b in itertools.permutations(cubes, 2) if a[0] == b[0])
    one_of_a_pair = len(probe.parameter_names(type(module).forward)) > 1 and any(
        "expert" in name for name in vars(module)
    )
    return one_of_a_pair or any(_fit(up[1:], down[1:]) for up, down in pairs)


def _fit(up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether the matrices ``up`` (gate and up, or up alone) and ``down`` have matching sizes in the same layout."""
    return any(
        hidden == back and hidden != inner and wide in (inner, 2 * inner)
        for (wide, hidden), (back, inner) in ((up, down), (up[::-1], down[::-1]))
    )


def recognise_experts(module: nn.Module) -> Verdict:
    """The recipe for ``module``, or the reason why its experts are not replaced."""
    has_gate = getattr(type(module), _GATE, None) is not None
    further = [name for name, _ in module.named_parameters() if "." in name]
    try:
        with probe.probing():
            gate = find_gate(module) if has_gate and not _trains_its_gate(module) else None
            whole = None if further else _find_whole(module, _UNITS if gate is None else (gate,))
            if whole is not None:
                return whole
            called = has_gate and _calls_gate(module)
    except Exception as error:  # any exception in the probe means that the forward is not recognised
        return (f"packed experts that cannot be probed ({probe.describe(error)})",)
    if called:
        return ExpertsRecipe(gate) if gate else ("packed experts whose gate is not act(gate) * up with silu or gelu",)
    call = f", and calls no {_GATE} ({_implementation(module)})" if gate else ""
    return (f"packed experts: their forward is no sum of weight * down(act(gate) * up){call}",)


def _trains_its_gate(module: nn.Module) -> bool:
    """Whether the result of ``_apply_gate`` depends on a parameter."""
    names = reads_of([getattr(type(module), _GATE)], type(module)).names
    return any(name.partition(".")[0] in names for name, _ in module.named_parameters())


def find_gate(module: nn.Module) -> GluFormula | None:
    """The formula of the module's ``_apply_gate``; None if it is no :class:`GluFormula`."""
    clone = probe.bare_copy(module)
    apply = getattr(type(module), _GATE)
    for interleaved, gate_first in itertools.product((False, True), (True, False)):
        for gate in _solve(lambda x: apply(clone, x), interleaved, gate_first):
            scales = (2.0, gate.limit or 1.0, 1e3)
            if all(_same(lambda x: apply(clone, x), gate, scale) for scale in scales):
                dtypes = {apply(clone, probe.randn(2, 2 * _INNER).to(dtype)).dtype: dtype for dtype in PROBED}
                return gate if all(got == dtype for got, dtype in dtypes.items()) else None
    return None


def _same(function: Any, gate: GluFormula, scale: float) -> bool:
    """Whether ``function`` has the values and gradients of ``gate`` on numbers of this size."""
    x = (scale * probe.randn(16, 2 * _INNER, dtype=torch.float64)).requires_grad_()
    upstream = probe.randn(16, _INNER, dtype=torch.float64)
    y, expected = function(x), packed_glu_ref(x, gate)
    if probe.relative_difference(y, expected) >= probe.SAME_FORMULA:
        return False
    slopes = (torch.autograd.grad(t, x, upstream.to(t.dtype))[0] for t in (y, expected))
    return probe.relative_difference(*slopes) < probe.SAME_FORMULA


def _solve(function: Any, interleaved: bool, gate_first: bool) -> list[GluFormula]:
    """All gates that a function in this layout can be. Their limit, offset and factor are solved from its values.

    Where up is not clamped, the result is linear in it, (up + offset), so two points give offset and factor."""

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
    known: dict[str, Any] = {"limit": limit, "offset": offset, "interleaved": interleaved, "gate_first": gate_first}
    gates = [GluFormula(activation, **known) for activation in ("gelu", "gelu_tanh")]
    if 0 < 2 * act < 1:  # act is 0.5 * sigmoid(0.5 * alpha)
        gates.append(GluFormula("silu", alpha=_rounded(2 * math.log(2 * act / (1 - 2 * act))), **known))
    return gates


def _rounded(number: float) -> float:
    """A setting, rounded because the result may have passed through float32."""
    return float(f"{number:.6g}") if abs(number) > 1e-6 else 0.0


class _Small(NamedTuple):
    """A copy of a module with small random parameters in float32, for one interpretation of their sizes."""

    module: Any
    hidden: int
    parameters: Parameters

    def has_all(self) -> bool:
        """Whether ``parameters`` are all parameters of the module, and the first has room for gate and up."""
        known = list(self.parameters.of(self.module).values())
        return known[0].numel() == 2 * known[1].numel() and len(known) == len(self.module._parameters)


def _find_whole(module: nn.Module, gates: tuple[GluFormula, ...]) -> ExpertsRecipe | None:
    """The recipe for the whole ``module``; None if its forward computes something else or has more parameters."""
    if len(probe.parameter_names(type(module).forward)) != 3:
        return None
    for small in _small_copies(module):
        if not small.has_all():
            continue
        for dtype, bound in ((torch.float64, probe.SAME_FORMULA), (torch.float32, _SAME_IN_FLOAT32)):
            small.module.to(dtype)
            try:
                results = [_run(small, scale) for scale in (1.0, 1e3)]
            except Exception:  # a foreign forward may raise anything
                continue
            for gate in gates:
                expected = [_run(small, scale, gate) for scale in (1.0, 1e3)]
                pairs = zip(itertools.chain(*results), itertools.chain(*expected), strict=True)
                if all(probe.relative_difference(a, b) < bound for a, b in pairs):
                    if not _same_in_16_bits(small, gate, torch.bfloat16):
                        return None
                    return ExpertsRecipe(gate, small.parameters, _same_in_16_bits(small, gate, torch.float32))
            break
    return None


@torch.no_grad()
def _same_in_16_bits(small: _Small, gate: GluFormula, dtype: torch.dtype) -> bool:
    """Whether the result is bfloat16 and differs by a few roundings, if the router's weights have ``dtype``."""
    small.module.to(torch.bfloat16)
    hidden, ids, weights = _tokens(small)
    try:
        y = type(small.module).forward(small.module, hidden, ids, weights.to(dtype))
    except Exception:  # a call in which upstream raises must not be replaced
        return False
    expected = experts_ref(hidden, ids, weights.to(dtype), gate=gate, **small.parameters.of(small.module))
    return y.dtype == hidden.dtype and probe.relative_difference(y, expected) < 8 * torch.finfo(y.dtype).eps


def _run(small: _Small, scale: float, gate: GluFormula | None = None) -> list[torch.Tensor]:
    """The result of the module, or of the reference with ``gate``, for random tokens, and every gradient."""
    torch.default_generator.manual_seed(1)
    hidden, ids, weights = _tokens(small)
    leaves = [(scale * hidden).requires_grad_(), weights.requires_grad_(), *small.module.parameters(recurse=False)]
    if gate is None:
        y = type(small.module).forward(small.module, leaves[0], ids, leaves[1])
    else:
        y = experts_ref(leaves[0], ids, leaves[1], gate=gate, **small.parameters.of(small.module))
    upstream = probe.randn(*hidden.shape, dtype=torch.float64).to(hidden.dtype)
    return [y, *torch.autograd.grad(y, leaves, upstream)]


def _calls_gate(module: nn.Module) -> bool:
    """Whether the forward, with small parameters, calls ``_apply_gate``.

    Raises:
        Exception: the forward's exception, if it raises for every interpretation of its sizes."""
    calls: list[torch.Size] = []
    errors: list[Exception] = []
    copies = list(_small_copies(module))
    original = getattr(type(module), _GATE)
    for small in copies:

        def recorded(x: torch.Tensor, small: Any = small.module) -> torch.Tensor:
            calls.append(x.shape)
            return original(small, x)

        small.module.__dict__[_GATE] = recorded
        try:
            with torch.no_grad():
                type(module).forward(small.module, *_tokens(small))
        except Exception as error:
            errors.append(error)
    if errors and len(errors) == len(copies):
        raise errors[0]
    return bool(calls)


def _tokens(small: _Small) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the experts of each token, and the experts' weights. One token has an expert twice."""
    down = getattr(small.module, small.parameters.down)
    hidden = probe.randn(5, small.hidden, dtype=torch.float64).to(down.dtype)
    ids = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 3], [5, 1]]) % len(down)
    return hidden, ids, probe.randn(5, 2, dtype=torch.float64).abs().to(down.dtype)


def _small_copies(module: nn.Module) -> Iterator[_Small]:
    """A small copy for each interpretation of the sizes of ``module``."""
    shapes = true_shapes(module)
    for (up_name, up), (down_name, down) in itertools.permutations(_cubes(module).items(), 2):
        for transposed in (False, True):
            wide, hidden = up[1:][::-1] if transposed else up[1:]
            back, inner = down[1:][::-1] if transposed else down[1:]
            if hidden != back or wide not in (inner, 2 * inner):
                continue
            # Equal sizes stay equal, because an attribute may mean either.
            sizes = {hidden: _HIDDEN, inner: _INNER, 2 * inner: 2 * _INNER}
            biases = [[n for n in shapes if shapes[n] == (up[0], size)] for size in (wide, hidden)]
            for pair in itertools.product(*((*names,) or (None,) for names in biases)):
                parameters = Parameters(up_name, down_name, transposed, *pair)
                yield _Small(_small_copy(module, sizes), sizes[hidden], parameters)


def _small_copy(module: nn.Module, sizes: dict[int, int]) -> Any:
    parameters = {}
    for name, shape in true_shapes(module).items():
        first, *rest = shape or ()
        parameters[name] = nn.Parameter(probe.randn(first, *(sizes.get(size, size) for size in rest)) / 3)
    small: Any = probe.bare_copy(module, **parameters)
    for name, value in vars(module).items():
        if type(value) is int and value in sizes and "expert" not in name:
            small.__dict__[name] = sizes[value]
    return small


# The possible units if the unit is no separate method.
_UNITS = tuple(
    GluFormula(activation, gate_first=first) for activation in ("silu", "gelu_tanh", "gelu") for first in (True, False)
)
EXPERTS = Recogniser(
    ("experts",),
    is_packed_experts,
    recognise_experts,
    key=lambda module: fingerprint(module, replaced=true_shapes(module)),
)
