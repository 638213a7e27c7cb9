"""PEFT's DoRA layers of a patched model: the same numbers, and PEFT's own forward wherever a call is something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels import ops
from tests.lora_checks import Mask, Net, Sharded, adapted, inputs, layers, patched_quietly, second, step, visible
from tests.patching_checks import DEVICE, batch, check_same, compare, fallbacks, tiny, train


def decomposed(base: nn.Module | None = None, **options: Any) -> Any:
    return adapted(base, use_dora=True, **options)


MODELS: dict[str, Callable[[], Any]] = {
    "one adapter": decomposed,
    "rslora": lambda: decomposed(use_rslora=True, r=5),
    "a second one that is not active": lambda: second(decomposed(), use_dora=True),
    "a dropout that drops nothing in evaluation": lambda: decomposed(lora_dropout=0.1).eval(),
    "a trained base": lambda: decomposed().requires_grad_(True),
    "frozen adapters": lambda: decomposed().requires_grad_(False),
    "frozen magnitudes": lambda: (model := decomposed(), [m.requires_grad_(False) for m in magnitudes(model)])[0],
    "disabled": lambda: (model := decomposed(), model.base_model.disable_adapter_layers())[0],
    "merged": lambda: (model := decomposed(), model.merge_adapter())[0],
}


def magnitudes(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "lora_magnitude" in name]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers(name: str) -> None:
    patched = check_same(MODELS[name](), step)
    report = liger_kernels.status(patched)
    assert report.counts() == {"dora_linear": 2}
    assert not report.fallbacks
    ops.reset_launches()
    step(patched)
    assert bool(ops.launches().get("_dora_norm_kernel")) == (name not in ("disabled", "merged"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_adapters_of_a_16_bit_model_are_as_near_to_float64_as_peft_s(dtype: torch.dtype) -> None:
    model = decomposed(Net().to(DEVICE, dtype))
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    results = {name: step(m, inputs()) for name, m in (("peft", model), ("ours", patched))}
    for name, exact in step(copy.deepcopy(model).double(), inputs().to(dtype)).items():
        ours, theirs = (results[who][name] for who in ("ours", "peft"))
        three_way(ours, theirs, exact, dtype, name)
        assert ours.dtype == theirs.dtype


def test_a_frozen_weight_that_changes_has_another_length() -> None:
    """As after merging another adapter into it, which writes behind autograd's back."""
    own = decomposed()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for _ in range(2):
        expected, found = step(own), step(patched)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)
        for model in (own, patched):
            for layer in layers(model):
                layer.base_layer.weight.data *= 3.0


def checkpointed(model: Any, reentrant: bool, between: Callable[[Any], None] = lambda model: None) -> dict[str, Any]:
    """The gradients of a step that runs the model again in the backward; ``between`` forward and backward."""
    model.zero_grad(set_to_none=True)
    y = checkpoint(model, inputs().to(DEVICE).requires_grad_(), use_reentrant=reentrant)
    with torch.no_grad():
        between(model)
    y.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_runs_again_has_the_length_that_it_had(reentrant: bool) -> None:
    own = decomposed()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for _ in range(2):
        ops.reset_launches()
        found = checkpointed(patched, reentrant)
        assert ops.launches()["_dora_norm_kernel"] == len(layers(patched))
        torch.testing.assert_close(found, checkpointed(own, reentrant))
        for model in (own, patched):
            for layer in layers(model):
                layer.base_layer.weight.data *= 3.0


def other_scale(model: Any) -> None:
    for layer in layers(model):
        layer.scaling["default"] *= 2


def other_weights(model: Any) -> None:
    for layer in layers(model):
        layer.base_layer.weight.mul_(2)


def other_adapters(model: Any) -> None:
    for layer in layers(model):
        layer.lora_B["default"].weight = nn.Parameter(2 * layer.lora_B["default"].weight)


@pytest.mark.parametrize("change", [other_scale, other_weights, other_adapters])
def test_a_layer_that_changes_before_it_runs_again_has_another_length(change: Callable[[Any], None]) -> None:
    own = decomposed()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    torch.testing.assert_close(checkpointed(patched, False, change), checkpointed(own, False, change))


