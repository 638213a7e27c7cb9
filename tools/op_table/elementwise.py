"""Rows of the table: norms, rotary embeddings and gated units."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from liger_kernels import ops
from liger_kernels.ops._gated_rms_norm import ACTIVATIONS
from liger_kernels.ops._gated_rms_norm import FORMULAS as GATED_FORMULAS
from liger_kernels.ops._rms_norm import FORMULAS
from liger_kernels.ops._rope import PAIRINGS
from tools.op_table.row import RUNS, Op, both


def norm(name: str, dims: str, in_program: int = 3, results: str = "y", **options: Any) -> Op:
    return both(name, dims, {"in_program": in_program, "results": results}, eps=1e-3, **options)


GPT_OSS = ops.GluFormula(alpha=1.702, limit=0.7, offset=1.0)
NORMS = {
    **{f"rms_norm, {formula}": norm("rms_norm", "nk,k", formula=formula) for formula in FORMULAS},
    "rms_norm, no weight": norm("rms_norm", "nk", in_program=2),
    **{
        f"add_rms_norm, {formula}": norm("add_rms_norm", "nk,nk,k", results="y total", formula=formula)
        for formula in FORMULAS
    },
    "layer_norm": norm("layer_norm", "nk,k,k", in_program=4),
    "layer_norm, zero-centered": norm("layer_norm", "nk,k", zero_centered=True),
    "layer_norm, no weight": norm("layer_norm", "nk", in_program=2),
    **{
        f"gated_rms_norm, {activation}, {'first' if first else 'last'}, {formula}": norm(
            "gated_rms_norm", "nw,nw,w", groups=1 + first, activation=activation, gate_first=first, formula=formula
        )
        for activation, first, formula in itertools.product(ACTIVATIONS, (False, True), GATED_FORMULAS)
    },
}
_ROPE = {"results": "q k", "batched": "s"}
ROPE = {
    f"rope, {pairing}": both("rope", "nhsd,ngsd,1sr:constant,1sr:constant", _ROPE, pairing=pairing)
    for pairing in PAIRINGS
}


def packed(gate: ops.GluFormula) -> Op:
    return both("packed_glu", "nw", {"in_program": 0}, gate=gate)


UNITS = {
    "swiglu": both("swiglu", "nk,nk"),
    **{f"geglu, {a}": both("geglu", "nk,nk", approximate=a) for a in ("tanh", "none")},
    "packed_glu": packed(ops.GluFormula()),
    "packed_glu, gelu": packed(ops.GluFormula("gelu")),
    "packed_glu, gelu_tanh of the second": packed(ops.GluFormula("gelu_tanh", gate_first=False)),
    "packed_glu, gpt-oss": packed(dataclasses.replace(GPT_OSS, interleaved=True)),
    "packed_glu, gpt-oss in halves": packed(GPT_OSS),
    "packed_glu, up first": packed(ops.GluFormula(limit=0.7, interleaved=True, gate_first=False)),
}
# Of the product of a linear layer cuBLAS chooses an algorithm by the number of rows.
_LINEAR = {"promised": (RUNS,)}
LINEAR = {
    "swiglu_linear": both("swiglu_linear", "nk,nk,ok,o", _LINEAR),
    "swiglu_linear, no bias": both("swiglu_linear", "nk,nk,ok", _LINEAR),
    **{f"geglu_linear, {a}": both("geglu_linear", "nk,nk,ok,o", _LINEAR, approximate=a) for a in ("tanh", "none")},
}
# One of each kernel's ways through memory.
LAYOUTS = ["rms_norm, cast_then_scale", "add_rms_norm, cast_then_scale", "layer_norm"]
LAYOUTS += [f"gated_rms_norm, silu, {order}, cast_then_scale" for order in ("last", "first")]  # first: in groups
LAYOUTS += ["swiglu", "packed_glu", "packed_glu, gpt-oss"]
