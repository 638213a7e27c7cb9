"""LoRA layers that an attention calls with one tensor run as one op, and only those."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels.ops import launches, reset_launches
from liger_kernels.patching.lora.shared_input import shared_calls, sharing
from tests.patching_checks import batch, check_same, gradients, tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHARED = (("q", "k", "v"),)


class Straight(nn.Module):
    def forward(self, x: Any) -> Any:
        q = self.q(x).view(2, -1)
        k: Any = self.norm(self.k(x))
        v = self.v(x)
        return self.o(q + k + v)


class Assigned(nn.Module):
    def forward(self, x: Any) -> Any:
        q, k = self.q(x), self.k(x)
        x = x + 1
        v = self.v(x)
        return q + k + v


class Loop(nn.Module):
    def forward(self, x: Any) -> Any:
        q = self.q(x)
        for _ in range(2):
            x = self.k(x)
        return q + self.v(x)


class Conditional(nn.Module):
    def forward(self, x: Any) -> Any:
        q = self.q(x)
        if self.training:
            k = self.k(x)
            v = self.v(x)
        else:
            k, v = x, x
        w = self.w(x) if q is None else None
        return q, k, v, w


class Leaves(nn.Module):
    def forward(self, x: Any) -> Any:
        q = self.q(x)
        if q is None:
            return q
        return q + self.k(x)


class Twice(nn.Module):
    def forward(self, x: Any) -> Any:
        a = self.q(x)
        b = self.q(x)
        c = self.q(x, 1)
        return a + b + c


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Straight, (("q", "k", "v"),)),
        (Assigned, (("q", "k"),)),
        (Loop, ()),
        (Conditional, (("k", "v"),)),
        (Leaves, ()),
        (Twice, ()),
    ],
)
def test_which_calls_share_their_input(cls: Any, expected: tuple[tuple[str, ...], ...]) -> None:
    assert shared_calls(cls.forward) == expected


def test_a_forward_without_source_shares_nothing() -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.q(x), self.k(x)", scope)
    assert shared_calls(scope["forward"]) == ()


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three patched LoRA layers of one parent."""
    torch.manual_seed(0)
    parent = nn.ModuleDict({name: nn.Linear(12, size) for name, size in (("q", 8), ("k", 4), ("v", 4))})
    model = peft.get_peft_model(nn.Sequential(parent), peft.LoraConfig(r=3, target_modules=["q", "k", "v"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    liger_kernels.patch(model)
    return model.base_model.model[0].to(DEVICE, dtype)


def run(parent: Any, forward: Callable[[], Any], shared: tuple[tuple[str, ...], ...] = SHARED) -> Any:
    reset_launches()
    return sharing(parent, shared, forward)


def check(found: list[torch.Tensor], expected: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for ours, theirs, exact in zip(found, expected, truth, strict=True):
        three_way(ours, theirs, exact, torch.float32, "a projection")


def each(parent: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [parent[name](x) for name, x in zip("qkv", inputs, strict=True)]


def test_siblings_run_together() -> None:
    parent, x = layers(), torch.randn(5, 12, device=DEVICE)
    alone = run(parent, lambda: each(parent, x, x, x), ())
    assert launches()["_lora_linear_rows_kernel"] == 3
    together = run(parent, lambda: each(parent, x, x, x))
    assert launches()["_lora_linear_rows_kernel"] == 1
    check(together, alone, each(copy.deepcopy(parent).double(), *[x.double()] * 3))


def test_a_sibling_with_another_input_computes_its_own() -> None:
    parent, x, other = layers(), *torch.randn(2, 5, 12, device=DEVICE)
    expected = run(parent, lambda: each(parent, x, other, x), ())
    found = run(parent, lambda: each(parent, x, other, x))
    check(found, expected, each(copy.deepcopy(parent).double(), x.double(), other.double(), x.double()))


def test_a_sibling_after_a_change_in_place_computes_its_own() -> None:
    parent, x = layers(), torch.randn(5, 12, device=DEVICE)

    def forward() -> list[torch.Tensor]:
        q = parent["q"](x)
        x.mul_(2)
        return [q, parent["k"](x), parent["v"](x)]

    with torch.no_grad():
        found = run(parent, forward)
        expected = [parent["q"](x / 2), parent["k"](x), parent["v"](x)]
        exact = x.double()
        check(found, expected, each(copy.deepcopy(parent).double(), exact / 2, exact, exact))


def test_nothing_is_left_of_a_forward_that_fails() -> None:
    parent, x = layers(), torch.randn(5, 12, device=DEVICE)

    def fails() -> None:
        parent["q"](x)
        raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        run(parent, fails)
    reset_launches()
    parent["k"](x)
    assert launches()["_lora_linear_rows_kernel"] == 1


@pytest.mark.parametrize("what", ["hook", "dropout", "disabled"])
def test_a_sibling_that_has_to_be_called_is_called(what: str) -> None:
    parent, x = layers(), torch.randn(5, 12, device=DEVICE)
    seen = []
    if what == "hook":
        parent["k"].register_forward_pre_hook(lambda module, args: seen.append(1) or (2 * args[0],))
    elif what == "dropout":
        parent["k"].lora_dropout["default"] = nn.Dropout(1.0)
    else:
        parent["k"].enable_adapters(False)
    found = run(parent, lambda: each(parent, x, x, x))
    expected = run(parent, lambda: each(parent, x, x, x), ())
    assert len(seen) == (2 if what == "hook" else 0)
    check(found, expected, each(copy.deepcopy(parent).double(), *[x.double()] * 3))


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_step_of_a_model(checkpointing: bool | None) -> None:
    """With as few launches as a layer needs, and the gradients of the unpatched model; ``checkpointing`` is reentrant
    or not."""
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny("llama").to(DEVICE), adapter)
    inputs = {name: t.to(DEVICE) for name, t in batch(rows=2, length=16).items()}
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})

    def run_step(model: Any) -> dict[str, torch.Tensor]:
        return gradients(model, model(**inputs, use_cache=False).loss)

    reset_launches()
    patched = check_same(model, run_step)
    layers = 2 * (1 if checkpointing is None else 2)
    # Forward and backward: q, k and v; o; gate and up; down.
    assert launches()["_lora_linear_rows_kernel"] == 4 * layers + 4 * 2
    assert not liger_kernels.status(patched).fallbacks