def dropping(model: Any) -> None:
    for layer in layers(model)[:1]:
        layer.lora_dropout["default"] = Mask()


def watched(model: Any) -> None:
    layers(model)[0].lora_magnitude_vector["default"].register_forward_hook(lambda *_: None)


def watched_base(model: Any) -> None:
    layers(model)[0].base_layer.register_forward_hook(lambda *_: None)


def sharded(model: Any) -> None:
    magnitude = layers(model)[0].lora_magnitude_vector["default"]
    magnitude.weight = nn.Parameter(magnitude.weight.detach().as_subclass(Sharded))


def plain(model: Any) -> None:
    second(model).set_adapter("other")  # it adapts the first layer alone


def two(model: Any) -> None:
    second(model, use_dora=True).base_model.set_adapter(["default", "other"])


ODD: dict[str, tuple[Callable[[Any], None], str]] = {
    "dropout": (dropping, "an adapter that scales to a magnitude has an active dropout"),
    "hooks": (watched, "its magnitude is no plain tensor, or somebody watches it"),
    "no plain tensor": (sharded, "its magnitude is no plain tensor, or somebody watches it"),
    "a watched base": (watched_base, "the weight that an adapter with a magnitude changes is not known"),
    "an adapter without a magnitude": (plain, "an adapter without a magnitude is active"),
    "two adapters": (two, "several adapters are active, one of which scales to a magnitude"),
}


@pytest.mark.parametrize("why", ODD)
def test_peft_computes_what_was_not_probed_and_the_report_counts_why(why: str) -> None:
    own = decomposed()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    change, reason = ODD[why]
    for model in (own, patched):
        torch.manual_seed(4)
        change(model)
    expected, found = step(own), step(patched)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)
    assert fallbacks(patched) == {f"PEFT computed an adapter: {reason}": 1}


@pytest.mark.parametrize("change", ["norm with a gradient", "scaled twice", "bias scaled"])
def test_a_magnitude_that_computes_something_else_is_left(change: str) -> None:
    """As a later version of PEFT might."""
    model = decomposed()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        base, s = self.base_layer, self.scaling["default"]
        norm = torch.linalg.vector_norm(base.weight + s * (b @ a), dim=1)
        c = self.lora_magnitude_vector["default"].weight / (norm if change == "norm with a gradient" else norm.detach())
        delta = nn.functional.linear(x.to(a.dtype), b @ a) * (s * (2 if change == "scaled twice" else 1))
        bias = 0.0 if base.bias is None else base.bias
        kept = 0.0 if change == "bias scaled" else bias
        return (c * (base(x) - kept + delta) + kept).to(x.dtype)

    for layer in layers(model):
        layer.__class__ = type("Later", (type(layer),), {"forward": forward})
    report = patched_quietly(model)
    assert not report.replaced
    assert any("it is not m / |W" in left.reason for left in report.left)


def test_a_model_trains_as_unpatched() -> None:
    """Its gated MLP and its attention call such layers as the modules they are."""
    model = decomposed(tiny("llama"), target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"])
    expected, truth = train(model), train(copy.deepcopy(model).double())
    liger_kernels.patch(model)
    compare(model, train(model), expected, truth)
    report = liger_kernels.status(model)
    assert report.counts()["dora_linear"] == 4 * len(model.get_base_model().model.layers)
    assert not report.fallbacks
    assert not report.never_ran
    liger_kernels.unpatch(model)
    compare(model, train(model), expected, truth)


def test_autocast() -> None:
    model = visible(decomposed(tiny("llama"), target_modules=["q_proj", "down_proj"]))
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    losses = []
    for one in (model, patched):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = one(**batch()).loss
        loss.backward()
        losses.append(loss.detach())
    truth = copy.deepcopy(model).double()(**batch()).loss.detach()
    three_way(losses[1], losses[0], truth, torch.bfloat16, "loss")
    assert not fallbacks(patched)
