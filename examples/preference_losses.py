"""Losses of preferences in a loop of your own, on ``linear_log_probs``: DPO, IPO, ORPO, SimPO and KTO.

    python examples/preference_losses.py MODEL LOSS PAIRS_FILE

LOSS is dpo, ipo, orpo, simpo or kto. Each line of PAIRS_FILE is a JSON object with "prompt", "chosen" and "rejected".
Only the hidden states of tokens that a loss counts are multiplied by the head, and no logits are held.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernels
from liger_kernels.ops import linear_log_probs


class Batch(NamedTuple):
    """Prompts with their answers, padded on the right: all chosen answers, then the rejected ones in the same order.

    Attributes:
        input_ids: int64 [2 * pairs, length].
        tokens: bool, of that shape: all but padding.
        answers: bool, of that shape: the tokens of the answers.
    """

    input_ids: Tensor
    tokens: Tensor
    answers: Tensor


def token_log_probs(model: Any, input_ids: Tensor, counted: Tensor) -> Tensor:
    """The log-probability of every next token, [batch, length - 1]; 0 where not ``counted``."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    targets = input_ids.masked_fill(~counted, -100)[:, 1:]
    out: Any = linear_log_probs(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten())
    return out.log_probs.view_as(targets)


def log_ratios(model: Any, reference: Any, batch: Batch) -> Tensor:
    """log p_model(answer) - log p_reference(answer), [2 * pairs]."""
    with torch.no_grad():
        expected = token_log_probs(reference, batch.input_ids, batch.answers)
    return (token_log_probs(model, batch.input_ids, batch.answers) - expected).sum(-1)


def lengths(batch: Batch) -> Tensor:
    """The number of tokens of each answer, [2 * pairs]."""
    return batch.answers[:, 1:].sum(-1).clamp(min=1)


def dpo(model: Any, reference: Any, batch: Batch, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)). Equation 7 of arXiv 2305.18290."""
    chosen, rejected = log_ratios(model, reference, batch).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def ipo(model: Any, reference: Any, batch: Batch, beta: float = 0.1) -> Tensor:
    """The squared distance of the margin from 1 / (2 beta). Equation 17 of arXiv 2310.12036, of means over tokens."""
    chosen, rejected = (log_ratios(model, reference, batch) / lengths(batch)).chunk(2)
    return (chosen - rejected - 1 / (2 * beta)).square().mean()


def orpo(model: Any, batch: Batch, beta: float = 0.1) -> Tensor:
    """The language model's loss of chosen - beta * log sigmoid(log odds ratio). Equation 6 of arXiv 2403.07691.

    The odds of an answer are p / (1 - p), where log p is the mean over its tokens. No reference model is needed.
    """
    log_probs = token_log_probs(model, batch.input_ids, batch.tokens)
    chosen, rejected = ((log_probs * batch.answers[:, 1:]).sum(-1) / lengths(batch)).chunk(2)
    log_odds = chosen - rejected - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))
    pairs = len(chosen)
    language = -log_probs[:pairs].sum() / batch.tokens[:pairs, 1:].sum()
    return language - beta * F.logsigmoid(log_odds).mean()


def simpo(model: Any, batch: Batch, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-log sigmoid(beta * margin of means over tokens - gamma). Equation 6 of arXiv 2405.14734."""
    log_probs = token_log_probs(model, batch.input_ids, batch.answers)
    chosen, rejected = (log_probs.sum(-1) / lengths(batch)).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected) - gamma).mean()


def kto(model: Any, reference: Any, batch: Batch, mismatched: Batch, beta: float = 0.1) -> Tensor:
    """1 - sigmoid(beta * (log-ratio - KL)) of chosen, 1 - sigmoid(beta * (KL - log-ratio)) of rejected answers.

    Equations 7 and 8 of arXiv 2402.01306. KL is a constant, estimated on ``mismatched``: prompts with answers to other
    prompts. Chosen and rejected answers need not be pairs, if you halve the batch by a mask instead of ``chunk``.
    """
    with torch.no_grad():
        kl = log_ratios(model, reference, mismatched).mean().clamp(min=0)
    chosen, rejected = log_ratios(model, reference, batch).chunk(2)
    return 1 - torch.cat([torch.sigmoid(beta * (chosen - kl)), torch.sigmoid(beta * (kl - rejected))]).mean()


def collate(tokenizer: Any, prompts: list[str], answers: list[str]) -> Batch:
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    padded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    tokens = padded["attention_mask"].bool()
    begins = torch.tensor([len(tokenizer(prompt)["input_ids"]) for prompt in prompts])
    return Batch(padded["input_ids"], tokens, tokens & (torch.arange(tokens.shape[1]) >= begins[:, None]))


def train(name: str, loss: str, pairs: list[dict[str, str]], steps: int = 3) -> list[float]:
    """The loss of every step; the reference is the model as it was loaded."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    model.to(device)
    liger_kernels.patch(model)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts, chosen, rejected = ([pair[key] for pair in pairs] for key in ("prompt", "chosen", "rejected"))
    batch = collate(tokenizer, 2 * prompts, chosen + rejected)
    mismatched = collate(tokenizer, prompts, chosen[1:] + chosen[:1])
    batch, mismatched = (Batch(*(tensor.to(device) for tensor in one)) for one in (batch, mismatched))
    compute = {
        "dpo": lambda: dpo(model, reference, batch),
        "ipo": lambda: ipo(model, reference, batch),
        "orpo": lambda: orpo(model, batch),
        "simpo": lambda: simpo(model, batch),
        "kto": lambda: kto(model, reference, batch, mismatched),
    }[loss]
    losses = []
    for _ in range(steps):
        value = compute()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


if __name__ == "__main__":
    lines = Path(sys.argv[3]).read_text(encoding="utf-8").splitlines()
    print(train(sys.argv[1], sys.argv[2], [json.loads(line) for line in lines]))
