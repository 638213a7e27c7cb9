"""The losses of ``examples/`` are trl's own: the same value and gradients, in float64.

trl's function runs in a trainer that has nothing but what the function reads, on a model without kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matrix.trainers.test_examples import EXAMPLES

VERSION = tuple(map(int, importlib.metadata.version("trl").split(".")[:2]))
pytestmark = pytest.mark.skipif(VERSION < (1, 16), reason=f"trl {VERSION}: its losses are other functions before 1.16")
IDS = torch.arange(40).remainder(13).reshape(4, 10) * 7 + torch.arange(4)[:, None]
LENGTHS = torch.tensor([10, 8, 9, 5])
TOKENS = torch.arange(10) < LENGTHS[:, None]
ANSWERS = TOKENS & (torch.arange(10) >= 3)
MISMATCHED = TOKENS & (torch.arange(10) >= 2)
ADVANTAGES = torch.tensor([1.5, -0.5, -1.2, 0.2], dtype=torch.float64)
POLICIES: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.04},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "dapo": {"epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.2},
}


class OwnHead(nn.Module):
    """What trl's patched forward returns, from logits."""

    is_gradient_checkpointing = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **ignored: Any) -> Any:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        log_p, targets = logits.log_softmax(-1), labels[:, 1:]
        log_probs = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
        each = {"entropy": -(log_p.exp() * log_p).sum(-1), "mean_logits": logits.mean(-1)}
        return SimpleNamespace(log_probs=log_probs, is_top1=logits.argmax(-1) == targets, **each)


def trainer(name: str, **attributes: Any) -> Any:
    """One that was not initialised."""
    found = object.__new__(getattr(importlib.import_module(f"trl{name.rpartition('.')[0]}"), name.rpartition(".")[2]))
    same = {"gather": lambda x: x, "gather_for_metrics": lambda x: x, "reduce": lambda x, reduction: x}
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, **same)
    common = {"accelerator": accelerator, "aux_loss_enabled": False, "_metrics": {"train": defaultdict(list)}}
    vars(found).update(common | {"_total_train_tokens": 0, "_tp_size": 1} | attributes)
    return found


def preference(name: str, model: Any, reference: Any) -> Tensor:
    """By trl, of the pairs (0, 2) and (1, 3)."""
    halves = {"input_ids": IDS, "attention_mask": TOKENS.long(), "completion_mask": ANSWERS.long()}
    if name in ("orpo", "simpo"):
        options: dict[str, Any] = (
            {"beta": 0.1} if name == "orpo" else {"beta": 2.0, "simpo_gamma": 1.0, "loss_type": "simpo"}
        )
        options |= {"is_encoder_decoder": False, "label_smoothing": 0.0, "alpha": 0.0, "cpo_alpha": 0.0}
        batch = {}
        for kind, half in (("chosen", slice(0, 2)), ("rejected", slice(2, 4))):
            batch[f"{kind}_input_ids"] = IDS[half]
            batch[f"{kind}_attention_mask"] = TOKENS[half].long()
            batch[f"{kind}_labels"] = IDS[half].masked_fill(~ANSWERS[half], -100)
        own = trainer({"orpo": ".experimental.orpo.ORPOTrainer", "simpo": ".experimental.cpo.CPOTrainer"}[name])
        vars(own).update(options | {"pad_token_id": 0, "padding_value": 0})
        return own.get_batch_loss_metrics(model, batch)[0]
    wrapped, frozen = OwnHead(model), OwnHead(reference)
    options = {"model": wrapped, "ref_model": frozen, "beta": 0.1, "precompute_ref_logps": False, "ld_alpha": None}
    options["args"] = SimpleNamespace(gradient_checkpointing_kwargs=None)
    if name == "kto":
        own = trainer(".KTOTrainer", loss_type="kto", desirable_weight=1.0, undesirable_weight=1.0, **options)
        own.calculate_KL = True
        halves |= {"KL_input_ids": IDS, "KL_attention_mask": TOKENS.long(), "KL_completion_mask": MISMATCHED.long()}
        return own._compute_loss(wrapped, halves | {"label": torch.tensor([True, True, False, False])}, False)
    own = trainer(".DPOTrainer", f_divergence_type="reverse_kl", use_weighting=False, loss_weights=[1.0], **options)
    own.loss_types = [{"dpo": "sigmoid"}.get(name, name)]
    return own._compute_loss(wrapped, halves, False)


def policy(name: str, log_probs: Tensor, entropy: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """By trl: answers from the fourth token on."""
    options = {"loss_type": name, "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2}
    options |= {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False}
    options |= {"current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False, **POLICIES[name]}
    own = trainer(".GRPOTrainer", model=SimpleNamespace(training=True), **options)
    own.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    own._get_per_token_logps_and_entropies = lambda *args, **kwargs: (log_probs[:, 2:], entropy[:, 2:], None)
    inputs = {"prompt_ids": IDS[:, :3], "prompt_mask": TOKENS[:, :3].long(), "advantages": ADVANTAGES}
    inputs |= {"completion_ids": IDS[:, 3:], "completion_mask": ANSWERS[:, 3:].long()}
    inputs |= {"old_per_token_logps": old[:, 2:], "ref_per_token_logps": reference[:, 2:]}
    return own._compute_loss(None, inputs | {"num_items_in_batch": ANSWERS.sum()})


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> tuple[Any, Any]:
    """One that is trained, and a reference."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    found = [AutoModelForCausalLM.from_pretrained(folders["llama"]).double() for _ in range(2)]
    with torch.no_grad():
        for parameter in found[1].requires_grad_(False).parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return found[0].train(), found[1]


def check(model: Any, ours: Tensor, trls: Tensor, tolerance: float = 1e-12) -> None:
    parameters = [*model.parameters()]
    found = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (ours, trls)]
    torch.testing.assert_close(ours.double(), trls.double(), rtol=tolerance, atol=tolerance)
    for left, right in zip(*found, strict=True):
        assert right.count_nonzero()
        assert (left - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_preference(name: str, models: tuple[Any, Any]) -> None:
    module, (model, reference) = runpy.run_path(str(EXAMPLES / "preference_losses.py")), models
    batch, mismatched = module["Batch"](IDS, TOKENS, ANSWERS), module["Batch"](IDS, TOKENS, MISMATCHED)
    arguments = (batch,) if name in ("orpo", "simpo") else (reference, batch)
    ours = module[name](model, *arguments, *([mismatched] if name == "kto" else []))
    # trl computes the odds ratio in float32, always.
    check(model, ours, preference(name, model, reference), 1e-6 if name == "orpo" else 1e-10)


@pytest.mark.parametrize("name", [*POLICIES])
def test_policy(name: str, models: tuple[Any, Any]) -> None:
    module, (model, reference) = runpy.run_path(str(EXAMPLES / "policy_losses.py")), models
    counted = ANSWERS[:, 1:]
    log_probs, entropy = module["token_log_probs"](model, IDS, counted)
    with torch.no_grad():
        expected, _ = module["token_log_probs"](reference, IDS, counted)
        old = log_probs + 0.3 * torch.sin(torch.arange(36.0)).reshape(4, 9) * counted
    options = {"grpo": {"reference": expected}, "gspo": {"low": 0.03, "high": 0.04}, "cispo": {"most": 1.2}}
    ours = module["LOSSES"][name](log_probs, old, ADVANTAGES, counted, **options.get(name, {}))
    check(model, ours, policy(name, log_probs, entropy, old, expected))
