"""One op for linear layers that share x, each with low-rank adapters. The op multiplies by the weights itself.

The layers share passes: one over x for z of all adapters, one over x for all dA, and one over dx for all g A
(projection.py). Each result is a new tensor, to which the adapters are added in place. The formulas are those of
lora_linear.py, which accepts any base and adapters with dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops.lora.lora_linear import cast_as_base, lora_linear_ref
from liger_kernels.ops.lora.projection import (
    NodeParts,
    NodeProjection,
    Projection,
    add_deltas,
    base_products,
    check_input,
    check_projection,
    gradient_of_x,
    gradients_of_parts,
    gradients_of_ranks,
    out_features,
    ranks_of_all,
    runs_as_one,
)
from liger_kernels.ops.runtime.anchor import Computed, anchor, saves_first
from liger_kernels.ops.runtime.arguments import checked, checked_op
from liger_kernels.ops.runtime.dispatch import as_values, backward_once
from liger_kernels.ops.runtime.kept import keep, kept


@checked
def adapted_linears_ref(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """:func:`adapted_linears` in plain torch: the definition of correct, for any floating-point dtype."""
    _check(x, projections)
    return _reference(x, projections)


def _reference(x: Tensor, projections: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(one_ref(x, one) for one in projections)


def one_ref(x: Tensor, projection: Any) -> Tensor:
    """One projection in plain torch."""
    w = projection.dense(projection.weight)
    return lora_linear_ref(x, lambda x: F.linear(x, w, projection.bias), projection.adapters)


class AdaptedFunction(torch.autograd.Function):
    """Saves x and z of all adapters, and keeps the projections' tensors. Returns each projection's result, or with
    ``first`` the anchor of a single projection, and z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, node: NodeParts, first: bool, *floating: Tensor) -> tuple[Tensor, ...]:
        parts = node.parts
        rows = x.reshape(-1, x.shape[-1])
        z = ranks_of_all(rows, parts)
        ctx.save_for_backward(x, z)
        keep(ctx, node.tensors)
        ctx.node = node
        ctx.set_materialize_grads(False)
        if first:
            assert z is not None
            ctx.mark_non_differentiable(z)
            return anchor((*x.shape[:-1], out_features(parts[0])), x.dtype, x.device), z
        return tuple(_results(rows, z, parts, x.shape))

    @staticmethod
    @backward_once
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_x, _node, _first, *needs = ctx.needs_input_grad
        x, z = ctx.saved_tensors  # read once, because a recomputation gives them only once
        node: NodeParts = ctx.node
        kept(ctx)  # raises if a tensor of the projections has changed
        parts, of_parts = node.parts, node.needs(needs)
        slopes = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in dys[: len(parts)]]
        if all(dy is None for dy in slopes):
            return None, None, None, *[None] * len(needs)
        g = gradients_of_ranks(slopes, parts) if needs_x or any(any(one.a) for one in of_parts) else None
        gradients = gradients_of_parts(x.reshape(-1, x.shape[-1]), slopes, z, g, parts, of_parts)
        dx = gradient_of_x(slopes, g, parts) if needs_x else None
        return None if dx is None else dx.view(x.shape), None, None, *node.of_floating(gradients)


def _results(rows: Tensor, z: Tensor | None, parts: Sequence[NodeProjection], shape: Sequence[int]) -> Sequence[Tensor]:
    ys = base_products(rows, parts)
    add_deltas(ys, z, parts)
    return [y.view(*shape[:-1], y.shape[-1]) for y in ys]


def _result(rows: Tensor, z: Tensor | None, part: NodeProjection, shape: Sequence[int]) -> Tensor:
    (y,) = _results(rows, z, [part], shape)
    return y


def _check(x: Tensor, projections: Sequence[Projection]) -> None:
    check_input(x)
    if not projections:
        raise ValueError("projections is empty; it must have one Projection at least")
    for i, one in enumerate(projections):
        check_projection(f"projections[{i}]", one, x, x.shape[-1])


@checked_op
def adapted_linears(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """The result of each of ``projections``, which share x. lora_linear.py has the formulas.

    Under autocast, x, weights and biases are cast as ``F.linear`` casts them. Adapters keep their dtype.

    Args:
        x: [..., in features]: float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        projections: each is a :class:`Projection` of in features. More than 256 ranks in total run the reference.

    Returns:
        For each projection a new tensor [..., out features] of x's dtype.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, dtype, shape or device.
    """
    _check(x, projections)
    if not runs_as_one(x, projections):
        return _reference(x, projections)
    return adapted_linears_of_checked(x, projections, saves_first())


def adapted_linears_of_checked(x: Tensor, projections: Sequence[Any], first: bool) -> tuple[Tensor, ...]:
    """:func:`adapted_linears` for checked arguments that the kernels accept.

    With ``first``, a single projection saves before its product. If that product is the last of a checkpointed block,
    it is not recomputed."""
    (x,) = as_values(cast_as_base(x))  # type: ignore[assignment]
    node = NodeParts(projections)
    if not first or len(projections) > 1 or not projections[0].adapters:
        results: tuple[Tensor, ...] = AdaptedFunction.apply(x, node, False, *node.floating)
        return results
    stand_in, z = AdaptedFunction.apply(x, node, True, *node.floating)
    (part,) = node.parts
    compute = partial(_result, x.detach().reshape(-1, x.shape[-1]), z, part, x.shape)
    return (Computed.apply(compute, stand_in),)
