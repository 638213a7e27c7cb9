r"""A linear head with low-rank adapters: the adapters' part of the logits of a chunk, and its gradients.

    logits = hidden @ W^T + bias + z @ B^T,    z = [s_1 hidden A_1^T, s_2 hidden A_2^T, ...],    B = [B_1, B_2, ...]

A separate autograd node computes z and the gradient of every A. So a schedule of the head only handles z and B. It
writes z B^T into the logits' buffer and adds the product of hidden and W to it. From the logits' gradient G the
schedule computes

    dz += G B        dB += G^T z

Both sums are float32. In a product with 16-bit logits, a float32 number is split into three numbers of the logits'
dtype; all parts are columns of one product. Two parts are enough if the result is rounded to that dtype. float16 has
too little range for the parts. So each rank is first divided by a power of two, and its largest magnitude is then at
most 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._split_sum import add_product
from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.columns import columns_product
from liger_kernels.ops.lora.products import MOST_RANKS, rows_product
from liger_kernels.ops.lora.products import add_product as plus_product
from liger_kernels.ops.runtime.dispatch import as_values, backward_once


class LowRank(NamedTuple):
    """The factors of the adapters' part of the logits, z B^T."""

    z: Tensor  # [tokens, ranks], float32
    b: Tensor  # [vocab, ranks]


def low_rank(
    hidden: Tensor, adapters: Sequence[LoraAdapter], take: Callable[[Tensor], Tensor], invariant: bool = False
) -> tuple[Tensor, LowRank]:
    """Return ``hidden`` [tokens, hidden size] and the :class:`LowRank` of a head's ``adapters``. The caller must go on
    with the returned ``hidden``. A bias becomes one more rank, and the z of that rank is the scale. ``take`` selects
    the rows of ``hidden`` from an adapter's dropped input. With ``invariant``, the bits of a row do not depend on the
    other rows."""
    zs, bs = [], []
    passes = hidden.requires_grad and torch.is_grad_enabled()
    for one in adapters:
        dropped = None if one.dropped is None else take(one.dropped)
        for a, b in _of_few_ranks(one):
            if dropped is not None:
                (z,) = RanksFunction.apply(*as_values(dropped, a), one.scale, False, invariant)
            elif passes:
                z, hidden = RanksFunction.apply(*as_values(hidden, a), one.scale, True, invariant)
            else:
                (z,) = RanksFunction.apply(*as_values(hidden, a), one.scale, False, invariant)
            zs.append(z)
            bs.append(b)
        if one.bias is not None:
            zs.append(torch.full((len(hidden), 1), one.scale, dtype=torch.float32, device=hidden.device))
            bs.append(one.bias[:, None])
    return hidden, LowRank(zs[0], bs[0]) if len(zs) == 1 else LowRank(torch.cat(zs, 1), torch.cat(bs, 1))


def _of_few_ranks(adapter: LoraAdapter) -> Sequence[tuple[Tensor, Tensor]]:
    """A and B, split into parts with few enough ranks for one program."""
    if len(adapter.a) <= MOST_RANKS:
        return [(adapter.a, adapter.b)]
    return [*zip(adapter.a.split(MOST_RANKS), adapter.b.split(MOST_RANKS, dim=1), strict=True)]


class RanksFunction(torch.autograd.Function):
    """z = scale * x A^T, float32 [tokens, ranks], and with ``passes`` also x itself, as the head's input. The backward
    then adds the adapter's gradient to the head's gradient of x in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, scale: float, passes: bool, invariant: bool) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, a)
        ctx.scale, ctx.invariant = scale, invariant
        ctx.set_materialize_grads(False)
        z = rows_product(x, [a], scale, invariant=invariant)
        return (z, x) if passes else (z,)

    @staticmethod
    @backward_once
    def backward(ctx: Any, dz: Tensor | None, dx: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needs_x, needs_a, *_ = ctx.needs_input_grad
        if dz is None:  # only tensors between this node and the result were differentiated
            return dx, None, None, None, None
        x, a = ctx.saved_tensors
        da = columns_product(x, dz, a.shape, a.dtype, ctx.scale, by_rank=True) if needs_a else None
        dx = plus_product(dx, dz, [a], None, ctx.scale, x.shape, x.dtype, invariant=ctx.invariant) if needs_x else None
        return dx, da, None, None, None


class ThinProducts:
    """The products with z and B of one pass over the logits of a head."""

    def __init__(self, low: LowRank, dtype: torch.dtype, needs_z: bool, needs_b: bool) -> None:
        """``dtype`` is the logits' dtype; ``needs_z`` and ``needs_b`` say which gradients are wanted."""
        self._low = low
        b, self._b_unit = _parts(low.b, dtype)
        z, _ = _parts(low.z if self._b_unit is None else low.z * self._b_unit, dtype, in_units=False)
        pairs = [(i, j) for i in range(len(z)) for j in range(len(b)) if i + j < _ROUNDED]
        self._z_added, self._b_added = torch.cat([z[i] for i, _ in pairs], 1), torch.cat([b[j] for _, j in pairs], 1)
        self._b = self._dz = self._z = self._db = None
        if needs_z:
            self._b = torch.cat(b, 1)
            self._dz = low.z.new_zeros((len(low.z), self._b.shape[1]))
        if needs_b:
            z, self._z_unit = _parts(low.z, dtype)
            self._z = torch.cat(z, 1)
            self._db = low.z.new_zeros((len(low.b), self._z.shape[1]))

    def added(self, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """z and B for ``rows`` and ``classes``, in the logits' dtype. Their product is the adapters' part of the
        logits."""
        return self._z_added[rows], self._b_added[classes]

    def add(self, d_logits: Tensor, rows: slice, classes: slice, invariant: bool = False) -> None:
        """Add the contribution of these logits to the gradients of z and B. With ``invariant``, the bits of a row of
        z's gradient do not depend on the other rows."""
        if self._b is not None and self._dz is not None:
            add_product(self._dz[rows], d_logits, self._b[classes], 1.0, invariant)
        if self._z is not None and self._db is not None:
            add_product(self._db[classes], d_logits.t(), self._z[rows], keep=1.0)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients of z and B, float32. A gradient that is not wanted has no elements."""
        none, ranks = self._low.z.new_empty(0), self._low.z.shape[1]
        dz = none if self._dz is None else _summed(self._dz, ranks, self._b_unit)
        db = none if self._db is None else _summed(self._db, ranks, self._z_unit)
        return dz, db


_ROUNDED, _EXACT = 2, 3  # parts of a float32 number if the result has the logits' dtype, and if it is float32


def _parts(t: Tensor, dtype: torch.dtype, in_units: bool = True) -> tuple[list[Tensor], Tensor | None]:
    """Tensors of ``dtype`` whose sum is ``t`` [rows, ranks], and the divisor of each rank, if ranks were divided."""
    if dtype in (torch.float32, t.dtype):
        return [t.to(dtype)], None
    rest, unit, parts = t.float(), None, []
    if dtype is torch.float16 and in_units and len(t):
        largest = rest.abs().amax(0)
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        rest = rest / unit
    for _ in range(_EXACT):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return parts, unit


def _summed(t: Tensor, ranks: int, unit: Tensor | None) -> Tensor:
    total = t.unflatten(1, (-1, ranks)).sum(1) if t.shape[1] > ranks else t
    return total if unit is None else total * unit
