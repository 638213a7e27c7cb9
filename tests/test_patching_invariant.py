"""patch(invariant=True): a sequence has the same bits alone and among others, forward and backward, and they are right.

Sequences have one length, so that attention, which is upstream's, multiplies the same shapes for each of them.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import liger_kernels
from liger_kernels.ops import _grouped, experts
from liger_kernels.ops.runtime.tiling import tiled
from tests.patching_checks import DEVICE, VOCAB, check_same, tiny, train
from tools.determinism import same_bits

LENGTH, SEQUENCES = 9, 5


@pytest.fixture(autouse=True)
def blocks_of_few_rows(poisoned_empty: None) -> Iterator[None]:
    with tiled(rows_of_block=lambda choose: 16):
        yield


def patch(model: Any) -> Any:
    return liger_kernels.patch(model, invariant=True)


def ids() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(3, VOCAB, (SEQUENCES, LENGTH)).to(DEVICE)


def found(model: Any, sequences: list[int]) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of the embedded tokens under a loss that is a sum, of some sequences."""
    some = ids()[sequences]
    embedded = model.get_input_embeddings()(some).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=some, num_items_in_batch=torch.tensor(8.0)).loss
    (grad,) = torch.autograd.grad(loss, embedded)
    with torch.no_grad():
        logits, first = model(some).logits, model(some[:, :1]).logits
    return {"grad": grad, "logits": logits, "first token": first}


def not_the_same(model: Any) -> set[str]:
    """What a sequence has other bits of alone, or in another order, than among all."""
    whole, differ = found(model, [*range(SEQUENCES)]), set()
    for sequences in ([2], [4, 1], [4, 3, 2, 1, 0]):
        part = found(model, sequences)
        differ |= {name for name, t in whole.items() if not same_bits(t[sequences], part[name])}
    return differ


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_a_sequence_among_others(family: str) -> None:
    model = tiny(family, hidden_size=64, intermediate_size=120).to(DEVICE)
    report = patch(model)
    assert not not_the_same(model)
    assert report.counts()["invariant_linear"] >= 8
    assert not liger_kernels.status(model).never_ran


def test_without_the_option_bits_differ() -> None:
    model = tiny("llama", hidden_size=64, intermediate_size=120)
    liger_kernels.patch(model)
    assert "first token" in not_the_same(model)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_model(family: str) -> None:
    check_same(tiny(family), train, patch=patch)


def test_adapters_run_on_layers_in_blocks() -> None:
    peft = pytest.importorskip("peft")
    model = tiny("llama", hidden_size=64, intermediate_size=120)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    report = patch(model)
    assert not not_the_same(model)
    assert any("PEFT computes it, by linear layers in blocks" in left.reason for left in report.left)
    assert "lora_linear" not in report.counts()


def test_the_report_names_what_is_not_ours() -> None:
    report = patch(tiny("llama"))
    # Some versions of transformers multiply positions and frequencies by @.
    multiplies = " @ " in inspect.getsource(LlamaRotaryEmbedding)
    expected = {"LlamaAttention", *(["LlamaRotaryEmbedding"] if multiplies else [])}
    assert {left.what for left in report.not_invariant} == expected
    assert "not invariant, because the patch does not compute it:" in str(report)
    assert not liger_kernels.patch(tiny("llama")).not_invariant


def test_copies_and_pickles_keep_it_and_unpatch_ends_it() -> None:
    model = tiny("llama")
    patch(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert liger_kernels.status(other).invariant
        assert liger_kernels.status(other).counts() == liger_kernels.status(model).counts()
    with pytest.raises(ValueError, match="already patched with invariant=True, not False"):
        liger_kernels.patch(model)
    liger_kernels.unpatch(model)
    assert all(type(module) is not torch.nn.Linear or "Linear" in repr(type(module)) for module in model.modules())
    assert not [module for module in model.modules() if type(module).__dict__.get("_liger_kernels_recipe")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_a_token(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    tokens, n_experts, hidden = 40, 4, 64
    given = {
        "hidden": torch.randn(tokens, hidden),
        "weights": torch.rand(tokens, 2),
        "gate_up": torch.randn(n_experts, 96, hidden) / 8,
        "down": torch.randn(n_experts, hidden, 48) / 8,
        "down_bias": torch.randn(n_experts, hidden),
    }
    given = {name: t.to(dtype).to(device) for name, t in given.items()}
    chosen, upstream = torch.randint(n_experts, (tokens, 2), device=device), torch.randn(tokens, hidden, device=device)

    def run(rows: list[int], invariant: bool) -> list[torch.Tensor]:
        tensors = {name: t[rows] if len(t) == tokens else t for name, t in given.items()}
        leaves = [tensors[name].requires_grad_() for name in ("hidden", "weights")]
        y = experts(ids=chosen[rows], **tensors, invariant=invariant)
        return [y, *torch.autograd.grad(y, leaves, upstream[rows].to(dtype))]

    every = [*range(tokens)]
    whole, plain = run(every, True), run(every, False)
    for rows in ([7], [*range(3, 30)], torch.randperm(tokens).tolist()):
        assert all(same_bits(all_rows[rows], part) for all_rows, part in zip(whole, run(rows, True), strict=True))
    for ours, theirs in zip(whole, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=8 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"invariant is an int \(1\); it must be True or False"):
        liger_kernels.patch(tiny("llama"), invariant=1)


@pytest.mark.parametrize(
    ("dtype", "capability", "one"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 3), True),
        (torch.bfloat16, (12, 0), False),
        (torch.bfloat16, (8, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_where_torchs_grouped_product_is_one_kernel(
    dtype: torch.dtype, capability: tuple[int, int], one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it is a loop over the groups, each product with a kernel for its number of rows."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert _grouped._is_one_kernel(torch.empty(0, dtype=dtype)) == one
