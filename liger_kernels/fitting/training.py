"""The options of training that affect memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops.loss.linear_cross_entropy import Memory
from liger_kernels.patching.offload import Offload
from liger_kernels.patching.recompute import Recompute

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Training:
    """A way of training.

    Attributes:
        rank: the rank of the LoRA adapters: float32, on every linear layer. None trains every weight.
        quantised: whether the adapted layers are in four bits (QLoRA).
        full: the optimizer, one of :data:`OPTIMIZERS`; adapters use "adamw".
        batch: the rows of a step.
        checkpointing: whether the backward recomputes each layer.
        memory, offload, recompute: as in :func:`liger_kernels.patch`.
        patched: whether the model is patched.
    """

    rank: int | None = None
    quantised: bool = False
    full: str = "adamw"
    batch: int = 1
    checkpointing: bool = True
    memory: Memory | None = None
    offload: Offload | None = None
    recompute: Recompute | None = None
    patched: bool = True

    def optimizer(self, parameters: Iterable[nn.Parameter], fused: bool = False) -> Any:
        """The optimizer. With ``fused`` its step allocates nothing. Without, it has the same states and runs on any
        device."""
        how: dict[str, bool] = {"fused": True} if fused else {"foreach": False}
        return OPTIMIZERS[self.full](list(parameters), lr=1e-6, **how)

    def __str__(self) -> str:
        adapters = "QLoRA" if self.quantised else "LoRA"
        how = f"full, {self.full}" if self.rank is None else f"{adapters} of rank {self.rank}"
        options = ["checkpointing" if self.checkpointing else "no checkpointing"]
        options += [f'memory="{self.memory}"'] if self.memory is not None else []
        options += [f'offload="{self.offload}"'] if self.offload is not None else []
        options += [f'recompute="{self.recompute}"'] if self.recompute is not None else []
        return ", ".join([how, *options])


def check_training(
    lora: Any, qlora: Any, full: Any, batch: int, memory: Any, offload: Any, recompute: Any, checkpointing: bool
) -> Training:
    """The :class:`Training` of :func:`liger_kernels.fit`'s arguments.

    Raises:
        ValueError: more than one of lora, qlora and full is given; a rank or batch is below 1; the optimizer is
            unknown; offload is given without checkpointing; or PEFT is not installed.
    """
    given = {"lora": lora, "qlora": qlora, "full": full}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are given; a model is trained in one way: give one of them")
    rank = lora if qlora is None else qlora
    for name, number in (("lora" if qlora is None else "qlora", rank), ("batch", batch)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
    optimizer = "adamw" if full is None else full.lower()
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"full is {full!r}; the optimizer must be one of {list(OPTIMIZERS)}")
    if offload is not None and not checkpointing:
        raise ValueError(
            f"offload is {offload!r} and checkpointing False; there are layer inputs with checkpointing only"
        )
    if rank is not None and importlib.util.find_spec("peft") is None:
        raise ValueError(f"{chosen[0]} needs PEFT, which is not installed: pip install peft")
    return Training(rank, qlora is not None, optimizer, batch, checkpointing, memory, offload, recompute)
