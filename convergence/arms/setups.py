"""The set-ups that people train in: how a model is wrapped, run and sharded. An axis of the proof.

Baseline, replicas and candidate of a case train in the same set-up. Their truth trains in float64 in one process,
without the set-up, on the batches of all ranks. A new set-up is a class here and a line in :data:`SETUPS`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from convergence.arms.quantised import Format, Int8, Nf4, SameBits, Torchao, dequantise, quantise
from convergence.arms.setup import Setup
from convergence.models.data import IGNORE, Batch, Step

RANKS = 2


class Autocast(Setup):
    name = "bf16-autocast"
    does = "torch.autocast in bfloat16 around the forward"
    dtypes = ("float32",)
    computes_in = torch.bfloat16

    def running(self, device: torch.device) -> Any:
        return torch.autocast(device.type, dtype=self.computes_in)


class Fp16Scaler(Autocast):
    """Gradients are read after the scaler has taken its factor out of them."""

    name = "fp16-scaler"
    does = "torch.autocast in float16, and a GradScaler"
    computes_in = torch.float16
    scale = 1024.0

    def backward(self, wrapped: Any, loss: torch.Tensor) -> None:
        scaler = torch.amp.GradScaler(loss.device.type, init_scale=self.scale)
        scaler.scale(loss).backward()
        # One parameter group is all that unscale_ asks for.
        trained = [parameter for parameter in wrapped.parameters() if parameter.grad is not None]
        kept = [parameter.grad for parameter in trained]
        scaler.unscale_(torch.optim.SGD(trained, lr=0.0))
        for parameter, grad in zip(trained, kept, strict=True):
            parameter.grad = grad


class Checkpointing(Setup):
    name = "checkpointing"
    orders = ("before", "after")
    does = "activations of the decoder layers are computed again in the backward"

    def wrap(self, model: Any, device: torch.device) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class Compile(Setup):
    name = "compile"
    orders = ("before", "after")
    does = "torch.compile of every decoder layer (a CPU runs the graphs without Inductor)"

    def environment(self, folder: str) -> dict[str, str]:
        return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}

    def wrap(self, model: Any, device: torch.device) -> Any:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager" if device.type == "cpu" else "inductor", dynamic=True)
        return model


class Lora(Setup):
    """Two adapters that differ in all that an adapter may have, float32 ones on a model of 16 bits, as peft makes
    them."""

    name = "lora"
    does = "two active adapters of peft's LoRA on every projection, with a bias and rslora; the rest is frozen"
    needs: tuple[str, ...] = ("peft",)
    orders: tuple[str, ...] = ("after",)
    targets: tuple[str, ...] = ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    kernels: tuple[str, ...] = ("lora_linear",)
    dropout = 0.0
    has_bias = True
    has_second = True

    def absent(self, model: nn.Module | None, dtype: str, device: str) -> str:
        named = [] if model is None else [name.rpartition(".")[2] for name, _ in model.named_modules()]
        missing = [target for target in self.targets if named and target not in named]
        return super().absent(model, dtype, device) or (
            f"the set-up {self.name} adapts {', '.join(missing)}, which this model does not have" if missing else ""
        )

    def options(self) -> dict[str, Any]:
        """What both adapters adapt, and how."""
        return {"target_modules": [*self.targets], "lora_dropout": self.dropout}

    def template(self, model: Any) -> Any:
        import peft

        torch.manual_seed(1)
        adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **self.options()))
        if self.has_second:
            options = {**self.options(), "use_rslora": True}
            if self.has_bias and "lora_bias" in peft.LoraConfig.__dataclass_fields__:
                options["lora_bias"] = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an adapter with a bias cannot be merged with a layer without one
                adapted.add_adapter("second", peft.LoraConfig(r=6, lora_alpha=3, **options))
            adapted.base_model.set_adapter(["default", "second"])
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:  # zero at first, so that the adapter would not show
                    parameter.normal_(std=0.1)
        return adapted.train()

    def cast(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()


class _Checkpointed(Setup):
    def wrap(self, model: Any, device: torch.device) -> Any:
        wrapped = super().wrap(model, device)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return wrapped


def with_checkpointing(*setups: type[Setup]) -> Iterator[type[Setup]]:
    """Each of ``setups``, and the same where activations of the decoder layers are computed again in the backward."""
    for setup in setups:
        does = f"the same as {setup.name}, and activations of the decoder layers are computed again in the backward"
        members = {"name": f"{setup.name}-checkpointing", "does": does, "__doc__": does}
        yield setup
        yield type(f"{setup.__name__}Checkpointing", (_Checkpointed, setup), members)


class Mask(nn.Module):
    """A dropout whose mask follows from the index of each element, so that it is the same in every dtype and arm."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        index = torch.arange(x.numel(), device=x.device) + self.seed
        kept = (index * 2654435761 >> 7) % 8 > 0
        return x * kept.view(x.shape) * (8 / 7)


class LoraDropout(Lora):
    """Every projection and adapter has a mask of its own."""

    name = "lora-dropout"
    does = "the same as lora, and each adapter drops an eighth of what its projection gets"
    dropout = 0.125

    def template(self, model: Any) -> Any:
        adapted = super().template(model)
        dropouts = [(m, name) for m in adapted.modules() if hasattr(m, "lora_dropout") for name in m.lora_dropout]
        for seed, (module, name) in enumerate(dropouts):
            module.lora_dropout[name] = Mask(1000 * seed)
        return adapted


class LoraAutocast(Lora):
    name = "lora-autocast"
    does = "two active adapters of peft's LoRA on every projection, and torch.autocast in bfloat16"
    dtypes = ("float32",)

    def running(self, device: torch.device) -> Any:
        return torch.autocast(device.type, dtype=torch.bfloat16)


