"""Recognise an RMS norm, one with a gate, or a LayerNorm by what it computes, and let the kernel of the formula that
matched run in its ``forward``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from liger_kernels.ops import layer_norm, layer_norm_ref, rms_norm, rms_norm_ref
from liger_kernels.ops._norm_rows import MAX_HIDDEN
from liger_kernels.ops._rms_norm import FORMULAS
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.gated_norms import GATE, OPEN, GatedNormRecipe, gate_of, gated_candidates, one_dtype
from liger_kernels.patching.recipes.probe import PLAIN, PROBED, randn, relative_difference
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.swap import RAN, Calls, Recipe
from liger_kernels.patching.watch import unchanged

# In 16 bits, two evaluations of one formula agree in every element but those where a last-bit difference in float32
# tips a rounding: about 2^-8 of them for each unit in the last place (float32 has 2^13 to 2^16 steps in one of theirs,
# so a fraction well below 1%). Rounding at another place changes more than a tenth.
AGREEING_FRACTION = 0.99
_NO_NORM = "it is not a norm of ours"
# What torch has for channels; a probe of rows would only raise in them.
_OF_CHANNELS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class NormRecipe(Recipe):
    """A norm whose forward is ``rms_norm(x, weight, eps, formula=formula)``."""

    kernel = "rms_norm"
    formula: str
    eps: float
    weight: str | None  # the name of the weight parameter
    mixed: bool = True  # also where x and weight have two dtypes, with which T5's does something else

    @property
    def live(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(filter(None, (self.weight,)))

    @property
    def detail(self) -> str:
        return f"{self.formula}, eps={self.eps:g}{one_dtype(self.mixed)}"

    def reference(self, x: torch.Tensor, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        return rms_norm_ref(x, _named(vectors, self.weight), self.eps, formula=self.formula)

    def foreseen(self, module: Any, step: Any) -> Calls:
        if self.weight is None:
            return ()
        weight = step.like(module, self.weight)
        x = step.tensor(step.tokens, *weight.shape, dtype=step.stream)
        return (functools.partial(rms_norm, x, weight, self.eps, formula=self.formula),)

    def namespace(self, base: Any) -> dict[str, Any]:
        formula, eps, weight_name, mixed = self.formula, self.eps, self.weight, self.mixed

        def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = (*args, *kwargs.values())  # one tensor, by position or by whatever name upstream gave it
            if left_to_inductor("rms_norm", x) or not unchanged(self):
                return base.forward(self, *args, **kwargs)
            weight = probe.parameter_of(self, weight_name) if weight_name is not None else None
            if (
                type(x) not in PLAIN
                or x.dtype not in PROBED
                or not (weight_name is None or probe.fits(weight, x, mixed))
            ):
                return base.forward(self, *args, **kwargs)
            self.__dict__[RAN] = True
            return rms_norm(x, weight, eps, formula=formula)

        return {"forward": forward}


@dataclass(frozen=True)
class LayerNormRecipe(Recipe):
    """A norm whose forward is ``layer_norm(x, weight, bias, eps, zero_centered=zero_centered)``."""

    kernel = "layer_norm"
    eps: float
    weight: str | None  # the names of the parameters
    bias: str | None
    zero_centered: bool = False
    bare: bool = False  # it is F.layer_norm and nothing else: then autocast's rule for that is all that autocast does
    mixed: bool = True  # also where x and the parameters have two dtypes

    @property
    def live(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(filter(None, (self.weight, self.bias)))

    @property
    def detail(self) -> str:
        vectors = ("1 + weight" if self.zero_centered else "weight") if self.weight is not None else ""
        bias = "bias" if self.bias is not None else ""
        names = " and ".join(filter(None, (vectors, bias))) or "no weight"
        return f"{names}, eps={self.eps:g}{one_dtype(self.mixed)}"

    def reference(self, x: torch.Tensor, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, bias = _named(vectors, self.weight), _named(vectors, self.bias)
        return layer_norm_ref(x, weight, bias, self.eps, zero_centered=self.zero_centered)

    def foreseen(self, module: Any, step: Any) -> Calls:
        if self.weight is None:
            return ()
        weight = step.like(module, self.weight)
        bias = None if self.bias is None else step.like(module, self.bias)
        x = step.tensor(step.tokens, *weight.shape, dtype=step.stream)
        return (functools.partial(layer_norm, x, weight, bias, self.eps, zero_centered=self.zero_centered),)

    def namespace(self, base: Any) -> dict[str, Any]:
        eps, zero_centered, bare, mixed = self.eps, self.zero_centered, self.bare, self.mixed
        weight_name, bias_name = self.weight, self.bias

        def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = (*args, *kwargs.values())
            if left_to_inductor("layer_norm", x) or not unchanged(self):
                return base.forward(self, *args, **kwargs)
            weight = probe.parameter_of(self, weight_name) if weight_name is not None else None
            bias = probe.parameter_of(self, bias_name) if bias_name is not None else None
            autocast = torch.is_autocast_enabled(x.device.type)
            dtype = _autocast_dtype(x.device, x.dtype) if autocast else None
            mixes = (autocast and (dtype != x.dtype or _are_float32(weight, bias))) if bare else mixed
            if (
                type(x) not in PLAIN
                or x.dtype not in PROBED
                or not (weight_name is None or probe.fits(weight, x, mixes))
                or not (bias_name is None or probe.fits(bias, x, mixes))
                or (autocast and not bare)
            ):
                return base.forward(self, *args, **kwargs)
            self.__dict__[RAN] = True
            return layer_norm(x, weight, bias, eps, zero_centered=zero_centered, dtype=dtype)

        return {"forward": forward}


AnyNormRecipe = NormRecipe | LayerNormRecipe | GatedNormRecipe


def _named(vectors: dict[str, torch.Tensor], name: str | None) -> torch.Tensor | None:
    return None if name is None else vectors[name]


def _are_float32(*vectors: Any) -> bool:
    """Whether ``F.layer_norm`` takes these for x of any dtype, on a CPU. On a GPU it does so only where autocast casts
    them."""
    return all(vector is None or vector.dtype == torch.float32 for vector in vectors)


@functools.cache
def _autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What ``F.layer_norm`` makes of ``dtype`` under autocast, which is on: float32 on GPUs, the same on CPUs."""
    return F.layer_norm(torch.empty(0, 1, device=device, dtype=dtype), (1,)).dtype


