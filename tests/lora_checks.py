"""What the tests of PEFT's LoRA layers share: small models with adapters, inputs, and a step with its gradients."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import torch
from torch import nn

import liger_kernels
from tests.patching_checks import DEVICE

IN, INNER, OUT = 12, 20, 8


class Net(nn.Module):
    """Two linear layers, one of which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, INNER)
        self.last = nn.Linear(INNER, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return y


class Mask(nn.Module):
    """A dropout whose mask follows from the index of an element, so that it is the same in every dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = (torch.arange(x.numel(), device=x.device) * 7919 % 11 > 3).view(x.shape)
        return x * kept * 1.5


def visible(model: Any) -> Any:
    """``model`` with B and biases that are not zero, in training mode."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_magnitude" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


def adapted(base: nn.Module | None = None, **options: Any) -> Any:
    """A model with an adapter."""
    torch.manual_seed(0)
    base = Net().to(DEVICE) if base is None else base
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["first", "last"], **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a layer without bias gets an adapter with one
        return visible(peft.get_peft_model(base, config))


def second(model: Any, **options: Any) -> Any:
    """``model`` with another adapter."""
    config = peft.LoraConfig(**{"r": 5, "lora_alpha": 4, "target_modules": ["first"], **options})
    model.add_adapter("other", config)
    return visible(model)


def both(model: Any) -> Any:
    """Both adapters of ``model`` are active and trained."""
    second(model).base_model.set_adapter(["default", "other"])
    return model


def masked(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name in module.lora_dropout:
                module.lora_dropout[name] = Mask()
    return model


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def inputs(*shape: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 7, IN)), generator=generator)


def step(model: Any, x: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients, by name."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    x = (inputs() if x is None else x).to(like.device, like.dtype).requires_grad_()
    y = model(x)
    generator = torch.Generator().manual_seed(3)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"y": y.detach(), "x": x.grad, **found}


class Sharded(torch.Tensor):
    """A subclass, as a DTensor is one."""


def patched_quietly(model: nn.Module, kernels: list[str] | None = None) -> liger_kernels.PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was replaced
        return liger_kernels.patch(model, kernels)
