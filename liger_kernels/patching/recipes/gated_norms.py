"""RMS norms with a gate: the recipe, and what one may compute. :mod:`~liger_kernels.patching.recipes.norms` finds out
which."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import gated_rms_norm, gated_rms_norm_ref
from liger_kernels.ops._gated_rms_norm import ACTIVATIONS, FORMULAS
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.swap import RAN, Recipe
from liger_kernels.patching.watch import unchanged

GATE = ""  # the gate's name among the vectors that a probe gives to a norm; no parameter is called so
OPEN = (1.2784645427610738, 40.0)  # where silu is 1, and where a sigmoid is


@dataclass(frozen=True)
class GatedNormRecipe(Recipe):
    """A norm whose forward is ``gated_rms_norm(x, gate, weight, eps, ...)``."""

    kernel = "gated_rms_norm"
    formula: str
    eps: float
    weight: str  # the name of the parameter
    activation: str
    gate_first: bool
    groups: int
    mixed: bool = True  # also where x, gate and weight have several dtypes

    @property
    def live(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.weight,)

    @property
    def detail(self) -> str:
        order = f"norm of x {self.activation}(gate)" if self.gate_first else f"norm, then {self.activation}(gate)"
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{order}, {self.formula}{groups}, eps={self.eps:g}{one_dtype(self.mixed)}"

    @property
    def options(self) -> dict[str, Any]:
        """As the op takes them."""
        return {name: getattr(self, name) for name in ("formula", "activation", "gate_first", "groups")}

    def reference(self, x: torch.Tensor, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        return gated_rms_norm_ref(x, gate_of(x, vectors[GATE]), vectors[self.weight], self.eps, **self.options)

    def namespace(self, base: Any) -> dict[str, Any]:
        names = probe.parameter_names(base.forward)
        eps, weight_name, mixed, options = self.eps, self.weight, self.mixed, self.options

        def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            given = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
            if len(given) != 2:  # some are called without a gate
                return base.forward(self, *args, **kwargs)
            x, gate = given
            weight = probe.parameter_of(self, weight_name)
            if (
                type(x) not in PLAIN
                or type(gate) not in PLAIN
                or gate.shape != x.shape
                or left_to_inductor("gated_rms_norm", x)
                or not unchanged(self)
                or x.dtype not in PROBED
                or gate.dtype not in PROBED
                or not (mixed or gate.dtype == x.dtype)
                or not probe.fits(weight, x, mixed)
            ):
                return base.forward(self, *args, **kwargs)
            self.__dict__[RAN] = True
            return gated_rms_norm(x, gate, weight, eps, **options)

        return {"forward": forward}


def one_dtype(mixed: bool) -> str:
    """What the formula of a norm ends with, for the report."""
    return "" if mixed else ", where all has one dtype"


def gate_of(x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """The gate of a probe: ``vector`` [hidden] in another size for each row of ``x``, in the first row as it is."""
    rows = torch.linspace(1, -2, x.numel() // x.shape[-1], dtype=vector.dtype)
    return rows.view(*x.shape[:-1], 1) * vector


def gated_candidates(weight: str, size: int, own: Iterable[int], eps: float) -> Iterator[GatedNormRecipe]:
    """What a norm of ``size`` with a gate may compute.

    ``own`` are numbers that the norm holds: groups, or columns of a group.
    """
    divisors = {n for n in own if 0 < n <= size and size % n == 0}
    for groups in sorted({1} | divisors | {size // n for n in divisors}):
        for activation, gate_first, formula in itertools.product(ACTIVATIONS, (False, True), FORMULAS):
            yield GatedNormRecipe(formula, eps, weight, activation, gate_first, groups)
