"""Patches for the proof to judge: an honest one in plain torch, and faults that it must see."""

from __future__ import annotations

import types
from collections.abc import Callable
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


def same_memory_in_evaluation(model: Any) -> None:
    """Without gradients, the logits of every forward of one shape are in the same memory, as in a CUDA graph."""
    honest(model)
    memory: dict[torch.Size, torch.Tensor] = {}

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            return output
        return memory.setdefault(output.shape, torch.empty_like(output)).copy_(output)

    model.get_output_embeddings().register_forward_hook(hook)


# Of what no rule about patching sees anything: hooks. Only numbers can show them.


def _scale_in_evaluation(module: Any) -> None:
    def hook(module: Any, args: Any, output: Any) -> Any:
        if module.training:
            return output
        return output * 1.01 if isinstance(output, torch.Tensor) else (output[0] * 1.01, *output[1:])

    module.register_forward_hook(hook)


def last_norm_too_large_in_evaluation(model: Any) -> None:
    """What the last norm returns is 1% too large, in evaluation only."""
    _scale_in_evaluation(model.get_decoder().norm)


def layer_too_large_in_evaluation(model: Any) -> None:
    """The same of what the first layer returns. The norms after it divide most of it out."""
    _scale_in_evaluation(model.get_decoder().layers[0])


def _hook_decoding(model: Any, change: Callable[[dict[str, Any], int], None]) -> None:
    """``change`` gets the arguments of a forward of the decoder, and how many tokens its cache has, if it has any."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (cache := kwargs.get("past_key_values")) is not None and (seen := cache.get_seq_length()):
            change(kwargs, seen)
        return args, kwargs

    model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)


def rope_one_off_in_decoding(model: Any) -> None:
    """A token that is decoded with a cache is rotated as if it stood one position further on."""

    def change(kwargs: dict[str, Any], seen: int) -> None:
        ids = kwargs["input_ids"]
        kwargs["position_ids"] = (seen + 1 + torch.arange(ids.shape[1], device=ids.device)).expand_as(ids)

    _hook_decoding(model, change)


def rope_of_the_first_row_in_decoding(model: Any) -> None:
    """A token that is decoded with a cache is rotated by the angle of the first row, in every row."""

    def change(kwargs: dict[str, Any], seen: int) -> None:
        kwargs["position_ids"] = kwargs["position_ids"][:1].expand(len(kwargs["input_ids"]), -1)

    _hook_decoding(model, change)


def padding_seen_in_decoding(model: Any) -> None:
    """A token that is decoded with a cache sees the padding before a prompt, too."""

    def change(kwargs: dict[str, Any], seen: int) -> None:
        kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])

    _hook_decoding(model, change)


def gradient_too_large_in_evaluation(model: Any) -> None:
    """What arrives at the last norm in a backward pass is 5% too large, of a model in evaluation mode only."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad and not module.training:
            output.register_hook(lambda grad: grad * 1.05)

    model.get_decoder().norm.register_forward_hook(hook)


def norm_keeps_its_state_in_the_module(model: Any) -> None:
    """The last norm's backward takes the size of each row from the latest forward, whichever that was."""
    latest: dict[str, torch.Tensor] = {}

    def hook(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if output.requires_grad:
            latest["size"] = size = args[0].detach().norm(dim=-1, keepdim=True)
            output.register_hook(lambda grad: grad * (size / latest["size"]).to(grad.dtype))

    model.get_decoder().norm.register_forward_hook(hook)


def head_too_large_in_training(model: Any) -> None:
    """The logits of a forward in training mode are 1% too large."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.01 if module.training else output

    model.get_output_embeddings().register_forward_hook(hook)


def last_norm_too_large_in_decoding(model: Any) -> None:
    """What the last norm returns is 1% too large where one token is decoded with a cache."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if module.training or output.shape[1] > 1 else output * 1.01

    model.get_decoder().norm.register_forward_hook(hook)


def last_rows_without_gradient(model: Any) -> None:
    """The last three rows of every batch get no gradient from the norm before the last MLP."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(cut)

    def cut(grad: torch.Tensor) -> torch.Tensor:
        kept = grad.clone()
        kept.flatten(0, -2)[-3:] = 0
        return kept

    model.get_decoder().layers[-1].post_attention_layernorm.register_forward_hook(hook)
