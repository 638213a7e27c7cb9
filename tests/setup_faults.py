"""Faults of set-ups: each is a patch that applies our own and then does one thing wrong there."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels

# The set-up and the mini model in which the proof must see each, and what it does.
FAULTS = {
    "head_not_reduced": ("ddp", "llama-untied", "The gradient of the head is not reduced over the ranks."),
    "mean_of_means": ("sequence-parallel", "llama-tied", "Each rank divides by its own number of targets."),
    "stale_weight": ("fsdp2", "llama-untied", "The backward multiplies by the head's weight of an earlier step."),
    "doubled_by_recomputation": ("checkpointing", "llama-tied", "Computing a norm again doubles its gradient."),
    "unscaled_loss": ("fp16-scaler", "llama-tied", "The loss ignores the factor of the scaler in its backward."),
    "half_a_vocabulary": ("tensor-parallel", "llama-untied", "The loss sees the first half of the classes."),
    "skipped_delta": ("lora", "llama-tied", "One adapted layer runs without its adapter."),
    "rounded_scales": ("qlora", "llama-tied", "The scales of one 4-bit weight are rounded to bfloat16."),
    "backward_without_scales": (
        "float8",
        "llama-tied",
        "The backward of one layer multiplies by float8 numbers without their scales.",
    ),
}
SAMPLE = ("doubled_by_recomputation", "skipped_delta")


def head_not_reduced(model: Any) -> None:
    liger_kernels.patch(model)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["lm_head.weight"])


def _around_forward(model: nn.Module, change: Any) -> None:
    """``change(forward, kwargs)`` in place of the model's forward."""
    cls, own = type(model), type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(lambda **given: own(self, *args, **given), kwargs)

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def mean_of_means(model: Any) -> None:
    liger_kernels.patch(model)
    _around_forward(model, lambda forward, kwargs: forward(**{**kwargs, "num_items_in_batch": None}))


_weights: list[torch.Tensor] = []


def stale_weight(model: Any) -> None:
    liger_kernels.patch(model, [k for k in liger_kernels.KERNELS if k != "linear_cross_entropy"])
    cls = type(model.lm_head)

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        _weights.append(self.weight.detach().clone())
        earlier = F.linear(hidden, _weights[-2:][0])
        return F.linear(hidden.detach(), self.weight) + (earlier - earlier.detach())

    model.lm_head.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def doubled_by_recomputation(model: Any) -> None:
    liger_kernels.patch(model)
    norm = model.model.layers[0].input_layernorm

    def double(module: nn.Module, inputs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # inside of a backward
            module.weight.register_hook(lambda grad: 2 * grad)

    norm.register_forward_pre_hook(double)


def unscaled_loss(model: Any) -> None:
    liger_kernels.patch(model)

    def change(forward: Any, kwargs: Any) -> Any:
        outputs = forward(**kwargs)
        if outputs.loss is not None and outputs.loss.requires_grad:
            outputs.loss.register_hook(torch.ones_like)
        return outputs

    _around_forward(model, change)


def half_a_vocabulary(model: Any) -> None:
    liger_kernels.patch(model)
    own = model.loss_function

    def loss(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        half = vocab_size // 2
        below = torch.where(labels < half, labels, -100)
        return own(logits=logits[..., :half], labels=below, vocab_size=half, **kwargs)

    model.loss_function = loss


def skipped_delta(model: Any) -> None:
    liger_kernels.patch(model)
    adapted = [module for module in model.modules() if hasattr(module, "lora_B")]
    adapted[1].scaling = dict.fromkeys(adapted[1].scaling, 0.0)


def _base_layer(model: Any) -> Any:
    return model.get_base_model().model.layers[0].mlp.down_proj.base_layer


def rounded_scales(model: Any) -> None:
    from bitsandbytes.functional import dequantize_blockwise

    liger_kernels.patch(model)
    state = _base_layer(model).weight.quant_state
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    state.absmax, state.nested, state.offset, state.state2 = scales.bfloat16().float(), False, None, None


def backward_without_scales(model: Any) -> None:
    liger_kernels.patch(model)
    layer = _base_layer(model)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wrong = F.linear(x, self.weight.qdata.to(x.dtype))
        return F.linear(x.detach(), self.weight) + (wrong - wrong.detach())

    layer.__class__ = type("Linear", (type(layer),), {"forward": forward})


def second_rank_dies(model: Any) -> None:
    if os.environ.get("RANK") == "1":
        os._exit(3)
    liger_kernels.patch(model)
