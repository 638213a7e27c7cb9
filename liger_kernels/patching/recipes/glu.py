"""Recognise a gated MLP, ``down(act(gate(x)) * up(x))``, by what it computes, and fuse the activation and the product.

The projections themselves stay the modules they are and are called as modules: adapters, hooks and quantized layers
on them keep working. Only where calling ``down`` is ``F.linear`` and nothing else it joins the fused op, which then
keeps no product for the backward. With adapters, or where the MLP computes again (recompute.py), all three join it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from liger_kernels.ops import gated_mlp, geglu, geglu_linear, swiglu, swiglu_linear
from liger_kernels.ops._glu import glu_linear_of_owned
from liger_kernels.ops.lora.gated_mlp import gated_mlp_of_checked
from liger_kernels.ops.runtime.anchor import anchors_only
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.lora.projection import Held, adapted, as_projections, foreseen_projection, has_adapters
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import PLAIN, PROBED, takes_one_tensor, true_shape
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.recompute import in_tiles, recomputes
from liger_kernels.patching.swap import Calls, Recipe, mark_run
from liger_kernels.patching.watch import unchanged

_Unit = tuple[Callable[..., torch.Tensor], ...]


def _gelu(approximate: str) -> _Unit:
    return tuple(partial(function, approximate=approximate) for function in (F.gelu, geglu, geglu_linear))


def _of_owned(activation: str) -> Callable[..., torch.Tensor]:
    return partial(glu_linear_of_owned, activation=activation)


# By activation: torch's own, the fused unit, the one that computes the projection behind it, too, and the same of a
# gate and an up that nobody else has.
_UNITS: dict[str, _Unit] = {
    "silu": (F.silu, swiglu, swiglu_linear, _of_owned("silu")),
    "gelu_tanh": (*_gelu("tanh"), _of_owned("gelu_tanh")),
    "gelu": (*_gelu("none"), _of_owned("gelu")),
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
    autocast: bool = True  # also under autocast, where a cast of its own may show

    @property
    def live(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(filter(None, (self.gate, self.up, self.down)))

    @property
    def kernel(self) -> str:
        return "swiglu" if self.activation == "silu" else "geglu"

    @property
    def detail(self) -> str:
        halves = "" if self.up is not None else (", gate and up in one" if self.gate_first else ", up and gate in one")
        return f"down({self.activation}(gate) * up){halves}"

    def foreseen(self, module: Any, step: Any) -> Calls:
        _, fused, fused_linear, of_owned = _UNITS[self.activation]
        projections = [getattr(module, name) for name in self.live]
        if self.up is not None and any(map(has_adapters, projections)):
            x = step.tensor(step.batch, step.length, projections[0].in_features)
            parts = [foreseen_projection(one, step) for one in projections]
            return (partial(gated_mlp, x, *parts, activation=self.activation),)
        features = getattr(module, self.gate).out_features
        gate = step.tensor(step.batch, step.length, features)
        up = step.tensor(step.batch, step.length, features)
        if self.up is None:
            gate, up = gate.chunk(2, dim=-1)
        down = getattr(module, self.down)
        if _plain_weights(down) is not None:
            weight, bias = (step.like(down, name, step.linear) for name in ("weight", "bias"))
            return (partial(of_owned if _owns(module, self) else fused_linear, gate, up, weight, bias),)
        return (partial(fused, gate, up),)

    def namespace(self, base: Any) -> dict[str, Any]:
        recipe = self
        called = {self.gate, self.up, self.down}
        projections, under_autocast = self.live, self.autocast

        def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = (*args, *kwargs.values())  # one tensor, by position or by whatever name upstream gave it
            if (
                type(x) not in PLAIN
                or left_to_inductor(recipe.kernel, x)
                or not unchanged(self)
                or skips_watched(self, called)
                or _mixes_dtypes(self, projections, x)
                or (not under_autocast and torch.is_autocast_enabled(x.device.type))
            ):
                return base.forward(self, *args, **kwargs)
            mark_run(self)
            again = recomputes(self)
            if recipe.up is not None and (parts := _projections(self, recipe, x, again)) is not None:
                gate, up, down = parts
                return gated_mlp_of_checked(x, gate, up, down, recipe.activation, again)
            return in_tiles(self, partial(_run, recipe), x) if again else _run(recipe, self, x)

        return {"forward": forward}


def _run(recipe: GluRecipe, mlp: Any, x: torch.Tensor, backward_only: bool = False) -> torch.Tensor:
    """The MLP of ``x`` by its modules. With ``backward_only``, its last product need not be computed."""
    activate, fused, fused_linear, of_owned = _UNITS[recipe.activation]
    gate = getattr(mlp, recipe.gate)(x)
    if recipe.up is not None:
        up = getattr(mlp, recipe.up)(x)
    else:
        first, second = gate.chunk(2, dim=-1)
        gate, up = (first, second) if recipe.gate_first else (second, first)
    down = getattr(mlp, recipe.down)
    # A plan that keeps DTensors, or one that is broadcast.
    if type(gate) not in PLAIN or type(up) not in PLAIN or gate.shape != up.shape:
        return down(activate(gate) * up)
    linear = _just_linear(down, gate, up)
    if linear is None:
        return down(fused(gate, up))
    fused_linear = of_owned if _owns(mlp, recipe) else fused_linear
    if not backward_only:
        return fused_linear(gate, up, *linear)
    with anchors_only():
        return fused_linear(gate, up, *linear)


def _owns(mlp: Any, recipe: GluRecipe) -> bool:
    """Whether nobody else has gate and up: two linear layers returned them, and nobody watches these."""
    return recipe.up is not None and all(_plain_weights(getattr(mlp, name)) for name in (recipe.gate, recipe.up))


def _projections(mlp: nn.Module, recipe: GluRecipe, x: torch.Tensor, again: bool) -> list[Held] | None:
    """The projections of an MLP that runs as one op: because it has adapters, or computes ``again``; None where one
    has to be called."""
    modules: Any = mlp._modules
    held = as_projections if again else adapted
    return held([modules[name] for name in recipe.live], x, modules[recipe.gate].out_features)


def skips_watched(mlp: nn.Module, called: set[str | None]) -> bool:
    """Whether somebody watches a module that upstream calls and the kernel does not: the activation, for one."""
    for name, child in mlp._modules.items():
        if name in called or child is None:
            continue
        if probe.is_watched(child) or probe.has_global_hooks() or (child._modules and skips_watched(child, set())):
            return True
    return False


def _mixes_dtypes(mlp: nn.Module, projections: tuple[str, ...], x: torch.Tensor) -> bool:
    """Whether a projection has another dtype than ``x``: upstream may cast, or raise. Autocast casts what comes in.

    No kernel takes float64, either.
    """
    dtype, modules = x.dtype, mlp._modules
    if dtype not in PROBED:
        return True
    for name in projections:
        projection: Any = modules.get(name)
        if projection is None:
            return True
        weight = projection._parameters.get("weight")
        if weight is None:  # an adapter tells that of what it wraps
            weight = getattr(projection, "weight", None)
        if type(weight) in PLAIN and weight.dtype != dtype and weight.dtype in (*PROBED, torch.float64):
            return not torch.is_autocast_enabled(x.device.type) or weight.dtype == torch.float64
    return False


def _just_linear(module: Any, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """:func:`_plain_weights` of the projection behind the product, in its dtype; else ``module`` casts or raises."""
    linear = _plain_weights(module)
    if linear is None:
        return None
    weight, bias = linear
    dtype = weight.dtype
    if bias is not None and bias.dtype != dtype:
        return None
    one = gate.dtype == dtype and up.dtype == dtype
    return linear if one or torch.is_autocast_enabled(gate.device.type) else None


def _plain_weights(module: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight and bias of ``module``, where calling it is ``F.linear`` of these, and nobody watches or changes that."""
    if type(module) is not nn.Linear or probe.has_hooks(module) or probe.has_global_hooks():
        return None
    weight = module.weight
    return (weight, module.bias) if type(weight) in PLAIN else None  # not sharded, not quantized


