"""A gated MLP as one op, whose projections may have low-rank adapters.

    h = act(gate(x)) * up(x)        y = down(h)

Each projection is a :class:`Projection`. The op multiplies by the weights itself, and owns what lies between:

- The unit's kernel adds the adapters of gate and up where it reads the products, so that no pass over memory is spent
  on them alone. The activation is rounded as :mod:`liger_kernels.ops._glu` rounds it.
- Saved are x, the two products of the weights, and the ranks z of the adapters, but neither h nor a sum. The backward's
  kernel makes h once more, adds the gradient that h has through down's adapters, and writes the gradients of gate and
  up over their products: three tensors of the inner size exist there, and not six. Where the graph is kept for another
  backward, they are new.
- Gate and up share x, and with it the products of their adapters (projection.py).

Under checkpointing, everything is saved before the last product, which is not computed again (runtime/anchor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops._glu import ACTIVATIONS, _activate
from liger_kernels.ops.lora.adapted_linears import one_ref
from liger_kernels.ops.lora.adapter import delta_of
from liger_kernels.ops.lora.lora_linear import cast_as_base
from liger_kernels.ops.lora.products import plus_delta, ranks_of_program, remembered, some_of_w, tiles_of_program
from liger_kernels.ops.lora.projection import (
    Kinds,
    NodeProjection,
    Projection,
    add_delta,
    as_it_is,
    base_product,
    check_input,
    check_projection,
    columns_of,
    flat,
    gradient_of_x,
    gradients_of_parts,
    gradients_of_ranks,
    needs_of,
    out_features,
    parts_of,
    ranks_of_all,
    runs_as_one,
)
from liger_kernels.ops.runtime.anchor import Computed, anchor, saves_first
from liger_kernels.ops.runtime.arguments import checked, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import as_values, backward_once, launch, tl, triton
from liger_kernels.ops.runtime.kept import keep, kept
from liger_kernels.ops.runtime.tiling import cdiv, choice, tile

# Whether the graph is kept for another backward. Where torch does not say, it may be.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
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


# fmt: off
@triton.jit
def _lora_glu_fwd_kernel(
    gate_ptr, up_ptr, h_ptr,                                # [rows, columns]; of the weights alone
    gate_z_ptr, gate_z_stride,                              # [rows, ranks] float32, or None as all of no adapter
    gate_w_ptr, gate_rank_stride, gate_col_stride,          # [ranks, columns]
    gate_bias_ptr, gate_ranks, gate_scale,
    up_z_ptr, up_z_stride, up_w_ptr, up_rank_stride, up_col_stride, up_bias_ptr, up_ranks, up_scale,
    n_rows, n_cols, col_blocks, rows_of_program,
    ACTIVATION: tl.constexpr, EXACT: tl.constexpr, GATE_RANKS: tl.constexpr, UP_RANKS: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first = (program // col_blocks).to(tl.int64) * rows_of_program
    col = (program % col_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    gate_w = some_of_w(
        gate_w_ptr, None, None, 0, 0, gate_rank_stride, gate_col_stride, 0, col, n_cols, gate_ranks, PART
    )
    up_w = some_of_w(
        up_w_ptr, None, None, 0, 0, up_rank_stride, up_col_stride, 0, col, n_cols, up_ranks, PART
    )
    for start in range(0, rows_of_program, ROWS):
        row = first + start + tl.arange(0, ROWS)[:, None]
        mask = (row < n_rows) & (col < n_cols)
        gate = tl.load(gate_ptr + row * n_cols + col, mask=mask, other=0.0)
        up = tl.load(up_ptr + row * n_cols + col, mask=mask, other=0.0)
        gate = plus_delta(
            gate, gate_z_ptr, gate_z_stride, gate_w_ptr, None, None, 0, 0, gate_rank_stride, gate_col_stride,
            gate_bias_ptr, gate_w, row, col, n_rows, n_cols, gate_ranks, gate_scale, EXACT, GATE_RANKS, PART,
        )
        up = plus_delta(
            up, up_z_ptr, up_z_stride, up_w_ptr, None, None, 0, 0, up_rank_stride, up_col_stride,
            up_bias_ptr, up_w, row, col, n_rows, n_cols, up_ranks, up_scale, EXACT, UP_RANKS, PART,
        )
        act, _ = _activate(gate, ACTIVATION)
        h = act.to(gate_ptr.dtype.element_ty).to(tl.float32) * up
        tl.store(h_ptr + row * n_cols + col, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _lora_glu_bwd_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,           # [rows, columns]; gate and up of the weights alone
    g_ptr, g_stride, a_ptr, a_rank_stride, a_col_stride, down_ranks,    # [rows, ranks], [ranks, columns]
    gate_z_ptr, gate_z_stride, gate_w_ptr, gate_rank_stride, gate_col_stride, gate_bias_ptr, gate_ranks, gate_scale,
    up_z_ptr, up_z_stride, up_w_ptr, up_rank_stride, up_col_stride, up_bias_ptr, up_ranks, up_scale,
    n_rows, n_cols, col_blocks, rows_of_program,
    ACTIVATION: tl.constexpr, PRODUCT: tl.constexpr, EXACT: tl.constexpr, DOWN_RANKS: tl.constexpr,
    GATE_RANKS: tl.constexpr, UP_RANKS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """``dh_ptr`` has the gradient through down's weight, and with ``PRODUCT`` becomes h. Each gradient may lie where
    its product lies."""
    program = tl.program_id(0)
    first = (program // col_blocks).to(tl.int64) * rows_of_program
    col = (program % col_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    gate_w = some_of_w(
        gate_w_ptr, None, None, 0, 0, gate_rank_stride, gate_col_stride, 0, col, n_cols, gate_ranks, PART
    )
    up_w = some_of_w(
        up_w_ptr, None, None, 0, 0, up_rank_stride, up_col_stride, 0, col, n_cols, up_ranks, PART
    )
    a = some_of_w(a_ptr, None, None, 0, 0, a_rank_stride, a_col_stride, 0, col, n_cols, down_ranks, PART)
    for start in range(0, rows_of_program, ROWS):
        row = first + start + tl.arange(0, ROWS)[:, None]
        mask = (row < n_rows) & (col < n_cols)
        at = row * n_cols + col
        dh = tl.load(dh_ptr + at, mask=mask, other=0.0)
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
        up = tl.load(up_ptr + at, mask=mask, other=0.0)
        dh = plus_delta(
            dh, g_ptr, g_stride, a_ptr, None, None, 0, 0, a_rank_stride, a_col_stride, None, a,
            row, col, n_rows, n_cols, down_ranks, 1.0, EXACT, DOWN_RANKS, PART,
        )
        gate = plus_delta(
            gate, gate_z_ptr, gate_z_stride, gate_w_ptr, None, None, 0, 0, gate_rank_stride, gate_col_stride,
            gate_bias_ptr, gate_w, row, col, n_rows, n_cols, gate_ranks, gate_scale, EXACT, GATE_RANKS, PART,
        )
        up = plus_delta(
            up, up_z_ptr, up_z_stride, up_w_ptr, None, None, 0, 0, up_rank_stride, up_col_stride,
            up_bias_ptr, up_w, row, col, n_rows, n_cols, up_ranks, up_scale, EXACT, UP_RANKS, PART,
        )
        act, slope = _activate(gate, ACTIVATION)
        act = act.to(gate_ptr.dtype.element_ty).to(tl.float32)
        tl.store(dup_ptr + at, (dh * act).to(dup_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_ptr + at, (dh * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        if PRODUCT:
            tl.store(dh_ptr + at, (act * up).to(dh_ptr.dtype.element_ty), mask=mask)
# fmt: on


@choice("gated_mlp")
@remembered
def _unit_shape(
    n_rows: int, n_cols: int, widest: int, backward: bool, device: torch.device
) -> tuple[int, dict[str, int]]:
    """Tiles of a program, and launch choices of a kernel that holds several tiles of float32. 4096 x 14336, bfloat16,
    on an H100, with eight tiles and with one: 16 ranks forward 150 and 158 us, backward 279 and 312; 64 ranks forward
    290 and 337, backward 498 and 570."""
    rows, block = tile(n_rows, n_cols, 32 if backward and widest <= 32 else 64, 64)
    shape = {"PART": min(widest, 32), "ROWS": rows, "BLOCK": block, "num_warps": 4}
    tiles, stages = tiles_of_program(n_rows, n_cols, widest, 3 if backward else 2, shape, 8, device)
    return tiles, {**shape, "num_stages": stages}


def _delta_arguments(z: Tensor | None, part: NodeProjection) -> tuple[tuple[Any, ...], int]:
    """What a kernel takes of the adapters of ``part``, and the ranks of its program."""
    if z is None:
        return (None, 0, None, 0, 0, None, 0, 1.0), 0
    w, bias, scale = delta_of(part.b, part.biases, part.scales)
    bias = None if bias is None else bias.contiguous()
    (out_stride, rank_stride), n_ranks = w.stride(), w.shape[1]
    return (z, z.stride(0), w, rank_stride, out_stride, bias, n_ranks, float(scale)), ranks_of_program(n_ranks)


def _unit(gate: Tensor, up: Tensor, z: Tensor | None, parts: Sequence[NodeProjection], activation: str) -> Tensor:
    h = torch.empty_like(gate)
    n_rows, n_cols = gate.shape
    gate_z, up_z = columns_of(z, parts)
    of_gate, gate_ranks = _delta_arguments(gate_z, parts[0])
    of_up, up_ranks = _delta_arguments(up_z, parts[1])
    tiles, options = _unit_shape(n_rows, n_cols, max(16, gate_ranks, up_ranks), False, gate.device)
    blocks, rows_of_program = cdiv(n_cols, options["BLOCK"]), tiles * options["ROWS"]
    launch(
        _lora_glu_fwd_kernel,
        (cdiv(n_rows, rows_of_program) * blocks,),
        gate.device,
        gate,
        up,
        h,
        *of_gate,
        *of_up,
        n_rows,
        n_cols,
        blocks,
        rows_of_program,
        ACTIVATION=activation,
        EXACT=gate.dtype is not torch.bfloat16,
        GATE_RANKS=gate_ranks,
        UP_RANKS=up_ranks,
        **options,
    )
    return h


def _unit_gradients(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    z: Tensor | None,
    g: Tensor | None,
    parts: Sequence[NodeProjection],
    activation: str,
    product: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; with ``product``, ``dh`` becomes h."""
    dgate, dup = (torch.empty_like(gate), torch.empty_like(up)) if _keeps_graph() else (gate, up)
    n_rows, n_cols = gate.shape
    of_parts, down = parts[:2], parts[2]
    gate_z, up_z = columns_of(z, of_parts)
    of_gate, gate_ranks = _delta_arguments(gate_z, parts[0])
    of_up, up_ranks = _delta_arguments(up_z, parts[1])
    of_down: tuple[Any, ...] = None, 0, None, 0, 0, 0
    down_ranks = 0
    if g is not None:
        a = down.a[0] if len(down.a) == 1 else torch.cat([one.float() for one in down.a])
        of_down, down_ranks = (g, g.stride(0), a, *a.stride(), a.shape[0]), ranks_of_program(a.shape[0])
    tiles, options = _unit_shape(n_rows, n_cols, max(16, gate_ranks, up_ranks, down_ranks), True, gate.device)
    blocks, rows_of_program = cdiv(n_cols, options["BLOCK"]), tiles * options["ROWS"]
    launch(
        _lora_glu_bwd_kernel,
        (cdiv(n_rows, rows_of_program) * blocks,),
        gate.device,
        dh,
        gate,
        up,
        dgate,
        dup,
        *of_down,
        *of_gate,
        *of_up,
        n_rows,
        n_cols,
        blocks,
        rows_of_program,
        ACTIVATION=activation,
        PRODUCT=product,
        EXACT=gate.dtype is not torch.bfloat16,
        DOWN_RANKS=down_ranks,
        GATE_RANKS=gate_ranks,
        UP_RANKS=up_ranks,
        **options,
    )
    return dgate, dup


