"""PEFT's LoRA of packed experts (``target_parameters``): the same numbers within the op of the experts, and PEFT's own
forward wherever a call is something else."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels import ops
from tests.patching_checks import DEVICE, built, check_same, compare, fallbacks, gradients
from tests.test_ops_experts_adapters import Sizes
from tests.test_patching_experts import Experts, TransposedExperts, zoo_batch

if "target_parameters" not in inspect.signature(peft.LoraConfig).parameters:
    pytest.skip(f"peft {peft.__version__} has no LoraConfig(target_parameters=...)", allow_module_level=True)

HIDDEN = 16
UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
PATCHED = {"lora_experts": 2, "experts": 1}


class Mixture(nn.Module):
    """A router and experts."""

    def __init__(self, cls: Any = Experts, is_transposed: bool | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 6)
        self.experts = cls()
        if is_transposed is not None:
            self.experts.is_transposed = is_transposed  # what PEFT asks for

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        y: torch.Tensor = self.experts(x, ids, weights)
        return y


def visible(model: Any) -> Any:
    """``model`` with B that is not zero, in training mode."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.train()


def adapted(base: nn.Module | None = None, **options: Any) -> Any:
    """A model with an adapter of both weights."""
    torch.manual_seed(0)
    base = Mixture().to(DEVICE) if base is None else base
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_parameters": [UP, DOWN], **options})
    return visible(peft.get_peft_model(base, config))


def second(model: Any) -> Any:
    """``model`` with another adapter."""
    model.add_adapter("other", peft.LoraConfig(r=5, lora_alpha=4, target_parameters=[UP, DOWN]))
    return visible(model)


def both(model: Any) -> Any:
    """Both adapters of ``model`` are active and trained."""
    second(model).base_model.set_adapter(["default", "other"])
    return model


def wrappers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.ParamWrapper)]


