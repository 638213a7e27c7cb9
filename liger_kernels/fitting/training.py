"""How a model is trained, as far as memory depends on it."""

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
        rank: of LoRA adapters, which are on every linear layer and in float32; None: every weight is trained.
        quantised: whether the layers below adapters are in four bits (QLoRA).
        full: the optimizer, of :data:`OPTIMIZERS`; adapters have "adamw".
        batch: rows of a step.
        checkpointing: whether each layer is computed again in the backward.
        memory, offload, recompute: as in :func:`liger_kernels.patch`.
        patched: whether the model is patched at all.
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
        """A fused one, whose step allocates nothing; or one with the same states, for any device."""
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
    """What the arguments of :func:`liger_kernels.fit` say.

    Raises:
        ValueError: more than one of lora, qlora and full, a rank or batch below 1, an unknown optimizer, offload
            without checkpointing, or PEFT is not installed.
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
