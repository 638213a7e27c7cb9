"""A low-rank adapter, the sum of several adapters of one layer, and the gradients of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from liger_kernels.ops.lora.columns import columns_product
from liger_kernels.ops.runtime.arguments import FINITE, checked_fields


@checked_fields
@dataclass(frozen=True)
class LoraAdapter:
    """One low-rank adapter of a linear layer.

    Attributes:
        a: [rank, in features], any floating dtype.
        b: [out features, rank], any floating dtype.
        scale: the factor of the adapter's result.
        bias: [out features], or None. ``scale`` multiplies the bias, too.
        dropped: [..., in features], x after an active dropout, the adapter's input in place of x; None without dropout.

    Raises:
        TypeError, ValueError: for an attribute of a wrong type, dtype, shape or device.
    """

    a: Tensor
    b: Tensor
    scale: Annotated[float, FINITE] = 1.0
    bias: Tensor | None = None
    dropped: Tensor | None = None

    def __post_init__(self) -> None:
        a, b, bias, dropped = self.a, self.b, self.bias, self.dropped
        for name, t in (("a", a), ("b", b), ("bias", bias), ("dropped", dropped)):
            if t is None:
                continue
            if not t.is_floating_point():
                raise TypeError(f"{name} is {t.dtype}; it must be floating point")
            if t.device != a.device:
                raise ValueError(f"{name} is on {t.device}, a on {a.device}; move one to the other")
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(
                f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}; they must be [rank, in features] and [out "
                "features, rank]"
            )
        if bias is not None and bias.shape != b.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}; with this b it must be ({len(b)},)")
        if dropped is not None and (not dropped.dim() or dropped.shape[-1] != a.shape[1]):
            raise ValueError(f"dropped has shape {tuple(dropped.shape)}; with this a it must be [..., {a.shape[1]}]")


def stacked_b(b: Sequence[Tensor], scales: Sequence[float]) -> tuple[Tensor, float]:
    """B, [out features, ranks], and the scale that B must still be multiplied by."""
    if len(b) == 1:
        return b[0], scales[0]
    return torch.cat([scale * one.float() for one, scale in zip(b, scales, strict=True)], dim=1), 1.0


def delta_of(
    b: Sequence[Tensor], biases: Sequence[Tensor | None], scales: Sequence[float]
) -> tuple[Tensor, Tensor | None, float]:
    """w [out features, ranks], bias and scale of the sum of all adapters: scale * (z w^T + bias)."""
    w, scale = stacked_b(b, scales)
    if len(b) == 1:
        return w, biases[0], scale
    total = None
    for one, factor in zip(biases, scales, strict=True):
        if one is not None:
            total = factor * one.float() if total is None else total + factor * one.float()
    return w, total, scale


def gradients_of_a(
    x: Tensor, g: Tensor, a: Sequence[Tensor], needs: Sequence[bool], dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """The gradients of ``a`` that ``needs`` asks for, each in its tensor's dtype or in ``dtype``. x is [..., in
    features], ``g`` is float32 [tokens, ranks]."""
    if len(a) == 1:
        return [columns_product(x, g, a[0].shape, dtype or a[0].dtype, 1.0, by_rank=True)]
    ranks = [one.shape[0] for one in a]
    of_all = dtype or (a[0].dtype if all(one.dtype is a[0].dtype for one in a) else torch.float32)
    every = columns_product(x, g, (sum(ranks), x.shape[-1]), of_all, 1.0, by_rank=True)
    parts = zip(every.split(ranks), a, needs, strict=True)
    return [part.to(dtype or one.dtype) if needed else None for part, one, needed in parts]


def gradients_of_b(
    dy: Tensor,
    z: Tensor,
    b: Sequence[Tensor],
    scales: Sequence[float],
    needs: Sequence[bool],
    dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """The gradients of ``b`` that ``needs`` asks for, each in its tensor's dtype or in ``dtype``. ``dy`` is [..., out
    features], ``z`` is float32 [tokens, ranks]."""
    if len(b) == 1:
        return [columns_product(dy, z, b[0].shape, dtype or b[0].dtype, scales[0])]
    ranks = [one.shape[1] for one in b]
    every = columns_product(dy, z, (dy.shape[-1], sum(ranks)), torch.float32, 1.0)
    parts = zip(every.split(ranks, dim=1), b, scales, needs, strict=True)
    return [(s * part).to(dtype or one.dtype) if needed else None for part, one, s, needed in parts]


def gradients_of_biases(
    dy: Tensor, scales: Sequence[float], dtypes: Sequence[torch.dtype | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the biases that ``needs`` asks for, in ``dtypes``. ``dy`` is [..., out features]."""
    total = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)
    kinds = zip(scales, dtypes, needs, strict=True)
    return [(scale * total).to(dtype) if needed else None for scale, dtype, needed in kinds]
