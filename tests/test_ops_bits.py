"""A tensor whose memory does not hold its values is read as its values: every argument of every op, and every gradient
that comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tools.op_table import TABLE

# What a negated number is seen through: in the memory of the view it has the other sign.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch._neg_view,
    "imaginary part of a conjugate": lambda x: torch.complex(torch.zeros_like(x), x).conj().imag,
}


class Call(NamedTuple):
    op: Callable[..., Any]
    arguments: dict[str, torch.Tensor]


def call_of(name: str, device: torch.device) -> Call:
    """The call of a row of the table."""
    return Call(TABLE[name].op, TABLE[name].named(TABLE[name].leaves(4, torch.float32, device)))


def step(call: Call, arguments: dict[str, torch.Tensor], seen: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """The results and the gradients of the leaves, with upstream gradients that are ``seen`` through a view."""
    results = call.op(**arguments)
    results = [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]
    leaves = [t for t in call.arguments.values() if t.requires_grad]
    if not leaves:
        return results, []
    wanted = [y for y in results if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y) for y in wanted]
    upstream = [g if seen is None else seen(-g) for g in upstream]
    return results, torch.autograd.grad(wanted, leaves, upstream, allow_unused=True)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", TABLE)
def test_every_argument_and_gradient_is_read_as_its_values(name: str, view: str, device: torch.device) -> None:
    call, seen = call_of(name, device), VIEWS[view]
    expected = step(call, call.arguments, None)
    for argument, t in call.arguments.items():
        if t.dtype == torch.bool or (not t.is_floating_point() and view != "negated"):
            continue
        with_view = {**call.arguments, argument: seen(-t)}
        assert with_view[argument].is_neg()
        torch.testing.assert_close(
            step(call, with_view, None), expected, rtol=0, atol=0, msg=lambda m, a=argument: f"{a}: {m}"
        )
    torch.testing.assert_close(step(call, call.arguments, seen), expected, rtol=0, atol=0)
