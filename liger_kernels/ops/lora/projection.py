"""A linear layer with its adapters whose products an op computes itself, and several such layers that share x.

Layers that share x share the passes over x. One pass computes z = x A^T of all adapters, one computes all dA, and one
adds g A to dx. The formulas are those of lora_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._split_sum import add_product as add_to_sum
from liger_kernels.ops.lora.adapter import (
    LoraAdapter,
    delta_of,
    gradients_of_a,
    gradients_of_b,
    gradients_of_biases,
    stacked_b,
)
from liger_kernels.ops.lora.columns import columns_products
from liger_kernels.ops.lora.nf4 import dense_nf4, same_nf4
from liger_kernels.ops.lora.products import MOST_RANKS, add_product, add_products, alike, rows_product, rows_products
from liger_kernels.ops.runtime.arguments import checked_fields, describe
from liger_kernels.ops.runtime.dispatch import as_values, in_dtype, use_triton


def as_it_is(weight: Tensor) -> Tensor:
    """The identity: ``weight`` is already a matrix."""
    return weight


@checked_fields
@dataclass(frozen=True)
class Projection:
    """A linear layer, y = x W^T + bias + sum over a of s_a (x A_a^T B_a^T + beta_a).

    Attributes:
        weight: [out features, in features], or a tensor of which ``dense`` makes such a matrix. The backward's saved
            tensor is ``weight`` itself.
        bias: [out features], or None.
        adapters: :class:`LoraAdapter`, without ``dropped``.
        dense: makes W of ``weight``, in any floating dtype. It is called in the forward and again in the backward.

    Raises:
        TypeError, ValueError: for an attribute of a wrong type, dtype, shape or device.
    """

    weight: Tensor
    bias: Tensor | None = None
    adapters: Sequence[LoraAdapter] = ()
    dense: Callable[[Tensor], Tensor] = as_it_is

    def __post_init__(self) -> None:
        weight, bias = self.weight, self.bias
        if self.dense is as_it_is and (not weight.is_floating_point() or weight.dim() != 2):
            raise (ValueError if weight.is_floating_point() else TypeError)(
                f"weight is {describe(weight)}; it must be floating point, [out features, in features], or dense must "
                "make that of it"
            )
        if bias is not None and not bias.is_floating_point():
            raise TypeError(f"bias is {bias.dtype}; it must be floating point")
        for one in self.adapters:
            if not isinstance(one, LoraAdapter):
                raise TypeError(f"adapters has {describe(one)} in it; it must be a list of LoraAdapters")
            if one.dropped is not None:
                raise ValueError("one of adapters has dropped, and a Projection takes none; call lora_linear instead")
        outputs, inputs = self.shape
        if bias is not None and (bias.dim() != 1 or outputs not in (None, len(bias))):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; with this weight it must be ({outputs},)")
        for one in self.adapters:
            if one.b.shape[0] != outputs or one.a.shape[1] != inputs:
                raise ValueError(
                    f"one of adapters has a of shape {tuple(one.a.shape)} and b {tuple(one.b.shape)}; with this weight "
                    f"they must be [rank, {inputs}] and [{outputs}, rank]"
                )
        for name, t in (("bias", bias), *[("one of adapters", one.a) for one in self.adapters]):
            if t is not None and t.device != weight.device:
                raise ValueError(f"{name} is on {t.device}, weight on {weight.device}; move one to the other")

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """Out and in features; None if only the dense weight tells them."""
        if self.dense is as_it_is:
            return self.weight.shape[0], self.weight.shape[1]
        if self.adapters:
            return self.adapters[0].b.shape[0], self.adapters[0].a.shape[1]
        return None, None


class NodeProjection(NamedTuple):
    """A :class:`Projection` inside an autograd node: its tensors by their roles."""

    weight: Tensor
    bias: Tensor | None
    a: Sequence[Tensor]
    b: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    scales: Sequence[float]
    dense: Callable[[Tensor], Tensor]

    @property
    def ranks(self) -> int:
        return sum([one.shape[0] for one in self.a])


class Needs(NamedTuple):
    """Which gradients of a :class:`NodeProjection` are wanted."""

    weight: bool
    bias: bool
    a: Sequence[bool]
    b: Sequence[bool]
    biases: Sequence[bool]

    @property
    def any(self) -> bool:
        return self.weight or self.bias or any(self.a) or any(self.b) or any(self.biases)


class NodeParts:
    """The projections of an autograd node. The node gets the tensors of floating point, and this object for all others.

    Attributes:
        parts: each projection.
        tensors: all tensors of all of them in one list: of each projection the weight, the bias, all A, all B, all
            biases of adapters.
        floating: those of floating point, which alone may have a gradient or a tangent.
    """

    __slots__ = ("_places", "floating", "parts", "tensors")

    def __init__(self, projections: Sequence[Any]):
        self.parts: list[NodeProjection] = []
        self.tensors: list[Tensor | None] = []
        for one in projections:
            adapters = one.adapters
            (weight,) = as_values(one.weight) if one.dense is as_it_is else (one.weight,)
            (bias,) = as_values(one.bias)
            a, b = as_values(*[t.a for t in adapters]), as_values(*[t.b for t in adapters])
            biases = as_values(*[t.bias for t in adapters])
            self.parts.append(NodeProjection(weight, bias, a, b, biases, [t.scale for t in adapters], one.dense))  # type: ignore[arg-type]
            self.tensors += (weight, bias, *a, *b, *biases)
        with torch._C.DisableTorchFunctionSubclass():  # bitsandbytes' class of parameters takes long to answer
            self._places = [i for i, t in enumerate(self.tensors) if t is not None and t.is_floating_point()]
        self.floating = [self.tensors[i] for i in self._places]

    def needs(self, of_floating: Sequence[bool]) -> list[Needs]:
        """Which gradients of each projection are wanted, from what autograd says of ``floating``."""
        every = [False] * len(self.tensors)
        for place, needed in zip(self._places, of_floating, strict=True):
            every[place] = needed
        found, first = [], 0
        for part in self.parts:
            a = first + 2
            b, biases = a + len(part.a), a + 2 * len(part.a)
            end = biases + len(part.a)
            found.append(Needs(every[first], every[first + 1], every[a:b], every[b:biases], every[biases:end]))
            first = end
        return found

    def of_floating(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of ``floating``, from those of ``tensors``."""
        return [gradients[place] for place in self._places]


