"""Patches for the proof to judge: an honest one in plain torch, and faults that it must see."""

from __future__ import annotations

import types
from typing import Any

import torch

SCALED = "model.layers.1.mlp.down_proj.weight"


def rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Llama's RMSNorm by another sequence of roundings."""
    x = hidden_states.float()
    x = x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
    return self.weight * x.to(hidden_states.dtype)


def honest(model: Any) -> None:
    """Every norm of this model computes the same by another formula."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(rms_norm, module)


def scale_gradient(model: Any, path: str = SCALED) -> None:
    """A gradient that is 1% too large."""
    model.get_parameter(path).register_hook(lambda grad: grad * 1.01)


def poison_gradient(model: Any) -> None:
    """A gradient of which one element is NaN."""

    def poison(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[grad.numel() // 2] = float("nan")
        return grad

    model.get_parameter(SCALED).register_hook(poison)


def drop_gradient(model: Any) -> None:
    """A parameter without a gradient."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model.get_parameter(SCALED).register_post_accumulate_grad_hook(drop)


def one_gradient_scaled(model: Any) -> None:
    honest(model)
    scale_gradient(model)


def nan_in_one_gradient(model: Any) -> None:
    honest(model)
    poison_gradient(model)


def missing_gradient(model: Any) -> None:
    honest(model)
    drop_gradient(model)


def overwrites_the_logits(model: Any) -> None:
    """The logits that the caller holds become their gradient in the backward pass."""
    honest(model)

    def overwrite(output: torch.Tensor) -> Any:
        def write(grad: torch.Tensor) -> None:
            output.data.copy_(grad)

        return write

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(overwrite(output))

    model.get_output_embeddings().register_forward_hook(hook)
