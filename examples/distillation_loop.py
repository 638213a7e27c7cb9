"""On-policy distillation in a loop of your own: the student's term, on ``linear_log_probs``.

    python examples/distillation_loop.py STUDENT TEACHER PROMPT

The reverse divergence KL(student || teacher) is the mean of log p_student(y) - log p_teacher(y) over tokens y that the
student samples. Its gradient needs only the log-probabilities of these tokens, not the two distributions.
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
) -> Tensor:
    """The log-probability of every next token, [batch, length - 1]; 0 where not ``counted``."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    targets = input_ids.masked_fill(~counted, -100)[:, 1:]
    return head(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten()).log_probs.view_as(targets)


def student_loss(
    student: Any, teacher: Any, input_ids: Tensor, counted: Tensor, head: Callable[..., Any] = linear_log_probs
) -> Tensor:
    """What the student minimises: each counted token's divergence weights the gradient of its log-probability."""
    with torch.no_grad():
        expected = token_log_probs(teacher, input_ids, counted, head)
    log_probs = token_log_probs(student, input_ids, counted, head)
    divergence = (log_probs - expected).detach()
    return (divergence * log_probs).sum() / counted[:, 1:].sum()


def train(student_name: str, teacher_name: str, prompt: str, steps: int = 3, tokens: int = 8) -> list[float]:
    """The loss of every step, each on answers that the student has just sampled."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(student_name)
    student: Any = AutoModelForCausalLM.from_pretrained(student_name)
    student.to(device)
    teacher: Any = AutoModelForCausalLM.from_pretrained(teacher_name)
    teacher.to(device).requires_grad_(False)
    for model in (student, teacher):
        liger_kernels.patch(model)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    ids = tokenizer([prompt] * 2, return_tensors="pt")["input_ids"].to(device)
    losses = []
    for _ in range(steps):
        sampled = student.generate(ids, do_sample=True, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
        counted = sampled != tokenizer.pad_token_id
        counted[:, : ids.shape[1]] = False
        loss = student_loss(student, teacher, sampled, counted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(sys.argv[1], sys.argv[2], sys.argv[3]))
