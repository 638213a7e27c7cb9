"""A gated MLP as one op, whose projections may have low-rank adapters.

    h = act(gate(x)) * up(x)        y = down(h)

Each projection is a :class:`Projection`. The op multiplies by the weights itself and owns all tensors in between:

- The unit's kernel adds the adapters of gate and up while it reads the products. So the adapters need no separate pass
  over memory (adapted_glu.py).
- The op saves x, the two products of the weights, and z of the adapters, but neither h nor a sum. The backward's kernel
  computes h again and adds the gradient of h through down's adapters. It writes the gradients of gate and up over their
  products, so only three tensors of the inner size exist. If the graph is retained, the gradients are new tensors.
- Gate and up share x, and so the products of their adapters (projection.py).

With ``recompute``, the op saves only x. The backward computes the products of gate and up again, one tile of tokens
after another. Then only one tile's inner tensors exist at a time.

Under checkpointing, everything is saved before the last product, so the last product is not recomputed
(runtime/anchor.py). With ``recompute``, x is saved before the first product, and the layer's recomputation stops there.
Gate and up are then recomputed only once, in their tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops._glu import ACTIVATIONS
from liger_kernels.ops.lora.adapted_glu import glu_gradients, glu_of_adapted
from liger_kernels.ops.lora.adapted_linears import one_ref
from liger_kernels.ops.lora.lora_linear import cast_as_base
from liger_kernels.ops.lora.projection import (
    GradientSums,
    Needs,
    NodeParts,
    NodeProjection,
    Projection,
    add_deltas,
    as_it_is,
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
from liger_kernels.ops.runtime.arguments import checked, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import as_values, backward_once
from liger_kernels.ops.runtime.kept import keep, keeps_graph, kept
from liger_kernels.ops.runtime.tiling import choice

_UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
Activation = Annotated[str, one_of(ACTIVATIONS)]


@checked
def gated_mlp_ref(
    x: Tensor, gate: Projection, up: Projection, down: Projection, *, activation: Activation = "silu"
) -> Tensor:
    """:func:`gated_mlp` in plain torch: the definition of correct, for any floating-point dtype."""
    _check(x, gate, up, down)
    return _reference(x, gate, up, down, activation)


def _reference(x: Tensor, gate: Any, up: Any, down: Any, activation: str) -> Tensor:
    return one_ref(_UNITS[activation](one_ref(x, gate)) * one_ref(x, up), down)


class Inner(NamedTuple):
    """The tensors of a forward that the backward reads: the products of gate's and up's weights [tokens, inner
    features], and z of the adapters. z of down may be computed later."""

    gate: Tensor
    up: Tensor
    z: Tensor | None
    down_z: Tensor | None = None


def inner_of(rows: Tensor, inner: Sequence[NodeProjection]) -> Inner:
    """The inner tensors of ``rows`` [tokens, in features]."""
    z = ranks_of_all(rows, inner)
    gate, up = base_products(rows, inner)
    return Inner(gate, up, z)


def unit_of(found: Inner, inner: Sequence[NodeProjection], activation: str) -> Tensor:
    """h = act(gate) * up, a new tensor."""
    return glu_of_adapted(found.gate, found.up, found.z, inner, activation)


def down_of(h: Tensor, z: Tensor | None, part: NodeProjection, shape: Sequence[int]) -> Tensor:
    """down(h), of ``shape``."""
    (y,) = base_products(h, [part])
    add_deltas([y], z, [part])
    return y.view(shape)


def gradients_of_mlp(
    rows: Tensor,
    dy: Tensor,
    found: Inner,
    parts: Sequence[NodeProjection],
    needs: Sequence[Needs],
    needs_x: bool,
    activation: str,
    in_place: bool,
    sums: GradientSums | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of x and of all tensors of ``parts``. With ``in_place``, the gradients of gate and up overwrite
    ``found``. With ``sums``, the tensors' gradients are added to ``sums``."""
    *inner, down = parts
    *inner_needs, down_needs = needs
    n_inner = sum([2 + 3 * len(part.a) for part in inner])
    before = needs_x or any(one.any for one in inner_needs)
    g = gradients_of_ranks([dy], [down]) if before or any(down_needs.a) else None
    later_z = found.down_z is None and any(down_needs.b)
    product = down_needs.weight or any(down_needs.a) or later_z
    dx: Tensor | None = None
    inner_gradients: list[Tensor | None] = [None] * n_inner
    if before:
        h = gradient_of_x([dy], None, [down])
        assert h is not None
        slopes = glu_gradients(h, found.gate, found.up, found.z, g, parts, activation, product, in_place)
    elif product:
        h = unit_of(found, inner, activation)
    else:
        h = found.gate  # not read
    down_z = ranks_of_all(h, [down]) if later_z else found.down_z
    down_gradients = gradients_of_parts(h, [dy], down_z, g, [down], [down_needs], sums, n_inner)
    if before:
        del h
        inner_g = None
        if needs_x or any(needed for one in inner_needs for needed in one.a):
            inner_g = gradients_of_ranks(slopes, inner)
        inner_gradients = gradients_of_parts(rows, slopes, found.z, inner_g, inner, inner_needs, sums)
        if needs_x:
            dx = gradient_of_x(slopes, inner_g, inner)
    return dx, [*inner_gradients, *down_gradients]


