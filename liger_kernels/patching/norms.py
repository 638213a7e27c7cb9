"""Recognise an RMS norm by what it computes, and replace its ``forward`` by the kernel of the formula that matched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import rms_norm, rms_norm_ref
from liger_kernels.patching.probe import (
    PLAIN,
    SAME_FORMULA,
    bare_copy,
    describe,
    full,
    probing,
    randn,
    relative_difference,
    signature_of,
    takes_one_tensor,
    true_shape,
    with_origin,
)
from liger_kernels.patching.recogniser import Recogniser, fingerprint
from liger_kernels.patching.swap import Recipe, mark_run

FORMULAS = ("cast_then_scale", "scale_then_cast", "offset_scale_then_cast")

# In 16 bits, two evaluations of one formula agree in every element but those where a last-bit difference in float32
# tips a rounding: about 2^-8 of them for each unit in the last place (float32 has 2^13 to 2^16 steps in one of theirs,
# so a fraction well below 1%). Rounding at another place changes more than a tenth.
AGREEING_FRACTION = 0.99


@dataclass(frozen=True)
class NormRecipe(Recipe):
    """A norm whose forward is ``rms_norm(x, weight, eps, formula=formula)``."""

    formula: str
    eps: float
    weight: str | None  # the name of the weight parameter

    @property
    def kernel(self) -> str:
        return "rms_norm"

    @property
    def detail(self) -> str:
        return f"{self.formula}, eps={self.eps:g}"

    def namespace(self, base: Any) -> dict[str, Any]:
        formula, eps, weight_name = self.formula, self.eps, self.weight

        def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():  # Inductor fuses this with the residual around it, but no kernel of ours
                return base.forward(self, *args, **kwargs)
            (x,) = (*args, *kwargs.values())  # one tensor, by position or by whatever name upstream gave it
            weight = getattr(self, weight_name) if weight_name is not None else None
            if type(x) not in PLAIN or (weight is not None and not _fits(weight, x)):
                return base.forward(self, *args, **kwargs)
            mark_run(self)
            return rms_norm(x, weight, eps, formula=formula)

        return {"forward": forward}


def _fits(weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the weight is there as one plain tensor: where it is sharded, something has gathered it."""
    return type(weight) in PLAIN and weight.numel() == x.shape[-1]


def is_norm_candidate(module: nn.Module) -> bool:
    """A leaf of vectors: one, or several or none where it looks like a norm. Cheap: nothing is run."""
    if module._modules or type(module).forward is nn.Module.forward:
        return False
    shapes = _vectors(module)
    if any(shape is not None and len(shape) != 1 for shape in shapes.values()):
        return False
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


def recognise_norm(module: nn.Module) -> NormRecipe | str:
    """The recipe for ``module``, or the reason why it is none of our RMS norms.

    A copy of the module with random weights runs on rows of very different sizes (zero and tiny ones, where eps
    decides, among them), in float32, in both 16-bit types and with float32 weights under 16-bit inputs; values, result
    dtypes and gradients must be those of one formula.
    """
    shapes = _vectors(module)
    if not takes_one_tensor(type(module).forward):
        names = ", ".join(parameter.name for parameter in signature_of(type(module).forward)[1:])
        return f"its forward takes more than one tensor: {names}" if names else "its forward has no signature to read"
    name, shape = next(iter(shapes.items()), (None, None))
    verdict: NormRecipe | str = "it is not an RMS norm"
    for size in _sizes(module, shape):
        try:
            with probing():
                if len(shapes) <= 1:
                    weight = randn(size) if name is not None else None
                    eps = _solve_eps(module, name, weight, size)
                    verdict = eps if isinstance(eps, str) else _match(module, name, weight, size, eps)
                if isinstance(verdict, str) and (kind := _kind(module, shapes, size)) is not None:
                    verdict = kind if len(shapes) > 1 or "not an RMS norm" in verdict else verdict
            break
        except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
            verdict = f"it cannot be probed ({describe(error)})"
    if isinstance(verdict, str) and name is not None and shape is None:
        return "its weight is sharded: call patch() before sharding the model"
    return verdict


def _verdict(module: nn.Module) -> NormRecipe | tuple[str, ...]:
    verdict = recognise_norm(module)
    if isinstance(verdict, NormRecipe):
        return verdict
    return (with_origin(verdict, type(module)),) if looks_like_norm(module) or normalises(module) else ()


def normalises(module: nn.Module) -> bool:
    """Whether the size of what goes in does not show in what comes out, which only a norm does."""
    shapes = _vectors(module)
    try:
        with probing():
            size = _sizes(module, next(iter(shapes.values()), None))[0]
            return takes_one_tensor(type(module).forward) and _kind(module, shapes, size) is not None
    except Exception:
        return False


def _kind(module: nn.Module, shapes: dict[str, Any], size: int) -> str | None:
    """Which norm it is, if it is one: by what it does not see of a row, a scale or a constant that is added."""
    x = randn(3, size)
    weights = {name: randn(size) for name in shapes}
    with torch.no_grad():
        y, scaled, shifted = (_run(module, x_, **weights) for x_ in (x, 1000 * x, x + 3))
    if not bool(y.any()) or relative_difference(scaled, y) > 1e-2:  # eps shows a little
        return None
    if relative_difference(shifted, y) < 1e-3:
        return "it is not an RMS norm but a LayerNorm (it subtracts the mean): no kernel for it"
    return "it is not an RMS norm of ours: no kernel for it"


