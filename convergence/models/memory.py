"""How much memory a case takes, and how much there is: known before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convergence.arms import float64

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What a case trains its truth in, and what its largest arm takes.

    Attributes:
        truth: float64 where it fits, else float32 for arms of 16 bits.
        device, host: bytes that are needed on the GPU, and in the machine's memory.
        free_device, free_host: bytes that are free there. Without a GPU everything is in the machine's memory.
    """

    truth: torch.dtype
    device: int
    host: int
    free_device: int
    free_host: int

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.device + self.host

    @property
    def fits(self) -> bool:
        return self.device <= self.free_device and self.host <= self.free_host

    def __str__(self) -> str:
        places = [f"{self.host / GIB:.1f} of {self.free_host / GIB:.1f} GiB of memory"]
        if self.device:
            places.insert(0, f"{self.device / GIB:.1f} of {self.free_device / GIB:.1f} GiB of the GPU's memory")
        return f"{' and '.join(places)}, truth in {describe(self.truth)}"


def describe(truth: torch.dtype) -> str:
    """A truth's arithmetic in words."""
    return "float64" if truth is torch.float64 else "float32 with TF32 off"


def plan(
    model: nn.Module,
    rows: int,
    length: int,
    judged: torch.dtype,
    device: str,
    saved_in: torch.dtype,
    own: bool = True,
    kept: float = 2.0,
) -> Plan:
    """The first plan that fits, or where none does the smallest.

    Args:
        model: on the meta device.
        rows, length: of a batch.
        judged: the dtype of baseline and candidate.
        saved_in: the dtype of the template.
        own: whether the template is in the machine's memory, and not on the device.
        kept: how often what goes into a layer and comes out of it is held: for the backward pass, and by default once
            more to see that it stays.
    """
    free_device, free_host = available(device)
    elements = sum(parameter.numel() for parameter in model.parameters())
    truths = [torch.float64] if judged is torch.float32 else [torch.float64, torch.float32]
    for truth in truths:
        arm = _arm(model, rows, length, truth, kept)
        # The template and the copy that becomes the arm, and the arm's initial weights.
        template = elements * 2 * saved_in.itemsize
        host = elements * judged.itemsize + (template if own else 0)
        if device == "cpu":
            found = Plan(truth, 0, host + arm, free_device, free_host)
        else:
            # While an arm trains, its copy of the template is the arm.
            found = Plan(truth, arm + (0 if own else template // 2), host, free_device, free_host)
        if found.fits:
            break
    return found


def _arm(model: Any, rows: int, length: int, dtype: torch.dtype, kept: float) -> int:
    """The bytes of one arm in training: weights, gradients, activations, logits. An upper bound, roughly."""
    tokens, head, config = rows * length, model.get_output_embeddings(), model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    activations = int(kept * tokens * sum(layer.in_features + layer.out_features for layer in layers))
    scores = rows * length**2 * config.num_attention_heads
    if config._attn_implementation == "eager" or (dtype is torch.float64 and scores <= float64.BLOCK):
        activations += 3 * scores * config.num_hidden_layers  # no kernel spares them
    elif dtype is torch.float64:
        activations += 2 * float64.BLOCK
    logits = tokens * head.weight.shape[0]
    # As they are, for the loss, their gradients, and what is observed. In blocks, the truth holds two of them in
    # float64, and any other arm, which takes more then, four in float32.
    held = 17 if logits > float64.BLOCK else 6 * dtype.itemsize
    # When all gradients are there, the logits are what is left of those.
    later = max(held * logits + head.weight.numel() * dtype.itemsize, (logits + weights) * dtype.itemsize)
    return (weights + activations) * dtype.itemsize + later


def available(device: str) -> tuple[int, int]:
    """Free bytes of the GPU (0 without one), and of the machine, within what its control group allows."""
    # What this process holds there is of the case before, and freed before the next one trains.
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if device == "cuda" else 0
    return free, min(
        [_free_memory(), *_limits((Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")))]
    )


def _free_memory() -> int:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # no Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits(files: Sequence[Path]) -> list[int]:
    try:
        limit, used = (int(file.read_text()) for file in files)
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return []
    return [limit - used]
