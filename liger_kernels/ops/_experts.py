"""The experts of a mixture, packed in two parameters: each token goes through some of them (Shazeer, arXiv:1701.06538).

    experts(x)_t = sum over k of w_tk * down_e(unit(gate_up_e(x_t)))        e = ids_tk, unit = packed_glu

gate_up_e and down_e are linear layers, with biases or without.

Rows, one for each token and choice, are sorted by expert, so that all experts are two grouped products of torch's. A
token's result is the sum of its rows times the router's weights w, in float32, in the order of its choices. Saved are
the tokens and the first product, nothing else that has a row for each choice: the backward gathers the rows of the
tokens again, makes the unit again from the first product, over its own gradient, and has no need of the second product,

    dL/dw_tk = <dL/dy_t down_e, unit> + <dL/dy_t, bias of down_e>        dL/d(unit) = w_tk * (dL/dy_t down_e)

because that is linear. The gradient of down multiplies the rows of dL/dy by units that have w in them. Under
checkpointing all of that is saved before the second product, which is not computed again (runtime/anchor.py).

Low-rank adapters add to each product what is in lora/experts.py, over it. Of theirs, z of the first product is saved;
that of the second one comes of the unit that the backward makes, with w in it, as the gradient of down does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from liger_kernels.ops._grouped import grouped_outer_product, grouped_product
from liger_kernels.ops._packed_glu import SWIGLU, GluFormula, GroupBias, gradients, packed_glu_ref, product
from liger_kernels.ops._row_blocks import as_canonical, multiply_rows
from liger_kernels.ops.lora.experts import (
    ExpertsAdapter,
    Scales,
    Stacked,
    adapted_product_ref,
    check_adapters,
    halves,
    runs_kernel,
    stacked,
)
from liger_kernels.ops.lora.grouped import Groups
from liger_kernels.ops.runtime.anchor import Computed, anchor, saves_first
from liger_kernels.ops.runtime.arguments import checked, checked_op
from liger_kernels.ops.runtime.dispatch import as_values, backward_once, launch, tl, triton, use_triton
from liger_kernels.ops.runtime.tiling import as_rows, cdiv, choice, next_power_of_2, tile


@checked
def experts_ref(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: GluFormula | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_adapters: Sequence[ExpertsAdapter] = (),
    down_adapters: Sequence[ExpertsAdapter] = (),
) -> torch.Tensor:
    """:func:`experts` in plain torch, one expert after the other: the definition of correct, for any float dtype."""
    parameters = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    _check(hidden, ids, weights, parameters)
    check_adapters("gate_up_adapters", gate_up_adapters, "gate_up", gate_up)
    check_adapters("down_adapters", down_adapters, "down", down)
    choices = ids.shape[1]
    rows = hidden.repeat_interleave(choices, dim=0)
    results = rows.new_zeros(rows.shape)
    for expert in ids.unique().tolist():
        if not 0 <= expert < len(gate_up):
            continue
        chosen = (ids.reshape(-1) == expert).nonzero()[:, 0]
        gate_and_up = adapted_product_ref(rows[chosen], gate_up, gate_up_adapters, expert)
        if gate_up_bias is not None:
            gate_and_up = gate_and_up + gate_up_bias[expert]
        result = adapted_product_ref(packed_glu_ref(gate_and_up, gate), down, down_adapters, expert)
        results = results.index_copy(0, chosen, result if down_bias is None else result + down_bias[expert])
    weighted = results.view(*ids.shape, hidden.shape[1]) * weights[:, :, None]  # of no tokens, too
    return weighted.sum(1).to(hidden.dtype)


# fmt: off
@triton.jit
def _experts_gather_kernel(
    x_ptr, x_stride, order_ptr,    # [tokens, hidden], [rows]: which token and choice, n_choices * token + choice
    rows_ptr, place_ptr,           # [rows, hidden], [rows]: the order's inverse, or None
    n_rows, n_choices, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    source = tl.load(order_ptr + row, mask=inside, other=0)
    if place_ptr is not None:
        tl.store(place_ptr + source, row.to(tl.int32), mask=inside)
    token = source // n_choices
    for start in range(0, hidden, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        mask = inside[:, None] & (col < hidden)
        x = tl.load(x_ptr + token[:, None] * x_stride + col, mask=mask, other=0.0)
        tl.store(rows_ptr + row[:, None] * hidden + col, x, mask=mask)


@triton.jit
def _experts_sum_kernel(
    rows_ptr, place_ptr, ends_ptr,    # [rows, hidden], [tokens, CHOICES]: where its rows are, [experts]
    weight_ptr, ids_ptr, bias_ptr,    # [tokens, CHOICES] or None, [tokens, CHOICES], [experts, hidden] or None
    y_ptr,                            # [tokens, hidden]
    n_tokens, n_experts, hidden,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """A row behind the last end is one of no expert, and not defined."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    end = tl.load(ends_ptr + n_experts - 1)
    for start in range(0, hidden, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for number in tl.static_range(CHOICES):
            place = tl.load(place_ptr + token * CHOICES + number, mask=token < n_tokens, other=0)
            mask = ((token < n_tokens) & (place < end))[:, None] & (col < hidden)
            x = tl.load(rows_ptr + place.to(tl.int64)[:, None] * hidden + col, mask=mask, other=0.0)
            x = x.to(tl.float32)
            if bias_ptr is not None:
                expert = tl.load(ids_ptr + token * CHOICES + number, mask=token < n_tokens, other=0).to(tl.int64)
                x += tl.load(bias_ptr + expert[:, None] * hidden + col, mask=mask, other=0.0).to(tl.float32)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + token * CHOICES + number, mask=token < n_tokens, other=0.0)
                x *= weight.to(tl.float32)[:, None]
            total += x
        mask = (token < n_tokens)[:, None] & (col < hidden)
        tl.store(y_ptr + token[:, None] * hidden + col, total.to(y_ptr.dtype.element_ty), mask=mask)
