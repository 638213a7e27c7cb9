"""What a case of the benchmarks is, and how its inputs are made.

Bytes are those of a perfect kernel: each input read once, each output written once, in forward and in backward (a loss:
in one pass for both). ``flops`` counts floating-point operations, roughly where no matrix product is among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tools.op_table import FIRST

Tensors = tuple[torch.Tensor, ...]

# Of the labels, as in instruction tuning, where the prompts' are ignored.
SHARE = 0.3
# Of a loss; float64 logits of all rows would not fit. The other ops are compared over all rows.
CHECKED_ROWS = 384


@dataclass(frozen=True)
class Site:
    """Where inputs are made, and in which dtype."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype).requires_grad_()

    def targets(self, rows: int, classes: int, masked: bool = False) -> torch.Tensor:
        targets = torch.randint(classes, (rows,), device=self.device)
        if masked:
            targets[torch.randperm(rows, device=self.device)[counted(targets) :]] = -100
        return targets

    def row_weights(self, rows: int) -> Tensors:
        """The weight of each row and their sum, as a loss of packed rows takes them."""
        weight = torch.rand(rows, device=self.device)
        return weight, weight.sum()


@dataclass(frozen=True)
class BenchmarkCase:
    """One op at one shape.

    ``inputs(rows)`` makes leaf tensors; ``ours``, ``eager`` and ``truth`` take them and return a tensor or several.
    ``eager`` is what a model runs without kernels, ``truth`` is right in float64; without one, ``eager`` is. Peers are
    found by ``formula``: cases that differ only in how ours goes about it share one, and its results.
    """

    formula: str
    shape: str
    rows: int
    inputs: Callable[[int], Tensors] = field(repr=False)
    ours: Callable[..., Any] = field(repr=False)
    eager: Callable[..., Any] = field(repr=False)
    bytes: int
    flops: int
    truth: Callable[..., Any] | None = field(default=None, repr=False)
    memory: str | None = None
    checked_rows: int | None = None

    @property
    def op(self) -> str:
        return f"{self.formula} ({self.memory})" if self.memory else self.formula

    @property
    def name(self) -> str:
        """What is asked for on the command line."""
        return self.formula.split()[0]


def pair(name: str, **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The op of that name in the table of ops, and its reference, with ``options``."""
    ours, reference = (partial(f, **options) for f in FIRST[name].public)
    return ours, reference


def counted(targets: torch.Tensor) -> int:
    """How many of masked ``targets`` count. A trainer asks the device for it at the beginning of the forward."""
    return round(SHARE * len(targets))