def dense_weights(parts: Sequence[NodeProjection], dtype: torch.dtype) -> Iterator[Tensor]:
    """The dense weight of each of ``parts`` in ``dtype``. Weights in NF4 are made dense in one launch, others one after
    the other, so that one copy at a time exists."""
    if same_nf4(states := [part.dense for part in parts]):
        ws = dense_nf4([part.weight for part in parts], states)  # type: ignore[arg-type]
        while ws:
            yield in_dtype(ws.pop(0), dtype)
        return
    for part in parts:
        yield in_dtype(part.dense(part.weight), dtype)


def base_products(x: Tensor, parts: Sequence[NodeProjection]) -> list[Tensor]:
    """x W^T + bias of each of ``parts`` for ``x`` [tokens, in features], new tensors of x's dtype."""
    found = []
    for part, w in zip(parts, dense_weights(parts, x.dtype), strict=True):
        bias = part.bias
        found.append(torch.mm(x, w.t()) if bias is None else torch.addmm(in_dtype(bias, x.dtype), x, w.t()))
    return found


def ranks_of_all(x: Tensor, parts: Sequence[NodeProjection]) -> Tensor | None:
    """z = x A^T, float32 [tokens, ranks], with the ranks of all adapters of ``parts`` side by side; None without
    adapters."""
    every = [a for part in parts for a in part.a]
    return rows_product(x, every, 1.0) if every else None


def columns_of(t: Tensor | None, parts: Sequence[NodeProjection]) -> list[Tensor | None]:
    """The columns of z, or of its gradient, for each of ``parts``."""
    if t is None or len(parts) == 1:
        return [t] * len(parts)
    found: list[Tensor | None] = []
    first = 0
    for part in parts:
        n = part.ranks
        found.append(t.narrow(1, first, n) if n else None)
        first += n
    return found


def in_one_launch(parts: Sequence[NodeProjection]) -> tuple[list[Tensor], float] | None:
    """B of each of ``parts``, [out features, ranks], and the scale of all, if one launch accepts them."""
    ranks = [part.ranks for part in parts]
    if len(parts) < 2 or not ranks[0] or any(other != ranks[0] for other in ranks):
        return None
    stacked = [stacked_b(part.b, part.scales) for part in parts]
    scale = stacked[0][1]
    ws = [w for w, _ in stacked]
    return (ws, scale) if alike(ws) and all(other == scale for _, other in stacked) else None


