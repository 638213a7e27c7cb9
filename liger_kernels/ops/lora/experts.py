"""Low-rank adapters of the packed experts of a mixture. They add to the two products of the op ``experts``.

Each expert e has its own matrices. With the rows x of e, its weight W_e, and the upstream gradient dY of the product:

    z = x A_e^T        y = x W_e^T + s z B_e^T        g = s dY B_e        dx = dY W_e + g A_e

    dB_e = s dY^T z    dA_e = g^T x

So no tensor has the size of W. Several adapters of one weight are stacked, A = [A_1; A_2] and B = [s_1 B_1, s_2 B_2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops.lora.grouped import Groups, add_product_, columns_product, rows_product
from liger_kernels.ops.lora.products import MOST_RANKS
from liger_kernels.ops.runtime.arguments import FINITE, checked_fields, describe


@checked_fields
@dataclass(frozen=True)
class ExpertsAdapter:
    """One low-rank adapter of a packed weight of experts.

    Attributes:
        a: [experts, rank, in features], any floating dtype and strides.
        b: [experts, out features, rank], any floating dtype and strides.
        scale: the factor of the adapter's result.

    Raises:
        TypeError, ValueError: for an attribute of a wrong type, dtype, shape or device.
    """

    a: Tensor
    b: Tensor
    scale: Annotated[float, FINITE] = 1.0

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        for name, t in (("a", a), ("b", b)):
            if not t.is_floating_point():
                raise TypeError(f"{name} is {t.dtype}; it must be floating point")
        if a.device != b.device:
            raise ValueError(f"b is on {b.device}, a on {a.device}; move one to the other")
        if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[1] != b.shape[2]:
            raise ValueError(
                f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}; they must be [experts, rank, in features] and "
                "[experts, out features, rank]"
            )


def check_adapters(name: str, adapters: Sequence[Any], weight_name: str, weight: Tensor) -> None:
    """Raise if one of ``adapters``, the argument ``name``, does not fit ``weight`` [experts, out, in]."""
    for one in adapters:
        if not isinstance(one, ExpertsAdapter):
            raise TypeError(f"{name} has {describe(one)} in it; it must be a list of ExpertsAdapters")
        if one.a.device != weight.device:
            raise ValueError(f"one of {name} is on {one.a.device}, {weight_name} on {weight.device}; move one of them")
        if weight.dim() == 3 and (len(one.a), one.b.shape[1], one.a.shape[2]) != weight.shape:
            raise ValueError(
                f"one of {name} has a of shape {tuple(one.a.shape)}, b {tuple(one.b.shape)}; with {weight_name} of "
                f"shape {tuple(weight.shape)} they must be [{len(weight)}, rank, {weight.shape[2]}] and "
                f"[{len(weight)}, {weight.shape[1]}, rank]"
            )


def adapted_product_ref(x: Tensor, weight: Tensor, adapters: Sequence[Any], expert: int) -> Tensor:
    """x W^T plus the results of one expert's adapters, rounded once."""
    y = F.linear(x, weight[expert])
    if not adapters:
        return y
    dtype = torch.promote_types(y.dtype, torch.float32)
    for one in adapters:
        dtype = torch.promote_types(torch.promote_types(dtype, one.a.dtype), one.b.dtype)
    with torch.autocast(x.device.type, enabled=False):
        total = y.to(dtype)
        for one in adapters:
            z = F.linear(x.to(dtype), one.a[expert].to(dtype))
            total = total + one.scale * F.linear(z, one.b[expert].to(dtype))
        return total.to(y.dtype)


def runs_kernel(adapters: Sequence[Any]) -> bool:
    """Whether the kernels accept these adapters of one weight."""
    ranks = 0
    for one in adapters:
        ranks += one.a.shape[1]
        if one.a.dtype is torch.float64 or one.b.dtype is torch.float64:
            return False
    return not adapters or 0 < ranks <= MOST_RANKS