# fmt: on


@choice("experts")
def _launch_shape(n_rows: int, hidden: int) -> dict[str, int]:
    """A row in a program, in blocks of up to 2048 columns: 16 elements a lane."""
    block = min(next_power_of_2(hidden), 2048)
    rows, block = tile(n_rows, hidden, max(1, 1024 // block), block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": 4}


class _Routing:
    """Rows sorted by expert: for each its expert and its token and choice, where the experts' rows end, and (once rows
    have been gathered) where the row of each token and choice is."""

    def __init__(self, ids: torch.Tensor, n_experts: int):
        self.choices = ids.shape[1]
        # A number that is no expert's, and may not fit into the keys, becomes one behind all experts.
        numbers = ids.long().clamp(-1, n_experts)
        if n_experts < 255:  # sorting keys of 8 bits is one pass over them
            self.ids = numbers.to(torch.uint8).contiguous()  # -1 is 255 there
        else:
            self.ids = numbers.remainder(n_experts + 1).to(torch.int32).contiguous()
        self.expert, self.order = torch.sort(self.ids.view(-1), stable=True)
        numbers = torch.arange(n_experts, dtype=self.ids.dtype, device=ids.device)
        self.ends = torch.searchsorted(self.expert, numbers, right=True, out_int32=True)
        self.groups = Groups(self.expert, self.ends)
        self.place = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)

    def gather(self, x: torch.Tensor, first: bool = False) -> torch.Tensor:
        """``x`` [tokens, hidden] as rows; the first time, :attr:`place` is written."""
        n_rows, hidden = len(self.order), x.shape[1]
        rows = x.new_empty(n_rows, hidden)
        shape = _launch_shape(n_rows, hidden)
        place = self.place if first else None
        sizes, grid = (n_rows, self.choices, hidden), (cdiv(n_rows, shape["ROWS"]),)
        launch(_experts_gather_kernel, grid, x.device, *as_rows(x), self.order, rows, place, *sizes, **shape)
        return rows

    def sum(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum of each token's rows plus their expert's ``bias`` [experts, hidden], times ``weights``
        [tokens, choices]: [tokens, hidden]."""
        n_rows, hidden = rows.shape
        n_tokens = n_rows // self.choices
        y = rows.new_empty(n_tokens, hidden)
        shape = _launch_shape(n_tokens, hidden)
        sizes, grid = (n_tokens, len(self.ends), hidden), (cdiv(n_tokens, shape["ROWS"]),)
        # fmt: off
        launch(
            _experts_sum_kernel, grid, rows.device,
            rows, self.place, self.ends, weights, self.ids, bias, y, *sizes, CHOICES=self.choices, **shape,
        )
        # fmt: on
        return y


def _packed(t: torch.Tensor | None) -> torch.Tensor | None:
    """Without gaps, as the kernels read it."""
    return t if t is None else t.contiguous()


def _weight_gradient(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """left^T right of each expert, laid out in memory as its parameter ``like`` is, so that nobody copies it."""
    if like.stride(1) < like.stride(2):
        return grouped_outer_product(right, left, ends).transpose(1, 2)
    return grouped_outer_product(left, right, ends)


def _bias_gradient(rows: torch.Tensor, factor: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    """The sum of each expert's rows times their ``factor``: a product with eight equal columns, 16 bytes of them."""
    column = rows.new_ones(len(rows), 1) if factor is None else factor.to(rows.dtype)[:, None]
    return grouped_outer_product(rows, column.expand(-1, 8).contiguous(), ends)[..., 0]


class ExpertsFunction(torch.autograd.Function):
    """Saves tokens, weights, parameters and the first product; the gradients are new tensors. With a list ``first`` it
    returns an anchor, and the list gets the routing and the first product.

    ``of_adapters``: A of each adapter of gate_up, B of each, A of each of down, B of each; ``scales`` those of both."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        gate: GluFormula,
        first: list[Any] | None,
        scales: Scales,
        invariant: bool,
        *of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        routing = _Routing(ids, len(gate_up))
        up_adapters, down_adapters = stacked(of_adapters, scales)
        rows = routing.gather(hidden, first=True)
        gate_and_up = grouped_product(rows, gate_up.transpose(1, 2), routing.ends, invariant)
        z = None
        if up_adapters is not None:
            z = up_adapters.inner(rows, routing.groups)
            up_adapters.add_(gate_and_up, z, routing.groups)
        del rows
        ctx.save_for_backward(hidden, weights, gate_up, down, gate_up_bias, down_bias, gate_and_up, z, *of_adapters)
        ctx.routing, ctx.gate, ctx.scales, ctx.invariant = routing, gate, scales, invariant
        if first is not None:
            first += routing, gate_and_up
            return anchor(hidden.shape, hidden.dtype, hidden.device)
        of_down = weights, down, gate_up_bias, down_bias, gate, down_adapters
        return _second_product(*of_down, invariant, routing, gate_and_up)

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weights, gate_up, down, gate_up_bias, down_bias, gate_and_up, z, *of_adapters = ctx.saved_tensors
        needs_hidden, _, needs_weights, *needs_parameters = ctx.needs_input_grad[:7]
        needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias = needs_parameters
        up_adapters, down_adapters = stacked(of_adapters, ctx.scales)
        needs_up, needs_lower = halves(ctx.needs_input_grad[11:], ctx.scales)
        routing, ends, groups = ctx.routing, ctx.routing.ends, ctx.routing.groups
        dhidden = dweights = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        of_up: Sequence[torch.Tensor | None] = [None] * len(needs_up)
        of_lower: Sequence[torch.Tensor | None] = [None] * len(needs_lower)
        rows = routing.gather(dy)
        unit = grouped_product(rows, down, ends, ctx.invariant)  # its gradient; it becomes the unit times its weight
        if down_adapters is not None:
            g = down_adapters.inner_gradient(rows, groups)
            down_adapters.add_input_gradient_(unit, g, groups)
        scale = weights.reshape(-1)[routing.order]
        # fmt: off
        dgate_and_up, dscale = gradients(
            unit, gate_and_up, ctx.gate, GroupBias(_packed(gate_up_bias), routing.expert), scale,
            (needs_hidden or needs_gate_up or needs_gate_up_bias or any(needs_up), needs_weights),
            keep_product=needs_down or any(needs_lower),
        )
        # fmt: on
        if needs_down:
            ddown = _weight_gradient(rows, unit, ends, down)
        if down_adapters is not None:
            of_lower = down_adapters.gradients(needs_lower, groups, unit, None, rows, g)
        if needs_down_bias:
            ddown_bias = _bias_gradient(rows, scale, ends)
        del rows, unit
        if dscale is not None:
            dscale.masked_fill_(routing.expert >= len(ends), 0.0)
            dweights = torch.empty_like(dscale).scatter_(0, routing.order, dscale).view_as(weights)
            if down_bias is not None:  # of every expert, which is little beside the experts themselves
                of_bias = dy.new_empty(len(dy), len(down_bias))
                multiply_rows(of_bias, as_canonical(dy), down_bias.t(), ctx.invariant)
                of_bias = F.pad(of_bias, (0, 1))
                dweights += of_bias.gather(1, routing.ids.long().clamp(max=len(ends)))
            dweights = dweights.to(weights.dtype)
        if dgate_and_up is not None:
            if needs_gate_up:
                dgate_up = _weight_gradient(dgate_and_up, routing.gather(hidden), ends, gate_up)
            if needs_gate_up_bias:
                dgate_up_bias = _bias_gradient(dgate_and_up, None, ends)
            if up_adapters is not None and (needs_hidden or any(needs_up)):
                g, tokens = up_adapters.inner_gradient(dgate_and_up, groups), (routing.order, routing.choices)
                of_up = up_adapters.gradients(needs_up, groups, hidden, z, dgate_and_up, g, *tokens)
            if needs_hidden:
                rows = grouped_product(dgate_and_up, gate_up, ends, ctx.invariant)
                if up_adapters is not None:
                    up_adapters.add_input_gradient_(rows, g, groups)
                dhidden = routing.sum(rows)
        of_parameters = dgate_up, ddown, dgate_up_bias, ddown_bias
        return dhidden, None, dweights, *of_parameters, None, None, None, None, *of_up, *of_lower


def _second_product(
    weights: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate: GluFormula,
    adapters: Stacked | None,
    invariant: bool,
    routing: _Routing,
    gate_and_up: torch.Tensor,
) -> torch.Tensor:
    """What comes of the first one: the unit, its product, and the sum for each token. ``adapters``: those of down."""
    unit = product(gate_and_up, gate, GroupBias(_packed(gate_up_bias), routing.expert))
    rows = grouped_product(unit, down.transpose(1, 2), routing.ends, invariant)
    if adapters is not None:
        adapters.add_(rows, adapters.inner(unit, routing.groups), routing.groups)
    return routing.sum(rows, weights.contiguous(), _packed(down_bias))


def _check(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, parameters: dict[str, torch.Tensor | None]
) -> None:
    given = {name: t for name, t in parameters.items() if t is not None}
    for name, t in {"hidden": hidden, "weights": weights, **given}.items():
        if not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}; it must be floating point")
        if t.device != hidden.device:
            raise ValueError(f"{name} is on {t.device}, hidden on {hidden.device}; move one to the other")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids is {ids.dtype}; it must be the numbers of experts, of an integer dtype")
    if ids.device != hidden.device:
        raise ValueError(f"ids is on {ids.device}, hidden on {hidden.device}; move one to the other")
    if any(t.dtype != hidden.dtype for t in given.values()):
        dtypes = ", ".join(f"{name} {t.dtype}" for name, t in given.items())
        raise TypeError(f"hidden is {hidden.dtype}, {dtypes}; all must have one dtype")
    if hidden.dim() != 2 or ids.dim() != 2 or ids.shape != weights.shape or len(ids) != len(hidden) or not ids.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)}; they "
            "must be [tokens, hidden], [tokens, choices] and [tokens, choices]"
        )
    gate_up = given["gate_up"]
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != hidden.shape[1]:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}; it must be [experts, 2 features, {hidden.shape[1]}], as hidden "
            "has columns"
        )
    n_experts, wide, columns = gate_up.shape
    shapes = {
        "gate_up_bias": (n_experts, wide),
        "down": (n_experts, columns, wide // 2),
        "down_bias": (n_experts, columns),
    }
    for name, shape in shapes.items():
        if name in given and tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}; with this gate_up it must be {shape}")


@checked_op
def experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: GluFormula | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_adapters: Sequence[ExpertsAdapter] = (),
    down_adapters: Sequence[ExpertsAdapter] = (),
    invariant: bool = False,
) -> torch.Tensor:
    """The weighted sum of what the experts of each token make of it; the formula stands at the top of this file.

    The host does not wait for the device in bfloat16 on a GPU of compute capability 9.0 or newer, where torch has
    grouped products. Elsewhere the products are a loop over the experts.

    Args:
        hidden: [tokens, hidden], float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        ids: [tokens, choices], any integer dtype: the experts of each token. A number below 0, or of ``experts`` or
            above, contributes nothing: so choices are marked that go to another rank, or nowhere. A token may have the
            same expert twice.
        weights: [tokens, choices], any floating dtype: the router's.
        gate_up: [experts, 2 features, hidden] of hidden's dtype. A transposed view of a parameter that is stored the
            other way round costs nothing, and its gradient is laid out as the parameter is.
        down: [experts, hidden, features] of hidden's dtype, likewise.
        gate: the unit between the two products; by default silu(first half) * second half.
        gate_up_bias, down_bias: [experts, 2 features] and [experts, hidden] of hidden's dtype, or None.
        gate_up_adapters, down_adapters: :class:`ExpertsAdapter` of each weight, which add to its product. They keep
            their own dtype; of 16-bit hidden states, float32 ones lose 2^-24. More than 256 ranks together of one
            weight, or float64 ones, run the reference.
        invariant: the bits of a token's result and of the gradients of ``hidden`` and ``weights`` do not depend on the
            other tokens: products go in blocks of 1024 rows. Not with adapters, and not in the reference.

    Returns:
        A new contiguous tensor [tokens, hidden] of hidden's dtype.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape or device, and for ``invariant`` with adapters.
    """
    if invariant and (gate_up_adapters or down_adapters):
        raise ValueError("invariant is True and adapters were given, which do not go together: leave one of them out")
    formula = SWIGLU if gate is None else gate
    runs = use_triton(hidden, eager_only=True) and weights.dtype != torch.float64 and hidden.numel() and gate_up.numel()
    biases = gate_up_bias, down_bias
    of_adapters: tuple[Any, ...] = ()
    scales: Scales = (), ()
    if gate_up_adapters or down_adapters:
        check_adapters("gate_up_adapters", gate_up_adapters, "gate_up", gate_up)
        check_adapters("down_adapters", down_adapters, "down", down)
        runs = runs and runs_kernel(gate_up_adapters) and runs_kernel(down_adapters)
        both = gate_up_adapters, down_adapters
        of_adapters = as_values(*[t for of_one in both for t in (*[x.a for x in of_one], *[x.b for x in of_one])])
        scales = tuple([x.scale for x in gate_up_adapters]), tuple([x.scale for x in down_adapters])
    if not runs:
        return experts_ref(hidden, ids, weights, gate_up, down, formula, *biases, gate_up_adapters, down_adapters)
    parameters = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    _check(hidden, ids, weights, parameters)
    first: list[Any] | None = [] if saves_first() else None
    given = hidden, ids, weights, gate_up, down, *biases, formula, first, scales, invariant
    out = ExpertsFunction.apply(*given, *of_adapters)
    if first is None:
        return out
    _, lower = stacked(as_values(*[t.detach() for t in of_adapters]), scales)
    return Computed.apply(partial(_second_product, weights, down, *biases, formula, lower, invariant, *first), out)
