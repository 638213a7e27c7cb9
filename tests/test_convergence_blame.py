"""A failed case names its culprit: kernel, module and pass are those that were made faulty."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_kernels
from convergence.blame.changes import Changes
from convergence.case import Case, prove
from convergence.models.models import MODELS
from convergence.report import report
from convergence.report.records import Record
from tests import blame_faults
from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMS = "all 5 (model.layers.0.input_layernorm, ...)"
# The first tensor that is off, kernel, module and pass, and what the note says.
CULPRITS = {
    "one_norm_forward": ("loss", "rms_norm", "model.layers.1.input_layernorm", "forward", ""),
    "norm_weight_gradient": ("gradient of model.norm.weight", "rms_norm", NORMS, "backward", ""),
    "cross_entropy_gradient": ("gradient of the logits", "cross_entropy", "lm_head", "backward", ""),
    "raises_in_the_backward_pass": ("", "rms_norm", "model.layers.1.post_attention_layernorm", "backward", ""),
    "wrapper_of_the_model": ("loss", "LlamaForCausalLM", "the model itself", "forward", ""),
    "one_foreign_norm": ("loss", "LlamaRMSNorm", "model.layers.0.post_attention_layernorm", "forward", ""),
    "only_together": ("loss", "LlamaRMSNorm and LlamaMLP", "", "", "no kernel alone"),
    "torchs_own_loss": ("loss", "", "", "", "outside of every module"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Mutants that name a guilty kernel: all if asked for, else one of each pass in float32, of the model that the
    culprits have, too. Those with one truth and baseline run on one xdist worker."""
    every = metafunc.config.getoption("--mutants") == "all"
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize("dtype", ("float32", "bfloat16") if every else ("float32",))
    if "mutant" not in metafunc.fixturenames:
        return
    chosen = [m for m in MUTANTS.values() if m.kernel is not None and m.check is None]
    if not every:
        known = (m for m in chosen if m.sample and m.model == "llama-untied" and m.dies == "statistics")
        chosen = list({m.phase: m for m in known}.values())
    pairs = [(m, dtype) for m in chosen for dtype in m.dtypes if every or dtype == "float32"]
    pairs.sort(key=lambda pair: (pair[0].model, pair[1]))
    parameters = [
        pytest.param(m, dtype, id=f"{m.name}-{dtype}", marks=pytest.mark.xdist_group(f"blame {m.model}/{dtype}"))
        for m, dtype in pairs
    ]
    metafunc.parametrize(("mutant", "dtype"), parameters)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CULPRITS)
def test_the_culprit_is_named(fault, dtype):
    case = Case("llama-untied", dtype, f"tests.blame_faults:{fault}", "plain", DEVICE)
    record = Record.of(case, prove(case))
    assert record.verdict == "different"
    (row,) = record.blame
    tensor, kernel, module, which, note = CULPRITS[fault]
    assert (row["tensor"], row["kernel"], row["module"], row["pass"]) == (tensor, kernel, module, which), row
    assert row["step"] == ("initial: plain 0" if tensor else "")
    assert (note or f"{kernel} alone: different") in row["note"]
    assert row["note"] in report.failure(record)


@pytest.mark.slow
def test_the_mutated_kernel_is_blamed(mutant: Mutant, dtype: str):
    record = prove(Case(mutant.model, dtype, f"tests.mutants:{mutant.name}", device=DEVICE))
    assert {row["kernel"] for row in record.blame} == {mutant.kernel}, record.blame
    if mutant.dies == "statistics":
        assert {row["pass"] for row in record.blame} == {mutant.phase}, record.blame


def test_a_search_that_fails_is_a_note(monkeypatch):
    def fail(*args: object) -> None:
        raise RuntimeError("lost the trail")

    monkeypatch.setattr("convergence.patches.fused_linear", blame_faults.one_foreign_norm)
    case = Case("llama-untied", "float32", "convergence.patches:fused_linear", "plain", DEVICE)
    unasked = prove(case, blames=False)
    assert (unasked.verdict, unasked.blame, unasked.notes) == ("different", [], [])
    monkeypatch.setattr("convergence.case.blame", fail)
    record = prove(case)
    assert (record.verdict, record.blame) == ("different", [])
    assert record.failures == unasked.failures
    assert "lost the trail" in record.notes[-1]


def state(model: Any) -> dict[str, Any]:
    return {path: (type(module), set(vars(module))) for path, module in model.named_modules()}


@pytest.mark.parametrize("patch", [liger_kernels.patch, blame_faults.one_foreign_norm, blame_faults.one_norm_forward])
def test_what_a_patch_changed_is_taken_back_and_put_on_again(patch):
    model: Any = MODELS["llama-untied"].build(0)
    before = state(model)
    changes = Changes(model)
    patch(model)
    patched = state(model)
    parts = changes.find()
    assert patched != before
    changes.keep([])
    assert state(model) == before
    changes.keep([part for part in parts if part.path == "model.layers.0.post_attention_layernorm"])
    assert state(model)["model.norm"] == before["model.norm"]
    changes.keep(parts)
    assert state(model) == patched


def test_hooks_replaced_modules_and_weights_are_taken_back():
    model: Any = MODELS["llama-untied"].build(0)
    changes = Changes(model)
    old, norm = model.model.layers[0].mlp, model.model.norm
    weight = norm.weight.detach().clone()
    model.model.layers[0].mlp = new = torch.nn.Linear(100, 100)
    norm.weight.register_hook(lambda grad: grad * 2)
    norm.register_forward_hook(lambda module, args, output: output * 2)
    parts = changes.find()
    assert {(part.path, part.kernel) for part in parts} == {
        ("model.layers.0.mlp", "LlamaMLP"),
        ("model.norm", "LlamaRMSNorm"),
    }
    with torch.no_grad():
        norm.weight.fill_(7)
    x = torch.ones(1, 100)
    changes.keep([])
    assert model.model.layers[0].mlp is old
    assert torch.equal(norm.weight, weight)
    plain = norm(x)
    plain.sum().backward()
    grad, norm.weight.grad = norm.weight.grad, None
    changes.keep(parts)
    assert model.model.layers[0].mlp is new
    assert torch.equal(norm(x), plain * 2)
    norm(x).sum().backward()
    assert torch.equal(norm.weight.grad, grad * 4)