def is_norm_candidate(module: nn.Module) -> bool:
    """A leaf of vectors: one, or several or none where it looks like a norm. Cheap: nothing is run.

    A norm by name whose weight is no vector is one, too, for the report to say so.
    """
    if module._modules or type(module).forward is nn.Module.forward:
        return False
    shapes = _vectors(module)
    if any(shape is not None and len(shape) != 1 for shape in shapes.values()):
        return "Norm" in type(module).__name__ and len(shapes) <= 2
    if len(shapes) == 1:
        return True
    if not shapes and "Dropout" not in type(module).__name__ and any(_is_eps(value) for value in vars(module).values()):
        return True  # without a weight, only an eps makes it a norm
    return looks_like_norm(module)


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a module says of itself that it is a norm: by an eps, by the shape that it normalises, or by its name."""
    if "normalized_shape" in vars(module) or "Norm" in type(module).__name__:
        return True
    return any("eps" in name and _is_eps(value) for name, value in vars(module).items())


def recognise_norm(module: nn.Module) -> AnyNormRecipe | str:
    """The recipe for ``module``, or the reason why it is none of our norms.

    A copy of the module with random weights runs on rows of very different sizes (zero and tiny ones, where eps
    decides, among them), in float32, in both 16-bit types and with float32 weights under 16-bit inputs; values, result
    dtypes and gradients must be those of one formula.
    """
    return _examined(module)[0]


def _verdict(module: nn.Module) -> Verdict:
    verdict, normalises = _examined(module)
    if isinstance(verdict, Recipe):
        return verdict
    return (probe.with_origin(verdict, type(module)),) if normalises or looks_like_norm(module) else ()


def _examined(module: nn.Module) -> tuple[AnyNormRecipe | str, bool]:
    """What :func:`recognise_norm` answers, and whether a refused module turned out to be a norm of some kind."""
    shapes = _vectors(module)
    gated = probe.takes_tensors(type(module).forward, 2)
    names = ", ".join(probe.parameter_names(type(module).forward))
    several = f"its forward takes more than one tensor: {names}" if names else "its forward has no signature to read"
    if not probe.takes_one_tensor(type(module).forward) and (not gated or len(shapes) != 1):
        return several, False
    shape = next(iter(shapes.values()), None)
    if any(s is not None and len(s) != 1 for s in shapes.values()):
        return "its weight is no vector: no kernel for it", True
    if isinstance(module, _OF_CHANNELS):
        return "it normalises channels, not rows: no kernel for it", True
    if shape is not None and shape[0] > MAX_HIDDEN:
        return f"its rows of {shape[0]} are wider than a kernel holds ({MAX_HIDDEN})", True
    no_norm = several if gated else _NO_NORM
    verdict: AnyNormRecipe | str = no_norm
    kind = None
    for size in _sizes(module, shape):
        try:
            with probe.probing():
                if len(shapes) <= 2:
                    vectors = (*shapes, GATE) if gated else tuple(shapes)
                    weights = {name: randn(size) for name in vectors}
                    eps = _solve_eps(module, weights, size)
                    verdict = eps if isinstance(eps, str) else _match(module, weights, size, eps)
                    verdict = no_norm if verdict == _NO_NORM else verdict
                if isinstance(verdict, str) and not gated and (kind := _kind(module, shapes, size)) is not None:
                    verdict = kind if verdict == _NO_NORM else verdict
            break
        except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
            verdict = several if gated else f"it cannot be probed ({probe.describe(error)})"
    if isinstance(verdict, str) and shapes and shape is None:
        verdict = "its weight is sharded: call patch() before sharding the model"
    return verdict, kind is not None


def _kind(module: nn.Module, shapes: dict[str, Any], size: int) -> str | None:
    """Which norm it is, if it is one: by what it does not see of a row, a scale or a constant that is added."""
    x = randn(3, size)
    weights = {name: randn(size) for name in shapes}
    with torch.no_grad():
        y, scaled, shifted = (_run(module, x_, weights) for x_ in (x, 1000 * x, x + 3))
    if not bool(y.any()) or relative_difference(scaled, y) > 1e-2:  # eps shows a little
        return None
    centres = relative_difference(shifted, y) < 1e-3
    return f"it is {'a LayerNorm' if centres else 'an RMS norm'} of another formula: no kernel for it"


def _vectors(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """The true shapes of the parameters of a leaf, by name.

    FSDP1 without ``use_orig_params`` leaves plain tensors under the names of parameters.
    """
    return probe.true_shapes(module) or {
        name: probe.true_shape(v) for name, v in vars(module).items() if type(v) is torch.Tensor and v.dim() == 1
    }


def _sizes(module: nn.Module, shape: tuple[int, ...] | None) -> list[int]:
    """Sizes of rows that ``module`` may take, the likeliest first: not every norm has a weight that tells it."""
    if shape is not None:
        return [shape[0]]
    declared = vars(module).get("normalized_shape")
    if declared is not None:
        last = declared[-1] if isinstance(declared, (tuple, list)) else declared
        return [int(last)]
    own = {v for v in vars(module).values() if isinstance(v, int) and not isinstance(v, bool) and 1 < v <= 1 << 16}
    return [48, *sorted(own, reverse=True)]


def _candidates(module: nn.Module, names: list[str], size: int, eps: float) -> Iterator[AnyNormRecipe]:
    """Every formula of ours for a norm with parameters of these names, whatever they are called."""
    if GATE in names:
        own = (value for value in vars(module).values() if type(value) is int)
        yield from gated_candidates(names[0], size, own, eps)
        return
    if len(names) < 2:
        weight = names[0] if names else None
        for formula in FORMULAS if names else FORMULAS[:1]:
            yield NormRecipe(formula, eps, weight)
    for weight, bias in itertools.permutations([*names, None, None][:2]):
        for zero_centered in (False, True)[: 1 if weight is None else 2]:
            yield LayerNormRecipe(eps, weight, bias, zero_centered)


def _match(module: nn.Module, weights: dict[str, torch.Tensor], size: int, eps: float) -> AnyNormRecipe | str:
    rows = probe.full((8,), 1.0)
    rows[:4] = rows.new_tensor([0.0, 1e-2 * eps**0.5, eps**0.5, 1e-2])
    rows[6:] = rows.new_tensor([30.0, 3e3])
    x = randn(len(rows), 3, size) * rows[:, None, None]  # what normalises over more than the last dimension shows
    departures = []
    for recipe in _candidates(module, list(weights), size, eps):
        parts = (_both(module, part, weights, recipe) for part in (x[1:3], x[-5:]))
        if all(relative_difference(*both) <= probe.SAME_FORMULA for both in parts):
            departure = _departure(module, x, weights, recipe)
            optional = (3,) if isinstance(recipe, GatedNormRecipe) else (2, 3)
            if departure is not None and departure[0] in optional:
                alone = replace(recipe, mixed=False)
                if _departure(module, x, weights, alone) is None:
                    recipe, departure = alone, None
            if departure is None and isinstance(recipe, LayerNormRecipe):
                return _with_torchs_own(recipe, module, x, weights)
            if departure is None:
                return recipe
            departures.append(departure)
    # The formula that it follows furthest says most about why it is refused.
    return max(departures)[1] if departures else _NO_NORM


class _Called(TorchFunctionMode):
    """Every function of torch that is called inside, and whether a ``layer_norm`` was given tensors of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self.mixed = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(function)
        given = (*args, *(kwargs or {}).values())
        if function in _TORCHS_OWN:
            self.mixed = self.mixed or len({t.dtype for t in given if isinstance(t, torch.Tensor)}) > 1
        return function(*args, **(kwargs or {}))


