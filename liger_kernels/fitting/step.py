"""Counts the bytes of a model's training step at its peak, by purpose."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import liger_kernels
from liger_kernels.fitting.count import LiveBytes
from liger_kernels.fitting.stand_in import meta_as_gpu
from liger_kernels.fitting.training import Training
from liger_kernels.patching.offload import INPUTS
from liger_kernels.patching.recipes.probe import describe

ROUNDING = 512  # CUDA's caching allocator allocates multiples of this
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer states"
KEPT, LAYER, LOSS = "kept for the backward", "backward of a layer", "loss"
# What torch says where a step reads data of a meta tensor. The text of a tensor, "device='meta'", does not count.
_READS_DATA = re.compile(r"(?<!device=')meta\b(?!-)|_local_scalar_dense", re.IGNORECASE)
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, KEPT, LAYER, LOSS)


@dataclass(frozen=True)
class Counted:
    """The memory of a step.

    Attributes:
        parts: bytes at the peak, by part.
        square: bytes of the largest tensor [batch, heads, tokens, tokens]; 0 if there is none.
        fallbacks: the reasons why logits were computed, and how often.
        host: bytes of layer inputs in the host's memory.
    """

    parts: dict[str, int]
    square: int = 0
    fallbacks: tuple[str, ...] = ()
    host: int = 0

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def build(config: Any, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The causal language model of ``config``, in ``dtype``. Its weights are not loaded."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)  # newer versions call it "dtype"
    return model.train()


def prepare(model: Any, setup: Training) -> Any:
    """``model`` with the adapters, checkpointing and patch of ``setup``."""
    if setup.rank is not None:
        import peft

        adapters = peft.LoraConfig(r=setup.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.device("meta") if model.device.type == "meta" else contextlib.nullcontext():
            model = peft.get_peft_model(model, adapters)
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if setup.rank is not None:
            model.enable_input_require_grads()
    if setup.patched:
        liger_kernels.patch(model, memory=setup.memory, offload=setup.offload, recompute=setup.recompute)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@contextlib.contextmanager
def labelled(model: Any, counter: LiveBytes) -> Iterator[None]:
    """Inside, a step of ``model`` tells ``counter`` the purpose of its tensors."""
    hooks = []

    def loss_begins(module: Any, args: Any, output: Any) -> None:
        counter.label = LOSS
        hidden = output[0]
        if hidden.requires_grad:
            hooks.append(hidden.register_hook(layers_begin))

    def layers_begin(grad: torch.Tensor) -> None:
        counter.label = LAYER

    def gradient_is_there(p: torch.Tensor) -> None:
        if p.grad is not None:
            counter.move(p.grad, GRADIENTS)

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hooks.append(base.base_model.register_forward_hook(loss_begins))
    for p in trained(model):
        hooks.append(p.register_post_accumulate_grad_hook(gradient_is_there))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def backward(model: Any, setup: Training, tokens: int, device: str, counter: LiveBytes | None = None) -> None:
    """Forward and backward of one step on rows of ``tokens``. Every position is a target."""
    context = contextlib.nullcontext() if counter is None else labelled(model, counter)
    ids = torch.zeros((setup.batch, tokens), dtype=torch.int64, device=device)
    kind = "cpu" if device == "meta" else torch.device(device).type
    with context:
        with torch.autocast(kind, torch.bfloat16, enabled=setup.rank is not None):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        torch.autograd.backward([loss])


class MetaStep:
    """Steps of one model on the meta device, of any length.

    Raises:
        ValueError: ``config`` has no causal language model, adapters of this rank are impossible, or the model's step
            needs data or fails.
    """

    def __init__(self, config: Any, setup: Training, dtype: torch.dtype = torch.bfloat16, rounding: int = ROUNDING):
        self.setup, self.rounding = setup, rounding
        try:
            model = build(config, "meta", dtype)
        except Exception as error:  # a model's own code may raise whatever it likes
            name = type(config).__name__
            raise ValueError(
                f"transformers cannot make a causal language model of this {name}: {describe(error)}"
            ) from error
        if setup.checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
            raise ValueError(
                f"checkpointing is True, and {type(model).__name__} does not support it: pass checkpointing=False "
                "(--no-checkpointing)"
            )
        linears = quantised_linears(model) if setup.quantised else []
        try:
            self.model = prepare(model, setup)
        except (RuntimeError, TypeError) as error:  # torch, of a rank that no tensor has
            raise ValueError(f"{type(model).__name__} cannot be trained as {setup}: {describe(error)}") from error
        self.report = liger_kernels.status(self.model)  # its counts go on; to ask again would look at every module
        self._counted: dict[int, Counted] = {}
        self.optimizer = setup.optimizer(trained(self.model))
        # Weights have four bits. One weight at a time has 16 bits, while it is multiplied.
        self.saved = sum(2 * n - nf4(n) for n in linears)
        self.dequantised = 2 * max(linears, default=0)

    def count(self, tokens: int) -> Counted:
        """The bytes of a step on rows of ``tokens``. The optimizer already has its states, as after an earlier step."""
        if tokens not in self._counted:
            self._counted[tokens] = self._count(tokens)
        return self._counted[tokens]

    def _count(self, tokens: int) -> Counted:
        if not self.optimizer.state:
            self._make_states()
        counter = LiveBytes(WEIGHTS, self.rounding, tokens)
        for t in (*self.model.parameters(), *self.model.buffers()):
            counter.add(t)
        for state in self.optimizer.state.values():
            for t in state.values():
                if torch.is_tensor(t) and t.is_meta:  # the count of steps is not
                    counter.add(t, OPTIMIZER)
        counter.label = KEPT
        for module in self.model.modules():
            module.__dict__.pop(INPUTS, None)  # host memory of a step of another length
        with meta_as_gpu() as stream:
            self._backward(tokens, counter)
        parts = {name: counter.at_peak[name] for name in PARTS}
        parts[WEIGHTS] -= self.saved
        parts[LAYER] += self.dequantised
        fallbacks = () if self.report is None else tuple(self.report.fallbacks)
        return Counted(parts, counter.square, fallbacks, stream.host)

    def _make_states(self) -> None:
        for p in trained(self.model):
            p.grad = torch.empty_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, tokens: int, counter: LiveBytes) -> None:
        try:
            with counter:
                backward(self.model, self.setup, tokens, "meta", counter)
        except Exception as error:  # a model's own code may raise whatever it likes
            what = f"failed on rows of {tokens} tokens"
            if _READS_DATA.search(str(error)):
                what = "cannot be calculated on the meta device, where tensors have no data"
            raise ValueError(f"a step of {type(self.model).__name__} {what}: {describe(error)}") from error
        finally:
            for p in trained(self.model):
                p.grad = None


def quantised_linears(model: Any) -> list[int]:
    """The number of elements of each weight that QLoRA keeps in four bits: every linear layer but the head."""
    head = model.get_output_embeddings()
    return [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


def nf4(elements: int) -> int:
    """Bytes of a weight in bitsandbytes' NF4: half a byte per element, and doubly quantised scales of blocks of 64."""
    blocks = -(-elements // 64)
    return -(-elements // 2) + blocks + 4 * -(-blocks // 256)
