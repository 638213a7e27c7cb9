"""PEFT's LoRA layers of a patched model: the same numbers, whatever changes between the calls, and PEFT's own forward
wherever a call is something else."""

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
from torch import nn
from torch.utils.checkpoint import checkpoint

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels import ops
from tests.ops_checks import Products
from tests.patching_checks import DEVICE, batch, check_same, compare, fallbacks, tiny, train

IN, INNER, OUT = 12, 20, 8


class Net(nn.Module):
    """Two linear layers, one of which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, INNER)
        self.last = nn.Linear(INNER, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return y


class Mask(nn.Module):
    """A dropout whose mask follows from the index of an element, so that it is the same in every dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = (torch.arange(x.numel(), device=x.device) * 7919 % 11 > 3).view(x.shape)
        return x * kept * 1.5


def visible(model: Any) -> Any:
    """``model`` with B and biases that are not zero, in training mode."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_magnitude" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


def adapted(base: nn.Module | None = None, **options: Any) -> Any:
    """A model with an adapter."""
    torch.manual_seed(0)
    base = Net().to(DEVICE) if base is None else base
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["first", "last"], **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a layer without bias gets an adapter with one
        return visible(peft.get_peft_model(base, config))


def second(model: Any, **options: Any) -> Any:
    """``model`` with another adapter."""
    config = peft.LoraConfig(**{"r": 5, "lora_alpha": 4, "target_modules": ["first"], **options})
    model.add_adapter("other", config)
    return visible(model)


def both(model: Any) -> Any:
    """Both adapters of ``model`` are active and trained."""
    second(model).base_model.set_adapter(["default", "other"])
    return model


def masked(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name in module.lora_dropout:
                module.lora_dropout[name] = Mask()
    return model


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def inputs(*shape: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 7, IN)), generator=generator)


def step(model: Any, x: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients, by name."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    x = (inputs() if x is None else x).to(like.device, like.dtype).requires_grad_()
    y = model(x)
    generator = torch.Generator().manual_seed(3)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"y": y.detach(), "x": x.grad, **found}


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


def hooked(layer: Any) -> None:
    layer.lora_B["default"].register_forward_hook(lambda *_: None)


def replaced(layer: Any) -> None:
    a = layer.lora_A["default"]
    a.forward = lambda x: nn.functional.linear(x, 2 * a.weight)


class Sharded(torch.Tensor):
    """A subclass, as a DTensor is one."""


def sharded(layer: Any) -> None:
    layer.lora_A["default"].weight = nn.Parameter(layer.lora_A["default"].weight.detach().as_subclass(Sharded))


def varied(layer: Any) -> None:
    class Doubled:
        @staticmethod
        def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
            return result + 2 * module.lora_B[active_adapter](module.lora_A[active_adapter](x))

    layer.lora_variant["default"] = Doubled()


def parametrised(layer: Any) -> None:
    nn.utils.parametrizations.weight_norm(layer.lora_A["default"])


ODD: dict[str, Callable[[Any], None]] = {
    "hooks": hooked,
    "no plain linear layer": parametrised,
    "a forward of its own": replaced,
    "no plain tensor": sharded,
    "variant": varied,
}


@pytest.mark.parametrize("why", ODD)
def test_peft_computes_what_was_not_probed_and_the_report_counts_why(why: str) -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for model in (own, patched):
        ODD[why](layers(model)[0])
    expected, found = step(own), step(patched)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)
    (reason,) = fallbacks(patched)
    assert reason.startswith("PEFT computed an adapter: ")
    assert why in reason
    assert fallbacks(patched) == {reason: 1}
    assert reason in str(liger_kernels.status(patched))


def test_a_hook_of_all_modules_sees_those_of_an_adapter() -> None:
    model = adapted()
    liger_kernels.patch(model)
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(inputs().to(DEVICE))
    finally:
        hook.remove()
    assert all(layer.lora_B["default"] in seen for layer in layers(model))
    assert set(fallbacks(model).values()) == {2}


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


def test_adapter_names_in_a_batch() -> None:
    own = second(adapted())
    own.eval()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    x, names = inputs(3, IN).to(DEVICE), ["default", "other", "__base__"]
    torch.testing.assert_close(patched(x, adapter_names=names), own(x, adapter_names=names))
    for layer in layers(patched):
        with pytest.raises(ValueError, match="adapter_names"):
            layer(torch.ones(2, layer.in_features, device=DEVICE), adapter_names=names)


VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "weights decomposed": ({"use_dora": True}, "its adapters are variants of LoRA: PEFT computes them"),
    "an adapter of a parameter": (
        {"target_modules": [], "target_parameters": ["first.weight"]},
        "it is not base(x) + sum of scale * B(A(dropout(x)))",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_left_to_peft(name: str) -> None:
    options, reason = VARIANTS[name]
    model = adapted(**options)
    expected = step(model)
    report = patched_quietly(model, ["lora_linear"])
    assert not report.replaced
    assert {left.reason for left in report.left} == {reason}
    assert all(map(torch.equal, step(model).values(), expected.values()))


@pytest.mark.parametrize("config", [peft.IA3Config, peft.LoHaConfig, peft.VeraConfig])
def test_other_adapters_are_not_listed(config: Any) -> None:
    options = {"feedforward_modules": []} if config is peft.IA3Config else {}
    report = patched_quietly(peft.get_peft_model(Net().to(DEVICE), config(target_modules=["first"], **options)))
    assert not report.replaced
    assert not report.left


def patched_quietly(model: nn.Module, kernels: list[str] | None = None) -> liger_kernels.PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was replaced
        return liger_kernels.patch(model, kernels)


@pytest.mark.parametrize("change", ["scaled twice", "rounded", "another gradient", "no scale"])
def test_a_forward_that_computes_something_else_is_left(change: str) -> None:
    """As a later version of PEFT might."""
    model = adapted()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_A["default"], self.lora_B["default"]
        scale = {"scaled twice": 2 * self.scaling["default"], "no scale": 1.0}.get(change, self.scaling["default"])
        z = a(self.lora_dropout["default"](x.to(a.weight.dtype)))
        delta = b(z.detach() + 0 * z if change == "another gradient" else z) * scale
        if change == "rounded":
            delta = delta.bfloat16()
        y = self.base_layer(x)
        return (y + delta).to(y.dtype)

    for layer in layers(model):
        layer.__class__ = type("Later", (type(layer),), {"forward": forward})
    assert not patched_quietly(model).replaced


def test_what_is_no_linear_layer_is_not_listed() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, IN)
            self.conv = nn.Conv1d(IN, 4, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.conv(self.embed(ids).mT)
            return y

    model = adapted(Words().to(DEVICE), target_modules=["embed", "conv"])
    report = patched_quietly(model)
    assert not report.replaced
    ids = torch.arange(8, device=DEVICE)[None]
    model(ids).sum().backward()


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


def half_adapters(model: Any) -> None:
    for layer in layers(model):
        layer.lora_B.to(torch.float16)


def uncast(model: Any) -> None:
    model.bfloat16()
    for layer in layers(model):
        layer.lora_A.float()
        layer.lora_B.float()
        layer.cast_input_dtype_enabled = False


BAD: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "other features": (lambda model: None, lambda: torch.randn(2, IN + 1)),
    "integers": (lambda model: None, lambda: torch.ones(2, IN, dtype=torch.int64)),
    "no tensor": (lambda model: None, lambda: [1.0]),
    "float16 of B alone": (half_adapters, lambda: torch.randn(2, IN)),
    "another dtype, not cast": (uncast, lambda: torch.randn(2, IN).bfloat16()),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_peft_raises(name: str) -> None:
    change, given = BAD[name]
    errors = []
    for patch in (False, True):
        model = adapted()
        if patch:
            liger_kernels.patch(model)
        change(model)
        x = given()
        with pytest.raises(Exception) as raised:  # noqa: PT011  (whatever it is)
            model(x.to(DEVICE) if isinstance(x, torch.Tensor) else x)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


def test_an_adapter_without_memory_is_peft_s() -> None:
    own = adapted()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    for model in (own, patched):
        layers(model)[1].lora_B.to("meta")
    x = inputs().to(DEVICE)
    found = []
    for model in (own, patched):
        try:
            found.append(str(model(x).device))
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] == found[1]
    assert "PEFT computed an adapter: a weight of it is on another device than x" in fallbacks(patched)


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


def test_without_the_kernel_adapters_stay_as_they_are() -> None:
    model = adapted(tiny("llama"), target_modules=["q_proj"])
    report = liger_kernels.patch(model, [k for k in liger_kernels.KERNELS if k != "lora_linear"])
    assert "lora_linear" not in report.counts()
    ops.reset_launches()
    model(**batch()).loss.backward()
    assert not any("lora" in name for name in ops.launches())
    assert not liger_kernels.status(model).left


def test_a_compiled_model_runs_peft_s_forward() -> None:
    model = adapted().to("cpu")
    expected = step(model)
    liger_kernels.patch(model)
    ops.reset_launches()
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    x = inputs().requires_grad_()
    torch.testing.assert_close(compiled(x), expected["y"])
    assert not ops.launches()


def test_a_transform_of_torch_func_runs_peft_s_forward() -> None:
    model = adapted().to("cpu")
    expected = torch.func.jacrev(model.base_model.model)(inputs(IN))
    liger_kernels.patch(model)
    torch.testing.assert_close(torch.func.jacrev(model.base_model.model)(inputs(IN)), expected)