_TORCHS_OWN = (F.layer_norm, torch.layer_norm)


def _with_torchs_own(
    recipe: LayerNormRecipe, module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor]
) -> LayerNormRecipe:
    """``recipe``, where ``F.layer_norm`` is all that the module calls, or raises on a GPU in two dtypes."""
    with torch.no_grad(), _Called() as called:
        _run(module, x, weights)
    bare = called.functions in [[function] for function in _TORCHS_OWN]
    if recipe.mixed and not bare:
        with called:
            _run(module, x.bfloat16(), weights)
    return replace(recipe, bare=bare, mixed=bare or (recipe.mixed and not called.mixed))


_OF_ONE_DTYPE = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))


def _departure(
    module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor], recipe: AnyNormRecipe
) -> tuple[int, str] | None:
    """How far a module whose float32 values match follows the formula, and where it departs; None if nowhere.

    Where the recipe is ``mixed``, x and weights of several dtypes are tried, too, after those of one.
    """
    for stage, (dtype, weight_dtype) in enumerate((*_OF_ONE_DTYPE, *[(torch.bfloat16, torch.float32)] * recipe.mixed)):
        cast = {name: weight.to(weight_dtype) for name, weight in weights.items()}
        with torch.no_grad():
            got, expected = _both(module, x.clamp(-6e4, 6e4).to(dtype), cast, recipe)
        if got.dtype != expected.dtype:
            return stage, f"for {dtype} inputs and {weight_dtype} weights it returns {got.dtype}, not {expected.dtype}"
        if float((got == expected).double().mean()) < AGREEING_FRACTION:
            return stage, f"in {dtype} it rounds at other places than our formulas do"
    if recipe.mixed and (reason := _departure_of_dtypes(module, x[3:5], weights, recipe)) is not None:
        return 3, reason
    leaf = x[3:].clone().requires_grad_()
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    gradients = [
        torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [leaf, *leaves.values()])
        for y in _both(module, leaf, leaves, recipe)
    ]
    for got, expected in zip(*gradients, strict=True):
        # ten times the forward's bound: the gradient sums over rows and over columns
        if relative_difference(got, expected) > 10 * probe.SAME_FORMULA:
            return 4, "its gradient is not that of its formula"
    return None