class LoraExperts(Lora):
    """peft adapts parameters without dropout and without a bias."""

    name = "lora-experts"
    does = "two active adapters of peft's LoRA on the packed weights of experts; the rest is frozen"
    targets = ("experts.gate_up_proj", "experts.down_proj")
    kernels = ("lora_experts",)
    has_bias = False

    def absent(self, model: Any, dtype: str, device: str) -> str:
        if (missing := Setup.absent(self, model, dtype, device)) or model is None:
            return missing
        import peft

        if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
            return f"the set-up {self.name} needs a newer peft, whose LoraConfig has target_parameters"
        names = [name for name, _ in model.named_parameters()]
        if all(any(name.endswith(target) for name in names) for target in self.targets):
            return ""
        return f"the set-up {self.name} adapts packed experts, which this model does not have"

    def options(self) -> dict[str, Any]:
        return {"target_parameters": [*self.targets]}


class LoraHead(Lora):
    """A head that is tied to its embedding has the adapters alone: the embedding stays as it is."""

    name = "lora-head"
    does = "two adapters of peft's LoRA on every projection and the LM head"
    targets = (*Lora.targets, "lm_head")


class Dora(Lora):
    """peft scales to magnitudes what one adapter makes."""

    name = "dora"
    does = "an adapter of peft's DoRA on every projection; the rest is frozen"
    kernels = ("dora_linear",)
    has_second = False

    def options(self) -> dict[str, Any]:
        return {**super().options(), "use_dora": True}


class Qlora(Lora):
    """The truth has the weights that the quantised ones stand for. They are frozen, and nothing of them is observed."""

    name = "qlora"
    does = "adapters as in lora, on weights of bitsandbytes in 4 bits (NF4), whose scales are quantised, too"
    needs = ("peft", "bitsandbytes")
    format: Format = Nf4()

    def truth(self) -> Setup:
        return _Dequantised(self)

    def loaded(self, model: Any, dtype: torch.dtype) -> Any:
        values = dict(model.named_parameters())
        adapted = self.template(quantise(model.unload(), self.targets, self.format))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = values[name].data
        return adapted

    def named(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in super().named(model, wrapped) if not name.endswith("base_layer.weight"))


class _Dequantised(Setup):
    """The truth of a set-up whose weights are quantised."""

    def __init__(self, setup: Qlora) -> None:
        self.setup = setup

    def loaded(self, model: Any, dtype: torch.dtype) -> Any:
        return dequantise(model, self.setup.targets, self.setup.format, dtype)

    def named(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.setup.named(model, wrapped)


class Qdora(Dora, Qlora):
    name = "qdora"
    does = "an adapter as in dora, on weights of bitsandbytes in 4 bits as in qlora"


class Qlora8Bit(Qlora):
    """On a GPU the product rounds what comes in to 8 bits, which the truth does not do: its verdict sees little of the
    base. So every result of a base must have the bits that the base's own class returns.
    """

    name = "qlora-8bit"
    does = "adapters as in lora, on weights of bitsandbytes in 8 bits; results of these layers are equal bit for bit"
    format = Int8()

    def wrap(self, model: Any, device: torch.device) -> Any:
        SameBits.watch(model, "base_layer")
        return super().wrap(model, device)

    def weights(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        SameBits.check(model)
        return super().weights(model, wrapped)


class Float8(Qlora):
    name = "float8"
    does = "adapters as in lora, but for the bias, on weights of torchao: 8-bit integers in o_proj, float8 elsewhere"
    needs = ("peft", "torchao")
    format = Torchao()
    has_bias = False  # peft refuses it


class DeviceMap(Setup):
    """A head that is tied to its embedding lies with it, on the first device."""

    name = "device-map"
    does = "accelerate's dispatch_model over two GPUs (a CPU gets its hooks alone)"
    orders = ("after", "before")
    gpus = 2
    needs = ("accelerate",)

    def wrap(self, model: Any, device: torch.device) -> Any:
        from accelerate import dispatch_model

        first, last = ("cpu", "cpu") if device.type == "cpu" else (0, 1)
        half = len(model.model.layers) // 2
        where = {f"model.{name}": first for name, _ in model.model.named_children() if name != "layers"}
        where |= {f"model.layers.{i}": first if i < half else last for i in range(len(model.model.layers))}
        head = first if model.config.tie_word_embeddings else last
        return dispatch_model(model, {**where, "model.norm": last, "lm_head": head}, force_hooks=True)


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


_CLASSES: tuple[type[Setup], ...] = (
    Setup,
    Autocast,
    Fp16Scaler,
    Checkpointing,
    Compile,
    *with_checkpointing(Lora, LoraDropout, LoraAutocast, LoraExperts, LoraHead, Dora, Qlora, Qdora, Qlora8Bit, Float8),
    DeviceMap,
    Ddp,
    Fsdp2,
    *with_checkpointing(LoraFsdp2),
    Fsdp1,
    Zero3,
    TensorParallel,
    SequenceParallel,
)
SETUPS: dict[str, Setup] = {cls.name: cls() for cls in _CLASSES}


@functools.cache
def select(names: str) -> tuple[Setup, ...]:
    """The set-ups that ``--setups`` names: ``all``, or a comma-separated list.

    Raises:
        ValueError: for an unknown name, with the allowed ones.
    """
    wanted = [part.strip() for part in names.split(",")]
    for name in wanted:
        if name != "all" and name not in SETUPS:
            raise ValueError(f"unknown set-up {name!r}; allowed are {', '.join(['all', *SETUPS])}")
    return tuple(setup for name, setup in SETUPS.items() if "all" in wanted or name in wanted)
