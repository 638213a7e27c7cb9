"""Rows of the table: linear layers with adapters, and experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from liger_kernels import ops
from tools.op_table.row import RUNS, by_name, through

Tensor = torch.Tensor


def _linear(weight: Tensor) -> Any:
    return lambda x: F.linear(x, weight.resolve_neg())


def adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, *, op: Any) -> Any:
    """A linear layer with one adapter."""
    return op(x, _linear(weight), [ops.LoraAdapter(a, b, 0.5, bias)])


def alone(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, *, op: Any) -> Any:
    """A linear layer with one adapter, and nobody else who has its x."""
    (result,) = op(x, [ops.Projection(weight, None, [ops.LoraAdapter(a, b, 0.5, bias)])])
    return result


def several(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *, op: Any) -> Any:
    """Two that share their x."""
    return op(x, [ops.Projection(weight, None, [ops.LoraAdapter(a, b, scale)]) for scale in (2.0, 0.5)])


def decomposed(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor, norm: Tensor, *, op: Any) -> Any:
    """A linear layer with a DoRA adapter."""
    return op(x, _linear(weight), ops.LoraAdapter(a, b, 2.0), magnitude, norm + 1.0)


def norm_of(weight: Tensor, b: Tensor, a: Tensor, *, op: Any) -> Any:
    return op(weight, ops.LoraAdapter(a, b, 2.0))


def mlp(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *, op: Any) -> Any:
    """A gated MLP whose first two projections are one. The last one is its transpose."""
    one = ops.Projection(weight, None, [ops.LoraAdapter(a, b, 2.0)])
    return op(x, one, one, ops.Projection(weight.t(), None, [ops.LoraAdapter(b.t(), a.t(), 2.0)]))


_FIELDS: dict[str, Any] = {"promised": (RUNS,), "in_program": 0}
_EXPERTS = {"hidden": "nk", "ids": "nc:experts", "weights": "nc", "gate_up": "etk", "down": "ekm"}
_ADAPTER = "nk,ok:small,ak:adapter,oa:adapter"
LORA = {
    **{
        name: through(adapted, "lora_linear", dims, {**_FIELDS, "kernels": 2})
        for name, dims in {"lora_linear": "nk,ok,ak,oa,o", "lora_linear, no bias": "nk,ok,ak,oa"}.items()
    },
    "adapted_linears": through(alone, "adapted_linears", "nk,ok,ak,oa,o", {**_FIELDS, "kernels": 2}),
}
# With options, or of dtypes, that tests of these ops judge themselves.
MORE = {
    "lora_linear, float32 adapter": through(adapted, "lora_linear", _ADAPTER, _FIELDS),
    "adapted_linears, two": through(several, "adapted_linears", _ADAPTER, {**_FIELDS, "results": "y z"}),
    "dora_linear": through(decomposed, "dora_linear", f"{_ADAPTER},o:float32,o:share", _FIELDS),
    "dora_norm": through(
        norm_of, "dora_norm", "nk,na:adapter,ak:adapter", {**_FIELDS, "results": "norm", "in_program": None}
    ),
    "gated_mlp": through(mlp, "gated_mlp", _ADAPTER, _FIELDS),
    "experts": by_name("experts", _EXPERTS, {**_FIELDS, "in_program": None}),
    "experts, bias": by_name(
        "experts",
        _EXPERTS | {"gate_up_bias": "et", "down_bias": "ek"},
        {**_FIELDS, "promised": None, "in_program": None},
    ),
}
