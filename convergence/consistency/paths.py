"""Computes the log-probabilities of a text in one arm, in each way that trainers and rollouts use.

The *training forward* gets the whole text, in training mode, with labels and gradients. *Prefill* gets the whole text
without gradients and fills a cache. *Decoding* gets a prompt, and then one token at a time with the cache of the
earlier tokens. All three are the same function, so they agree in exact arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch

from convergence import ours
from convergence.arms.quantities import DECODING, INITIAL, LOG_PROBS, LOSS, PREFILL, TRAINING_FORWARD, Moment
from convergence.arms.tasks.causal_lm import PROMPT_TOKENS, decoded
from convergence.arms.train import observed
from convergence.arms.trajectory import Run, Trajectory
from convergence.report import progress

PATHS = (TRAINING_FORWARD, PREFILL, DECODING)


def at(path: str) -> Moment:
    """The moment at which an arm computes by ``path``."""
    return Moment(INITIAL, path)


def observe(run: Run) -> Trajectory:
    """The log-probabilities [batch, length - prompt] of the tokens after the prompt in ``run.evaluation``, by each of
    :data:`PATHS`. The result also has the loss of the training forward.

    Raises:
        CannotApply: the patch raised. Later exceptions are not wrapped.
    """
    return observed(run, _observe)


def _observe(run: Run, model: Any, result: Trajectory) -> None:
    ids = run.evaluation.input_ids.to(run.device)
    _train(model, ids, result)
    model.eval()
    with torch.no_grad():
        for done, (path, prompt) in enumerate(((PREFILL, ids.shape[1]), (DECODING, PROMPT_TOKENS)), start=2):
            # The last token of the prompt predicts the first token that counts. The last token of the text predicts
            # none.
            logits = torch.cat(list(decoded(model, ids, prompt)), 1)
            _record(result, path, logits, ids)
            progress.reach(path, done, len(PATHS))
    model.train()


def _train(model: Any, ids: torch.Tensor, result: Trajectory) -> None:
    model.train()
    with ours.head_in_chunks(model, ids.numel()):
        outputs = model(input_ids=ids, labels=ids.clone(), use_cache=False)
        result.record(LOSS, at(TRAINING_FORWARD), outputs.loss)
        _record(result, TRAINING_FORWARD, outputs.logits, ids)
    progress.reach(TRAINING_FORWARD, 1, len(PATHS))


def _record(result: Trajectory, path: str, logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Record the log-probabilities of the tokens after the prompt, from ``logits`` [batch, length, vocab]. They are
    float32, or float64 in a truth."""
    targets = ids[:, PROMPT_TOKENS:].to(logits.device)
    log_probs = logits.detach()[:, PROMPT_TOKENS - 1 : -1].float().log_softmax(-1)
    result.record(LOG_PROBS, at(path), log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
