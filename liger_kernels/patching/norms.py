"""Recognise an RMS norm by what it computes, and replace its ``forward`` by the kernel of the formula that matched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import rms_norm, rms_norm_ref
from liger_kernels.ops._compiling import left_to_inductor
from liger_kernels.ops.rms_norm import FORMULAS
from liger_kernels.patching import probe
from liger_kernels.patching.probe import PLAIN, randn, relative_difference
from liger_kernels.patching.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.swap import RAN, Recipe

# In 16 bits, two evaluations of one formula agree in every element but those where a last-bit difference in float32
# tips a rounding: about 2^-8 of them for each unit in the last place (float32 has 2^13 to 2^16 steps in one of theirs,
# so a fraction well below 1%). Rounding at another place changes more than a tenth.
AGREEING_FRACTION = 0.99


@dataclass(frozen=True)
class NormRecipe(Recipe):
    """A norm whose forward is ``rms_norm(x, weight, eps, formula=formula)``."""

    kernel = "rms_norm"
    formula: str
    eps: float
    weight: str | None  # the name of the weight parameter

    @property
    def detail(self) -> str:
        return f"{self.formula}, eps={self.eps:g}"

    def namespace(self, base: Any) -> dict[str, Any]:
        formula, eps, weight_name = self.formula, self.eps, self.weight

        def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = (*args, *kwargs.values())  # one tensor, by position or by whatever name upstream gave it
            if left_to_inductor("rms_norm", x):
                return base.forward(self, *args, **kwargs)
            weight = getattr(self, weight_name) if weight_name is not None else None
            if type(x) not in PLAIN or (weight is not None and not _fits(weight, x)):
                return base.forward(self, *args, **kwargs)
            self.__dict__[RAN] = True
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
    return _examined(module)[0]


def _verdict(module: nn.Module) -> Verdict:
    verdict, normalises = _examined(module)
    if isinstance(verdict, NormRecipe):
        return verdict
    return (probe.with_origin(verdict, type(module)),) if normalises or looks_like_norm(module) else ()


def _examined(module: nn.Module) -> tuple[NormRecipe | str, bool]:
    """What :func:`recognise_norm` answers, and whether a refused module turned out to be a norm of some kind."""
    shapes = _vectors(module)
    if not probe.takes_one_tensor(type(module).forward):
        names = ", ".join(parameter.name for parameter in probe.signature_of(type(module).forward)[1:])
        reason = f"its forward takes more than one tensor: {names}" if names else "its forward has no signature to read"
        return reason, False
    shape = next(iter(shapes.values()), None)
    verdict: NormRecipe | str = "it is not an RMS norm"
    kind = None
    for size in _sizes(module, shape):
        try:
            with probe.probing():
                if len(shapes) <= 1:
                    weights = {name: randn(size) for name in shapes}
                    eps = _solve_eps(module, weights, size)
                    verdict = eps if isinstance(eps, str) else _match(module, weights, size, eps)
                if isinstance(verdict, str) and (kind := _kind(module, shapes, size)) is not None:
                    verdict = kind if len(shapes) > 1 or "not an RMS norm" in verdict else verdict
            break
        except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
            verdict = f"it cannot be probed ({probe.describe(error)})"
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
    return {name: probe.true_shape(tensor) for name, tensor in tensors.items()}


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


def _match(module: nn.Module, weights: dict[str, torch.Tensor], size: int, eps: float) -> NormRecipe | str:
    rows = probe.full((8,), 1.0)
    rows[:4] = rows.new_tensor([0.0, 1e-2 * eps**0.5, eps**0.5, 1e-2])
    rows[6:] = rows.new_tensor([30.0, 3e3])
    x = randn(len(rows), size) * rows[:, None]
    departures = []
    for formula in FORMULAS if weights else FORMULAS[:1]:
        parts = (_both(module, part, weights, eps, formula) for part in (x[-5:], x[1:3]))
        if max(relative_difference(*both) for both in parts) <= probe.SAME_FORMULA:
            departure = _departure(module, x, weights, eps, formula)
            if departure is None:
                return NormRecipe(formula, eps, next(iter(weights), None))
            departures.append(departure)
    # The formula that it follows furthest says most about why it is refused.
    return max(departures)[1] if departures else "it is not an RMS norm"


def _departure(
    module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor], eps: float, formula: str
) -> tuple[int, str] | None:
    """How far a module whose float32 values match follows the formula, and where it departs; None if nowhere."""
    combinations = (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    )
    for stage, (dtype, weight_dtype) in enumerate(combinations):
        cast = {name: weight.to(weight_dtype) for name, weight in weights.items()}
        with torch.no_grad():
            got, expected = _both(module, x.clamp(-6e4, 6e4).to(dtype), cast, eps, formula)
        if got.dtype != expected.dtype:
            return stage, f"for {dtype} inputs and {weight_dtype} weights it returns {got.dtype}, not {expected.dtype}"
        if float((got == expected).double().mean()) < AGREEING_FRACTION:
            return stage, f"in {dtype} it rounds at other places than our formulas do"
    leaf = x[3:].clone().requires_grad_()
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    gradients = [
        torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [leaf, *leaves.values()])
        for y in _both(module, leaf, leaves, eps, formula)
    ]
    for got, expected in zip(*gradients, strict=True):
        # ten times the forward's bound: the gradient sums over rows and over columns
        if relative_difference(got, expected) > 10 * probe.SAME_FORMULA:
            return len(combinations), "its gradient is not that of its formula"
    return None


def _both(
    module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor], eps: float, formula: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the module makes of ``x``, and what the formula does."""
    return _run(module, x, weights), rms_norm_ref(x, next(iter(weights.values()), None), eps, formula=formula)


def _run(module: nn.Module, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    clone = probe.bare_copy(module)
    for name, weight in weights.items():
        # Not as an nn.Parameter: the probe wants gradients to flow to its own leaf.
        clone._parameters.pop(name, None)
        clone.__dict__[name] = weight
    return type(module).forward(clone, x)


def _solve_eps(module: nn.Module, weights: dict[str, torch.Tensor], size: int) -> float | str:
    """eps from the answer to a row so small that nothing but eps is under the root: y = w x / sqrt(x^2 + eps)."""
    ones = {name: probe.full((size,), 1.0) for name in weights}
    with torch.no_grad():
        tiny, large = (_run(module, probe.full((1, size), scale), ones).double().mean() for scale in (1e-12, 1.0))
    scale = float(large)  # 1, or 2 where the formula adds 1 to the weight; eps moves it by parts of 1
    ratio = float(tiny) / scale if scale else 0.0
    if not 0 < ratio < 1:
        return "it is not an RMS norm"
    solved = (1e-12 / ratio) ** 2 * (1 - ratio**2)
    known = [float(value) for value in vars(module).values() if _is_eps(value)]
    known += [float(f"1e-{k}") for k in range(3, 13)] + [torch.finfo(d).eps for d in (torch.float32, torch.float64)]
    for eps in known:
        # `scale` holds 1/sqrt(1 + eps), so the solved value is off by a relative eps besides float32 roundoff
        if abs(eps - solved) <= (2 * eps + 10 * probe.SAME_FORMULA) * eps:
            return eps
    return f"it is not an RMS norm, or its eps (about {solved:.2g}) is none of its attributes"


def _is_eps(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 0.1


NORMS = Recogniser(
    ("rms_norm",), is_norm_candidate, _verdict, key=lambda module: fingerprint(module, replaced=_vectors(module))
)
