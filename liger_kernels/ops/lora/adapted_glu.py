"""The gated unit of projections with adapters, act(gate) * up. The kernel adds the adapters' results while it reads
gate and up.

The forward reads the products of gate's and up's weights [rows, columns] and z [rows, ranks]. The backward also adds
the gradient of h through down's adapters. The activation is rounded as in :mod:`liger_kernels.ops._glu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernels.ops._glu import _activate
from liger_kernels.ops.lora.adapter import delta_of
from liger_kernels.ops.lora.products import plus_delta, ranks_of_program, remembered, some_of_w, tiles_of_program
from liger_kernels.ops.lora.projection import NodeProjection, columns_of
from liger_kernels.ops.runtime.dispatch import launch, tl, triton
from liger_kernels.ops.runtime.tiling import cdiv, choice, tile


# fmt: off
@triton.jit
def _lora_glu_fwd_kernel(
    gate_ptr, up_ptr, h_ptr,                                # [rows, columns]; of the weights alone
    gate_z_ptr, gate_z_stride,                              # [rows, ranks] float32; None without adapters
    gate_w_ptr, gate_rank_stride, gate_col_stride,          # [ranks, columns]
    gate_bias_ptr, gate_ranks, gate_scale,
    up_z_ptr, up_z_stride, up_w_ptr, up_rank_stride, up_col_stride, up_bias_ptr, up_ranks, up_scale,
    n_rows, n_cols, col_blocks, rows_of_program,
    ACTIVATION: tl.constexpr, GATE_RANKS: tl.constexpr, UP_RANKS: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    EXACT: tl.constexpr = gate_ptr.dtype.element_ty != tl.bfloat16
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
    ACTIVATION: tl.constexpr, PRODUCT: tl.constexpr, DOWN_RANKS: tl.constexpr,
    GATE_RANKS: tl.constexpr, UP_RANKS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """``dh_ptr`` has the gradient of h through down's weight; with ``PRODUCT`` the kernel overwrites it with h. The
    gradients of gate and up may overwrite gate and up."""
    EXACT: tl.constexpr = gate_ptr.dtype.element_ty != tl.bfloat16
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
    """Tiles of a program, and launch choices. The kernel holds several tiles of float32. Eight tiles are faster than
    one in bfloat16 on an H100 (4096 x 14336): the backward with 64 ranks takes 87% of the time."""
    rows, block = tile(n_rows, n_cols, 32 if backward and widest <= 32 else 64, 64)
    shape = {"PART": min(widest, 32), "ROWS": rows, "BLOCK": block, "num_warps": 4}
    tiles, stages = tiles_of_program(n_rows, n_cols, widest, 3 if backward else 2, shape, 8, device)
    return tiles, {**shape, "num_stages": stages}


def _delta_arguments(z: Tensor | None, part: NodeProjection) -> tuple[tuple[Any, ...], int]:
    """The kernel's arguments for the adapters of ``part``, and the ranks of a program."""
    if z is None:
        return (None, 0, None, 0, 0, None, 0, 1.0), 0
    w, bias, scale = delta_of(part.b, part.biases, part.scales)
    bias = None if bias is None else bias.contiguous()
    (out_stride, rank_stride), n_ranks = w.stride(), w.shape[1]
    return (z, z.stride(0), w, rank_stride, out_stride, bias, n_ranks, float(scale)), ranks_of_program(n_ranks)


def glu_of_adapted(
    gate: Tensor, up: Tensor, z: Tensor | None, parts: Sequence[NodeProjection], activation: str
) -> Tensor:
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
        GATE_RANKS=gate_ranks,
        UP_RANKS=up_ranks,
        **options,
    )
    return h


def glu_gradients(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    z: Tensor | None,
    g: Tensor | None,
    parts: Sequence[NodeProjection],
    activation: str,
    product: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up. With ``in_place`` they overwrite gate and up; with ``product``, h overwrites
    ``dh``."""
    dgate, dup = (gate, up) if in_place else (torch.empty_like(gate), torch.empty_like(up))
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
        DOWN_RANKS=down_ranks,
        GATE_RANKS=gate_ranks,
        UP_RANKS=up_ranks,
        **options,
    )
    return dgate, dup
