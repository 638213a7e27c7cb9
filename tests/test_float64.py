"""What the truth computes in blocks at real size is what upstream computes at once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from convergence.arms import float64

# A number here is at most three sums of 41 terms one after another (scores, softmax, values). Each term rounds once.
# Their order is all that blocks change, in the forward and in the backward.
ROUNDOFFS = 2 * 3 * 41 * 2.0**-53


def both(
    monkeypatch: pytest.MonkeyPatch, name: str, inputs: tuple[torch.Tensor, ...], compute: Any
) -> list[list[torch.Tensor]]:
    """Result and gradients in float64, at once and in blocks, for which ``name`` of the module is called once."""
    in_blocks = mock.Mock(wraps=getattr(float64, name))
    monkeypatch.setattr(float64, name, in_blocks)
    found = []
    for block in (2**28, 2**8):
        monkeypatch.setattr(float64, "BLOCK", block)
        leaves = [x.clone().requires_grad_() for x in inputs]
        with float64.InFloat64():
            result = compute(*leaves)
            result.backward(torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape))
        found.append([result.detach(), *(leaf.grad for leaf in leaves)])
    assert in_blocks.call_count == 1
    return found


@pytest.mark.parametrize(("masked", "kv_heads"), [("causal", 2), ("window", 2), ("one row", 4), ("no", 2)])
def test_attention_in_blocks_is_attention(monkeypatch: pytest.MonkeyPatch, masked: str, kv_heads: int) -> None:
    shapes = ((3, 4, 37, 8), (3, kv_heads, 37, 8), (3, kv_heads, 37, 8))
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    window = torch.ones(37, 37, dtype=torch.bool).tril().triu(-7).expand(3, 1, 37, 37)
    options = {
        "causal": {"is_causal": True},
        "window": {"attn_mask": window},
        "one row": {"attn_mask": torch.arange(37).lt(30).expand(3, 1, 1, 37)},
        "no": {},
    }[masked]

    def compute(*inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, dropout_p=0.0, scale=0.3, enable_gqa=kv_heads < 4, **options)

    at_once, in_blocks = both(monkeypatch, "attention", (query, key, value), compute)
    torch.testing.assert_close(in_blocks, at_once, rtol=ROUNDOFFS, atol=ROUNDOFFS)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_blocks_is_the_loss(monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    logits, targets = 5 * torch.randn(41, 19, dtype=torch.float64), torch.randint(19, (41,))
    targets[5:9] = -100

    def compute(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction=reduction)

    at_once, in_blocks = both(monkeypatch, "cross_entropy", (logits,), compute)
    torch.testing.assert_close(in_blocks, at_once, rtol=ROUNDOFFS, atol=1e-15)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weight": torch.ones(19, dtype=torch.float64)}])
def test_another_loss_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(float64, "BLOCK", 2**8)
    monkeypatch.setattr(float64, "cross_entropy", lambda *_, **__: pytest.fail("in blocks"))
    logits, targets = torch.randn(41, 19, dtype=torch.float64), torch.randint(19, (41,))
    with float64.InFloat64():
        loss = F.cross_entropy(logits, targets, **options)
    assert torch.equal(loss, F.cross_entropy(logits, targets, **options))
