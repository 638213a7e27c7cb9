"""An LM head whose weight bitsandbytes keeps in four bits: the fused loss of the weight that it stands for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels import ops
from tests.lora_checks import adapted
from tests.patching_checks import DEVICE, batch, fallbacks, tiny, train

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes 0.50 or newer, of the extra qlora")
DTYPES = (torch.float32, torch.bfloat16)


def four_bits(weight: torch.Tensor, dtype: torch.dtype) -> Any:
    layer = bitsandbytes.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, compute_dtype=dtype)
    layer.support_avx512bf16_for_cpu = False  # inference on such a CPU rounds the scales
    layer.weight = bitsandbytes.nn.Params4bit(weight.detach().cpu(), requires_grad=False, quant_type="nf4")
    return layer.to(DEVICE)


def dense(head: Any) -> torch.Tensor:
    return bitsandbytes.functional.dequantize_4bit(head.weight.data, head.weight.quant_state)


def pair(dtype: torch.dtype, adapter: bool) -> tuple[Any, Any]:
    """A model whose head has four bits, and the same in float64 with the weight that they stand for."""
    model = tiny("llama", hidden_size=64).to(dtype)
    model.lm_head = four_bits(model.lm_head.weight, dtype)
    plain = copy.deepcopy(model)
    plain.lm_head = nn.Linear(64, 67, bias=False, device=DEVICE)
    plain.lm_head.weight = nn.Parameter(dense(model.lm_head).float(), requires_grad=False)
    if adapter:
        model, plain = (adapted(one, target_modules=["lm_head"]) for one in (model, plain))
    return model, plain.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "with an adapter"])
@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_loss_and_gradients(dtype: torch.dtype, adapter: bool, memory: Any) -> None:
    model, plain = pair(dtype, adapter)
    own, exact = train(model), train(plain)
    liger_kernels.patch(model, memory=memory)
    ours = train(model)
    report = liger_kernels.status(model)
    assert report.fuses_head
    assert not report.fallbacks
    assert not report.never_ran
    assert ours.keys() == own.keys()
    for name, value in ours.items():
        three_way(value, own[name], exact[name], dtype, name, chain=8)


@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_the_weight_is_made_dense_once_in_each_direction(memory: Any) -> None:
    model, _ = pair(torch.float32, adapter=False)
    liger_kernels.patch(model, memory=memory)
    ops.reset_launches()
    loss = model(**batch()).loss
    forward = ops.launches()["_nf4_kernel"]
    loss.backward()
    both = ops.launches()["_nf4_kernel"]
    assert (forward, both) == (1, 2 if memory == "fast" else 1)  # "balanced" has the gradients by then


def test_logits_that_are_read() -> None:
    model, _ = pair(torch.float32, adapter=True)
    expected = model(**batch()).logits
    liger_kernels.patch(model)
    torch.testing.assert_close(model(**batch()).logits, expected)


def test_a_head_that_computes_in_another_dtype_computes_its_logits() -> None:
    model, _ = pair(torch.float32, adapter=False)
    model.lm_head.compute_dtype = torch.bfloat16
    liger_kernels.patch(model)
    model.lm_head.compute_type_is_set = True
    expected = copy.deepcopy(model)
    liger_kernels.unpatch(expected)
    torch.testing.assert_close(model(**batch()).loss, expected(**batch()).loss)
    assert any("more than a weight" in why for why in fallbacks(model))


def test_a_head_of_eight_bits_computes_its_logits() -> None:
    model = tiny("llama", hidden_size=64)
    model.lm_head = bitsandbytes.nn.Linear8bitLt(64, 67, bias=False, has_fp16_weights=False)
    report = liger_kernels.patch(model)
    assert not report.fuses_head
    assert any("not a plain linear layer" in left.reason for left in report.left)
