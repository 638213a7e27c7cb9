"""``torch.compile`` of every op over batches of many sizes: one graph each, the same results, and few programs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from liger_kernels import ops
from tests.op_table import LAYOUTS, OPS

SIZES = (8, 10, 24, 25, 40, 9)  # the hidden size is 24, up to which a compiled fused head keeps its logits
Inputs = tuple[torch.Tensor, ...]


def _new(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).requires_grad_()


def _row(name: str, device: torch.device) -> tuple[Callable[..., object], Callable[[int], Inputs]]:
    """Of the table: rows of any number, with weights that stay."""
    op = OPS[name]
    fixed = op.leaves(1, torch.float32, device, columns=24)

    def inputs(size: int) -> Inputs:
        new = op.leaves(size, torch.float32, device, columns=24)
        return tuple(t if rows else kept for t, kept, rows in zip(new, fixed, op.has_rows(), strict=True))

    return op.op, inputs


def _rope(device: torch.device) -> tuple[Callable[..., object], Callable[[int], Inputs]]:
    def inputs(size: int) -> Inputs:
        angles = torch.randn(2, size, 8, device=device)
        return _new(device, 2, 3, size, 8), _new(device, 2, 1, size, 8), angles.cos(), angles.sin()

    return ops.rope, inputs


def _loss(device: torch.device, **options: float) -> tuple[Callable[..., object], Callable[[int], Inputs]]:
    return (
        lambda logits, targets: ops.cross_entropy(logits, targets, **options),
        lambda size: (_new(device, size, 67), torch.randint(67, (size,), device=device)),
    )


def _head(device: torch.device, **options: object) -> tuple[Callable[..., object], Callable[[int], Inputs]]:
    weight = _new(device, 67, 24)
    return (
        lambda hidden, targets: ops.linear_cross_entropy(hidden, weight, targets, **options),
        lambda size: (_new(device, size, 24), torch.randint(67, (size,), device=device)),
    )


CALLS: dict[str, Callable[[torch.device], tuple[Callable[..., object], Callable[[int], Inputs]]]] = {
    **{name: functools.partial(_row, name) for name in (*LAYOUTS, "geglu, tanh", "swiglu_linear")},
    "rope": _rope,
    "cross_entropy": _loss,
    "cross_entropy, options": functools.partial(_loss, softcap=3.0, logit_scale=1.5, z_loss=0.01, label_smoothing=0.1),
    "linear_cross_entropy": _head,
    "linear_cross_entropy, fast": functools.partial(_head, memory="fast"),
    "linear_cross_entropy, small": functools.partial(_head, memory="small", softcap=3.0, label_smoothing=0.1),
}


def _results(op: Callable[..., object], inputs: Inputs) -> list[torch.Tensor]:
    """The outputs, and the gradients of their sum."""
    outputs = op(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(output.sum() for output in outputs)
    return [*outputs, *torch.autograd.grad(total, [x for x in inputs if x.requires_grad])]


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "as torch decides"])
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_many_sizes(name, dynamic, device):
    """``dynamic=True`` makes symbols of Python numbers, too: an op's options are checked all the same."""
    torch.compiler.reset()
    op, inputs = CALLS[name](device)
    programs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend=programs)
    for size in SIZES:
        given = inputs(size)
        torch.testing.assert_close(_results(compiled, given), _results(op, given))
    assert programs.frame_count <= 3  # of which one where only shapes of its own kind may follow
