"""Packed experts: what transformers' own classes compute is recognised and computed alike, what differs is refused."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from convergence.op.call import check_call
from liger_kernels.ops import GluFormula, launches, packed_glu_ref, reset_launches
from liger_kernels.patching.recipes.experts import ExpertsRecipe, Parameters, recognise_experts
from matrix.checks import zoo
from tests.ops_checks import randn
from tests.patching_checks import DEVICE, built, check_same, compare, gradients, variant

WHOLE = Parameters("gate_up_proj", "down_proj")
CLASSES = {
    ("mixtral", "MixtralForCausalLM"): GluFormula(),
    ("qwen3_moe", "Qwen3MoeForCausalLM"): GluFormula(),
    ("gpt_oss", "GptOssForCausalLM"): GluFormula(alpha=1.702, limit=7.0, offset=1.0, interleaved=True),
    ("deepseek_v4", "DeepseekV4ForCausalLM"): GluFormula(limit=10.0),
    ("minimax_m3_vl", "MiniMaxM3VLForCausalLM"): GluFormula(alpha=1.702, limit=7.0, offset=1.0),
}


def zoo_batch(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.to(DEVICE) for key, value in zoo.tiny_batch(model).items()}


def experts_of(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__.endswith("Experts")]


def with_implementation(model: nn.Module, name: str) -> nn.Module:
    for part in experts_of(model):
        part.config._experts_implementation = name
    return model


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("eager", torch.float32), ("grouped_mm", torch.bfloat16), ("batched_mm", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("module", "name"), list(CLASSES))
def test_every_way_to_multiply_is_computed_alike(module, name, implementation, dtype):
    """Tokens, of which some numbers lie beyond the limits, with every gradient."""
    (experts, *_) = experts_of(built(module, name))
    experts.to(dtype)
    names, parameters = zip(*experts.named_parameters(), strict=True)
    hidden = experts.gate_up_proj.shape[1 if experts.is_transposed else 2]
    ids = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(40)]).to(DEVICE)

    def call(module, implementation):
        def run(hidden, weights, *parameters):
            # Grouped products know no float64, and the loop is the definition.
            module.config._experts_implementation = "eager" if hidden.dtype == torch.float64 else implementation
            return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (hidden, ids, weights))

        return run

    candidate = copy.deepcopy(experts)
    report = liger_kernels.patch(candidate)
    assert [item.formula for item in report.replaced] == [f"sum of weight * down({CLASSES[module, name]})"]
    leaves = [
        randn(40, hidden, dtype=dtype, device=DEVICE, scale=4.0),
        torch.rand(40, 2).to(DEVICE, dtype).requires_grad_(),
        *((t * (10 if t.dim() == 3 else 1)).detach().requires_grad_() for t in parameters),
    ]
    reset_launches()
    check_call(call(candidate, implementation), call(experts, implementation), leaves, terms=hidden)
    assert bool(launches().get("_experts_sum_kernel")) == (implementation != "batched_mm")
    assert launches()["_packed_glu_fwd_kernel"] == launches()["_packed_glu_bwd_kernel"] == 1


def test_loss_and_gradients_are_those_of_the_model():
    model = with_implementation(built("gpt_oss", "GptOssForCausalLM"), "eager")
    batch = zoo_batch(model)
    candidate = check_same(model, lambda model: gradients(model, model(**batch).loss), ["experts"])
    found = liger_kernels.status(candidate)
    assert len(found.replaced) == len(experts_of(model)) > 0
    assert not found.never_ran
    liger_kernels.unpatch(candidate)
    assert [type(part) for part in experts_of(candidate)] == [type(part) for part in experts_of(model)]


@pytest.mark.parametrize("name", ["autocast", "checkpointing", "frozen", "another way to multiply"])
def test_whatever_is_set_around_it_the_model_is_the_same(name):
    model = with_implementation(built("qwen3_moe", "Qwen3MoeForCausalLM"), "eager")
    batch = zoo_batch(model)
    if name == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if name == "frozen":
        for part in experts_of(model):
            part.requires_grad_(False)

    def train(model):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=name == "autocast"):
            return gradients(model, model(**batch).loss)

    truth = train(copy.deepcopy(model).double())
    candidate, own = copy.deepcopy(model), train(model)
    liger_kernels.patch(candidate, ["experts"])
    if name == "another way to multiply":
        with_implementation(candidate, "batched_mm")
    reset_launches()
    ours = train(candidate)
    assert bool(launches().get("_experts_sum_kernel")) == (name in ("checkpointing", "frozen"))
    compare(model, ours, own, truth)


def test_under_autocast_experts_run_themselves():
    """Everything that they are given is in float32 here, so that autocast is the only reason."""
    model = nn.ModuleList([Experts()]).to(DEVICE)
    inputs = torch.randn(3, 16, device=DEVICE), torch.tensor([[0, 1], [1, 1], [5, 2]], device=DEVICE)
    weights = torch.rand(3, 2, device=DEVICE)
    plain = copy.deepcopy(model)
    liger_kernels.patch(model)
    for enabled in (True, False):
        reset_launches()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
            assert model[0](*inputs, weights).dtype == plain[0](*inputs, weights).dtype
        assert bool(launches().get("_experts_sum_kernel")) != enabled


@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32], ids=str)
def test_under_autocast_experts_of_its_dtype_run_on_the_kernel(of_weights):
    """As a Trainer with ``bf16=True`` trains a bfloat16 model. The router is no part of it: rounding may choose another
    expert."""
    base = with_implementation(built("qwen3_moe", "Qwen3MoeForCausalLM"), "eager")
    part = nn.ModuleList([experts_of(base)[0]]).to(torch.bfloat16)
    n_experts, _, hidden = part[0].gate_up_proj.shape
    x = torch.randn(12, hidden).to(DEVICE, torch.bfloat16)
    ids, weights = (
        torch.stack([torch.randperm(n_experts)[:2] for _ in range(12)]).to(DEVICE),
        torch.rand(12, 2).to(DEVICE),
    )

    def step(model, dtype=torch.bfloat16):
        given, scores = x.to(dtype).requires_grad_(), weights.to(torch.promote_types(of_weights, dtype))
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = model[0](given, ids, scores.requires_grad_())
        y.backward(torch.ones_like(y))
        return {
            "y": y.detach(),
            "x": given.grad,
            "weights": scores.grad,
            **{n: p.grad for n, p in model.named_parameters()},
        }

    truth, own = step(copy.deepcopy(part).double(), torch.float64), step(copy.deepcopy(part))
    liger_kernels.patch(part, ["experts"])
    reset_launches()
    ours = step(part)
    assert launches()["_experts_sum_kernel"]
    for name, exact in truth.items():
        assert ours[name].dtype == own[name].dtype
        three_way(ours[name], own[name], exact, torch.bfloat16, name, chain=4)


def test_adapters_on_the_parameters_of_experts():
    """peft gives the module another class while it runs, in which a parameter is computed."""
    peft = pytest.importorskip("peft")
    if "target_parameters" not in inspect.signature(peft.LoraConfig).parameters:
        pytest.skip(f"peft {peft.__version__} has no LoraConfig(target_parameters=...)")
    base = built("qwen3_moe", "Qwen3MoeForCausalLM")
    batch = zoo_batch(base)
    config = peft.LoraConfig(target_parameters=["gate_up_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).train()

    def train(model):
        return gradients(model, model(**batch).loss)

    reset_launches()
    check_same(model, train, ["experts"])
    assert launches()["_experts_sum_kernel"]


class Experts(nn.Module):
    """Every step a method, so that a subclass can get one of them wrong."""

    def __init__(self, hidden=16, inner=20, n_experts=6):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(n_experts, 2 * inner, hidden) / 4)
        self.down_proj = nn.Parameter(torch.randn(n_experts, hidden, inner) / 4)

    def activate(self, gate):
        return F.silu(gate.clamp(max=2.25))

    def limited(self, up):
        return up.clamp(-2.25, 2.25)

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return self.activate(gate) * self.limited(up)

    def unit(self, x):
        return self._apply_gate(x)

    def chosen(self, ids):
        return ids

    def expert(self, x, ids):
        x = torch.einsum("th,toh->to", x, self.gate_up_proj[ids])
        return torch.einsum("ti,thi->th", self.unit(x), self.down_proj[ids])

    def result(self, y, weight):
        return y * weight

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for k in range(top_k_index.shape[1]):
            ids = top_k_index[:, k]
            out = out + self.result(self.expert(hidden_states, self.chosen(ids)), top_k_weights[:, k, None])
        return out


class TransposedExperts(Experts):
    def __init__(self):
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().transpose(1, 2).contiguous()))

    def expert(self, x, ids):
        x = torch.einsum("th,tho->to", x, self.gate_up_proj[ids])
        return torch.einsum("ti,tih->th", self.unit(x), self.down_proj[ids])


def wrong(**methods: Any) -> type:
    return variant(Experts, **methods)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_strangers_experts_are_recognised_and_computed_alike(transposed):
    model = (TransposedExperts() if transposed else Experts()).to(DEVICE)
    recipe = recognise_experts(model)
    # Of weights of another dtype its result has another dtype, too.
    parameters = Parameters("gate_up_proj", "down_proj", transposed)
    assert recipe == ExpertsRecipe(GluFormula(limit=2.25), parameters, mixed=False)
    ids = torch.tensor([[0, 1], [1, 1], [5, 2]], device=DEVICE)
    inputs = (3 * torch.randn(3, 16, device=DEVICE), ids, torch.rand(3, 2, device=DEVICE))

    def train(m):
        hidden, weights = (t.to(m.down_proj) for t in (inputs[0], inputs[2]))
        return gradients(m, m(hidden, top_k_weights=weights, top_k_index=ids).square().sum())

    reset_launches()
    check_same(model, train)
    assert launches()["_experts_sum_kernel"] == 1


class BiasedBehindTheSum(Experts):
    """It has the shape of a bias of down."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6, 16))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) + self.bias[top_k_index].sum(1)