def is_glu_candidate(module: nn.Module) -> bool:
    """A function of one tensor with two or three linear-like children whose sizes fit, and no parameters of its own."""
    return not module._parameters and bool(_roles(module)) and takes_one_tensor(type(module).forward)


def recognise_glu(module: nn.Module) -> GluRecipe | str:
    """The recipe for ``module``, or the reason why it is not a gated MLP that we know.

    A copy with small random projections runs in float64.
    """
    sizes = _linear_sizes(module)
    try:
        with probe.probing(), torch.no_grad():
            further = [name for name, _ in module.named_parameters() if name.partition(".")[0] not in sizes]
            if further:
                return f"it has further parameters: {', '.join(further)}"
            for gate, up, down in _roles(module):
                recipe = _match(module, gate, up, down)
                if recipe is not None:
                    return recipe
            return "it is not down(act(gate(x)) * up(x)) with silu or gelu"
    except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
        return f"it cannot be probed ({probe.describe(error)})"


def _match(module: nn.Module, gate: str, up: str | None, down: str) -> GluRecipe | None:
    hidden, inner = 6, 10
    shapes = {gate: (hidden, 2 * inner if up is None else inner), down: (inner, hidden), up: (hidden, inner)}
    small: dict[str, Any] = {name: probe.random_linear(*shape) for name, shape in shapes.items() if name is not None}
    clone = probe.bare_copy(module, **small)
    # Usual numbers, and large ones, which show a clamp.
    samples = [scale * probe.randn(2, 3, hidden, dtype=torch.float64) for scale in (2.0, 1e3)]
    outputs = [type(module).forward(clone, x) for x in samples]
    halves = [(small[gate](x), small[up](x)) if up is not None else small[gate](x).chunk(2, dim=-1) for x in samples]
    for activation, gate_first in itertools.product(_UNITS, (True, False) if up is None else (True,)):
        act, *_ = _UNITS[activation]
        products = (act(first) * second if gate_first else act(second) * first for first, second in halves)
        pairs = zip(outputs, map(small[down], products), strict=True)
        if all(probe.relative_difference(y, expected) < probe.SAME_FORMULA for y, expected in pairs):
            recipe = GluRecipe(activation, gate, up, down, gate_first)
            if not all(_same_in(dtype, recipe, module, small, samples[0]) for dtype in PROBED):
                return None
            with torch.autocast("cpu", torch.bfloat16):
                return replace(recipe, autocast=_same_in(torch.float32, recipe, module, small, samples[0]))
    return None