def _vectors(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """The true shapes of the parameters of a leaf, by name.

    FSDP1 without ``use_orig_params`` leaves plain tensors under the names of parameters.
    """
    tensors = {name: p for name, p in module._parameters.items() if p is not None}
    if not tensors:
        tensors = {name: v for name, v in vars(module).items() if type(v) is torch.Tensor and v.dim() == 1}  # type: ignore[misc]
    return {name: true_shape(tensor) for name, tensor in tensors.items()}


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


def _match(module: nn.Module, name: str | None, weight: torch.Tensor | None, size: int, eps: float) -> NormRecipe | str:
    rows = full((8,), 1.0)
    rows[:4] = rows.new_tensor([0.0, 1e-2 * eps**0.5, eps**0.5, 1e-2])
    rows[6:] = rows.new_tensor([30.0, 3e3])
    x = randn(len(rows), size) * rows[:, None]
    departures = []
    for formula in FORMULAS if weight is not None else FORMULAS[:1]:
        difference = max(
            relative_difference(*_both(module, name, part, weight, eps, formula)) for part in (x[-5:], x[1:3])
        )
        if difference <= SAME_FORMULA:
            departure = _departure(module, name, x, weight, eps, formula)
            if departure is None:
                return NormRecipe(formula, eps, name)
            departures.append(departure)
    # The formula that it follows furthest says most about why it is refused.
    return max(departures)[1] if departures else "it is not an RMS norm"


def _departure(
    module: nn.Module, name: str | None, x: torch.Tensor, weight: torch.Tensor | None, eps: float, formula: str
) -> tuple[int, str] | None:
    """How far a module whose float32 values match follows the formula, and where it departs; None if nowhere."""
    combinations = (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    )
    for stage, (dtype, weight_dtype) in enumerate(combinations):
        cast = weight.to(weight_dtype) if weight is not None else None
        got, expected = _both(module, name, x.clamp(-6e4, 6e4).to(dtype), cast, eps, formula)
        if got.dtype != expected.dtype:
            return stage, f"for {dtype} inputs and {weight_dtype} weights it returns {got.dtype}, not {expected.dtype}"
        if float((got == expected).double().mean()) < AGREEING_FRACTION:
            return stage, f"in {dtype} it rounds at other places than our formulas do"
    gradients = []
    for function in (lambda x, w: _with(module, name, x, w), lambda x, w: rms_norm_ref(x, w, eps, formula=formula)):
        leaf = x[3:].clone().requires_grad_()
        scale = weight.clone().requires_grad_() if weight is not None else None
        y = function(leaf, scale)
        inputs = [leaf] if scale is None else [leaf, scale]
        gradients.append(torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), inputs))
    for got, expected in zip(*gradients, strict=True):
        # ten times the forward's bound: the gradient sums over rows and over columns
        if relative_difference(got, expected) > 10 * SAME_FORMULA:
            return len(combinations), "its gradient is not that of its formula"
    return None


def _both(
    module: nn.Module, name: str | None, x: torch.Tensor, weight: torch.Tensor | None, eps: float, formula: str
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return _with(module, name, x, weight), rms_norm_ref(x, weight, eps, formula=formula)


def _with(module: nn.Module, name: str | None, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return _run(module, x) if name is None or weight is None else _run(module, x, **{name: weight})


def _run(module: nn.Module, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
    clone = bare_copy(module)
    for name, weight in weights.items():
        # Not as an nn.Parameter: the probe wants gradients to flow to its own leaf.
        clone._parameters.pop(name, None)
        clone.__dict__[name] = weight
    return type(module).forward(clone, x)


def _solve_eps(module: nn.Module, name: str | None, weight: torch.Tensor | None, size: int) -> float | str:
    """eps from the answer to a row so small that nothing but eps is under the root: y = w x / sqrt(x^2 + eps)."""
    ones = full((size,), 1.0) if weight is not None else None
    with torch.no_grad():
        tiny, large = (_with(module, name, full((1, size), scale), ones) for scale in (1e-12, 1.0))
        scale = float(
            large.double().mean()
        )  # 1, or 2 where the formula adds 1 to the weight; eps moves it by parts of 1
        ratio = float(tiny.double().mean()) / scale if scale else 0.0
    if not 0 < ratio < 1:
        return "it is not an RMS norm"
    solved = (1e-12 / ratio) ** 2 * (1 - ratio**2)
    known = [float(value) for value in vars(module).values() if _is_eps(value)]
    known += [float(f"1e-{k}") for k in range(3, 13)] + [torch.finfo(d).eps for d in (torch.float32, torch.float64)]
    for eps in known:
        # `scale` holds 1/sqrt(1 + eps), so the solved value is off by a relative eps besides float32 roundoff
        if abs(eps - solved) <= (2 * eps + 10 * SAME_FORMULA) * eps:
            return eps
    return f"it is not an RMS norm, or its eps (about {solved:.2g}) is none of its attributes"


def _is_eps(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 0.1


NORMS = Recogniser(
    ("rms_norm",), is_norm_candidate, _verdict, key=lambda module: fingerprint(module, replaced=_vectors(module))
)