def add_deltas(ys: Sequence[Tensor], z: Tensor | None, parts: Sequence[NodeProjection]) -> None:
    """Add the adapters' results of each of ``parts`` to its own of ``ys`` [tokens, out features] in place."""
    if not any(bias is not None for part in parts for bias in part.biases) and (together := in_one_launch(parts)):
        assert z is not None
        add_products(ys, z, *together)
        return
    for y, own_z, part in zip(ys, columns_of(z, parts), parts, strict=True):
        if own_z is not None:
            w, bias, scale = delta_of(part.b, part.biases, part.scales)
            add_product(y, own_z, [w], bias, scale, y.shape, y.dtype, in_place=True, by_column=True)


def gradients_of_ranks(dys: Sequence[Tensor | None], parts: Sequence[NodeProjection]) -> Tensor | None:
    """g = s dY B, float32 [tokens, ranks], with the ranks of all adapters of ``parts`` side by side; None without
    adapters."""
    if not any(part.a for part in parts):
        return None
    if len(parts) == 1 and dys[0] is not None:
        w, scale = stacked_b(parts[0].b, parts[0].scales)
        return rows_product(dys[0], [w], scale, by_column=True)
    if all(dy is not None for dy in dys) and (together := in_one_launch(parts)):
        return rows_products(dys, *together)  # type: ignore[arg-type]
    like = next(dy for dy in dys if dy is not None)
    total = sum([part.ranks for part in parts])
    g = torch.empty((like.shape[0], total), dtype=torch.float32, device=like.device)
    for dy, part, columns in zip(dys, parts, columns_of(g, parts), strict=True):
        if columns is None:
            continue
        if dy is None:
            columns.zero_()
            continue
        w, scale = stacked_b(part.b, part.scales)
        rows_product(dy, [w], scale, out=columns, by_column=True)
    return g


class GradientSums:
    """Sums the gradients of ``tensors`` over tiles of tokens in float32, and rounds each sum once."""

    def __init__(self, tensors: Sequence[Tensor | None]):
        self.tensors = tensors
        self.totals: list[Tensor | None] = [None] * len(tensors)

    def add_product(self, i: int, a: Tensor, b: Tensor) -> None:
        """Add a @ b to the gradient of tensor ``i``."""
        total = self.totals[i]
        if total is None:
            total = self.totals[i] = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
            add_to_sum(total, a, b, 0.0)
        else:
            add_to_sum(total, a, b, 1.0)

    def add(self, first: int, gradients: Sequence[Tensor | None]) -> None:
        """Add ``gradients``, new float32 tensors, to the sums from number ``first`` on."""
        for i, gradient in enumerate(gradients, first):
            if gradient is not None:
                total = self.totals[i]
                self.totals[i] = gradient if total is None else total.add_(gradient)

    def rounded(self) -> list[Tensor | None]:
        """Each sum in the dtype of its tensor. Each float32 sum is freed before the next one is rounded."""
        found: list[Tensor | None] = []
        for i, t in enumerate(self.tensors):
            total, self.totals[i] = self.totals[i], None
            found.append(total if total is None or t is None else in_dtype(total, t.dtype))
        return found


