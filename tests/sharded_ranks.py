"""What one rank does for test_setups_sharded.py: trains a tiny Llama in every set-up, patched and unpatched.

Two data-parallel ranks hold different batches and average their gradients; tensor-parallel ones hold the same batch.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import liger_kernels
from convergence.arms.float64 import InFloat64
from tests.patching_checks import VOCAB, batch, compare, tiny
from tests.ranks import RANKS

LEARNING_RATE = 0.1
# Whose loss each step trains on: one of the logits that the ranks read from the model's output, or the model's own, by
# then with other weights.
STEPS = ("of logits", "the model's")
ORDERS = ("before", "after")


_ddp = nn.parallel.DistributedDataParallel


def _fsdp1(model: nn.Module, *wrapped: type[nn.Module], use_orig_params: bool = True, **options: Any) -> nn.Module:
    """As accelerate does it, which keeps the parameters."""
    policy = ModuleWrapPolicy(set(wrapped)) if wrapped else None
    options |= {"auto_wrap_policy": policy, "use_orig_params": use_orig_params}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def _fsdp2(model: Any, *groups: Any, output_dtype: torch.dtype | None = None, **root: Any) -> nn.Module:
    """Sharded in ``groups`` of modules, by default in its layers, and what is left."""
    for group in groups or model.model.layers:
        fully_shard(group)
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype), **root)


def _parts(model: nn.Module) -> list[nn.Module]:
    """Every module with parameters, the innermost first, but for the model itself."""
    parts = [part for part in model.modules() if list(part.parameters()) and not isinstance(part, nn.ModuleList)]
    return parts[:0:-1]


def _tensor_parallel(model: Any, style: ParallelStyle) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), {"lm_head": style})


def _transformers_plan(model: Any) -> nn.Module:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = dict.fromkeys(("lm_head", "lm_head.weight"), "colwise_gather_output")
    return apply_tensor_parallelism(model, init_device_mesh("cpu", (RANKS,)), plan)


def _deepspeed(model: nn.Module, stage: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


SETUPS: dict[str, Callable[[Any], Any]] = {
    "ddp": _ddp,
    "ddp, static graph": lambda m: _ddp(m, static_graph=True),
    "ddp, unused parameters": lambda m: _ddp(m, find_unused_parameters=True),
    "fsdp1 of layers": lambda m: _fsdp1(m, LlamaDecoderLayer),
    "fsdp1, flat parameters": lambda m: _fsdp1(m, use_orig_params=False),
    "fsdp1, gradients sharded": lambda m: _fsdp1(m, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1 of linear layers": lambda m: _fsdp1(m, LlamaDecoderLayer, nn.Linear),
    "fsdp2": _fsdp2,
    "fsdp2, root reshards": lambda m: _fsdp2(m, reshard_after_forward=True),
    "fsdp2, norm and head": lambda m: _fsdp2(m, *m.model.layers, [m.model.norm, m.lm_head]),
    "fsdp2 of every module": lambda m: _fsdp2(m, *_parts(m)),
    "fsdp2, outputs cast": lambda m: _fsdp2(m, output_dtype=torch.float64),
    "zero-1": lambda m: _deepspeed(m, 1),
    "zero-3": lambda m: _deepspeed(m, 3),
    "head by columns": lambda m: _tensor_parallel(m, ColwiseParallel(output_layouts=Replicate())),
    "head by columns, transformers' plan": _transformers_plan,
    "head by rows": lambda m: _tensor_parallel(m, RowwiseParallel(input_layouts=Replicate())),
    "head by columns, loss parallel": lambda m: _tensor_parallel(m, ColwiseParallel(use_local_output=False)),
}
UNFUSED = ("head by rows", "head by columns, loss parallel")
SAME_BATCH = ("head by columns", "head by columns, transformers' plan", *UNFUSED)


def _loss(outputs: Any, labels: torch.Tensor, whose: str) -> torch.Tensor:
    if whose == "the model's":
        return outputs.loss
    return F.cross_entropy(outputs.logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def _inputs(same: bool, step: int, rank: int) -> dict[str, torch.Tensor]:
    """What a rank is given."""
    return batch(seed=10 * step + (0 if same else rank), device=torch.device("cpu"))


@functools.cache
def truth(same: bool, rank: int) -> dict[str, torch.Tensor]:
    """Unpatched, in float64, in one process: the losses of ``rank``, and every parameter at the end."""
    with InFloat64():
        model = tiny("llama").cpu().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        losses = []
        for step, whose in enumerate(STEPS):
            inputs = [_inputs(same, step, each) for each in range(RANKS)]
            parts = [_loss(model(**each), each["labels"], whose) for each in inputs]
            losses.append(parts[rank].detach())
            (sum(parts) / RANKS).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": torch.stack(losses), **{name: p.detach().clone() for name, p in model.named_parameters()}}


def train(setup: str, order: str | None, rank: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Losses and parameters of ``rank``, and the report where the model was patched ``order`` it was wrapped."""
    model = tiny("llama").cpu()
    if order == "before":
        liger_kernels.patch(model)
    wrapped = SETUPS[setup](model)
    if order == "after":
        liger_kernels.patch(wrapped)
    engine = hasattr(wrapped, "backward")
    optimizer = wrapped if engine else torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    losses = []
    for step, whose in enumerate(STEPS):
        inputs = _inputs(setup in SAME_BATCH, step, rank)
        with loss_parallel() if setup.endswith("loss parallel") else contextlib.nullcontext():
            loss = _loss(wrapped(**inputs), inputs["labels"], whose)
            (wrapped.backward if engine else torch.Tensor.backward)(loss)
        losses.append(_whole(loss.detach()).double())
        optimizer.step()
        if not engine:
            optimizer.zero_grad()
    return {"losses": torch.stack(losses), **_parameters(model, wrapped)}, liger_kernels.status(wrapped)


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _parameters(model: nn.Module, wrapped: Any) -> dict[str, torch.Tensor]:
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            named = ((name.replace("_fsdp_wrapped_module.", ""), p) for name, p in wrapped.named_parameters())
            return {name: p.detach().clone() for name, p in named}
    gather: Any = contextlib.nullcontext()
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        import deepspeed

        gather = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with gather:
        return {name: _whole(p).detach().clone() for name, p in model.named_parameters()}


def check(setup: str, order: str, own: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """As exact as unpatched in the same set-up; what the report says."""
    ours, report = train(setup, order, rank)
    compare(tiny("llama"), ours, own, truth(setup in SAME_BATCH, rank))
    return {
        "fallbacks": dict(report.fallbacks),
        "fuses_head": report.fuses_head,
        "left": [left.reason for left in report.left],
        "never ran": [replacement.path for replacement in report.never_ran],
    }


def run(rank: int) -> dict[str, Any]:
    """What :func:`check` found of each set-up and order, or why it did not come to it."""
    found: dict[str, Any] = {}
    for setup in SETUPS:
        try:
            own, _ = train(setup, None, rank)
        except ImportError as error:
            found[setup] = {"absent": str(error)}
            continue
        for order in ORDERS:
            try:
                found[f"{setup}/{order}"] = check(setup, order, own, rank)
            except Exception:
                found[f"{setup}/{order}"] = {"error": traceback.format_exc()[-3000:]}
    return found
