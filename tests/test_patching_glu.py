"""Who has the gate and the up of a patched MLP: where nobody else does, their gradients are written over them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import liger_kernels
from liger_kernels.ops.runtime.anchor import anchors_only
from tests.patching_checks import DEVICE, check_same, tiny, train

LAYER = 1


def mlp() -> Any:
    """An MLP alone, patched as one of a model."""
    model = tiny("llama")
    liger_kernels.patch(model, ["swiglu"])
    return model.model.layers[LAYER].mlp


def inner_tensors(part: Any, *, retain: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a step of ``part`` saves in the size of its inner features: as it is after the backward, and as it was."""
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    width = part.gate_proj.out_features

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.shape[-1] == width and t.dim() == 3:
            saved.append((t, t.detach().clone()))
        return t

    x = torch.randn(2, 8, part.gate_proj.in_features, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = part(x)
    y.square().sum().backward(retain_graph=retain)
    return saved


def test_gradients_lie_over_what_two_linear_layers_returned() -> None:
    saved = inner_tensors(mlp())
    assert [torch.equal(*pair) for pair in saved] == [False, False]


def watched(part: Any) -> None:
    part.gate_proj.register_forward_hook(lambda *_: None)


def of_another_class(part: Any) -> None:
    part.up_proj.__class__ = type("Mine", (torch.nn.Linear,), {})


@pytest.mark.parametrize("change", [watched, of_another_class])
def test_what_somebody_else_may_have_stays_as_it_is(change: Any) -> None:
    part = mlp()
    change(part)
    saved = inner_tensors(part)
    assert [torch.equal(*pair) for pair in saved] == [True, True]


def test_a_graph_that_is_kept_keeps_them() -> None:
    assert [torch.equal(*pair) for pair in inner_tensors(mlp(), retain=True)] == [True, True]


def test_whoever_recomputes_around_an_mlp_gets_an_anchor() -> None:
    part = mlp()
    with anchors_only():
        y = part(torch.randn(2, 8, part.gate_proj.in_features, device=DEVICE, requires_grad=True))
    assert set(y.stride()) == {0}  # nothing was computed


def test_what_a_hook_saw_is_not_changed_by_the_backward() -> None:
    model = tiny("llama")
    liger_kernels.patch(model)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    gate = model.model.layers[LAYER].mlp.gate_proj
    gate.register_forward_hook(lambda _, args, y: seen.append((y.detach(), y.detach().clone())))
    train(model)
    assert seen
    assert all(torch.equal(*pair) for pair in seen)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "not reentrant", "reentrant"])
def test_the_model_is_the_same(reentrant: bool | None) -> None:
    model = copy.deepcopy(tiny("llama"))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check_same(model, train, ["swiglu"])
