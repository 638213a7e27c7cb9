"""GRPO in a loop of your own, with importance ratios and an entropy bonus, on ``linear_log_probs``.

    python examples/grpo_loop.py MODEL PROMPT

Log-probabilities and entropies come from hidden states; neither logits nor probabilities are held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernels
from liger_kernels.ops import linear_log_probs


def token_log_probs(
    model: Any, input_ids: Tensor, counted: Tensor, head: Callable[..., Any] = linear_log_probs
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every next token, [batch, length - 1]; 0 where not ``counted``."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    targets = input_ids.masked_fill(~counted, -100)[:, 1:]
    out = head(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten(), outputs=("log_probs", "entropy"))
    return out.log_probs.view_as(targets), out.entropy.view_as(targets)


def grpo_loss(
    model: Any,
    input_ids: Tensor,
    counted: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip: float = 0.2,
    entropy_bonus: float = 0.01,
    head: Callable[..., Any] = linear_log_probs,
) -> Tensor:
    """The clipped objective, a mean over the counted tokens.

    Args:
        input_ids: [batch, length], prompts with their answers.
        counted: bool, of that shape: the tokens of the answers.
        old_log_probs: [batch, length - 1], of the policy that sampled.
        advantages: [batch].
    """
    log_probs, entropy = token_log_probs(model, input_ids, counted, head)
    ratio = (log_probs - old_log_probs).exp()
    advantages = advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -((gain + entropy_bonus * entropy) * counted[:, 1:]).sum() / counted[:, 1:].sum()


def train(name: str, prompt: str, steps: int = 2, group: int = 4, updates: int = 2, tokens: int = 8) -> list[float]:
    """The loss of every update; each step samples a group and rewards answers of few distinct tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    model.to(device)
    liger_kernels.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = tokenizer([prompt] * group, return_tensors="pt")["input_ids"].to(device)
    losses = []
    for _ in range(steps):
        sampled = model.generate(ids, do_sample=True, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
        counted = torch.ones_like(sampled, dtype=torch.bool)
        counted[:, : ids.shape[1]] = False
        answers = sampled[:, ids.shape[1] :]
        counted[:, ids.shape[1] :] = answers != tokenizer.pad_token_id
        rewards = torch.tensor([-float(len(set(answer.tolist()))) for answer in answers], device=device)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        with torch.no_grad():
            old, _ = token_log_probs(model, sampled, counted)
        for _ in range(updates):
            loss = grpo_loss(model, sampled, counted, old, advantages)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(sys.argv[1], sys.argv[2]))