def inputs(seed: int = 2, tokens: int = 12) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def step(model: Any, call: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients, by name."""
    like = next(model.parameters())
    x = inputs().to(like.device, like.dtype).requires_grad_()
    y = model(x) if call is None else call(model, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"y": y.detach(), "x": x.grad, **found}


def check_step(patched: Any, own: Any, exact: Any = None) -> None:
    """A step of ``patched`` is as near to that of ``exact``, in float64, as one of ``own``, which is not patched."""
    exact = copy.deepcopy(own).double() if exact is None else exact
    truth, expected, found = step(exact), step(own), step(patched)
    compare(own, found, expected, truth)


def _transposed(is_transposed: bool) -> Any:
    """Where PEFT is not told, its A belongs to what the weight has in its last dimension, and that goes out."""
    return adapted(Mixture(TransposedExperts, is_transposed).to(DEVICE))


MODELS: dict[str, Callable[[], Any]] = {
    "both weights": adapted,
    "gate and up alone": lambda: adapted(target_parameters=[UP]),
    "down alone": lambda: adapted(target_parameters=[DOWN]),
    "transposed": lambda: _transposed(True),
    "transposed, and PEFT does not know": lambda: _transposed(False),
    "rslora": lambda: adapted(use_rslora=True, r=5),
    "two active adapters of other ranks": lambda: both(adapted()),
    "a trained base": lambda: adapted().requires_grad_(True),
    "frozen adapters": lambda: adapted().requires_grad_(False),
    "disabled": lambda: (model := adapted(), model.base_model.disable_adapter_layers())[0],
    "merged": lambda: (model := adapted(), model.merge_adapter())[0],
    "one of two wrappers merged": lambda: (model := adapted(), wrappers(model)[1].merge())[0],
    "one of two wrappers disabled": lambda: (model := adapted(), wrappers(model)[0].enable_adapters(False))[0],
}
IDLE = "disabled", "merged"


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers(name: str) -> None:
    model = MODELS[name]()
    ops.reset_launches()
    patched = check_same(model, step)
    report = liger_kernels.status(patched)
    assert report.counts() == {**PATCHED, "lora_experts": 1 if name.endswith("alone") else 2}
    assert not report.fallbacks
    assert bool(ops.launches().get("_lora_experts_add_kernel")) == (name not in IDLE)


@pytest.mark.parametrize("family", [("qwen3_moe", "Qwen3MoeForCausalLM"), ("gpt_oss", "GptOssForCausalLM")])
def test_the_models_of_transformers(family: tuple[str, str]) -> None:
    """gpt-oss has biases, and weights [experts, in, out]."""
    base = built(*family)
    batch = zoo_batch(base)
    model = visible(peft.get_peft_model(base, peft.LoraConfig(r=2, target_parameters=["gate_up_proj", "down_proj"])))
    patched = check_same(model, lambda m: gradients(m, m(**batch).loss))
    report = liger_kernels.status(patched)
    assert report.counts()["lora_experts"] == 2 * report.counts()["experts"] > 0
    assert not report.fallbacks
    assert not report.never_ran


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_adapters_of_16_bit_experts_are_as_near_to_float64_as_peft_s(
    dtype: torch.dtype, autocast: bool
) -> None:
    """Also under autocast of that dtype, as a Trainer with ``bf16=True`` runs them."""
    model = adapted(Mixture().to(DEVICE, dtype))
    assert {p.dtype for p in model.parameters()} == {dtype, torch.float32}
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    # The router is no part of it: rounding may choose another expert.
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(12)]).to(DEVICE)
    scores = torch.rand(12, 2).to(DEVICE)
    results = {}
    for name, m in (("peft", model), ("ours", patched), ("truth", copy.deepcopy(model).double())):
        with torch.autocast(DEVICE.type, dtype, enabled=autocast and name != "truth"):
            results[name] = step(m, lambda m, x: m.base_model.model.experts(x, ids, scores.to(x.dtype)))
    assert not fallbacks(patched)
    for name, exact in results["truth"].items():
        ours, theirs = (results[who][name] for who in ("ours", "peft"))
        three_way(ours, theirs, exact, dtype, name)
        assert ours.dtype == theirs.dtype


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set_adapter": lambda model: model.set_adapter("other"),
    "both active": lambda model: model.base_model.set_adapter(["other", "default"]),
    "set_scale": lambda model: [layer.set_scale("default", 0.25) for layer in wrappers(model)],
    "scaled": lambda model: [layer.scale_layer(3.0) for layer in wrappers(model)],
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "enabled": lambda model: model.base_model.enable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: model.unmerge_adapter(),
    "deleted": lambda model: model.delete_adapter("other"),
    "in evaluation": lambda model: model.eval(),
    "new weights": visible,
}


def test_state_that_changes_between_steps_is_read_at_each_call() -> None:
    own = second(adapted())
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for name, change in CHANGES.items():
        for model in (own, patched):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                change(model)
        check_step(patched, own)
        report = liger_kernels.status(patched)
        assert report.counts() == PATCHED, name
        assert not report.fallbacks, name


def test_disabled_and_merged_adapters_are_unmerged_by_peft() -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    plain = patched.base_model.model.experts.base_layer.base_layer.down_proj.detach().clone()
    for model in (own, patched):
        model.merge_adapter()
        model.base_model.disable_adapter_layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(step(patched), step(own))
    assert not any(layer.merged for layer in wrappers(patched))
    torch.testing.assert_close(patched.base_model.model.experts.base_layer.base_layer.down_proj, plain)


def test_disable_adapter_as_dpo_uses_it() -> None:
    """Its reference is the base alone, to the last bit, and what comes after it has the adapters again."""
    model = adapted()
    plain = copy.deepcopy(model).unload()
    for m in (model, plain):
        liger_kernels.patch(m)
    x = inputs().to(DEVICE)
    before = model(x)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), before)
    assert not torch.allclose(before, plain(x))


def parametrised(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(wrappers(model)[0].lora_A["default"])


class Sharded(torch.Tensor):
    """A subclass, as a DTensor is one."""


def sharded(model: Any) -> None:
    a = wrappers(model)[1].lora_A["default"]
    a.weight = nn.Parameter(a.weight.detach().as_subclass(Sharded))


def inside(model: Any) -> Any:
    return wrappers(model)[-1].base_layer


ODD: dict[str, Callable[[Any], Any]] = {
    "no plain linear layer": parametrised,
    "no plain tensor": sharded,
    "hooks": lambda model: inside(model).register_forward_hook(lambda *_: None),
    "hooks, or a forward of their own": lambda model: wrappers(model)[1].register_forward_hook(lambda *_: None),
    "disabled adapters are merged": lambda model: (
        wrappers(model)[1].merge(),
        wrappers(model)[1].enable_adapters(False),
    ),
    "a variant": lambda model: wrappers(model)[0].use_dora.update(default=True),
    "not what was recognised": lambda model: setattr(
        wrappers(model)[0], "_activate_lora", wrappers(model)[0]._activate_lora
    ),
    "in this call": lambda model: setattr(inside(model), "_apply_gate", partial(Experts._apply_gate, inside(model))),
}


@pytest.mark.parametrize("why", ODD)
def test_peft_computes_what_was_not_probed_and_the_report_counts_why(why: str) -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    exact = copy.deepcopy(own).double()
    for model in (own, patched, exact):
        ODD[why](model)
    check_step(patched, own, exact)
    reasons = fallbacks(patched)
    assert all(reason.startswith("PEFT computed an adapter: ") for reason in reasons)
    assert any(why in reason for reason in reasons), reasons


def test_under_autocast_peft_computes() -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    x = inputs().to(DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        torch.testing.assert_close(patched(x), own(x))
    assert any("in this call" in reason for reason in fallbacks(patched))


def test_where_experts_are_not_replaced_peft_computes() -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched, ["lora_experts"])
    assert liger_kernels.status(patched).counts() == {"lora_experts": 2}
    torch.testing.assert_close(step(patched), step(own))
    assert any("do not run on the kernel of experts" in reason for reason in fallbacks(patched))


def test_an_adapter_that_comes_after_patch() -> None:
    base = Mixture().to(DEVICE)
    own = adapted(copy.deepcopy(base))
    liger_kernels.patch(base)
    model = adapted(base)
    for a, b in zip(model.parameters(), own.parameters(), strict=True):
        a.data.copy_(b.data)
    report = liger_kernels.status(model)
    assert report.counts() == {"experts": 1}
    assert {left.reason for left in report.left} == {
        "it got its adapter after patch(), and PEFT computes that: call patch(model) again"
    }
    check_step(model, own)
    liger_kernels.patch(model)
    assert liger_kernels.status(model).counts() == PATCHED
    ops.reset_launches()
    check_step(model, own)
    assert ops.launches()["_lora_experts_add_kernel"]
    assert not fallbacks(model)


def later(change: str) -> Any:
    """What PEFT's class might be in a later version."""

    class Later(peft.tuners.lora.ParamWrapper):
        def get_delta_factors(self, adapter_name: str) -> Any:
            left, right, scale = super().get_delta_factors(adapter_name)
            if change == "another scale":
                scale = 2 * scale
            if change == "other experts":
                right = right.flip(0)
            if change == "another gradient":
                left = left.detach()
            return left, right, scale

        def get_delta_weight(self, adapter_name: str) -> Any:
            delta = super().get_delta_weight(adapter_name)
            return delta.flip(0) if change == "other experts of two adapters" else delta

    return Later


@pytest.mark.parametrize(
    "change", ["another scale", "other experts", "another gradient", "other experts of two adapters"]
)
def test_a_wrapper_that_computes_something_else_is_left(change: str) -> None:
    model = adapted()
    for wrapper in wrappers(model):
        wrapper.__class__ = later(change)
    report = liger_kernels.patch(model)
    assert report.counts() == {"experts": 1}
    assert [left.reason.startswith("its adapters are not W + sum of scale * B A") for left in report.left] == [True] * 2


@pytest.mark.parametrize("checkpointed", [False, True])
def test_nothing_has_the_size_of_a_weight(checkpointed: bool) -> None:
    """As it has in PEFT's own forward."""
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    weight = min(p.numel() for p in own.parameters() if p.dim() == 3)

    def call(model: Any, x: torch.Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)

    largest = []
    for model in (own, patched):
        with Sizes([*model.parameters()]) as sizes:
            step(model, call)
        largest.append(sizes.largest)
    assert largest[1] < weight <= largest[0]


def test_under_a_checkpoint_the_same_numbers() -> None:
    model = adapted()
    liger_kernels.patch(model)
    plain = step(model)
    again = step(model, lambda model, x: checkpoint(model, x, use_reentrant=False))
    assert all(map(torch.equal, plain.values(), again.values()))


def test_copies_pickles_and_unpatch(tmp_path: Path) -> None:
    model = adapted()
    classes = [type(module) for module in model.modules()]
    state = [dict(module.__dict__) for module in wrappers(model)]
    before = step(model)
    model.save_pretrained(tmp_path / "own")
    liger_kernels.patch(model)
    found = step(model)
    model.save_pretrained(tmp_path / "patched")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert liger_kernels.status(copied).counts() == PATCHED
        ops.reset_launches()
        again = step(copied)
        assert ops.launches()["_lora_experts_add_kernel"]
        assert all(map(torch.equal, again.values(), found.values()))
    liger_kernels.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert [dict(module.__dict__) for module in wrappers(model)] == state
    assert all(map(torch.equal, step(model).values(), before.values()))


def test_merging_and_unloading_a_patched_model_leaves_its_experts() -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    merged = [model.merge_and_unload() for model in (own, patched)]
    assert isinstance(merged[1].experts, Experts)
    torch.testing.assert_close(merged[1](inputs().to(DEVICE)), merged[0](inputs().to(DEVICE)))


def test_arguments_by_name() -> None:
    model = adapted()
    liger_kernels.patch(model)
    experts = model.base_model.model.experts
    x, ids = inputs(tokens=2).to(DEVICE), torch.tensor([[0, 1], [5, 2]], device=DEVICE)
    weights = torch.rand(2, 2, device=DEVICE)
    expected = experts(x, ids, weights)
    assert torch.equal(experts(x, top_k_weights=weights, top_k_index=ids), expected)
    assert not fallbacks(model)
    with pytest.raises(TypeError):
        experts(x, ids, weights, F.relu)
    with pytest.raises(ValueError, match="mixed adapter batches"):
        experts(x, ids, weights, adapter_names=["default"] * 2)
