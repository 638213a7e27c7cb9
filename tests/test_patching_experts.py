"""Packed experts: what transformers' own classes compute is recognised and computed alike, what differs is refused."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from liger_kernels.ops import Gate, launches, packed_glu_ref, reset_launches
from liger_kernels.patching.experts import ExpertsRecipe, find_gate, recognise_experts
from tests import zoo
from tests.patching_checks import DEVICE, check_same, gradients

CLAMPED = Gate(limit=10.0)
GPT_OSS = Gate(alpha=1.702, limit=7.0, offset=1.0)
CLASSES = {
    ("mixtral", "MixtralForCausalLM"): Gate(),
    ("qwen3_moe", "Qwen3MoeForCausalLM"): Gate(),
    ("gpt_oss", "GptOssForCausalLM"): Gate(alpha=1.702, limit=7.0, offset=1.0, interleaved=True),
    ("deepseek_v4", "DeepseekV4ForCausalLM"): CLAMPED,
    ("hy_v4", "HYV4ForCausalLM"): CLAMPED,
    ("minimax_m3_vl", "MiniMaxM3VLForCausalLM"): GPT_OSS,
}


@functools.cache
def built(module: str, name: str) -> Any:
    try:
        cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
        return zoo.tiny_model(cls).to(DEVICE)
    except (ImportError, AttributeError, zoo.CannotShrink) as error:
        pytest.skip(f"not in the zoo: {error}")


def experts_of(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__.endswith("Experts")]


def with_implementation(model: nn.Module, name: str) -> nn.Module:
    for part in experts_of(model):
        part.config._experts_implementation = name
    return model


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("module", "name"), list(CLASSES))
def test_loss_and_gradients_are_those_of_the_model(module, name, implementation):
    model = with_implementation(copy.deepcopy(built(module, name)), implementation)
    batch = {key: value.to(DEVICE) for key, value in zoo.tiny_batch(model).items()}

    def train(model):
        if next(model.parameters()).dtype == torch.float64:  # which grouped products do not know
            with_implementation(model, "eager")
        return gradients(model, model(**batch).loss)

    reset_launches()
    candidate = check_same(model, train, ["experts"])
    assert launches()
    found = liger_kernels.status(candidate).replaced
    assert len(found) == len(experts_of(model)) > 0
    assert {item.formula for item in found} == {str(CLASSES[module, name])}
    liger_kernels.unpatch(candidate)
    assert [type(part) for part in experts_of(candidate)] == [type(part) for part in experts_of(model)]


@pytest.mark.parametrize("limit", [0.5, 3.0, 7.25])
def test_the_limit_is_that_of_the_module(limit):
    (experts, *_) = experts_of(copy.deepcopy(built("deepseek_v4", "DeepseekV4ForCausalLM")))
    experts.limit = limit
    assert recognise_experts(experts) == ExpertsRecipe(Gate(limit=limit))


def test_eager_experts_that_call_no_gate_are_left():
    model = copy.deepcopy(built("qwen3_moe", "Qwen3MoeForCausalLM"))
    reasons = {item.reason for item in liger_kernels.patch(model).left if item.what.endswith("Experts")}
    assert reasons == {
        "packed experts: their forward (eager) calls no _apply_gate; patch the model with "
        "experts_implementation='grouped_mm'"
    }


class Experts(nn.Module):
    """Every step of the gate a method, so that a subclass can get one of them wrong."""

    def __init__(self, hidden=16, inner=20, n_experts=6):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(n_experts, 2 * inner, hidden) / 4)
        self.down_proj = nn.Parameter(torch.randn(n_experts, hidden, inner) / 4)

    def activate(self, gate):
        return F.silu(gate.clamp(max=2.0))

    def limited(self, up):
        return up.clamp(-2.0, 2.0)

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return self.activate(gate) * self.limited(up)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for k in range(top_k_index.shape[1]):
            ids = top_k_index[:, k]
            x = torch.einsum("th,toh->to", hidden_states, self.gate_up_proj[ids])
            y = torch.einsum("ti,thi->th", self._apply_gate(x), self.down_proj[ids])
            out = out + y * top_k_weights[:, k, None]
        return out


def wrong(**methods: Any) -> type:
    return type("Wrong", (Experts,), methods)


def test_a_strangers_experts_are_recognised_and_computed_alike():
    model = Experts().to(DEVICE)
    assert find_gate(model) == Gate(limit=2.0)
    ids = torch.tensor([[0, 1], [1, 1], [5, 2]], device=DEVICE)
    inputs = (3 * torch.randn(3, 16, device=DEVICE), ids, torch.rand(3, 2, device=DEVICE))
    check_same(model, lambda m: gradients(m, m(inputs[0].to(m.down_proj), ids, inputs[2].to(m.down_proj)).sum()))


@pytest.mark.parametrize(
    "cls",
    [
        wrong(limited=lambda self, up: up.clamp(max=2.0)),
        wrong(limited=lambda self, up: up),
        wrong(limited=lambda self, up: up.clamp(-3.0, 3.0)),
        wrong(activate=lambda self, gate: F.silu(gate)),
        wrong(activate=lambda self, gate: F.silu(gate.clamp(-2.0, 2.0))),
        wrong(activate=lambda self, gate: F.silu(gate).clamp(max=2.0)),
        wrong(activate=lambda self, gate: F.relu(gate.clamp(max=2.0))),
        wrong(activate=lambda self, gate: F.dropout(F.silu(gate.clamp(max=2.0)), 0.1, self.training)),
        wrong(activate=lambda self, gate: F.silu(gate.clamp(max=2.0)).detach()),
        wrong(_apply_gate=lambda self, x: packed_glu_ref(x).cumsum(0)),
    ],
)
def test_other_gates_are_left(cls):
    report = liger_kernels.patch(nn.ModuleList([cls(), nn.RMSNorm(16)]))
    assert [(item.path, item.reason) for item in report.left] == [
        ("0", "packed experts whose gate is not act(gate) * up with silu or gelu")
    ]


def test_a_watched_activation_runs():
    model = with_implementation(copy.deepcopy(built("mixtral", "MixtralForCausalLM")), "grouped_mm")
    liger_kernels.patch(model, ["experts"])
    seen = []
    for part in experts_of(model):
        part.act_fn.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(**{key: value.to(DEVICE) for key, value in zoo.tiny_batch(model).items()})
    assert seen
