"""What a cell checks of every model can fail: a forward that takes something else than upstream's is found."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import liger_kernels
from matrix.checks.signatures import differs, other_signatures


class Upstream:
    def forward(self, x: int, y: int = 0) -> int:
        return x + y


def passes_on(self: Any, *args: Any, **kwargs: Any) -> int:
    return Upstream.forward(self, *args, **kwargs)


def takes_more(self: Any, x: int, y: int = 0, z: int = 0) -> int:
    return x + y + z


def takes_less(self: Any, x: int) -> int:
    return x


def has_another_default(self: Any, x: int, y: int = 1) -> int:
    return x + y


BORROWED = "its signature is borrowed, and it does not hand everything on"


@pytest.mark.parametrize(
    ("forward", "said_of_borrowed"),
    [*((forward, BORROWED) for forward in (takes_more, takes_less, has_another_default)), (passes_on, "")],
)
def test_another_signature_is_found_and_a_borrowed_one_hides_nothing(forward: Any, said_of_borrowed: str) -> None:
    patched = type("Patched", (Upstream,), {"forward": forward})
    assert "it takes" in differs(patched().forward, Upstream().forward)
    patched = type("Patched", (Upstream,), {"forward": functools.wraps(Upstream.forward)(forward)})
    assert differs(patched().forward, Upstream().forward) == said_of_borrowed
    assert differs(Upstream().forward, Upstream().forward) == ""


def test_every_patched_module_shows_upstreams_signature() -> None:
    """Without that, whoever asks a patched head or norm what it takes is told ``*args, **kwargs``."""
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        return model

    upstream, patched = build(), build()
    report = liger_kernels.patch(patched)
    assert {"rms_norm", "swiglu", "rope", "linear_cross_entropy"} <= report.counts().keys()
    assert other_signatures(patched, upstream) == []
