"""The report says who computes a linear attention, and the samples of a packed row leak there as it says."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import liger_kernels
from convergence.models.models import MODELS
from tests.packing_checks import packed, samples
from tests.patching_checks import DEVICE, tiny

pytestmark = pytest.mark.usefixtures("references_on_a_cpu")
RULE, CONVOLUTION = "gated delta rule", "causal convolution"


def hybrid(name: str = "qwen3_next") -> Any:
    if not MODELS[name].is_available():
        pytest.skip(f"this transformers has no {MODELS[name].architecture}")
    return MODELS[name].build(0)


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Of fla and causal_conv1d, only these."""
    found = importlib.util.find_spec

    def find_spec(name: str, *args: Any) -> Any:
        if name in ("fla", "causal_conv1d"):
            return SimpleNamespace(name=name) if name in packages else None
        return found(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def said(model: Any) -> dict[str, str]:
    report = liger_kernels.patch(model)
    shown = str(report)
    assert all(item.reason in shown for item in report.linear_attention)
    assert [item.path for item in report.linear_attention] == ["model.layers.0.linear_attn"] * 2
    return {item.what.partition(": ")[2]: item.reason for item in report.linear_attention}


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    found = said(hybrid())
    assert "plain torch, because flash-linear-attention is not installed" in found[RULE]
    assert "plain torch, because causal-conv1d is not installed" in found[CONVOLUTION]
    assert all("LEAKS" in reason for reason in found.values())


def test_with_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "fla")
    found = said(hybrid())
    assert found[RULE].startswith("flash-linear-attention;")
    assert "cu_seq_lens_q" in found[RULE]
    assert "LEAKS" in found[CONVOLUTION]
    installed(monkeypatch, "fla", "causal_conv1d")
    found = said(hybrid())
    assert "seq_idx" in found[CONVOLUTION]


def test_a_model_without_any() -> None:
    report = liger_kernels.patch(tiny("llama"))
    assert report.linear_attention == []
    assert "linear attention" not in str(report)


def test_it_leaks_where_it_says_so() -> None:
    """Told by position_ids alone, the second sample sees the first."""
    model = hybrid().double().eval().to(DEVICE)
    found = said(model)
    if not any("LEAKS" in reason for reason in found.values()):
        pytest.skip("both packages are installed")
    documents = samples(9, 11)
    rows = packed(documents)
    with torch.no_grad():
        alone = model(input_ids=documents[1][0][None], use_cache=False).logits
        together = model(input_ids=rows["input_ids"], position_ids=rows["position_ids"], use_cache=False).logits[:, 9:]
        assert (together - alone).abs().max() > 1e-3 * alone.abs().max()