def gradients_of_parts(
    x: Tensor,
    dys: Sequence[Tensor | None],
    z: Tensor | None,
    g: Tensor | None,
    parts: Sequence[NodeProjection],
    needs: Sequence[Needs],
    sums: GradientSums | None = None,
    first_of_sums: int = 0,
) -> list[Tensor | None]:
    """The gradients of all tensors of ``parts``, which share ``x`` [tokens, in features], in the order of
    :class:`NodeParts`. ``dys`` are the gradients of the parts' results. With ``sums``, the gradients are also added to
    ``sums``, from ``first_of_sums`` on."""
    dtype = None if sums is None else torch.float32
    das: list[Tensor | None] = [None] * sum([len(part.a) for part in parts])
    if g is not None and any(needed for need in needs for needed in need.a):
        every = [a for part in parts for a in part.a]
        das = gradients_of_a(x, g, every, [n for need in needs for n in need.a], dtype)
    dbs = _gradients_of_single_bs(dys, z, parts, needs, dtype)
    found: list[Tensor | None] = []
    first = 0
    for i, (dy, part, need, own_z) in enumerate(zip(dys, parts, needs, columns_of(z, parts), strict=True)):
        n = len(part.a)
        own_das = das[first : first + n]
        first += n
        if dy is None:
            found += [None] * (2 + 3 * n)
            continue
        if need.weight and sums is not None:
            sums.add_product(first_of_sums + len(found), dy.t(), x)
        of_weight = need.weight and sums is None
        found.append(in_dtype(torch.mm(dy.t(), x), part.weight.dtype) if of_weight else None)
        bias = dy.sum(0, dtype=torch.float32) if need.bias else None
        found.append(bias if bias is None or part.bias is None else bias.to(dtype or part.bias.dtype))
        found += own_das
        if dbs is not None:
            found.append(dbs[i])
        else:
            wanted = own_z is not None and any(need.b)
            found += gradients_of_b(dy, own_z, part.b, part.scales, need.b, dtype) if wanted else [None] * n  # type: ignore[arg-type]
        dtypes = [None if one is None else dtype or one.dtype for one in part.biases]
        found += gradients_of_biases(dy, part.scales, dtypes, need.biases) if any(need.biases) else [None] * n
    if sums is not None:
        sums.add(first_of_sums, found)
    return found


def _gradients_of_single_bs(
    dys: Sequence[Tensor | None],
    z: Tensor | None,
    parts: Sequence[NodeProjection],
    needs: Sequence[Needs],
    dtype: torch.dtype | None,
) -> list[Tensor] | None:
    """The gradient of each part's B in one launch, where each has one adapter; None where it takes more."""
    if (
        z is None
        or any(dy is None for dy in dys)
        or not all(len(part.b) == 1 and all(need.b) for part, need in zip(parts, needs, strict=True))
    ):
        return None
    if (together := in_one_launch(parts)) is None:
        return None
    ws, scale = together
    return columns_products(dys, z, [w.shape for w in ws], dtype or ws[0].dtype, scale)  # type: ignore[arg-type]


def gradient_of_x(dys: Sequence[Tensor | None], g: Tensor | None, parts: Sequence[NodeProjection]) -> Tensor | None:
    """The gradient of the x that ``parts`` share, [tokens, in features]."""
    dx: Tensor | None = None
    known = [(dy, part) for dy, part in zip(dys, parts, strict=True) if dy is not None]
    if known:
        for (dy, _), w in zip(known, dense_weights([part for _, part in known], known[0][0].dtype), strict=True):
            dx = torch.mm(dy, w) if dx is None else dx.addmm_(dy, w)
    if g is not None and dx is not None:
        every = [a for part in parts for a in part.a]
        dx = add_product(dx, g, every, None, 1.0, dx.shape, dx.dtype, in_place=True)
    return dx


def runs_as_one(x: Tensor, projections: Sequence[Any]) -> bool:
    """Whether the kernels accept ``x`` and the adapters of ``projections``. One program must hold all their ranks."""
    if not use_triton(x, eager_only=True) or not x.numel():
        return False
    total = 0
    for one in projections:
        for adapter in one.adapters:
            total += adapter.a.shape[0]
            if adapter.a.dtype is torch.float64 or adapter.b.dtype is torch.float64:
                return False
    return total <= MOST_RANKS


def out_features(part: NodeProjection) -> int:
    """The number of output features."""
    return part.b[0].shape[0] if part.b else part.weight.shape[0]


def check_projection(name: str, one: Any, x: Tensor, features: int | None) -> None:
    """Raise unless ``one`` is a projection of ``features`` on x's device.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(one, Projection):
        raise TypeError(f"{name} is {describe(one)}; it must be a Projection")
    if one.weight.device != x.device:
        raise ValueError(f"the weight of {name} is on {one.weight.device}, x on {x.device}; move one to the other")
    inputs = one.shape[1]
    if None not in (inputs, features) and inputs != features:
        raise ValueError(
            f"{name} has {inputs} in features, and what it gets has {features} (x has shape {tuple(x.shape)}); they "
            "must be equal"
        )


def check_input(x: Tensor) -> None:
    """Raise unless a projection accepts ``x``.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; it must be floating point")
    if not x.dim():
        raise ValueError("x has shape (); it must be [..., in features]")
