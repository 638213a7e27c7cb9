"""Losses of policy gradients in a loop of your own, on ``linear_log_probs``: GRPO, GSPO, DAPO and CISPO.

    python examples/policy_losses.py MODEL LOSS PROMPT

LOSS is grpo, gspo, dapo or cispo. Log-probabilities and entropies come from hidden states; neither logits nor
probabilities are held.

All losses have these arguments, where the last token of a row predicts nothing:

    log_probs: [batch, length - 1], of the policy that is trained.
    old: of that shape, of the policy that sampled, without gradient.
    advantages: [batch].
    counted: bool [batch, length - 1], the tokens of the answers.
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


def token_log_probs(model: Any, input_ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every next token, [batch, length - 1]; 0 where not ``counted``, of that shape."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    targets = input_ids[:, 1:].masked_fill(~counted, -100)
    outputs = ("log_probs", "entropy")
    out: Any = linear_log_probs(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten(), outputs=outputs)
    return out.log_probs.view_as(targets), out.entropy.view_as(targets)


def mean_of_answers(x: Tensor, counted: Tensor) -> Tensor:
    """The mean over the counted tokens of each row, [batch]."""
    return (x * counted).sum(-1) / counted.sum(-1).clamp(min=1)


def mean_of_tokens(x: Tensor, counted: Tensor) -> Tensor:
    """The mean over all counted tokens: a long answer weighs more."""
    return (x * counted).sum() / counted.sum().clamp(min=1)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """What is gained, of a ratio that is worth no more than what lies in [1 - low, 1 + high]."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    counted: Tensor,
    clip: float = 0.2,
    reference: Tensor | None = None,
    beta: float = 0.04,
) -> Tensor:
    """A ratio for each token, each answer's mean. Equation 3 of arXiv 2402.03300.

    With ``reference``, log-probabilities of a reference model, beta times the divergence from it is added.
    """
    loss = -clipped((log_probs - old).exp(), advantages[:, None], clip, clip)
    if reference is not None:
        log_ratio = reference - log_probs
        loss = loss + beta * (log_ratio.exp() - log_ratio - 1)
    return mean_of_answers(loss, counted).mean()


def gspo(
    log_probs: Tensor, old: Tensor, advantages: Tensor, counted: Tensor, low: float = 3e-4, high: float = 4e-4
) -> Tensor:
    """A ratio for each answer, the geometric mean of its tokens' ratios. Equations 5 and 7 of arXiv 2507.18071."""
    ratio = mean_of_answers(log_probs - old, counted).exp()
    return -clipped(ratio, advantages, low, high).mean()


def dapo(
    log_probs: Tensor, old: Tensor, advantages: Tensor, counted: Tensor, low: float = 0.2, high: float = 0.28
) -> Tensor:
    """A ratio for each token, clipped higher above than below, mean over all tokens. Equation 8 of arXiv 2503.14476."""
    gain = clipped((log_probs - old).exp(), advantages[:, None], low, high)
    return -mean_of_tokens(gain, counted)


def cispo(log_probs: Tensor, old: Tensor, advantages: Tensor, counted: Tensor, most: float = 5.0) -> Tensor:
    """Each token's ratio is a weight without gradient, at most ``most``. Equation 4 of arXiv 2506.13585."""
    weight = (log_probs - old).exp().clamp(max=most).detach()
    return -mean_of_tokens(weight * advantages[:, None] * log_probs, counted)


LOSSES: dict[str, Callable[..., Tensor]] = {"grpo": grpo, "gspo": gspo, "dapo": dapo, "cispo": cispo}


def train(
    name: str,
    loss: str,
    prompt: str,
    steps: int = 2,
    group: int = 4,
    updates: int = 2,
    tokens: int = 8,
    entropy_bonus: float = 0.01,
) -> list[float]:
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
        answers = sampled[:, ids.shape[1] :]
        counted = sampled[:, 1:] != tokenizer.pad_token_id
        counted[:, : ids.shape[1] - 1] = False
        rewards = torch.tensor([-float(len(set(answer.tolist()))) for answer in answers], device=device)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        with torch.no_grad():
            old, _ = token_log_probs(model, sampled, counted)
        for _ in range(updates):
            log_probs, entropy = token_log_probs(model, sampled, counted)
            value = LOSSES[loss](log_probs, old, advantages, counted)
            value = value - entropy_bonus * mean_of_tokens(entropy, counted)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
    return losses


if __name__ == "__main__":
    print(train(sys.argv[1], sys.argv[2], sys.argv[3]))
