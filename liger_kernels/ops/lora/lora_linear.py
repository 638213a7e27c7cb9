"""A linear layer with low-rank adapters (Hu, arXiv:2106.09685). This op computes only the adapters' part.

    z_a = x_a A_a^T        y = base(x) + sum over a of s_a (z_a B_a^T + beta_a)

x_a is x, or x after the adapter's dropout. With the upstream gradient dY:

    g_a = s_a dY B_a        dB_a = s_a dY^T z_a        dA_a = g_a^T x_a        dbeta_a = s_a * sum of dY's rows

and g_a A_a is added to the base's gradient of x. Everything accumulates in float32. y, dA, dB and the gradient of x are
rounded once. In a product with 16-bit numbers, a float32 number is a sum of bfloat16 numbers (products.py). Memory
limits these products, so the extra multiplications cost no time.

The op has two autograd nodes (runtime/anchor.py). The first node computes z and saves every tensor that the backward
needs. The second node adds the adapters' part to the base's result and saves nothing. Activation checkpointing stops
its recomputation at the last saved tensor. So it skips the base's product if that product is the last of a block. x
reaches the base through the first node. The backward of this node adds g A to the base's gradient of x in one pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops.lora.adapter import (
    LoraAdapter,
    delta_of,
    gradients_of_a,
    gradients_of_b,
    gradients_of_biases,
    stacked_b,
)
from liger_kernels.ops.lora.products import MOST_RANKS, add_product, rows_product
from liger_kernels.ops.runtime.anchor import Computed, anchor
from liger_kernels.ops.runtime.arguments import checked, checked_op, describe
from liger_kernels.ops.runtime.dispatch import as_autocast, as_values, backward_once, use_triton


@checked
def lora_linear_ref(x: Tensor, base: Callable[[Tensor], Tensor], adapters: Sequence[LoraAdapter]) -> Tensor:
    """:func:`lora_linear` in plain torch: the definition of correct, for any floating-point dtype."""
    known = checked_adapters(x, adapters)
    x = cast_as_base(x)
    return _reference(base(x), x, known)


def cast_as_base(x: Tensor) -> Tensor:
    """x, cast as a linear layer casts it under autocast. Base and adapters share the result."""
    return x if x.is_meta else as_autocast(x, x.device)


def _reference(y0: Tensor, x: Tensor, adapters: Sequence[LoraAdapter]) -> Tensor:
    check_base(x, y0, adapters)
    dtype = torch.promote_types(y0.dtype, torch.float32)
    for t in [t for adapter in adapters for t in (adapter.a, adapter.b)]:
        dtype = torch.promote_types(dtype, t.dtype)
    with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        y = y0.to(dtype)
        for adapter in adapters:
            z = F.linear((x if adapter.dropped is None else adapter.dropped).to(dtype), adapter.a.to(dtype))
            delta = F.linear(z, adapter.b.to(dtype), None if adapter.bias is None else adapter.bias.to(dtype))
            y = y + adapter.scale * delta
        return y.to(y0.dtype)


class LoraFunction(torch.autograd.Function):
    """z = x A^T, float32 [tokens, ranks], an anchor of y, and with ``passes`` also x itself, as the base's input.

    The node saves x, z and the parameters themselves, because a sharding package may free and refill parameters. The
    anchor's gradient is dY. The gradient of the returned x is the base's gradient of x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, passes: bool, scales: tuple[float, ...], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """``parameters``: all A, then all B, then each adapter's bias or None. ``dtype`` is y's dtype."""
        a, b, biases = _thirds(parameters)
        z = rows_product(x, a, 1.0)
        ctx.save_for_backward(x, z, *a, *b)
        ctx.passes, ctx.scales, ctx.bias_dtypes = passes, scales, [None if t is None else t.dtype for t in biases]
        ctx.mark_non_differentiable(z)
        ctx.set_materialize_grads(False)
        y = anchor((*x.shape[:-1], b[0].shape[0]), dtype, x.device)
        return (z, y, x) if passes else (z, y)

    @staticmethod
    @backward_once
    def backward(ctx: Any, _: None, dy: Tensor | None, dx: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needs_x, _, _, _, *needs = ctx.needs_input_grad
        if dy is None:  # nothing was differentiated, or only tensors between this node and the result
            return dx, None, None, None, *[None] * len(needs)
        x, z, *parameters = ctx.saved_tensors  # read once, because a recomputation gives them only once
        (a, b), scales = _halves(parameters), ctx.scales
        needs_a, needs_b, needs_bias = _thirds(needs)
        da: Sequence[Tensor | None] = [None] * len(a)
        db: Sequence[Tensor | None] = [None] * len(b)
        dbias: Sequence[Tensor | None] = [None] * len(b)
        if needs_x or any(needs_a):
            stacked, scale = stacked_b(b, scales)
            g = rows_product(dy, [stacked], scale, by_column=True)
        if any(needs_b):
            db = gradients_of_b(dy, z, b, scales, needs_b)
        if any(needs_a):
            da = gradients_of_a(x, g, a, needs_a)
        if needs_x:
            dx = add_product(dx, g, a, None, 1.0, x.shape, x.dtype)
        if any(needs_bias):
            dbias = gradients_of_biases(dy, scales, ctx.bias_dtypes, needs_bias)
        return dx, None, None, None, *da, *db, *dbias


def _added(zs: Sequence[Tensor], adapters: Sequence[Any], y0: Tensor) -> Tensor:
    """y0 plus the sum of scale * (z B^T + bias), a new tensor of y0's dtype. ``zs`` have the order of ``adapters``."""
    b: tuple[Any, ...] = as_values(*[one.b for one in adapters])
    w, bias, scale = delta_of(b, as_values(*[one.bias for one in adapters]), [one.scale for one in adapters])
    z = zs[0] if len(zs) == 1 else torch.cat([*zs], dim=1)
    return add_product(y0, z, [w], bias, scale, y0.shape, y0.dtype, by_column=True)


def _halves(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return items[: len(items) // 2], items[len(items) // 2 :]


def _thirds(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    n = len(items) // 3
    return items[:n], items[n : 2 * n], items[2 * n :]


def checked_adapters(x: Tensor, adapters: Sequence[LoraAdapter]) -> list[LoraAdapter]:
    """``adapters`` as a list; an error if one does not fit x."""
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; it must be floating point")
    known = [*adapters]
    for one in known:
        if not isinstance(one, LoraAdapter):
            raise TypeError(f"adapters has {describe(one)} in it; it must be a list of LoraAdapters")
        if one.a.device != x.device:
            raise ValueError(f"one of adapters is on {one.a.device}, x on {x.device}; move one to the other")
        if not x.dim() or one.a.shape[1] != x.shape[-1]:
            raise ValueError(
                f"one of adapters has a of shape {tuple(one.a.shape)}, x has shape {tuple(x.shape)}; they must be "
                "[rank, in features] and [..., in features]"
            )
        if one.dropped is not None and one.dropped.shape != x.shape:
            raise ValueError(
                f"one of adapters has dropped of shape {tuple(one.dropped.shape)}; it must have that of x, "
                f"{tuple(x.shape)}"
            )
    return known


def check_base(x: Tensor, y0: Any, adapters: Sequence[LoraAdapter]) -> None:
    if not isinstance(y0, Tensor) or not y0.is_floating_point():
        raise TypeError(f"base returned {describe(y0)}; it must return a floating-point tensor")
    for one in adapters:
        if y0.shape != (*x.shape[:-1], len(one.b)):
            raise ValueError(
                f"base returned shape {tuple(y0.shape)} for x of shape {tuple(x.shape)}; with b of shape "
                f"{tuple(one.b.shape)} in adapters it must be {(*x.shape[:-1], len(one.b))}"
            )


def runs_kernel(x: Tensor, adapters: Sequence[LoraAdapter]) -> bool:
    if not use_triton(x, eager_only=True):
        return False
    ranks = 0
    for one in adapters:
        ranks += one.a.shape[0]
        if not all(t is None or t.dtype is not torch.float64 for t in (one.a, one.b, one.bias, one.dropped)):
            return False
    return 0 < ranks <= MOST_RANKS


@checked_op
def lora_linear(x: Tensor, base: Callable[[Tensor], Tensor], adapters: Sequence[LoraAdapter]) -> Tensor:
    """The result of ``base`` plus the results of low-rank ``adapters``. The formula is at the top of this file.

    Under autocast, x is cast as ``F.linear`` casts it, and base gets the cast x. The adapters keep their dtype.

    Args:
        x: [..., in features]: float16, bfloat16, float32, or float64 (which runs the reference). Never overwritten.
        base: the adapted layer. It is called once, with x or an alias of x. Its result is not overwritten.
        adapters: every :class:`LoraAdapter` of this layer. More than 256 ranks in total run the reference.

    Returns:
        A new tensor [..., out features] of the dtype of base's result. Without adapters, the result of base itself.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, dtype, shape or device.
    """
    known = checked_adapters(x, adapters)
    x = cast_as_base(x)
    if not known:
        return base(x)
    return lora_linear_of_checked(x, base, known)


def lora_linear_of_checked(x: Tensor, base: Callable[[Tensor], Tensor], adapters: Sequence[Any]) -> Tensor:
    """:func:`lora_linear` for at least one adapter and for arguments that were checked. x must have been cast."""
    if not runs_kernel(x, adapters):
        return _reference(base(x), x, adapters)
    groups = [(x, shared)] if (shared := [one for one in adapters if one.dropped is None]) else []
    groups += [(one.dropped, [one]) for one in adapters if one.dropped is not None]
    dtype, passes = x.dtype, bool(shared) and x.requires_grad and torch.is_grad_enabled()
    zs, anchors, ordered = [], [], []
    for what, group in groups:
        parameters = as_values(*[one.a for one in group], *[one.b for one in group], *[one.bias for one in group])
        through, scales = passes and what is x, tuple([one.scale for one in group])
        z, y, *passed = LoraFunction.apply(*as_values(what), dtype, through, scales, *parameters)
        if through:
            (x,) = passed
        zs.append(z)
        anchors.append(y)
        ordered += group
    y0 = base(x)
    check_base(x, y0, ordered)
    if y0.dtype is not dtype:
        return _reference(y0, x, ordered)
    (value,) = as_values(y0)
    assert value is not None
    return Computed.apply(partial(_added, zs, ordered, value.detach()), value, *anchors)
