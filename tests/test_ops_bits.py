"""A tensor whose memory does not hold its values is read as its values: every argument of every op, and every gradient
that comes in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from liger_kernels import ops
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.linear_log_probs import OUTPUTS
from tests.op_table import OPS
from tests.ops_checks import randn

# What a negated number is seen through: in the memory of the view it has the other sign.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch._neg_view,
    "imaginary part of a conjugate": lambda x: torch.complex(torch.zeros_like(x), x).conj().imag,
}


class Call(NamedTuple):
    op: Callable[..., Any]
    arguments: dict[str, torch.Tensor]


def calls(device: torch.device) -> dict[str, Call]:
    """A call of every op, by name, with all the tensors that it takes."""

    def new(*shape: int, grad: bool = True) -> torch.Tensor:
        return randn(*shape, dtype=torch.float32, device=device, grad=grad)

    def integers(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, device=device)

    targets = integers(1, -100, 4, 2, 0)
    weights = {"class_weight": new(6, grad=False).abs(), "row_weight": new(5, grad=False).abs()}
    head = {"hidden": new(5, 8), "weight": new(6, 8), "targets": targets, "bias": new(6)}
    denominator = torch.tensor(3.0, device=device)
    options: dict[str, Any] = {"softcap": 3.0, "extras": ("entropy", "log_probs")}
    found = {
        "cross_entropy": Call(
            partial(ops.cross_entropy, **options),
            {"logits": new(5, 6), "targets": targets, **weights, "denominator": denominator},
        ),
        "cross_entropy, none": Call(
            partial(ops.cross_entropy, reduction="none"), {"logits": new(5, 6), "targets": targets, **weights}
        ),
        "linear_cross_entropy, counted": Call(partial(ops.linear_cross_entropy, counted=4), head),
        "experts": Call(
            ops.experts,
            {
                "hidden": new(5, 8),
                "ids": torch.randint(0, 4, (5, 2)).to(device),
                "weights": new(5, 2),
                "gate_up": new(4, 12, 8),
                "down": new(4, 8, 6),
                "gate_up_bias": new(4, 12),
                "down_bias": new(4, 8),
            },
        ),
        "packing_weights": Call(
            lambda **given: ops.packing_weights(**given, loss_reduction="square")[1:],
            {"labels": targets, "seq_idx": integers(0, 0, 1, 1, 1), "class_weight": weights["class_weight"]},
        ),
    }
    for memory in MEMORY:
        for reduction in ("mean", "none"):
            call = partial(ops.linear_cross_entropy, memory=memory, reduction=reduction, **options)
            found[f"linear_cross_entropy, {memory}, {reduction}"] = Call(
                call, {**head, **weights, **({"denominator": denominator} if reduction == "mean" else {})}
            )
        heads = {name: t for name, t in head.items() if name != "targets"}
        heads |= {"teacher_hidden": new(5, 8, grad=False), "teacher_weight": new(6, 8, grad=False)}
        heads |= {"teacher_bias": new(6, grad=False), "mask": targets >= 0}
        call = partial(ops.linear_divergence, memory=memory, beta=0.3, outputs=ops.DivergenceOutput._fields)
        found[f"linear_divergence, {memory}"] = Call(call, heads)
        call = partial(ops.linear_log_probs, memory=memory, outputs=OUTPUTS)
        found[f"linear_log_probs, {memory}"] = Call(
            call, {**head, "ids": torch.tensor([[1, -1, 5]] * 5, device=device)}
        )
    for name, op in OPS.items():
        found[name] = Call(op.op, op.named(op.leaves(4, torch.float32, device)))
    return found


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
@pytest.mark.parametrize("name", calls(torch.device("cpu")))
def test_every_argument_and_gradient_is_read_as_its_values(name: str, view: str, device: torch.device) -> None:
    call, seen = calls(device)[name], VIEWS[view]
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
