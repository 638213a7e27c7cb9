"""Which experts a token of a mini model goes to does not hang on rounding: a choice, no kernel, would be judged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

from convergence.models.models import MODELS
from liger_kernels.patching.recipes.experts import is_packed_experts

MIXTURES = [name for name, row in MODELS.items() if "experts" in row.kernels]


def routed(model, ids):
    """For each layer the experts of every token, in the order of their numbers."""
    found = []
    for module in model.modules():
        if is_packed_experts(module):
            module.register_forward_pre_hook(lambda _, args: found.append(args[1].sort(-1).values))
    with torch.no_grad():
        model(input_ids=ids)
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_rounding_chooses_no_expert(name):
    if not MODELS[name].is_available():
        pytest.skip(f"transformers {transformers.__version__} has no {MODELS[name].architecture}")
    model = MODELS[name].build(0)
    steps, evaluation = MODELS[name].data("hard", 0, torch.float32)
    batches = [batch.input_ids for step in steps for batch in step.batches] + [evaluation.input_ids]
    ids = torch.cat([F.pad(batch, (0, 64 - batch.shape[1])) for batch in batches])
    truth = routed(copy.deepcopy(model).double(), ids)
    assert len(truth) == model.config.num_hidden_layers
    assert len(torch.cat(truth).unique()) > 3  # it does choose
    for dtype in (torch.float32, torch.bfloat16):
        chosen = routed(copy.deepcopy(model).to(dtype), ids)
        shares = [float((a == b).all(-1).double().mean()) for a, b in zip(truth, chosen, strict=True)]
        assert min(shares) == 1, (dtype, shares)
