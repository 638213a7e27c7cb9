"""PEFT's LoRA layers of a patched model: the same numbers, whatever changes between the calls."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels import ops
from tests.lora_checks import IN, Net, adapted, both, inputs, layers, masked, second, step, visible
from tests.ops_checks import Products
from tests.patching_checks import DEVICE, check_same, compare, fallbacks, tiny, train

MODELS: dict[str, Callable[[], Any]] = {
    "one adapter": adapted,
    "rslora": lambda: adapted(use_rslora=True, r=5),
    "with a bias": lambda: adapted(lora_bias=True),
    "two active adapters of other ranks": lambda: both(adapted()),
    "dropout": lambda: masked(adapted(lora_dropout=0.1)),
    "dropout of two": lambda: masked(both(adapted(lora_dropout=0.1))),
    "evaluation": lambda: masked(adapted(lora_dropout=0.1)).eval(),
    "a trained base": lambda: adapted().requires_grad_(True),
    "frozen adapters": lambda: adapted().requires_grad_(False),
    "disabled": lambda: (model := adapted(), model.base_model.disable_adapter_layers())[0],
    "merged": lambda: (model := adapted(), model.merge_adapter())[0],
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers(name: str) -> None:
    model = MODELS[name]()
    patched = check_same(model, step)
    report = liger_kernels.status(patched)
    assert report.counts() == {"lora_linear": 2}
    assert not report.fallbacks
    assert len(report.never_ran) == 0


def test_a_call_launches_kernels_unless_its_adapters_are_merged_or_disabled() -> None:
    for name, make in MODELS.items():
        model = make()
        liger_kernels.patch(model)
        ops.reset_launches()
        step(model)
        assert bool(ops.launches()) == (name not in ("disabled", "merged")), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_adapters_of_a_16_bit_model_are_as_near_to_float64_as_peft_s(dtype: torch.dtype) -> None:
    model = adapted(Net().to(DEVICE, dtype))
    assert {p.dtype for p in model.parameters()} == {dtype, torch.float32}
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    results = {name: step(m, inputs()) for name, m in (("peft", model), ("ours", patched))}
    truth = step(copy.deepcopy(model).double(), inputs().to(dtype))
    for name, exact in truth.items():
        ours, theirs = (results[who][name] for who in ("ours", "peft"))
        three_way(ours, theirs, exact, dtype, name)
        assert ours.dtype == theirs.dtype


CHANGES: dict[str, Callable[[Any], None]] = {
    "set_adapter": lambda model: model.set_adapter("other"),
    "both active": lambda model: model.base_model.set_adapter(["other", "default"]),
    "set_scale": lambda model: [layer.set_scale("default", 0.25) for layer in layers(model)] and None,
    "scaled": lambda model: [layer.scale_layer(3.0) for layer in layers(model)] and None,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "enabled": lambda model: model.base_model.enable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: model.unmerge_adapter(),
    "another one added": lambda model: (
        model.add_adapter("third", peft.LoraConfig(r=2, target_modules=["last"], lora_bias=True)),
        model.set_adapter("third"),
        visible(model).base_model.set_adapter(["default", "third"]),
    )[0],
    "deleted": lambda model: model.delete_adapter("other"),
    "in evaluation": lambda model: model.eval() and None,
    "in training": lambda model: model.train() and None,
    "new weights": lambda model: visible(model) and None,
}


def test_state_that_changes_between_steps_is_read_at_each_call() -> None:
    own = masked(second(adapted(lora_dropout=0.1), lora_dropout=0.2))
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for name, change in CHANGES.items():
        for model in (own, patched):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(7)
                change(model)
        expected, found = step(own), step(patched)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}")
        report = liger_kernels.status(patched)
        assert report.counts() == {"lora_linear": 2}, name
        assert not report.fallbacks, name


def test_disable_adapter_as_dpo_uses_it() -> None:
    """Its reference is the base alone, to the last bit, and what comes after it has the adapters again."""
    model = adapted()
    base = model.get_base_model()
    plain = Net().to(DEVICE)
    plain.load_state_dict({k.replace("base_layer.", ""): v for k, v in base.state_dict().items() if "lora" not in k})
    liger_kernels.patch(model)
    x = inputs().to(DEVICE)
    before = model(x)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), before)
    assert not torch.allclose(before, plain(x))


def test_a_watched_dropout_is_called() -> None:
    model = adapted()
    liger_kernels.patch(model)
    seen: list[torch.Tensor] = []
    layers(model)[0].lora_dropout["default"].register_forward_hook(lambda _, args, y: seen.append(y))
    step(model)
    assert [y.shape for y in seen] == [(2, 7, IN)]


def test_dropout_draws_the_numbers_that_peft_draws() -> None:
    own = adapted(lora_dropout=0.4)
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    results = []
    for model in (own, patched):
        torch.manual_seed(5)
        results.append(step(model))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """The same gradients. Of two frozen bases, only the first is computed again, where recomputation knows its end."""
    own = masked(adapted(lora_dropout=0.1))
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    x = inputs().to(DEVICE).requires_grad_()
    found = []
    for model in (copy.deepcopy(own).double(), own, patched):
        y: Any = checkpoint(model, x.to(next(model.parameters()).dtype), use_reentrant=reentrant)
        with Products() as products:
            y.square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    truth, theirs, ours = found
    compare(own, ours, theirs, truth)
    assert products.count == (4 if reentrant else 3)


def test_two_forwards_then_two_backwards() -> None:
    own = both(adapted())
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    found = []
    for model in (own, patched):
        ys = [model(inputs(4, IN, seed=seed).to(DEVICE)).square().sum() for seed in (1, 2)]
        for y in ys:
            y.backward(retain_graph=True)
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found[2:], found[:2])


def test_autocast() -> None:
    model = adapted()
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    x = inputs().to(DEVICE)
    exact = copy.deepcopy(model).double()
    truth = exact(x.double())
    truth.sum().backward()
    found = {}
    for name, one in (("peft", model), ("ours", patched)):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            y = one(x)
        y.sum().backward()
        found[name] = y.detach()
    assert found["ours"].dtype == found["peft"].dtype == torch.bfloat16
    three_way(found["ours"], found["peft"], truth.detach(), torch.bfloat16, "y")
    parameters = zip(patched.named_parameters(), model.parameters(), exact.parameters(), strict=True)
    for (name, ours), theirs, truths in parameters:
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert ours.grad.dtype == theirs.grad.dtype
            three_way(ours.grad, theirs.grad, truths.grad, torch.bfloat16, name)
    assert not fallbacks(patched)


def test_copies_pickles_and_unpatch(tmp_path: Path) -> None:
    model = masked(adapted(lora_dropout=0.1))
    classes = [type(module) for module in model.modules()]
    state = [dict(module.__dict__) for module in layers(model)]
    before = step(model)
    model.save_pretrained(tmp_path / "own")
    liger_kernels.patch(model)
    found = step(model)
    model.save_pretrained(tmp_path / "patched")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for copied in copies:
        assert liger_kernels.status(copied).counts() == {"lora_linear": 2}
        ops.reset_launches()
        again = step(copied)
        assert ops.launches()
        assert all(map(torch.equal, again.values(), found.values()))
    liger_kernels.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert [dict(module.__dict__) for module in layers(model)] == state
    assert all(map(torch.equal, step(model).values(), before.values()))


def test_merging_and_unloading_a_patched_model_leaves_nothing() -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    merged = [model.merge_and_unload() for model in (own, patched)]
    assert [type(m) for m in merged[0].modules()] == [type(m) for m in merged[1].modules()]
    assert torch.equal(merged[1](inputs().to(DEVICE)), merged[0](inputs().to(DEVICE)))


@pytest.mark.parametrize("shape", [(IN,), (5, IN), (0, IN), (2, 0, IN), (2, 3, 2, IN)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    check_same(adapted(), lambda model: step(model, inputs(*shape) if shape != (0,) else None))


def test_other_strides() -> None:
    check_same(adapted(), lambda model: step(model, inputs(IN, 5).t()))
    check_same(adapted(), lambda model: step(model, inputs(1, IN).expand(4, IN)))


def test_a_model_with_adapters_everywhere() -> None:
    """MLP, attention and adapters each run their kernels."""
    model = adapted(tiny("llama"), target_modules="all-linear")
    patched = check_same(model, train)
    report = liger_kernels.status(patched)
    assert report.counts() == {"rms_norm": 5, "rope": 2, "swiglu": 2, "lora_linear": 14, "linear_cross_entropy": 1}
    assert not report.never_ran
    assert not report.fallbacks
    assert not report.left


def test_an_adapter_that_comes_after_patch() -> None:
    model = tiny("llama")
    liger_kernels.patch(model)
    wrapped = adapted(model, target_modules=["q_proj", "down_proj"])
    report = liger_kernels.status(wrapped)
    assert "lora_linear" not in report.counts()
    late = [left for left in report.left if "patch(model) again" in left.reason]
    assert len(late) == 4
    expected, truth = train(wrapped), train(copy.deepcopy(wrapped).double())
    assert liger_kernels.patch(wrapped).counts()["lora_linear"] == 4
    assert not liger_kernels.status(wrapped).left
    compare(wrapped, train(wrapped), expected, truth)
