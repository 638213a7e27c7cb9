"""A training loop of your own: load, patch, train.

python examples/plain_loop.py MODEL TEXT_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernels


def train(name: str, texts: list[str], steps: int = 3, batch_size: int = 2) -> list[float]:
    """The loss of every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    model.to(device)
    print(liger_kernels.patch(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        first = step * batch_size % len(texts)
        batch = tokenizer(texts[first : first + batch_size], padding=True, return_tensors="pt").to(device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss  # computed from hidden states: there are no logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()))