class Stacked(NamedTuple):
    """The adapters of one weight, which the products see as one adapter: their parameters and scales."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scales: tuple[float, ...]

    def _a(self) -> Tensor:
        return self.a[0] if len(self.a) == 1 else torch.cat(self.a, dim=1)

    def _b(self) -> tuple[Tensor, float]:
        """B, contiguous along the ranks, and the scale that B must still be multiplied by."""
        if len(self.b) == 1:  # in PEFT's layout the ranks of an expert lie far apart
            return self.b[0].contiguous(), self.scales[0]
        return torch.cat([scale * b.float() for b, scale in zip(self.b, self.scales, strict=True)], dim=2), 1.0

    def inner(self, x: Tensor, groups: Groups) -> Tensor:
        """z, float32 [rows, ranks]."""
        return rows_product(x, self._a(), groups, 1.0)

    def add_(self, y: Tensor, z: Tensor, groups: Groups) -> None:
        """Add the adapters' result for z to ``y``."""
        b, scale = self._b()
        add_product_(y, z, b, groups, scale)

    def inner_gradient(self, dy: Tensor, groups: Groups) -> Tensor:
        """g, float32 [rows, ranks]."""
        b, scale = self._b()
        return rows_product(dy, b.transpose(1, 2), groups, scale)

    def add_input_gradient_(self, dx: Tensor, g: Tensor, groups: Groups) -> None:
        """Add the gradient through the adapters to ``dx``."""
        add_product_(dx, g, self._a().transpose(1, 2), groups, 1.0)

    def gradients(
        self,
        needs: Sequence[bool],
        groups: Groups,
        x: Tensor,
        z: Tensor | None,
        dy: Tensor,
        g: Tensor,
        order: Tensor | None = None,
        choices: int = 1,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of each A and each B that ``needs`` asks for. ``x``, ``order`` and ``choices`` are those of
        :func:`columns_product`. If ``z`` is None, it is computed from x."""
        count = len(self.a)
        of_a, of_b = needs[:count], needs[count:]
        da: Sequence[Tensor | None] = [None] * count
        db: Sequence[Tensor | None] = [None] * count
        if any(of_a):
            da = self._gradients_of_a(of_a, groups, x, g, order, choices)
        if any(of_b):
            db = self._gradients_of_b(of_b, groups, dy, self.inner(x, groups) if z is None else z)
        return *da, *db

    def _gradients_of_a(
        self, needs: Sequence[bool], groups: Groups, x: Tensor, g: Tensor, order: Tensor | None, choices: int
    ) -> list[Tensor | None]:
        ranks = [a.shape[1] for a in self.a]
        alone = len(ranks) == 1
        every = torch.empty_like(self.a[0]) if alone else g.new_empty(len(self.a[0]), sum(ranks), x.shape[1])
        columns_product(x, g, every.transpose(1, 2), groups, 1.0, order, choices)
        if alone:
            return [every]
        parts = zip(every.split(ranks, dim=1), self.a, needs, strict=True)
        return [torch.empty_like(a).copy_(part) if needed else None for part, a, needed in parts]

    def _gradients_of_b(self, needs: Sequence[bool], groups: Groups, dy: Tensor, z: Tensor) -> list[Tensor | None]:
        ranks = [b.shape[2] for b in self.b]
        if len(ranks) == 1:
            return [columns_product(dy, z, torch.empty_like(self.b[0]), groups, self.scales[0])]
        every = columns_product(dy, z, z.new_empty(len(self.b[0]), dy.shape[1], sum(ranks)), groups, 1.0)
        parts = zip(every.split(ranks, dim=2), self.b, self.scales, needs, strict=True)
        return [torch.empty_like(b).copy_(s * part) if needed else None for part, b, s, needed in parts]


Scales = tuple[tuple[float, ...], tuple[float, ...]]


def halves(items: Sequence[Any], scales: Scales) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split a list over the A and B of two weights' adapters into the lists of each weight."""
    first = 2 * len(scales[0])
    return items[:first], items[first:]


def stacked(items: Sequence[Any], scales: Scales) -> tuple[Stacked | None, Stacked | None]:
    """The adapters of two weights. ``items`` has every A and every B of the first weight, then those of the second."""
    if not items:
        return None, None
    found = []
    for parameters, of_one in zip(halves(items, scales), scales, strict=True):
        count = len(of_one)
        found.append(Stacked(tuple(parameters[:count]), tuple(parameters[count:]), of_one) if count else None)
    return found[0], found[1]