@pytest.mark.parametrize(
    "cls",
    [
        wrong(result=lambda self, y, weight: y * weight * weight),
        wrong(result=lambda self, y, weight: y),
        wrong(result=lambda self, y, weight: y * weight.detach()),
        wrong(result=lambda self, y, weight: F.dropout(y * weight, 0.1, self.training)),
        wrong(result=lambda self, y, weight: F.layer_norm(y, (y.shape[-1],)) * weight),
        wrong(chosen=lambda self, ids: 5 - ids),
        BiasedBehindTheSum,
    ],
)
def test_of_what_is_another_sum_of_experts_only_the_gate_is_replaced(cls):
    assert recognise_experts(cls()) == ExpertsRecipe(GluFormula(limit=2.25))


NO_SUM = "packed experts: their forward is no sum of weight * down(act(gate) * up)"


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(None, ExpertsRecipe(GluFormula(), WHOLE, mixed=False)), (50.0, (NO_SUM,))],
    ids=["no clamp", "clamp"],
)
def test_experts_without_a_method_for_their_gate(limit, verdict):
    """As those of transformers 5.0, whose forward is a loop; usual numbers do not reach the clamp."""
    assert (
        recognise_experts(wrong(unit=lambda self, x: packed_glu_ref(x, GluFormula(limit=limit)), _apply_gate=None)())
        == verdict
    )


