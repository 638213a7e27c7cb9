"""Perplexity and token accuracy of a text, on ``linear_log_probs``: no logits are held, however large the vocabulary.

python examples/perplexity.py MODEL TEXT_FILE
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernels
from liger_kernels.ops import linear_log_probs


@torch.no_grad()
def evaluate(model: Any, rows: list[torch.Tensor], head: Callable[..., Any] = linear_log_probs) -> tuple[float, float]:
    """Perplexity, and the share of tokens that have the largest logit, over all tokens of ``rows`` ([length] each)."""
    log_prob, right, tokens = 0.0, 0, 0
    for row in rows:
        hidden = model.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0, :-1]
        out = head(hidden, model.lm_head.weight, row[1:], outputs=("log_probs", "is_top1"))
        log_prob += out.log_probs.double().sum().item()
        right += int(out.is_top1.sum())
        tokens += len(row) - 1
    return math.exp(-log_prob / tokens), right / tokens


def run(name: str, texts: list[str]) -> tuple[float, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    model.to(device).eval()
    liger_kernels.patch(model)
    rows = [tokenizer(text, return_tensors="pt")["input_ids"][0].to(device) for text in texts]
    return evaluate(model, [row for row in rows if len(row) > 1])


if __name__ == "__main__":
    perplexity, accuracy = run(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
    print(f"perplexity {perplexity:.4g}, accuracy {accuracy:.3f}")
