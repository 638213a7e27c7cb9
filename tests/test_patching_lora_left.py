"""When PEFT's own forward runs in a patched model: calls and adapters that the kernel does not compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import liger_kernels
from liger_kernels import ops
from tests.lora_checks import IN, Net, Sharded, adapted, inputs, layers, patched_quietly, second, step
from tests.patching_checks import DEVICE, batch, fallbacks, tiny


def hooked(layer: Any) -> None:
    layer.lora_B["default"].register_forward_hook(lambda *_: None)


def replaced(layer: Any) -> None:
    a = layer.lora_A["default"]
    a.forward = lambda x: nn.functional.linear(x, 2 * a.weight)


def sharded(layer: Any) -> None:
    layer.lora_A["default"].weight = nn.Parameter(layer.lora_A["default"].weight.detach().as_subclass(Sharded))


def varied(layer: Any) -> None:
    class Doubled:
        @staticmethod
        def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
            return result + 2 * module.lora_B[active_adapter](module.lora_A[active_adapter](x))

    layer.lora_variant["default"] = Doubled()


def parametrised(layer: Any) -> None:
    nn.utils.parametrizations.weight_norm(layer.lora_A["default"])


ODD: dict[str, Callable[[Any], None]] = {
    "hooks": hooked,
    "no plain linear layer": parametrised,
    "a forward of its own": replaced,
    "no plain tensor": sharded,
    "variant": varied,
}


@pytest.mark.parametrize("why", ODD)
def test_peft_computes_what_was_not_probed_and_the_report_counts_why(why: str) -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for model in (own, patched):
        ODD[why](layers(model)[0])
    expected, found = step(own), step(patched)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)
    (reason,) = fallbacks(patched)
    assert reason.startswith("PEFT computed an adapter: ")
    assert why in reason
    assert fallbacks(patched) == {reason: 1}
    assert reason in str(liger_kernels.status(patched))


def test_a_hook_of_all_modules_sees_those_of_an_adapter() -> None:
    model = adapted()
    liger_kernels.patch(model)
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(inputs().to(DEVICE))
    finally:
        hook.remove()
    assert all(layer.lora_B["default"] in seen for layer in layers(model))
    assert set(fallbacks(model).values()) == {2}


def test_adapter_names_in_a_batch() -> None:
    own = second(adapted())
    own.eval()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    x, names = inputs(3, IN).to(DEVICE), ["default", "other", "__base__"]
    torch.testing.assert_close(patched(x, adapter_names=names), own(x, adapter_names=names))
    for layer in layers(patched):
        with pytest.raises(ValueError, match="adapter_names"):
            layer(torch.ones(2, layer.in_features, device=DEVICE), adapter_names=names)


VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "weights decomposed": ({"use_dora": True}, "its adapters are variants of LoRA: PEFT computes them"),
    "an adapter of a parameter": (
        {"target_modules": [], "target_parameters": ["first.weight"]},
        "it is not base(x) + sum of scale * B(A(dropout(x)))",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_left_to_peft(name: str) -> None:
    options, reason = VARIANTS[name]
    model = adapted(**options)
    expected = step(model)
    report = patched_quietly(model, ["lora_linear"])
    assert not report.replaced
    assert {left.reason for left in report.left} == {reason}
    assert all(map(torch.equal, step(model).values(), expected.values()))


@pytest.mark.parametrize("config", [peft.IA3Config, peft.LoHaConfig, peft.VeraConfig])
def test_other_adapters_are_not_listed(config: Any) -> None:
    options = {"feedforward_modules": []} if config is peft.IA3Config else {}
    report = patched_quietly(peft.get_peft_model(Net().to(DEVICE), config(target_modules=["first"], **options)))
    assert not report.replaced
    assert not report.left


@pytest.mark.parametrize("change", ["scaled twice", "rounded", "another gradient", "no scale"])
def test_a_forward_that_computes_something_else_is_left(change: str) -> None:
    """As a later version of PEFT might."""
    model = adapted()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_A["default"], self.lora_B["default"]
        scale = {"scaled twice": 2 * self.scaling["default"], "no scale": 1.0}.get(change, self.scaling["default"])
        z = a(self.lora_dropout["default"](x.to(a.weight.dtype)))
        delta = b(z.detach() + 0 * z if change == "another gradient" else z) * scale
        if change == "rounded":
            delta = delta.bfloat16()
        y = self.base_layer(x)
        return (y + delta).to(y.dtype)

    for layer in layers(model):
        layer.__class__ = type("Later", (type(layer),), {"forward": forward})
    assert not patched_quietly(model).replaced


def test_what_is_no_linear_layer_is_not_listed() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, IN)
            self.conv = nn.Conv1d(IN, 4, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.conv(self.embed(ids).mT)
            return y

    model = adapted(Words().to(DEVICE), target_modules=["embed", "conv"])
    report = patched_quietly(model)
    assert not report.replaced
    ids = torch.arange(8, device=DEVICE)[None]
    model(ids).sum().backward()


def half_adapters(model: Any) -> None:
    for layer in layers(model):
        layer.lora_B.to(torch.float16)


def uncast(model: Any) -> None:
    model.bfloat16()
    for layer in layers(model):
        layer.lora_A.float()
        layer.lora_B.float()
        layer.cast_input_dtype_enabled = False


BAD: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "other features": (lambda model: None, lambda: torch.randn(2, IN + 1)),
    "integers": (lambda model: None, lambda: torch.ones(2, IN, dtype=torch.int64)),
    "no tensor": (lambda model: None, lambda: [1.0]),
    "float16 of B alone": (half_adapters, lambda: torch.randn(2, IN)),
    "another dtype, not cast": (uncast, lambda: torch.randn(2, IN).bfloat16()),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_peft_raises(name: str) -> None:
    change, given = BAD[name]
    errors = []
    for patch in (False, True):
        model = adapted()
        if patch:
            liger_kernels.patch(model)
        change(model)
        x = given()
        with pytest.raises(Exception) as raised:  # noqa: PT011  (whatever it is)
            model(x.to(DEVICE) if isinstance(x, torch.Tensor) else x)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


def test_an_adapter_without_memory_is_peft_s() -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for model in (own, patched):
        layers(model)[1].lora_B.to("meta")
    x = inputs().to(DEVICE)
    found = []
    for model in (own, patched):
        try:
            found.append(str(model(x).device))
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] == found[1]
    assert "PEFT computed an adapter: a weight of it is on another device than x" in fallbacks(patched)


def test_without_the_kernel_adapters_stay_as_they_are() -> None:
    model = adapted(tiny("llama"), target_modules=["q_proj"])
    report = liger_kernels.patch(model, [k for k in liger_kernels.KERNELS if k != "lora_linear"])
    assert "lora_linear" not in report.counts()
    ops.reset_launches()
    model(**batch()).loss.backward()
    assert not any("lora" in name for name in ops.launches())
    assert not liger_kernels.status(model).left


def test_a_compiled_model_runs_peft_s_forward() -> None:
    model = adapted().to("cpu")
    expected = step(model)
    liger_kernels.patch(model)
    ops.reset_launches()
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    x = inputs().requires_grad_()
    torch.testing.assert_close(compiled(x), expected["y"])
    assert not ops.launches()


def test_a_transform_of_torch_func_runs_peft_s_forward() -> None:
    model = adapted().to("cpu")
    expected = torch.func.jacrev(model.base_model.model)(inputs(IN))
    liger_kernels.patch(model)
    torch.testing.assert_close(torch.func.jacrev(model.base_model.model)(inputs(IN)), expected)