def _same_in(
    dtype: torch.dtype, recipe: GluRecipe, module: nn.Module, small: dict[str, nn.Linear], x: torch.Tensor
) -> bool:
    """Whether the result has ``dtype`` where all that goes in has it, and differs by a few roundings at most.

    Under autocast it has the dtype that autocast makes.
    """
    weights = {name: nn.Parameter(linear.weight.to(dtype)) for name, linear in small.items()}
    cast: dict[str, Any] = {name: probe.bare_copy(small[name], weight=weight) for name, weight in weights.items()}
    y = type(module).forward(probe.bare_copy(module, **cast), x.to(dtype))
    gate = cast[recipe.gate](x.to(dtype))
    gate, up = (gate, cast[recipe.up](x.to(dtype))) if recipe.up is not None else gate.chunk(2, dim=-1)
    gate, up = (gate, up) if recipe.gate_first else (up, gate)
    expected = cast[recipe.down](_UNITS[recipe.activation][0](gate) * up)
    same = y.dtype == (expected.dtype if torch.is_autocast_cpu_enabled() else dtype)
    return same and probe.relative_difference(y, expected) <= 4 * torch.finfo(y.dtype).eps


_TWO_PROJECTIONS = "two projections instead of gate, up and down: no kernel for it"


def _other_mlp(module: nn.Module) -> str | None:
    """Why a module that goes from hidden to inner features and back is no gated MLP of ours; None if it does not."""
    sizes = list(_linear_sizes(module, conv1d=True).values())
    if not sizes:  # each projection in a module of its own
        inside = (_linear_sizes(child) for child in module._modules.values() if child is not None)
        sizes = [size for of_child in inside if len(of_child) == 1 for size in of_child.values()]
    if len(sizes) not in (2, 3):
        return None
    alone = takes_one_tensor(type(module).forward)
    if not alone and not _is_no_attention(module):
        return None
    if any(first == second[::-1] and first[0] != first[1] for first, second in itertools.permutations(sizes, 2)):
        return _TWO_PROJECTIONS if len(sizes) == 2 else "it is not down(act(gate(x)) * up(x))"
    if len(sizes) == 3 or module._parameters:
        return None
    if any(gate == (down[1], 2 * down[0]) and down[0] != down[1] for gate, down in itertools.permutations(sizes)):
        return f"its forward takes more than one tensor: {', '.join(probe.parameter_names(type(module).forward))}"
    if not alone or sizes[0] != sizes[1]:
        return None
    return _TWO_PROJECTIONS if sizes[0][0] == sizes[0][1] else "two projections and none behind them: no kernel for it"


def _is_no_attention(module: nn.Module) -> bool:
    """Whether a module either has blocks inside (a layer with an MLP of its own) or knows of no other tokens."""
    others = ("mask", "position", "cu_seqlens", "past_key", "key", "cache")
    return any(child._modules for child in module._modules.values() if child is not None) or not any(
        part in name for name in probe.parameter_names(type(module).forward) for part in others
    )


def _linear_sizes(module: nn.Module, conv1d: bool = False) -> dict[str, tuple[int, int]]:
    """(in, out) of every linear-like child, with ``conv1d`` also of those that keep their weight transposed."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, child in module._modules.items():
        inputs, outputs = getattr(child, "in_features", None), getattr(child, "out_features", None)
        if isinstance(inputs, int) and isinstance(outputs, int):
            sizes[name] = (inputs, outputs)
        elif conv1d and child is not None and len(child._parameters) == 2 and not child._modules:
            weight, bias = (None if p is None else true_shape(p) for p in child._parameters.values())
            if weight is not None and bias is not None and len(weight) == 2 and bias == weight[1:]:
                sizes[name] = (weight[0], weight[1])
    return sizes


def _roles(module: nn.Module) -> list[tuple[str, str | None, str]]:
    """Every (gate, up, down) that the sizes of the linear-like children allow; up is None for a joint projection."""
    sizes = _linear_sizes(module)
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


def _verdict(module: nn.Module) -> Verdict:
    if not is_glu_candidate(module):
        reason = _other_mlp(module)
        return () if reason is None else (reason,)
    verdict = recognise_glu(module)
    return verdict if isinstance(verdict, GluRecipe) else (probe.with_origin(verdict, type(module)),)


GATED_MLPS = Recogniser(
    ("swiglu", "geglu"),
    lambda module: is_glu_candidate(module) or _other_mlp(module) is not None,
    _verdict,
    key=lambda module: fingerprint(module, replaced=_linear_sizes(module)),
)