def _down(h: Tensor, z: Tensor | None, part: NodeProjection, shape: Sequence[int]) -> Tensor:
    return add_delta(base_product(h, part), z, part).view(shape)


class GatedMLPFunction(torch.autograd.Function):
    """Saves x, the products of gate's and up's weights and z of all adapters, and keeps the projections' own tensors.
    Returns y, or with ``first`` its anchor and what y is computed of."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: str, kinds: Kinds, first: bool, *tensors: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        parts = parts_of(kinds, tensors)
        *inner, down = parts
        rows = x.reshape(-1, x.shape[-1])
        z = ranks_of_all(rows, inner)
        gate, up = (base_product(rows, part) for part in inner)
        h = _unit(gate, up, z, inner, activation)
        down_z = ranks_of_all(h, [down])
        ctx.save_for_backward(x, gate, up, z, down_z)
        keep(ctx, tensors)
        ctx.activation, ctx.kinds = activation, kinds
        ctx.set_materialize_grads(False)  # zeros of h's size otherwise, which nobody reads
        shape = *x.shape[:-1], out_features(down)
        if not first:
            return _down(h, down_z, down, shape)
        values = (h,) if down_z is None else (h, down_z)
        ctx.mark_non_differentiable(*values)
        return anchor(shape, x.dtype, x.device), *values

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needs_x, _activation, _kinds, _first, *needs = ctx.needs_input_grad
        if dy is None:  # nobody asked for it
            return None, None, None, None, *[None] * len(needs)
        x, gate, up, z, down_z = ctx.saved_tensors  # once in a pass: a recomputation gives them once
        *inner, down = parts_of(ctx.kinds, kept(ctx))
        *inner_needs, down_needs = needs_of(ctx.kinds, needs)
        rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        before = needs_x or any(one.any for one in inner_needs)
        g = gradients_of_ranks([dy], [down]) if before or any(down_needs.a) else None
        product = down_needs.weight or any(down_needs.a)
        dx: Tensor | None = None
        inner_gradients: list[Tensor | None] = [None] * sum([2 + 3 * len(part.a) for part in inner])
        if before:
            h = gradient_of_x([dy], None, [down])
            assert h is not None
            slopes = _unit_gradients(h, gate, up, z, g, (*inner, down), ctx.activation, product)
        elif product:
            h = _unit(gate, up, z, inner, ctx.activation)
        else:
            h = gate  # not read
        down_gradients = gradients_of_parts(h, [dy], down_z, g, [down], [down_needs])
        if before:
            del h
            inner_g = None
            if needs_x or any(needed for one in inner_needs for needed in one.a):
                inner_g = gradients_of_ranks(slopes, inner)
            inner_gradients = gradients_of_parts(rows, slopes, z, inner_g, inner, inner_needs)
            if needs_x:
                dx = gradient_of_x(slopes, inner_g, inner)
        return None if dx is None else dx.view(x.shape), None, None, None, *inner_gradients, *down_gradients


def _check(x: Tensor, gate: Projection, up: Projection, down: Projection) -> None:
    check_input(x)
    check_projection("gate", gate, x, x.shape[-1])
    check_projection("up", up, x, x.shape[-1])
    inner = gate.shape[0]
    if up.shape[0] != inner and None not in (inner, up.shape[0]):
        raise ValueError(f"gate has {inner} out features, up {up.shape[0]}; they must have as many")
    check_projection("down", down, x, inner)


@checked_op
def gated_mlp(
    x: Tensor, gate: Projection, up: Projection, down: Projection, *, activation: Activation = "silu"
) -> Tensor:
    """down(act(gate(x)) * up(x)); what it saves and what it computes again stands at the top of this file.

    Under autocast, x is cast as ``F.linear`` casts it, and weights and biases with it. Adapters keep their own dtype.

    Args:
        x: [..., in features]: float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        gate, up: :class:`Projection` of in features to inner features.
        down: :class:`Projection` of inner features to out features. More than 256 ranks of gate and up together, or of
            down, run the reference.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        A new tensor [..., out features] of x's dtype.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, dtype, shape or device.
    """
    _check(x, gate, up, down)
    if not runs_as_one(x, (gate, up)) or not runs_as_one(x, (down,)):
        return _reference(x, gate, up, down, activation)
    return gated_mlp_of_checked(x, gate, up, down, activation)


def gated_mlp_of_checked(x: Tensor, gate: Any, up: Any, down: Any, activation: str) -> Tensor:
    """:func:`gated_mlp` of arguments that fit, and that kernels take."""
    (x,) = as_values(cast_as_base(x))  # type: ignore[assignment]
    kinds, tensors = flat((gate, up, down))
    if not saves_first() or not (down.adapters or down.dense is as_it_is):  # nobody knows how long y is
        y: Tensor = GatedMLPFunction.apply(x, activation, kinds, False, *tensors)
        return y
    stand_in, *values = GatedMLPFunction.apply(x, activation, kinds, True, *tensors)
    *_, part = parts_of(kinds, tensors)
    h, z = values[0], values[1] if len(values) > 1 else None
    return Computed.apply(partial(_down, h, z, part, stand_in.shape), stand_in)
