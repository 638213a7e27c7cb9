"""A policy of torch's selective checkpointing that keeps the output of attention, on a patched model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import liger_kernels
from liger_kernels.patching import offload
from tests.patching_checks import batch, fallbacks, gradients, tiny

LAYERS = 3


def is_attention(op: Any) -> bool:
    return "scaled_dot_product" in str(op) and "backward" not in str(op)


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(op) else CheckpointPolicy.PREFER_RECOMPUTE


class Attention(TorchDispatchMode):
    """How often attention ran."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += is_attention(func)
        return func(*args, **(kwargs or {}))


def step(keeps: bool, adapters: bool, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
    # On a GPU, attention in float32 is one operation only if each head has keys of its own.
    model = tiny("llama", num_hidden_layers=LAYERS, num_key_value_heads=4)
    if adapters:
        peft = pytest.importorskip("peft", reason="this version of transformers is tested without peft")
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model.enable_input_require_grads()
    how = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if keeps else {}
    model.gradient_checkpointing_enable({"use_reentrant": False, **how})
    liger_kernels.patch(model, **options)
    with Attention() as seen:
        found = gradients(model, model(**batch()).loss)
    assert not fallbacks(model)
    return found, seen.calls


@pytest.mark.parametrize("options", [{}, {"offload": "layers"}], ids=["", "offload"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_attention_runs_once_and_the_numbers_are_the_same(
    adapters: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 1)
    expected, twice = step(False, adapters)
    found, once = step(True, adapters, **options)
    assert (twice, once) == (2 * LAYERS, LAYERS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