class TakesAnything(Experts):
    """Tokens in rows, a weight for each token, hidden states of another dtype."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = hidden_states.flatten(0, -2).to(self.down_proj.dtype)
        ids = top_k_index.flatten(0, -2)
        weights = top_k_weights.expand(top_k_index.shape).flatten(0, -2).to(rows.dtype)
        return super().forward(rows, ids, weights).view(hidden_states.shape).to(hidden_states.dtype)


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda hidden, ids, weights: (hidden.view(2, 2, 16), ids.view(2, 2, 2), weights.view(2, 2, 2)),
        lambda hidden, ids, weights: (hidden, ids, weights[:, :1]),
        lambda hidden, ids, weights: (hidden.half(), ids, weights),
        lambda hidden, ids, weights: (hidden.as_subclass(Other), ids, weights),
    ],
    ids=["rows of tokens", "a weight for each token", "another dtype", "another kind of tensor"],
)
def test_a_call_of_another_form_runs_the_experts_themselves(change):
    model = nn.ModuleList([TakesAnything()]).to(DEVICE)
    ids = torch.tensor([[0, 1], [1, 1], [5, 2], [3, 4]], device=DEVICE)
    usual = torch.randn(4, 16, device=DEVICE), ids, torch.rand(4, 2, device=DEVICE)
    inputs = change(*usual)
    expected = model[0](*inputs)
    liger_kernels.patch(model)
    reset_launches()
    y = model[0](*inputs)
    assert "_experts_sum_kernel" not in launches()
    assert type(y) is type(expected)
    torch.testing.assert_close(y, expected)
    model[0](*usual)
    assert launches()["_experts_sum_kernel"] == 1


def test_experts_that_call_no_gate_are_left():
    cls = wrong(unit=lambda self, x: packed_glu_ref(x), result=lambda self, y, weight: y)
    assert recognise_experts(cls()) == (f"{NO_SUM}, and calls no _apply_gate (None)",)


@pytest.mark.parametrize(
    "cls",
    [
        wrong(limited=lambda self, up: up.clamp(max=2.25)),
        wrong(limited=lambda self, up: up),
        wrong(limited=lambda self, up: up.clamp(-3.0, 3.0)),
        wrong(activate=lambda self, gate: F.silu(gate)),
        wrong(activate=lambda self, gate: F.silu(gate.clamp(-2.25, 2.25))),
        wrong(activate=lambda self, gate: F.silu(gate).clamp(max=2.25)),
        wrong(activate=lambda self, gate: F.relu(gate.clamp(max=2.25))),
        wrong(activate=lambda self, gate: F.dropout(F.silu(gate.clamp(max=2.25)), 0.1, self.training)),
        wrong(activate=lambda self, gate: F.silu(gate.clamp(max=2.25)).detach()),
        wrong(_apply_gate=lambda self, x: packed_glu_ref(x).cumsum(0)),
    ],
)
def test_other_gates_are_left(cls):
    report = liger_kernels.patch(nn.ModuleList([cls(), nn.RMSNorm(16)]))
    assert [(item.path, item.reason) for item in report.left] == [
        ("0", "packed experts whose gate is not act(gate) * up with silu or gelu")
    ]


def test_a_watched_activation_runs():
    model = with_implementation(built("mixtral", "MixtralForCausalLM"), "grouped_mm")
    liger_kernels.patch(model, ["experts"])
    seen = []
    for part in experts_of(model):
        part.act_fn.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(**zoo_batch(model))
    assert seen