def _departure_of_dtypes(
    module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor], recipe: AnyNormRecipe
) -> str | None:
    """For which dtypes of x and of each weight the module raises, or returns another dtype or something else."""
    for dtype, *others in itertools.product(PROBED, repeat=1 + len(weights)):
        if {dtype} == {*others} or not others:
            continue
        cast = {name: weight.to(other) for (name, weight), other in zip(weights.items(), others, strict=True)}
        given = f"{dtype} inputs and weights of {', '.join(map(str, others))}"
        try:
            with torch.no_grad():
                got, expected = _both(module, x.to(dtype), cast, recipe)
        except Exception as error:  # whatever upstream raises, it is to raise
            return f"for {given} it raises ({probe.describe(error)})"
        if got.dtype != expected.dtype:
            return f"for {given} it returns {got.dtype}, not {expected.dtype}"
        if relative_difference(got, expected) > 4 * torch.finfo(torch.bfloat16).eps:
            return f"for {given} it computes something else"
    return None


def _both(
    module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor], recipe: AnyNormRecipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the module makes of ``x``, and what the formula does."""
    return _run(module, x, weights), recipe.reference(x, weights)


def _run(module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    clone = probe.bare_copy(module)
    arguments = [x, gate_of(x, weights[GATE])] if GATE in weights else [x]
    for name, weight in weights.items():
        # Not as an nn.Parameter: the probe wants gradients to flow to its own leaf.
        clone._parameters.pop(name, None)
        clone.__dict__[name] = weight
    return type(module).forward(clone, *arguments)


def _solve_eps(module: nn.Module, weights: dict[str, torch.Tensor], size: int) -> float | str:
    """eps from the answer to a row so small that nothing but eps is under the root, or why there is none."""
    # Next to a bias the answer would be lost, and any parameter may be one.
    names = [name for name in weights if name != GATE]
    biases = names if len(names) == 2 else [None, *names]
    gates = OPEN if GATE in weights else (1.0,)
    answers = [_eps_without(bias, gate, module, weights, size) for gate in gates for bias in biases]
    solved = [answer for answer in answers if isinstance(answer, float)]
    refused = [answer for answer in answers if answer != _NO_NORM]
    return [*solved, *refused, _NO_NORM][0]


def _eps_without(
    bias: str | None, gate: float, module: nn.Module, weights: dict[str, torch.Tensor], size: int
) -> float | str:
    """y = w x / sqrt(mean(x^2) + eps), of an x whose mean is 0, where ``bias`` is 0 and w is 1."""
    ones = {name: probe.full((size,), 0.0 if name == bias else 1.0) for name in weights}
    if GATE in ones:
        ones[GATE] *= gate
    row = probe.full((1, size), 1.0)
    row[:, 1::2] = -1.0
    row[:, size - size % 2 :] = 0.0 if size > 1 else 1.0
    with torch.no_grad():
        tiny, large = ((_run(module, scale * row, ones).double() * row).sum() for scale in (1e-12, 1.0))
    square = float(row.square().mean())
    ratio = float(tiny / large) if large else 0.0  # whatever w is: 2 where the formula adds 1 to the weight
    if not 0 < ratio < 1:
        return _NO_NORM
    solved = 1e-24 * square * (1 - ratio**2) / (ratio**2 - 1e-24)
    known = [float(value) for value in vars(module).values() if _is_eps(value)]
    known += [float(f"1e-{k}") for k in range(3, 13)] + [torch.finfo(d).eps for d in (torch.float32, torch.float64)]
    for eps in known:
        if abs(eps - solved) <= 10 * probe.SAME_FORMULA * eps:
            return eps
    return f"it is not a norm of ours, or its eps (about {solved:.2g}) is none of its attributes"


def _is_eps(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 0.1


NORMS = Recogniser(
    ("rms_norm", "layer_norm", "gated_rms_norm"),
    is_norm_candidate,
    _verdict,
    key=lambda module: fingerprint(module, replaced=_vectors(module)),
)
