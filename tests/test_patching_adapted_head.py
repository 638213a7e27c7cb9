"""LM heads with PEFT's adapters: the fused loss of hidden states, weight and adapters, and the head's own logits where
it computes something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from tests.lora_checks import adapted, second, visible
from tests.patching_checks import batch, check_same, compare, fallbacks, tiny, train

TARGETS = ["q_proj", "lm_head"]


def on_head(family: str = "llama", tied: bool = False, **options: Any) -> Any:
    return adapted(tiny(family, tie_word_embeddings=tied), **{"target_modules": TARGETS, **options})


def two(**options: Any) -> Any:
    """Two active adapters of other ranks."""
    model = second(on_head(**options), target_modules=["lm_head"], use_rslora=True)
    model.base_model.set_adapter(["default", "other"])
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "one adapter": on_head,
    "the head alone": lambda: on_head(target_modules=["lm_head"]),
    "two active adapters": two,
    "rslora": lambda: on_head(use_rslora=True, r=5),
    "with a bias": lambda: on_head(lora_bias=True),
    "a tied head": lambda: on_head(tied=True),
    "a soft-cap": lambda: on_head("gemma2"),
    "a trained base": lambda: on_head().requires_grad_(True),
    "frozen adapters": lambda: on_head().requires_grad_(False),
    "disabled": lambda: (model := on_head(), model.base_model.disable_adapter_layers())[0],
    "merged": lambda: (model := on_head(), model.merge_adapter())[0],
    "no active one": lambda: (model := on_head(), model.add_adapter("q", peft.LoraConfig(target_modules=["q_proj"])),
                              model.set_adapter("q"))[0],
}  # fmt: skip


def loss_of_no_gradient(model: Any) -> dict[str, torch.Tensor]:
    return {"loss": model(**batch()).loss.detach()}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_without_logits(name: str) -> None:
    frozen = name in ("frozen adapters", "disabled", "merged")
    patched = check_same(MODELS[name](), loss_of_no_gradient if frozen else train)
    report = liger_kernels.status(patched)
    assert report.fuses_head
    assert not fallbacks(patched)
    assert not [item for item in report.never_ran if item.kernel == "linear_cross_entropy"]
    assert not report.left


def test_a_tied_head_whose_adapter_is_the_embedding_s_turned() -> None:
    """A and B are views of the other's memory, with other strides."""
    make = lambda: on_head(tied=True, target_modules=["lm_head", "embed_tokens"], ensure_weight_tying=True)  # noqa: E731
    model, unpatched = make(), make()
    head = model.get_output_embeddings()
    assert not head.lora_A["default"].weight.is_contiguous()
    liger_kernels.patch(model)
    torch.testing.assert_close(train(model), train(unpatched))
    assert liger_kernels.status(model).fuses_head
    assert not fallbacks(model)


