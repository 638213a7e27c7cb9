"""FSDP2: patch first, then shard every decoder layer and the model.

torchrun --nproc-per-node 2 examples/fsdp2.py MODEL TEXT_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernels


def train(name: str, texts: list[str], steps: int = 3, batch_size: int = 2) -> list[float]:
    """The loss of every step, a mean over ranks; rank r takes every r-th text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    model.to(device)
    liger_kernels.patch(model)
    mesh = init_device_mesh(device, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own, losses = texts[rank::ranks], []
    for step in range(steps):
        batch = tokenizer(own[step * batch_size :][:batch_size], padding=True, return_tensors="pt").to(device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach() / ranks
        dist.all_reduce(shown)
        losses.append(shown.item())
    if rank == 0:
        print("losses", losses)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
