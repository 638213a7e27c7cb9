"""The census counts what is there: shares by hand on models of known sizes, and the committed page is its record's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from convergence.files import read_json
from matrix import census
from matrix.checks import count, zoo
from tests.patching_checks import SIZES, VOCAB, tiny


def test_shares_of_a_dense_model() -> None:
    """Llama of two layers: gate, up, down and the head run on kernels, and of the parameters the norms besides."""
    found = count.examine(tiny("llama", tie_word_embeddings=False))
    hidden, inner, layers = SIZES["hidden_size"], SIZES["intermediate_size"], 2
    mlp, attention, head, norms = 3 * hidden * inner * layers, 3 * hidden * hidden * layers, hidden * VOCAB, 5 * hidden
    total = mlp + attention + 2 * head + norms
    products = mlp + attention + head
    assert found["found"] == {
        "norm": [5, 0, 0],
        "rotary": [2, 0, 0],
        "experts": [0, 0, 0],
        "MLP": [2, 0, 0],
        "head": [1, 0, 0],
    }
    expected = {
        "rms_norm": [5, norms / total, 0.0],
        "rope": [2, 0.0, 0.0],
        "swiglu": [2, mlp / total, mlp / products],
        "linear_cross_entropy": [1, head / total, head / products],
    }
    assert {k: pytest.approx(v, abs=1e-6) for k, v in found["kernels"].items()} == expected
    assert found["reasons"] == {}


def test_a_tied_head_runs_where_the_head_does() -> None:
    tied, untied = (count.examine(tiny("llama", tie_word_embeddings=tie))["kernels"] for tie in (True, False))
    assert tied["linear_cross_entropy"][1] > untied["linear_cross_entropy"][1]
    assert tied["linear_cross_entropy"][2] == untied["linear_cross_entropy"][2]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(8, 24, 6))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.experts = Experts()
        self.listed = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(6, 12, bias=False) for _ in range(8))})
        self.shared_experts = Experts()
        self.embedding = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)


def test_a_token_meets_the_experts_that_it_is_routed_to() -> None:
    block: Any = Block()
    block.config = transformers.LlamaConfig()
    block.listed.top_k = 4
    modules: dict[str, Any] = dict(block.named_modules())
    routed: dict[Any, int] = {}
    found = {
        path: count._multiplied(block, modules, path, module, parameter, routed)
        for path, module in modules.items()
        for parameter in module._parameters.values()
        if parameter is not None
    }
    assert found["experts"] == 2 * 24 * 6
    assert found["shared_experts"] == 8 * 24 * 6
    assert found["listed.experts.3"] == 4 / 8 * 6 * 12
    assert found["embedding"] == found["norm"] == 0


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return q, k


def apply_mask(x: Any) -> Any:
    return x


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


class Attention(nn.Module):
    @decorated
    def forward(self, x: Any) -> Any:
        rotate = lambda q: apply_rotary_pos_emb(q, q, x, x)  # noqa: E731
        return rotate(apply_mask(x))


def test_rotary_functions_are_found_behind_decorators() -> None:
    assert count.rotary_names(Attention) == ["apply_rotary_pos_emb"]
    assert count.rotary_names(nn.Linear) == []


class StrangeNorm(nn.Module):
    """A norm of a form that no recogniser looks at."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "third"):
            self.register_parameter(name, nn.Parameter(torch.ones(2, 3)))

    def forward(self, x: Any) -> Any:
        return x


def test_what_is_left_is_counted_with_its_reason_or_without() -> None:
    model = tiny("llama")
    model.model.norm = nn.GroupNorm(2, SIZES["hidden_size"])
    model.model.layers[0].input_layernorm = StrangeNorm()
    found = count.examine(model)
    assert found["found"]["norm"] == [3, 1, 1]
    assert found["reasons"] == {
        "norm: it normalises channels, not rows: no kernel for it": 1,
        "norm: not in the report": 1,
    }


def entry(norms: list[int], experts: list[int], share: float) -> dict[str, Any]:
    found = {kind: [0, 0, 0] for kind in count.KINDS} | {"norm": norms, "experts": experts}
    return {"found": found, "kernels": {"rms_norm": [norms[0], share, share / 2]}}


def test_shares_count_every_class_alike() -> None:
    absent = {"name": "Gone", "absent": "ImportError"}
    entries = [
        entry([9, 1, 0], [1, 0, 0], 0.5),
        entry([0, 5, 5], [1, 1, 0], 0.1),
        entry([0, 0, 0], [0, 0, 0], 0),
        absent,
    ]
    found = count.shares({"classes": {"causal": entries[:1], "other": entries[1:]}})
    assert (found["classes"], found["norms"], found["parameters"], found["FLOPs"]) == (3, 0.45, 0.2, 0.1)
    assert (found["classes with experts"], found["experts replaced"]) == (2, 1)


def test_only_the_newest_version_keeps_its_classes() -> None:
    def taken(version: str) -> dict[str, Any]:
        return {
            "transformers": version,
            "torch": "2",
            "at": "",
            "classes": {"causal": [entry([1, 0, 0], [0, 0, 0], 0)]},
        }

    record: dict[str, Any] = {}
    for version in ("5.9.0", "5.23.0", "4.57.6"):
        record = census.add(taken(version), record)
    assert [version for version, found in record.items() if found["classes"]] == ["5.23.0"]
    assert all(found["shares"]["norms"] == 1 for found in record.values())


def test_the_page_is_what_the_record_says() -> None:
    record = read_json(census.RECORD)
    for file, text in census.pages(record).items():
        assert file.read_text(encoding="utf-8") == text, "python -m matrix census --write"
    assert census.RECORD.read_text(encoding="utf-8") == census.dump(record)


def test_a_shrunk_model_has_the_experts_that_upstream_chooses() -> None:
    shrunk = copy.deepcopy(zoo.tiny_config(transformers.Qwen3MoeForCausalLM))
    assert shrunk._experts_implementation == "eager"
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(zoo._with_default_experts(shrunk))
    assert model.config._experts_implementation != "eager"