def test_logits_that_are_read_are_the_head_s() -> None:
    model = two(lora_bias=True)
    expected = model(**batch())
    grads = torch.autograd.grad(expected.logits.square().mean(), [p for p in model.parameters() if p.requires_grad])
    liger_kernels.patch(model)
    out = model(**batch())
    torch.testing.assert_close(out.logits, expected.logits)
    again = torch.autograd.grad(out.logits.square().mean(), [p for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(again, grads)
    assert fallbacks(model) == {"outputs.logits was read": 1}
    torch.testing.assert_close(model(input_ids=batch()["input_ids"]).logits, expected.logits)


def test_state_that_changes_between_steps_is_read_at_each_call() -> None:
    model = second(on_head(), target_modules=["lm_head"])
    plain = copy.deepcopy(model)
    liger_kernels.patch(model)
    changes: list[Callable[[Any], Any]] = [
        lambda m: m.set_adapter("other"),
        lambda m: m.base_model.set_adapter(["default", "other"]),
        lambda m: m.get_output_embeddings().set_scale("default", 3.0),
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
        lambda m: m.base_model.disable_adapter_layers(),
        lambda m: m.base_model.enable_adapter_layers(),
        lambda m: m.delete_adapter("other"),
    ]
    for change in changes:
        for one in (model, plain):
            change(one)
        torch.testing.assert_close(loss_of_no_gradient(model), loss_of_no_gradient(plain))
    assert not fallbacks(model)


def dropping(model: Any) -> None:
    model.get_output_embeddings().lora_dropout["default"] = nn.Dropout(0.5)


def hooked(model: Any) -> None:
    model.get_output_embeddings().lora_A["default"].register_forward_hook(lambda *_: None)


def watched_base(model: Any) -> None:
    model.get_output_embeddings().base_layer.register_forward_hook(lambda *_: None)


def watched_head(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda *_: None)


ODD = {
    "dropout": (dropping, "their dropout is active"),
    "hooks": (hooked, "lora_A or lora_B has hooks"),
    "a watched base": (watched_base, "somebody watches it"),
    "a watched head": (watched_head, "a forward hook on the head expects logits"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_head_that_is_something_else_computes_its_logits(name: str) -> None:
    change, reason = ODD[name]
    model = on_head()
    liger_kernels.patch(model)
    change(model)
    model(**batch()).loss.backward()
    assert [why for why in fallbacks(model) if reason in why]


def test_dropout_draws_the_numbers_that_peft_draws() -> None:
    model = on_head(lora_dropout=0.5)
    plain = copy.deepcopy(model)
    liger_kernels.patch(model)
    found = []
    for one in (model, plain):
        torch.manual_seed(5)
        found.append(train(one))
    torch.testing.assert_close(*found)
    model.eval(), plain.eval()
    before = dict(fallbacks(model))
    torch.testing.assert_close(loss_of_no_gradient(model), loss_of_no_gradient(plain))
    assert fallbacks(model) == before


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
def test_patching_and_unpatching_in_any_order(order: str) -> None:
    model = tiny("llama")
    if order == "patch first":
        liger_kernels.patch(model)
    wrapped = adapted(model, target_modules=TARGETS)
    expected, truth = train(wrapped), train(copy.deepcopy(wrapped).double())
    liger_kernels.patch(wrapped)
    compare(wrapped, train(wrapped), expected, truth)
    counts = liger_kernels.status(wrapped).counts()
    assert (counts["lora_linear"], counts["linear_cross_entropy"]) == (2, 1)
    liger_kernels.unpatch(wrapped)
    assert liger_kernels.status(wrapped) is None
    assert not any("liger" in key for module in wrapped.modules() for key in module.__dict__)
    assert not any(hasattr(type(module), "_liger_kernels_base") for module in wrapped.modules())
    compare(wrapped, train(wrapped), expected, truth)


def test_variants_compute_their_logits() -> None:
    model = visible(on_head(use_dora=True))
    liger_kernels.patch(model)
    report = liger_kernels.status(model)
    assert not report.fuses_head
    assert any("not a plain linear layer" in left.reason for left in report.left)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_adapters_of_a_16_bit_head(dtype: torch.dtype) -> None:
    model = on_head()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if "lora_" in name else parameter.data.to(dtype)
    expected, truth = train(model), train(copy.deepcopy(model).double())
    liger_kernels.patch(model)
    chain = sum(1 for module in model.modules() if not module._modules)
    for name, ours in train(model).items():
        three_way(ours, expected[name], truth[name], dtype, name, chain)
    assert not fallbacks(model)


def test_autocast() -> None:
    model = on_head()
    plain = copy.deepcopy(model)
    liger_kernels.patch(model)
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16):
        losses = [one(**batch()).loss for one in (model, plain)]
    exact = copy.deepcopy(plain).double()(**batch()).loss
    chain = sum(1 for module in plain.modules() if not module._modules)  # each leaf rounds at least once
    three_way(*losses, exact, torch.bfloat16, "loss", chain)
    assert not fallbacks(model)


@pytest.mark.slow
def test_a_compiled_model_computes_its_logits() -> None:
    torch._dynamo.reset()
    model = adapted(tiny("llama", num_hidden_layers=0), target_modules=["lm_head"])
    expected = loss_of_no_gradient(copy.deepcopy(model))
    liger_kernels.patch(model)
    torch.testing.assert_close({"loss": torch.compile(model, backend="aot_eager")(**batch()).loss.detach()}, expected)


class Scaled(nn.Module):
    """A head whose weight is another one for the call."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.head, self.scale = head, nn.Parameter(torch.full((head.out_features, 1), 1.3, device=head.weight.device))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.func.functional_call(self.head, {"weight": self.head.weight * self.scale}, (x,))


def scaled(model: Any) -> Any:
    model.lm_head = Scaled(model.lm_head)
    return model


def of_a_parameter(model: Any) -> Any:
    if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip(f"peft {peft.__version__} has no LoraConfig(target_parameters=...)")
    return adapted(model, target_modules=[], target_parameters=["lm_head.weight"])


@pytest.mark.parametrize("wrapped", [scaled, of_a_parameter])
def test_a_weight_that_is_there_for_a_call_is_the_one_of_the_loss(wrapped: Callable[[Any], Any]) -> None:
    """Both wrap a head that was patched before."""

    candidate = tiny("llama", tie_word_embeddings=False)
    own = wrapped(copy.deepcopy(candidate))
    truth = copy.deepcopy(own).double()
    liger_kernels.patch(candidate)
    ours = wrapped(candidate)
    assert fallbacks(candidate) == {}
    compare(own, train(ours), train(own), train(truth))
    assert fallbacks(candidate) == {"what is around the head gives it another weight for its call": 1}