class GatedMLPFunction(torch.autograd.Function):
    """Saves x, the products of gate's and up's weights and z of all adapters, and keeps the projections' tensors.
    Returns y, or with ``first`` an anchor of y and the tensors that y is computed from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: str, node: NodeParts, first: bool, *floating: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        *inner, down = node.parts
        found = inner_of(x.reshape(-1, x.shape[-1]), inner)
        h = unit_of(found, inner, activation)
        down_z = ranks_of_all(h, [down])
        ctx.save_for_backward(x, found.gate, found.up, found.z, down_z)
        keep(ctx, node.tensors)
        ctx.activation, ctx.node = activation, node
        ctx.set_materialize_grads(False)  # else autograd would make zeros of h's size, which nobody reads
        shape = *x.shape[:-1], out_features(down)
        if not first:
            return down_of(h, down_z, down, shape)
        values = (h,) if down_z is None else (h, down_z)
        ctx.mark_non_differentiable(*values)
        return anchor(shape, x.dtype, x.device), *values

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needs_x, _activation, _node, _first, *needs = ctx.needs_input_grad
        if dy is None:  # no gradient is wanted
            return None, None, None, None, *[None] * len(needs)
        x, *found = ctx.saved_tensors  # read once, because a recomputation gives them only once
        node: NodeParts = ctx.node
        kept(ctx)  # raises if a tensor of the projections has changed
        dx, gradients = gradients_of_mlp(
            x.reshape(-1, x.shape[-1]),
            dy.reshape(-1, dy.shape[-1]),
            Inner(*found),
            node.parts,
            node.needs(needs),
            needs_x,
            ctx.activation,
            in_place=not keeps_graph(),
        )
        return None if dx is None else dx.view(x.shape), None, None, None, *node.of_floating(gradients)


def _check(x: Tensor, gate: Projection, up: Projection, down: Projection) -> None:
    check_input(x)
    check_projection("gate", gate, x, x.shape[-1])
    check_projection("up", up, x, x.shape[-1])
    inner = gate.shape[0]
    if up.shape[0] != inner and None not in (inner, up.shape[0]):
        raise ValueError(f"gate has {inner} out features, up {up.shape[0]}; they must have as many")
    check_projection("down", down, x, inner)


MOST_TOKENS = 8192  # of a tile


@choice("recomputed_mlp")
def tokens_of_tile(tokens: int) -> int:
    """The tile depends on the shape alone, because free memory differs from rank to rank."""
    return MOST_TOKENS if tokens >= 4 * MOST_TOKENS else MOST_TOKENS // 2


def _in_tiles(x: Tensor, parts: Sequence[NodeProjection], activation: str, shape: Sequence[int]) -> Tensor:
    """y, computed so that only one tile's inner tensors exist at a time."""
    *inner, down = parts
    rows = x.reshape(-1, x.shape[-1])
    tile = tokens_of_tile(len(rows))

    def one(rows: Tensor) -> Tensor:
        h = unit_of(inner_of(rows, inner), inner, activation)
        return down_of(h, ranks_of_all(h, [down]), down, (len(rows), shape[-1]))

    if len(rows) <= tile:
        return one(rows).view(shape)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    for some, of_y in zip(rows.split(tile), y.view(-1, shape[-1]).split(tile), strict=True):
        of_y.copy_(one(some))
    return y


