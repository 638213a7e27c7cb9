"""``torch.compile`` of every op over batches of many sizes: one graph each, the same results, and few programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tools.op_table import IN_PROGRAMS
from tools.op_table.row import Op

SIZES = (8, 10, 24, 25, 40, 9)  # the hidden size is 24, up to which a compiled fused head keeps its logits
Inputs = tuple[torch.Tensor, ...]
# A chain of products rounds too often for a comparison of float32 numbers.
NAMES = [name for name in IN_PROGRAMS if name != "gated_mlp"]


def inputs_of(op: Op, device: torch.device) -> Callable[[int], Inputs]:
    """Rows of any number, with weights that stay."""

    def drawn(size: int) -> Inputs:
        letters = {"n": 2, "g": 1, "h": 3, "r": 8, "v": 67, op.batched: size}
        return tuple(op.leaves(size, torch.float32, device, columns=24, sizes=letters))

    fixed = drawn(1)

    def inputs(size: int) -> Inputs:
        varied = [op.batched in dims for dims in op.leaf_dims]
        return tuple(t if varies else kept for t, kept, varies in zip(drawn(size), fixed, varied, strict=True))

    return inputs


def _results(op: Callable[..., object], inputs: Inputs) -> list[torch.Tensor]:
    """The outputs, and the gradients of their sum."""
    outputs = op(*inputs)
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    made = [y for y in every if y is not None]
    total = sum(y.sum() for y in made if y.requires_grad)
    return [*made, *torch.autograd.grad(total, [x for x in inputs if x.requires_grad])]


@pytest.mark.compilers
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "as torch decides"])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_many_sizes(name, dynamic, device):
    """``dynamic=True`` makes symbols of Python numbers, too: an op's options are checked all the same."""
    torch.compiler.reset()
    op, inputs = IN_PROGRAMS[name].op, inputs_of(IN_PROGRAMS[name], device)
    programs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend=programs)
    for size in SIZES:
        given = inputs(size)
        torch.testing.assert_close(_results(compiled, given), _results(op, given))
    assert programs.frame_count <= 3  # of which one where only shapes of its own kind may follow
