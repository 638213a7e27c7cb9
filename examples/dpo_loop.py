"""DPO in a loop of your own, on ``linear_log_probs``.

python examples/dpo_loop.py MODEL PROMPT CHOSEN REJECTED
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernels
from liger_kernels.ops import linear_log_probs


def sequence_log_probs(
    model: Any, input_ids: Tensor, counted: Tensor, head: Callable[..., Any] = linear_log_probs
) -> Tensor:
    """The log-probability of every sequence's ``counted`` tokens, [batch]."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    targets = input_ids.masked_fill(~counted, -100)[:, 1:]
    out = head(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten())
    return out.log_probs.view_as(targets).sum(-1)


def dpo_loss(
    model: Any,
    reference: Any,
    input_ids: Tensor,
    counted: Tensor,
    beta: float = 0.1,
    head: Callable[..., Any] = linear_log_probs,
) -> Tensor:
    """-log sigmoid(beta * (margin of the model - margin of the reference)), a mean over pairs.

    Args:
        input_ids: [2 * pairs, length], padded on the right; the chosen sequences first, then the rejected.
        counted: bool, of that shape: the tokens of the answers.
    """
    with torch.no_grad():
        chosen, rejected = sequence_log_probs(reference, input_ids, counted, head).chunk(2)
        expected = chosen - rejected
    chosen, rejected = sequence_log_probs(model, input_ids, counted, head).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected - expected)).mean()


def train(name: str, prompt: str, chosen: str, rejected: str, steps: int = 3) -> list[float]:
    """The loss of every step; the reference is the model as it was loaded."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    model.to(device)
    liger_kernels.patch(model)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokenizer([prompt + chosen, prompt + rejected], padding=True, padding_side="right", return_tensors="pt")
    ids, counted = batch["input_ids"].to(device), batch["attention_mask"].bool().to(device)
    counted[:, : len(tokenizer(prompt)["input_ids"])] = False
    losses = []
    for _ in range(steps):
        loss = dpo_loss(model, reference, ids, counted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4]))