class RecomputedMLPFunction(torch.autograd.Function):
    """Saves only x, and keeps the projections' tensors. Forward and backward compute one tile of tokens after
    another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, node: NodeParts, first: bool, *floating: Tensor) -> Tensor:
        parts = node.parts
        ctx.save_for_backward(x)
        keep(ctx, node.tensors)
        ctx.activation, ctx.node = activation, node
        ctx.set_materialize_grads(False)
        shape = *x.shape[:-1], out_features(parts[-1])
        return anchor(shape, x.dtype, x.device) if first else _in_tiles(x, parts, activation, shape)

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_x, _activation, _node, _first, *needs = ctx.needs_input_grad
        if dy is None:
            return None, None, None, None, *[None] * len(needs)
        (x,) = ctx.saved_tensors
        node: NodeParts = ctx.node
        kept(ctx)  # raises if a tensor of the projections has changed
        parts, of_parts = node.parts, node.needs(needs)
        rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        tile = tokens_of_tile(len(rows))
        sums = GradientSums(node.tensors) if len(rows) > tile else None
        dx = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if needs_x and sums is not None else None
        gradients: Sequence[Tensor | None] = ()
        for start in range(0, len(rows), tile):
            some = slice(start, start + tile)
            own_dx, gradients = gradients_of_mlp(
                rows[some],
                dy[some],
                inner_of(rows[some], parts[:2]),
                parts,
                of_parts,
                needs_x,
                ctx.activation,
                in_place=True,
                sums=sums,
            )
            if dx is None:
                dx = own_dx
            elif own_dx is not None:
                dx[some] = own_dx
        gradients = gradients if sums is None else sums.rounded()
        return None if dx is None else dx.view(x.shape), None, None, None, *node.of_floating(gradients)


@checked_op
def gated_mlp(
    x: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    activation: Activation = "silu",
    recompute: bool = False,
) -> Tensor:
    """down(act(gate(x)) * up(x)). The top of this file says what is saved and what is recomputed.

    Under autocast, x, weights and biases are cast as ``F.linear`` casts them. Adapters keep their dtype.

    Args:
        x: [..., in features]: float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        gate, up: :class:`Projection` of in features to inner features.
        down: :class:`Projection` of inner features to out features. More than 256 ranks of gate and up in total, or of
            down, run the reference.
        activation: "silu", "gelu" or "gelu_tanh".
        recompute: save only x, and compute the products of gate and up again in the backward. Both directions use tiles
            of 8192 tokens, or of 4096 below 32768 tokens. Gradients of weights are summed over tiles in float32. Under
            non-reentrant checkpointing this costs no additional product, because the layer's recomputation stops before
            the MLP.

    Returns:
        A new tensor [..., out features] of x's dtype.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, dtype, shape or device.
    """
    _check(x, gate, up, down)
    if not runs_as_one(x, (gate, up)) or not runs_as_one(x, (down,)):
        return _reference(x, gate, up, down, activation)
    return gated_mlp_of_checked(x, gate, up, down, activation, recompute)


def gated_mlp_of_checked(x: Tensor, gate: Any, up: Any, down: Any, activation: str, recompute: bool = False) -> Tensor:
    """:func:`gated_mlp` for checked arguments that the kernels accept."""
    (x,) = as_values(cast_as_base(x))  # type: ignore[assignment]
    node = NodeParts((gate, up, down))
    first = saves_first() and bool(down.adapters or down.dense is as_it_is)  # else the length of y is unknown
    if recompute:
        y: Tensor = RecomputedMLPFunction.apply(x, activation, node, first, *node.floating)
        if not first:
            return y
        compute = partial(_in_tiles, x, node.parts, activation, y.shape)
        return Computed.apply(compute, y)
    if not first:
        y = GatedMLPFunction.apply(x, activation, node, False, *node.floating)
        return y
    stand_in, *values = GatedMLPFunction.apply(x, activation, node, True, *node.floating)
    *_, part = node.parts
    h, z = values[0], values[1] if len(values) > 1 else None
    return Computed.apply(partial(down_of, h, z, part, stand_in.shape), stand_in)
