"""Layers that share x: the products of their adapters take one launch where one launch accepts them, and are right
where it does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from convergence.op.call import check_call
from liger_kernels import ops
from liger_kernels.ops import LoraAdapter, Projection, adapted_linears, adapted_linears_ref
from liger_kernels.ops.lora.products import alike
from liger_kernels.ops.runtime.tiling import tiled
from tests.ops_checks import DTYPES, randn

IN, ROWS = 24, 37
WIDTHS = (40, 20, 50)
Leaves = list[torch.Tensor]
KERNELS = ("_lora_linear_rows_kernel", "_lora_linear_add_kernel", "_lora_linear_columns_kernel")
TOGETHER = (2, 2, 2)  # launches: z and g; y and dx; dA and dB


def leaves_of(dtype: torch.dtype, device: torch.device, ranks: tuple[int, ...], of_adapter: torch.dtype) -> Leaves:
    """x, and of each layer the weight, a and b."""
    leaves = [randn(ROWS, IN, dtype=dtype, device=device)]
    for width, rank in zip(WIDTHS, ranks, strict=False):
        leaves.append(randn(width, IN, dtype=dtype, device=device, grad=False, scale=IN**-0.5))
        leaves += [randn(*size, dtype=of_adapter, device=device, scale=0.3) for size in ((rank, IN), (width, rank))]
    return leaves


def layers(op: Any, x: torch.Tensor, *leaves: torch.Tensor, scales: tuple[float, ...] = (2.0,) * 3) -> Any:
    parts = zip(leaves[::3], leaves[1::3], leaves[2::3], scales, strict=False)
    return op(x, [Projection(weight, None, [LoraAdapter(a, b, scale)]) for weight, a, b, scale in parts])


def check(leaves: Leaves, launches: tuple[int, ...], **options: Any) -> None:
    check_call(
        lambda *given: layers(adapted_linears, *given, **options),
        lambda *given: layers(adapted_linears_ref, *given, **options),
        leaves,
        terms=IN,
    )
    ops.reset_launches()
    ys = layers(adapted_linears, *leaves, **options)
    torch.autograd.grad(sum(y.float().square().sum() for y in ys), [t for t in leaves if t.requires_grad])
    found = ops.launches()
    assert tuple(found[kernel] for kernel in KERNELS) == launches


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rank", [4, 20])
@pytest.mark.parametrize("of_adapter", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch(dtype: torch.dtype, of_adapter: torch.dtype, rank: int, count: int, device: torch.device) -> None:
    check(leaves_of(dtype, device, (rank,) * count, of_adapter), TOGETHER)


@pytest.mark.parametrize("rank", [4, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_in_parts_and_tiles_below_one_another(dtype: torch.dtype, rank: int, device: torch.device) -> None:
    """As on a GPU for real sizes. What one launch leaves behind does not matter to the next one."""
    shape = {"ROWS": 16, "BLOCK": 16, "num_warps": 1, "num_stages": 2}
    with tiled(
        lora_rows=lambda *_: (2, shape),
        lora_add=lambda *_: (2, {**shape, "PART": 16}),
        lora_columns=lambda *_: (2, shape),
    ):
        leaves = leaves_of(dtype, device, (rank,) * 3, torch.float32)
        check(leaves, TOGETHER)
        check(leaves, TOGETHER)


def test_what_one_launch_does_not_accept(device: torch.device) -> None:
    """z and dA of all layers are one product in any case."""
    dtype = torch.float32
    check(leaves_of(dtype, device, (4, 5, 4), dtype), (4, 4, 4))
    check(leaves_of(dtype, device, (4, 4, 4), dtype), (4, 4, 4), scales=(2.0, 2.0, 1.0))


@pytest.mark.parametrize("unused", range(3))
def test_a_result_that_nobody_uses(unused: int, device: torch.device) -> None:
    def used(op: Any, *given: torch.Tensor) -> list[torch.Tensor]:
        return [y for i, y in enumerate(layers(op, *given)) if i != unused]

    leaves = leaves_of(torch.float32, device, (4, 4, 4), torch.float32)
    kept = [t for i, t in enumerate(leaves) if i - 3 * unused not in (2, 3)]
    others = {i: t for i, t in enumerate(leaves) if i - 3 * unused in (2, 3)}

    def call(op: Any, *given: torch.Tensor) -> list[torch.Tensor]:
        rest = [*given]
        every = [others[i].to(given[0].dtype) if i in others else rest.pop(0) for i in range(len(leaves))]
        return used(op, *every)

    check_call(partial(call, adapted_linears), partial(call, adapted_linears_ref), kept, terms=IN)


def test_the_gradients_of_some_b_alone(device: torch.device) -> None:
    """A frozen B has no gradient, and costs no launch."""
    leaves = leaves_of(torch.float32, device, (4, 4, 4), torch.float32)
    leaves[3] = leaves[3].detach()
    check(leaves, (2, 2, 3))


def test_a_tangent_is_refused(device: torch.device) -> None:
    """The op has no formula for forward-mode derivatives, also where nothing requires a gradient."""
    leaves = [t.detach() for t in leaves_of(torch.float32, device, (4, 4), torch.float32)]
    with forward_ad.dual_level():
        leaves[3] = forward_ad.make_dual(leaves[3], torch.ones_like(leaves[3]))
        with pytest.raises(NotImplementedError, match="jvp"):
            layers(adapted_linears, *leaves)


def test_which_matrices_are_alike() -> None:
    b = torch.zeros(8, 4)
    assert alike([b, torch.zeros(9, 4)])
    for ws in ([b], [b] * 4, [b, b.to(torch.bfloat16)], [b, torch.zeros(8, 3)], [b, torch.zeros(4, 8).t()]):
        assert not alike(ws)
