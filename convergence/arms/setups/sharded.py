"""Set-ups of two processes that share data, parameters, activations or the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from convergence.arms.setup import Setup
from convergence.arms.setups.adapters import Lora
from convergence.models.data import IGNORE, Batch, Step

RANKS = 2


class Ddp(Setup):
    name = "ddp"
    orders = ("before", "after")
    does = "DistributedDataParallel"
    ranks = RANKS

    def wrap(self, model: Any, device: torch.device) -> Any:
        return nn.parallel.DistributedDataParallel(model)


def _fully_sharded(model: Any, layers: Any, device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (RANKS,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Fsdp2(Setup):
    name = "fsdp2"
    orders = ("before", "after")
    sharded = True
    does = "fully_shard of every decoder layer and of the model"
    ranks = RANKS

    def wrap(self, model: Any, device: torch.device) -> Any:
        return _fully_sharded(model, model.model.layers, device)


class LoraFsdp2(Lora):
    """Gradients of a layer are of one dtype, as its group reduces them together."""

    name = "lora-fsdp2"
    orders = ("after", "before")
    sharded = True
    does = "two active adapters of peft's LoRA on every projection, and fully_shard of every decoder layer"
    ranks = RANKS

    def wrap(self, model: Any, device: torch.device) -> Any:
        return _fully_sharded(model, model.get_base_model().model.layers, device)


class Fsdp1(Setup):
    name = "fsdp1"
    orders = ("before", "after")
    sharded = True
    does = "FullyShardedDataParallel, FULL_SHARD, use_orig_params, around every decoder layer and the model"
    ranks = RANKS

    def wrap(self, model: Any, device: torch.device) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(layer) for layer in model.model.layers})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)

    def named(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in wrapped.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), parameter

    def gathered(self, model: nn.Module, wrapped: Any) -> Any:
        return wrapped.summon_full_params(wrapped)

    def gradients(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        with wrapped.summon_full_params(wrapped, with_grads=True):
            yield from super().gradients(model, wrapped)


class Zero3(Setup):
    """deepspeed brings the optimizer, so the learning rate is given when the engine is made."""

    name = "zero3"
    orders = ("before", "after")
    sharded = True
    does = "deepspeed, ZeRO stage 3"
    ranks = RANKS
    needs = ("deepspeed",)
    dtypes = ("float32",)
    without = ("accumulated",)  # its engine wants a step after each backward

    def wrap(self, model: Any, device: torch.device) -> Any:
        import deepspeed

        from convergence.arms.train import SGD_LEARNING_RATE

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": SGD_LEARNING_RATE}},
            # Each arm is wrapped anew for every step, and an engine keeps its bucket: by default 2 GiB of a GPU.
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 2**20},
            "zero_allow_untested_optimizer": True,
        }
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def backward(self, wrapped: Any, loss: torch.Tensor) -> None:
        wrapped.backward(loss)

    def optimizer(self, wrapped: Any, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
        return wrapped

    def gradients(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in model.named_parameters():
            grad = safe_get_full_grad(parameter)
            if grad is not None:
                yield name, grad.detach().clone()

    def gathered(self, model: nn.Module, wrapped: Any) -> Any:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(model.parameters()))


class TensorParallel(Setup):
    """A head that is tied to its embedding stays whole."""

    name = "tensor-parallel"
    orders = ("before", "after")
    sharded = True
    does = "parallelize_module: MLPs by columns and rows, an untied LM head by columns"
    ranks = RANKS
    same_batch = True

    def wrap(self, model: Any, device: torch.device) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan: dict[str, Any] = {
            "model.layers.*.mlp.gate_proj": ColwiseParallel(),
            "model.layers.*.mlp.up_proj": ColwiseParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(),
        }
        if not model.config.tie_word_embeddings:
            plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        return parallelize_module(model, init_device_mesh(device.type, (RANKS,)), plan)

    def optimizer(self, wrapped: Any, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
        """In two groups: on a GPU an optimizer takes the parameters of a group at once, and mixes no DTensors in."""
        split = [p for p in wrapped.parameters() if hasattr(p, "full_tensor")]
        whole = [p for p in wrapped.parameters() if not hasattr(p, "full_tensor")]
        return make([{"params": group} for group in (split, whole) if group])


class SequenceParallel(Setup):
    """Attention gathers the whole sequence. Everything else, the head and the loss included, sees one half of it.
    Losses and gradients are summed over the ranks, as a loop of one's own would do.
    """

    name = "sequence-parallel"
    does = "each rank has half of every sequence; attention gathers it, and shift_labels come with it"
    ranks = RANKS
    same_batch = sums = True
    without = ("packed", "padded", "label smoothing", "logits read")  # no masks; logits are of half a sequence

    def fitted(self, step: Step) -> Step:
        """``step`` in sequences that can be halved."""
        lengths = [batch.labels.shape[1] // RANKS * RANKS for batch in step.batches]
        cut = zip(step.batches, lengths, strict=True)
        return replace(step, batches=[Batch(batch.input_ids[:, :n], batch.labels[:, :n]) for batch, n in cut])

    def inputs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        ids, labels = kwargs["input_ids"], kwargs["labels"]
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rank = torch.distributed.get_rank()
        own = {"input_ids": ids, "labels": labels, "shift_labels": shifted, "position_ids": positions}
        halves = {name: tensor.chunk(RANKS, 1)[rank].contiguous() for name, tensor in own.items()}
        return {"num_items_in_batch": int((shifted != IGNORE).sum()), **kwargs, **halves}

    def wrap(self, model: Any, device: torch.device) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("sequence_parallel", _attention_over_ranks)
        model.config._attn_implementation = "sequence_parallel"
        return model

    def reduce(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(logits) for _ in range(RANKS)]
        torch.distributed.all_gather(parts, logits.contiguous())
        return torch.cat(parts, 1)


def _attention_over_ranks(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of this rank's queries [batch, heads, half, features] over the whole sequence."""
    from torch.distributed.nn.functional import all_gather

    q, k, v = (torch.cat(all_gather(x.contiguous()), 2) for x in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=options.get("scaling"), enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.chunk(RANKS, 2)[torch.distributed.get_rank()].transpose(1, 2).contiguous(), None
