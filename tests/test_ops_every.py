"""What every op has in common: its reference's derivative, float64, no rows, inputs whose gradient nobody wants."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernels import ops
from liger_kernels.ops.rms_norm import FORMULAS
from liger_kernels.ops.rope import PAIRINGS
from tests.ops_checks import run

Shapes = tuple[tuple[int, ...], ...]


class Op(NamedTuple):
    """``shapes`` gives those of the leaves for a number of rows; of the last ``constants`` nobody wants a gradient."""

    op: partial[Any]
    reference: Callable[..., Any]
    shapes: Callable[[int], Shapes]
    constants: int = 0

    def leaves(self, rows: int, dtype: torch.dtype, device: torch.device, needs: tuple[bool, ...] = ()) -> list:
        torch.manual_seed(0)
        tensors = [torch.randn(shape, dtype=dtype).to(device) for shape in self.shapes(rows)]
        return [t.requires_grad_(needed) for t, needed in zip(tensors, needs or self.differentiable(), strict=True)]

    def differentiable(self) -> tuple[bool, ...]:
        n = len(self.shapes(1))
        return tuple(i < n - self.constants for i in range(n))


def both(name: str, shapes: Callable[[int], Shapes], constants: int = 0, **options: Any) -> Op:
    return Op(*(partial(getattr(ops, f"{name}{end}"), **options) for end in ("", "_ref")), shapes, constants)


def rotated(n: int) -> Shapes:
    return (n, 2, 3, 8), (n, 1, 3, 8), (1, 3, 6), (1, 3, 6)


INTERLEAVED = ops.Gate(alpha=1.702, limit=0.7, offset=1.0, interleaved=True)
OPS = {
    **{f"rms_norm, {f}": both("rms_norm", lambda n: ((n, 12), (12,)), eps=1e-3, formula=f) for f in FORMULAS},
    "rms_norm, no weight": both("rms_norm", lambda n: ((n, 12),), eps=1e-3),
    **{
        f"add_rms_norm, {f}": both("add_rms_norm", lambda n: ((n, 12), (n, 12), (12,)), eps=1e-3, formula=f)
        for f in FORMULAS
    },
    "layer_norm": both("layer_norm", lambda n: ((n, 12), (12,), (12,)), eps=1e-3),
    "layer_norm, zero-centered": both("layer_norm", lambda n: ((n, 12), (12,)), eps=1e-3, zero_centered=True),
    "layer_norm, no weight": both("layer_norm", lambda n: ((n, 12),), eps=1e-3),
    **{
        f"gated_rms_norm, {activation}, {'first' if first else 'last'}": both(
            "gated_rms_norm",
            lambda n: ((n, 12), (n, 12), (12,)),
            eps=1e-3,
            groups=2,
            activation=activation,
            gate_first=first,
        )
        for activation, first in (("silu", False), ("silu", True), ("sigmoid", False))
    },
    **{f"rope, {pairing}": both("rope", rotated, 2, pairing=pairing) for pairing in PAIRINGS},
    "swiglu": both("swiglu", lambda n: ((n, 12), (n, 12))),
    **{f"geglu, {a}": both("geglu", lambda n: ((n, 12), (n, 12)), approximate=a) for a in ("tanh", "none")},
    "packed_glu": both("packed_glu", lambda n: ((n, 12),), gate=ops.Gate(limit=0.7)),
    "packed_glu, interleaved": both("packed_glu", lambda n: ((n, 12),), gate=INTERLEAVED),
    "swiglu_linear": both("swiglu_linear", lambda n: ((n, 12), (n, 12), (9, 12), (9,))),
    **{
        f"geglu_linear, {a}": both("geglu_linear", lambda n: ((n, 12), (n, 12), (9, 12), (9,)), approximate=a)
        for a in ("tanh", "none")
    },
}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> Op:
    return OPS[request.param]


def test_reference_gradient(op: Op) -> None:
    leaves = op.leaves(3, torch.float64, torch.device("cpu"), (True,) * len(op.shapes(3)))
    assert torch.autograd.gradcheck(op.reference, leaves)


def test_float64_runs_the_reference(op: Op, device: torch.device) -> None:
    """All of it, or one tensor of those that may differ in dtype."""
    leaves = op.leaves(4, torch.float32, device)
    one_dtype = "linear" in op.op.func.__name__
    for chosen in [range(len(leaves))] if one_dtype else [*((i,) for i in range(len(leaves))), range(len(leaves))]:
        mixed = [t.double() if i in chosen else t for i, t in enumerate(leaves)]
        ops.reset_launches()
        ours = op.op(*mixed)
        assert not ops.launches()
        torch.testing.assert_close(ours, op.reference(*mixed), rtol=0, atol=0)


def test_no_rows(op: Op, device: torch.device) -> None:
    leaves = op.leaves(0, torch.bfloat16, device)
    results, gradients = run(op.op, leaves)
    theirs, _ = run(op.reference, leaves)
    assert [t.shape for t in results] == [t.shape for t in theirs]
    for leaf, gradient in zip(itertools.compress(leaves, op.differentiable()), gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))
    ops.reset_launches()
    with torch.no_grad():
        op.op(*leaves)
    assert not ops.launches()


class Allocated(TorchDispatchMode):
    """Inside, the bytes of every tensor's memory that was made there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            self.storages[storage._cdata] = storage  # held, so that no other gets its number
        return out

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def test_what_is_frozen_costs_nothing(op: Op, device: torch.device) -> None:
    """Whatever is frozen: the same bits of the other gradients, no launch more, and less memory by the gradient's own.
    The two terms of a sum share theirs."""
    leaves = op.leaves(64, torch.float32, device)

    def step(needs: tuple[bool, ...]) -> tuple[list, list, dict[str, int], int]:
        mine = [t.detach().requires_grad_(needed) for t, needed in zip(leaves, needs, strict=True)]
        ops.reset_launches()
        with Allocated() as made:
            results, gradients = run(op.op, mine)
        return results, gradients, ops.launches(), made.bytes

    every = op.differentiable()
    results, gradients, _, cost = step(every)
    for wanted in itertools.product(*((False, True) if possible else (False,) for possible in every)):
        found, some, less, bytes_ = step(wanted)
        torch.testing.assert_close(found, results, rtol=0, atol=0)
        torch.testing.assert_close(some, list(itertools.compress(gradients, wanted)), rtol=0, atol=0)
        spared = [t.nbytes for t, had, has in zip(leaves, every, wanted, strict=True) if had and not has]
        if op.op.func is ops.add_rms_norm:
            terms = every[:2].count(True) - wanted[:2].count(True)
            spared = [*[leaves[0].nbytes] * (terms == 2), *[leaves[2].nbytes] * (not wanted[2])]
        assert bytes_ <= cost - sum(spared), wanted
        if not any(wanted):
            assert list(less.values()) == [1], "a backward ran, or more than one forward kernel"
            assert not any(y.requires_grad for y in found)
