"""What the tests of ``cross_entropy`` share: options, inputs, and a call with its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_kernels.ops.loss.cross_entropy import CrossEntropyOutput
from tests.linear_cross_entropy_checks import ALL, DTYPES, REDUCTIONS, drawn

ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    **{name: {name: value} for name, value in ALL.items()},
    "negative_logit_scale": {"logit_scale": -1.5},
    "smoothed_class_weight": {"class_weight": True, "label_smoothing": 0.3},
    "all": ALL,
}
every_option = pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
plain_and_all = pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make_inputs(tokens, vocab, dtype, device, options, spread=3.0, seed=0):
    """Logits, targets with ignored rows in the middle and at the end, and the options with drawn weights."""
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, vocab, generator=rng) * spread).to(dtype).to(device).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=rng)
    targets[tokens // 3 : tokens // 3 + 1] = targets[tokens - 1 :] = options.get("ignore_index", -100)
    return logits, targets.to(device), drawn(options, tokens, vocab, rng, device)


def run(function, logits, targets, upstream=None, **options):
    """The loss, or named tuple, and the logits' gradient under an upstream gradient that is not 1."""
    logits = logits.detach().clone().requires_grad_()
    out = function(logits, targets, **options)
    loss = out.loss if isinstance(out, CrossEntropyOutput) else out
    if upstream is None:
        upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1)) - 0.3
    loss.backward(upstream.to(loss))
    return out, logits.grad
