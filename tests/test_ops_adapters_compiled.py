"""Adapters of a patched model in a compiled program: its gradients are as near to float64 as PEFT's own in eager.

Inductor before torch 2.11 is said to compile some traced backward passes wrongly. The cells of old torches run this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.torch_version
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from tests.patching_checks import DEVICE, tiny, train

peft: Any = pytest.importorskip("peft", reason="some versions of transformers are tested without peft")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Mask(nn.Module):
    """A dropout whose mask follows from the index of an element, so that it is the same in every program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (torch.arange(x.numel(), device=x.device) * 7919 % 11 > 3).view(x.shape)
        return x * kept * 1.5


def adapted() -> Any:
    """One layer with an adapter on every projection, and another one, which drops, on some."""
    model = peft.get_peft_model(tiny("llama", num_hidden_layers=1), peft.LoraConfig(r=3, target_modules=TARGETS))
    some = {"target_modules": TARGETS[2::2], "lora_dropout": 0.1, "use_rslora": True}
    model.add_adapter("second", peft.LoraConfig(r=5, lora_alpha=4, **some))
    model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    for module in model.modules():
        if "second" in getattr(module, "lora_dropout", ()):
            module.lora_dropout["second"] = Mask()
    return model.train()


def check_compiled(compiled: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """Compare PEFT's own gradients in eager, and those of a patched model a part of which is compiled. The program runs
    once more inside of a checkpoint."""
    own = adapted()
    for name, parameter in own.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else dtype)
    truth = train(copy.deepcopy(own).double())
    ours = copy.deepcopy(own)
    liger_kernels.patch(ours)
    torch.compiler.reset()
    compiled(ours)
    found = [train(ours)]
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    found.append(train(ours))
    theirs = train(own)
    assert len(truth) == 1 + 2 * 7 + 2 * 3
    chain = sum(1 for module in own.modules() if not module._modules)  # each leaf rounds at least once
    for results in found:
        assert results.keys() == truth.keys()
        for name, exact in truth.items():
            three_way(results[name], theirs[name], exact, dtype, name, chain)


def layer_of(model: Any) -> Any:
    (layer,) = model.get_base_model().model.layers
    return layer


@pytest.mark.compilers
def test_traced() -> None:
    """Without Inductor, of which a CPU takes long to compile anything."""
    check_compiled(lambda m: layer_of(m).compile(backend="aot_eager", dynamic=False), torch.float32)


@pytest.mark.skipif(
    DEVICE.type == "cpu" and torch.__version__ >= torch.torch_version.TorchVersion("2.11"),
    reason="on a CPU, only Inductor before torch 2.11 is asked: it takes 20 seconds",
)
def test_inductor() -> None:
    """On a GPU a whole layer, also with float32 adapters on a bfloat16 model; on a CPU its MLP."""
    if DEVICE.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            check_compiled(lambda m: layer_of(m).compile(dynamic=False), dtype)
    else:
        with torch._inductor.config.patch({"cpp.simdlen": 1}):  # what vectors the processor has is compiled, too
            check_compiled(lambda m: layer_of(m).mlp.compile(dynamic=False), torch.float32)
