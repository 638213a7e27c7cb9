"""gated_mlp: it computes what its reference does, for every set of adapters, and saves and overwrites what it may."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_kernels import ops
from liger_kernels.ops import LoraAdapter, Projection, gated_mlp, gated_mlp_ref
from tests.ops_checks import DTYPES, Products, check_op, randn

ROWS, HIDDEN, INNER, OUT = 10, 24, 40, 20
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (OUT, INNER)}
Op = Callable[..., torch.Tensor]


def leaves_of(
    dtype: torch.dtype,
    device: torch.device,
    ranks: dict[str, tuple[int, ...]] | None = None,
    of_adapter: torch.dtype = torch.float32,
    trained: bool = False,
) -> list[torch.Tensor]:
    """x, and of each projection weight, bias, and of each adapter a, b and bias."""
    leaves = [randn(2, ROWS // 2, HIDDEN, dtype=dtype, device=device)]
    for name, (outputs, inputs) in SHAPES.items():
        like = {"dtype": dtype, "device": device, "grad": trained}
        leaves += [randn(outputs, inputs, **like, scale=inputs**-0.5), randn(outputs, **like)]
        for rank in ({} if ranks is None else ranks).get(name, ()):
            sizes = (rank, inputs), (outputs, rank), (outputs,)
            leaves += [randn(*size, dtype=of_adapter, device=device, scale=0.3) for size in sizes]
    return leaves


def call(op: Op, x: torch.Tensor, *leaves: torch.Tensor, ranks: dict[str, tuple[int, ...]], **options: Any) -> Any:
    """``op`` with adapters whose scales differ."""
    projections, rest = [], [*leaves]
    for name in SHAPES:
        weight, bias = rest.pop(0), rest.pop(0)
        adapters = []
        for i, _ in enumerate(ranks.get(name, ())):
            a, b, beta = (rest.pop(0) for _ in range(3))
            adapters.append(LoraAdapter(a, b, 0.5 + i, beta))
        projections.append(Projection(weight, bias, adapters))
    return op(x, *projections, **options)


def check(leaves: list[torch.Tensor], **options: Any) -> None:
    check_op(partial(call, gated_mlp, **options), partial(call, gated_mlp_ref, **options), leaves, terms=INNER)


ALL = {"gate": (4,), "up": (4,), "down": (4,)}
RANKS = [
    ALL,
    {},
    {"gate": (3,)},
    {"up": (20,)},
    {"down": (5,)},
    {"gate": (4, 7), "up": (3,), "down": (2, 2)},
    {"gate": (2, 2), "up": (3, 40), "down": (17,)},
]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_on_some_and_on_all(
    dtype: torch.dtype, ranks: dict[str, tuple[int, ...]], trained: bool, device: torch.device
) -> None:
    check(leaves_of(dtype, device, ranks, trained=trained), ranks=ranks)


@pytest.mark.parametrize("of_adapter", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_of_every_dtype(dtype: torch.dtype, of_adapter: torch.dtype, device: torch.device) -> None:
    check(leaves_of(dtype, device, ALL, of_adapter), ranks=ALL)
