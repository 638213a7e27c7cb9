"""Recognise an RMS norm by what it computes, and replace its ``forward`` by the kernel of the formula that matched."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import rms_norm, rms_norm_ref
from liger_kernels.patching.probe import SAME_FORMULA, bare_copy, describe, relative_difference, takes_one_tensor
from liger_kernels.patching.swap import Recipe

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
            return rms_norm(x, weight, eps, formula=formula)

        return {"forward": forward}


def is_norm_candidate(module: nn.Module) -> bool:
    """A leaf with at most one parameter, a vector. Cheap: nothing is run."""
    parameters = module._parameters
    if module._modules or len(parameters) > 1 or type(module).forward is nn.Module.forward:
        return False
    if not parameters or next(iter(parameters.values())) is None:  # without a weight, only an eps makes it a norm
        return any(_is_eps(value) for value in vars(module).values()) and "Dropout" not in type(module).__name__
    return next(iter(parameters.values())).dim() == 1  # type: ignore[union-attr]


def recognise_norm(module: nn.Module) -> NormRecipe | str:
    """The recipe for ``module``, or the reason why it is none of our RMS norms.

    A copy of the module with random weights runs on rows of very different sizes (zero and tiny ones, where eps
    decides, among them), in float32, in both 16-bit types and with float32 weights under 16-bit inputs; values, result
    dtypes and gradients must be those of one formula.
    """
    if not takes_one_tensor(type(module).forward):
        return "its forward takes more than one tensor"
    name, parameter = next(iter(module._parameters.items()), (None, None))
    if parameter is None:
        name = None
    size = parameter.numel() if parameter is not None else 48
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about mixed dtypes, which only the probe mixes
            torch.manual_seed(0)
            weight = torch.randn(size) if name is not None else None
            eps = _solve_eps(module, name, weight, size)
            if isinstance(eps, str):
                return eps
            return _match(module, name, weight, size, eps)
    except Exception as error:  # whatever a stranger's forward raises on the probe means that it is not ours
        return f"it cannot be probed ({describe(error)})"


def _match(module: nn.Module, name: str | None, weight: torch.Tensor | None, size: int, eps: float) -> NormRecipe | str:
    rows = torch.tensor([0.0, 1e-2 * eps**0.5, eps**0.5, 1e-2, 1.0, 1.0, 30.0, 3e3])
    x = torch.randn(len(rows), size) * rows[:, None]
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
    for function in (lambda x, w: _run(module, name, x, w), lambda x, w: rms_norm_ref(x, w, eps, formula=formula)):
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
        return _run(module, name, x, weight), rms_norm_ref(x, weight, eps, formula=formula)


def _run(module: nn.Module, name: str | None, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if name is None or weight is None:
        return type(module).forward(bare_copy(module), x)
    clone = bare_copy(module)
    # Not as an nn.Parameter: the probe wants gradients to flow to its own leaf.
    del clone._parameters[name]
    clone.__dict__[name] = weight
    return type(module).forward(clone, x)


def _solve_eps(module: nn.Module, name: str | None, weight: torch.Tensor | None, size: int) -> float | str:
    """eps from the answer to a row so small that nothing but eps is under the root: y = w x / sqrt(x^2 + eps)."""
    ones = torch.ones(size) if weight is not None else None
    with torch.no_grad():
        tiny, large = (_run(module, name, torch.full((1, size), scale), ones) for scale in (1e-12, 1.0))
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
