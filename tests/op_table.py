"""One table of ops: op, reference, inputs by rows, columns, dtype and device, and their variants. Tests filter it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from liger_kernels import ops
from liger_kernels.ops._gated_rms_norm import ACTIVATIONS
from liger_kernels.ops._gated_rms_norm import FORMULAS as GATED_FORMULAS
from liger_kernels.ops._rms_norm import FORMULAS
from liger_kernels.ops._rope import PAIRINGS
from tests.ops_checks import randn

# A letter is a dimension: n rows, k columns or w, twice as many; of rope h and g heads, s tokens, d and r columns; o
# features of a linear layer's result.
SIZES = {"h": 2, "g": 1, "s": 3, "d": 8, "r": 6, "o": 9, "1": 1}


class Op(NamedTuple):
    """``dims`` are those of the leaves, as einsum writes them. Of the last ``constants`` nobody wants a gradient. A
    forward launches each of ``kernels`` kernels once."""

    op: partial[Any]
    reference: partial[Any]
    dims: str
    constants: int = 0
    kernels: int = 1

    def shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        sizes = {**SIZES, "n": rows, "k": columns, "w": 2 * columns}
        return [tuple(sizes[letter] for letter in leaf) for leaf in self.dims.split(",")]

    def leaves(
        self, rows: int, dtype: torch.dtype, device: torch.device, needs: tuple[bool, ...] = (), columns: int = 12
    ) -> list[torch.Tensor]:
        shapes, needs = self.shapes(rows, columns), needs or self.differentiable()
        return [randn(*s, dtype=dtype, device=device, grad=needed) for s, needed in zip(shapes, needs, strict=True)]

    def inputs(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        return self.leaves(rows, dtype, device, columns=columns)

    def named(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The leaves by the names of the op's parameters."""
        names = [name for name in inspect.signature(self.op.func).parameters if name not in self.op.keywords]
        return dict(zip(names, leaves, strict=False))

    def differentiable(self) -> tuple[bool, ...]:
        n = len(self.dims.split(","))
        return tuple(i < n - self.constants for i in range(n))

    def has_rows(self) -> list[bool]:
        return [leaf.startswith("n") for leaf in self.dims.split(",")]


def both(name: str, dims: str, constants: int = 0, **options: Any) -> Op:
    return Op(*(partial(getattr(ops, f"{name}{end}"), **options) for end in ("", "_ref")), dims, constants)


def norm(name: str, dims: str, **options: Any) -> Op:
    return both(name, dims, eps=1e-3, **options)


GPT_OSS = ops.GluFormula(alpha=1.702, limit=0.7, offset=1.0)
NORMS = {
    **{f"rms_norm, {formula}": norm("rms_norm", "nk,k", formula=formula) for formula in FORMULAS},
    "rms_norm, no weight": norm("rms_norm", "nk"),
    **{f"add_rms_norm, {formula}": norm("add_rms_norm", "nk,nk,k", formula=formula) for formula in FORMULAS},
    "layer_norm": norm("layer_norm", "nk,k,k"),
    "layer_norm, zero-centered": norm("layer_norm", "nk,k", zero_centered=True),
    "layer_norm, no weight": norm("layer_norm", "nk"),
    **{
        f"gated_rms_norm, {activation}, {'first' if first else 'last'}, {formula}": norm(
            "gated_rms_norm", "nw,nw,w", groups=1 + first, activation=activation, gate_first=first, formula=formula
        )
        for activation, first, formula in itertools.product(ACTIVATIONS, (False, True), GATED_FORMULAS)
    },
}
UNITS = {
    "swiglu": both("swiglu", "nk,nk"),
    **{f"geglu, {a}": both("geglu", "nk,nk", approximate=a) for a in ("tanh", "none")},
    "packed_glu": both("packed_glu", "nw", gate=ops.GluFormula()),
    "packed_glu, gelu": both("packed_glu", "nw", gate=ops.GluFormula("gelu")),
    "packed_glu, gelu_tanh of the second": both("packed_glu", "nw", gate=ops.GluFormula("gelu_tanh", gate_first=False)),
    "packed_glu, gpt-oss": both("packed_glu", "nw", gate=dataclasses.replace(GPT_OSS, interleaved=True)),
    "packed_glu, gpt-oss in halves": both("packed_glu", "nw", gate=GPT_OSS),
    "packed_glu, up first": both(
        "packed_glu", "nw", gate=ops.GluFormula(limit=0.7, interleaved=True, gate_first=False)
    ),
}
LINEAR = {
    "swiglu_linear": both("swiglu_linear", "nk,nk,ok,o"),
    "swiglu_linear, no bias": both("swiglu_linear", "nk,nk,ok"),
    **{f"geglu_linear, {a}": both("geglu_linear", "nk,nk,ok,o", approximate=a) for a in ("tanh", "none")},
}


def adapted(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    op: Any,
) -> torch.Tensor:
    """A linear layer with one adapter."""
    result: torch.Tensor = op(x, lambda x: F.linear(x, weight.resolve_neg()), [ops.LoraAdapter(a, b, 0.5, bias)])
    return result


def alone(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    op: Any,
) -> torch.Tensor:
    """A linear layer with one adapter, and nobody else who has its x."""
    (result,) = op(x, [ops.Projection(weight, None, [ops.LoraAdapter(a, b, 0.5, bias)])])
    return result


LORA = {
    **{
        name: Op(*(partial(adapted, op=op) for op in (ops.lora_linear, ops.lora_linear_ref)), dims, kernels=2)
        for name, dims in {"lora_linear": "nk,ok,rk,or,o", "lora_linear, no bias": "nk,ok,rk,or"}.items()
    },
    "adapted_linears": Op(
        *(partial(alone, op=op) for op in (ops.adapted_linears, ops.adapted_linears_ref)), "nk,ok,rk,or,o", kernels=2
    ),
}
SUMS = LINEAR | LORA  # an element of whose results is a sum over the columns
ROPE = {f"rope, {pairing}": both("rope", "nhsd,ngsd,1sr,1sr", 2, pairing=pairing) for pairing in PAIRINGS}
OPS = NORMS | ROPE | UNITS | LINEAR | LORA
# One of each kernel's ways through memory.
LAYOUTS = ["rms_norm, cast_then_scale", "add_rms_norm, cast_then_scale", "layer_norm"]
LAYOUTS += [f"gated_rms_norm, silu, {order}, cast_then_scale" for order in ("last", "first")]  # first: in groups
LAYOUTS += ["swiglu", "packed_glu", "packed_glu, gpt-oss"]
