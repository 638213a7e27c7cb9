"""Rotary functions: what is recognised as which rotation, what is refused, and what upstream computes itself."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from functools import partial
from typing import Any

import pytest
import torch
import transformers

import liger_kernels
from convergence.arms.float64 import InFloat64
from convergence.op.call import check_call
from liger_kernels.ops import launches, reset_launches
from liger_kernels.ops.runtime.compiling import INDUCTOR_UP_TO
from liger_kernels.ops.runtime.dispatch import INTERPRET
from liger_kernels.patching.census import never_ran
from liger_kernels.patching.recipes.rotary import rotary_names
from liger_kernels.patching.recipes.rotary_call import rotary_function
from liger_kernels.patching.recipes.rotation import LAYOUTS, Rotation, recognise_rotation
from tests.ops_checks import randn
from tests.patching_checks import DEVICE, built
from tests.test_patching_zoo import train

HALF = Rotation("f", "half", False, False, False, False, False, LAYOUTS)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def with_sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """As transformers 4.57 has it in Qwen2-VL."""
    sections = mrope_section * 2
    cos, sin = (
        torch.cat([m[i % 3] for i, m in enumerate(x.split(sections, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
        for x in (cos, sin)
    )
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def side_by_side(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """As transformers 4.57 has it in DeepSeek-V3: an angle for each element."""
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return half(q, k, cos, sin, unsqueeze_dim)


# A function of upstream's, by its module and name, or of other versions, and the facts that differ from HALF's.
IN_MIDDLE, AFTER_TOKENS = ((4, 3, -3), (4, 2, -2)), ((4, 3, -2), (4, 2, -2), (3, 2, -2))
FUNCTIONS: dict[Any, dict[str, Any]] = {
    ("llama", "apply_rotary_pos_emb"): {},
    ("olmo", "apply_rotary_pos_emb"): {"casts_back": True},
    ("phi3", "apply_rotary_pos_emb"): {"partial": True},
    ("deepseek_v3", "apply_rotary_pos_emb_interleave"): {"pairing": "interleaved_to_half_repeat"},
    ("qwen2_vl", "apply_rotary_pos_emb_vision"): {"casts_back": True, "layouts": AFTER_TOKENS},
    ("gemma3n", "apply_rotary_pos_emb"): {},
    ("gpt_oss", "apply_rotary_pos_emb"): {"pairing": "half_repeat", "halved": True},
    ("nanochat", "apply_rotary_pos_emb"): {"inverse": True},
    ("gptj", "apply_rotary_pos_emb"): {"pairing": "interleaved_repeat", "halved": True, "layouts": ((4, 3, -2),)},
    ("cohere", "apply_rotary_pos_emb"): {"pairing": "interleaved", "casts_back": True},
    ("glm", "apply_rotary_pos_emb"): {"pairing": "interleaved_repeat", "partial": True},
    ("deepseek_v4", "apply_rotary_pos_emb"): {
        **{"pairing": "interleaved_repeat", "halved": True, "casts_back": True, "partial": True, "trailing": True},
    },
    ("deepseek_v2", "apply_rotary_emb"): {
        "pairing": "interleaved_repeat", "halved": True, "casts_back": True, "layouts": IN_MIDDLE,
    },
    ("llama4", "apply_rotary_emb"): {
        "pairing": "interleaved_repeat", "halved": True, "casts_back": True, "layouts": ((4, 3, -2),),
    },
    with_sections: {},
    side_by_side: {"pairing": "interleaved_to_half"},
}  # fmt: skip


def of_upstream(module, name):
    try:
        return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"transformers {transformers.__version__} has no {name} in {module}")


def expected(name, facts):
    return Rotation(**{**vars(HALF), "name": name, **facts})


def arguments(function, rotation, layout, dtype, rotary_dim):
    """Random tensors for a call of ``function``: what is rotated, cos and sin; and the call itself."""
    names = list(inspect.signature(function).parameters)
    count = 1 if names[0] in ("x", "tensor") else 2
    shapes = [(4, 7) if layout.heads == -3 else (7, 4), (2, 7) if layout.heads == -3 else (7, 2)][:count]
    leaves = [randn(*(3, *shape, 16)[4 - layout.dims :], dtype=dtype, device=DEVICE) for shape in shapes]
    width = rotary_dim // 2 if rotation.halved else rotary_dim
    table = (3, 7, width)[3 - layout.table_dims :]
    sections = {"mrope_section": [width // 2 - 4, 2, 2]} if "mrope_section" in names else {}
    table = (3, *table) if sections else table
    leaves += [randn(*table, device=DEVICE, dtype=torch.float32, grad=False) for _ in range(2)]

    def call(function, *tensors):
        *tensors, cos, sin = tensors
        angles = {"cos": cos, "sin": sin} if "cos" in names else {names[2]: torch.complex(cos.float(), sin.float())}
        if tensors[0].dtype == torch.float64 and "cos" not in names:
            angles = {names[2]: torch.complex(cos, sin)}
        if "unsqueeze_dim" in names:
            angles["unsqueeze_dim"] = layout.heads + layout.table_dims + 1
        with InFloat64() if tensors[0].dtype == torch.float64 else contextlib.nullcontext():
            return function(*tensors, **angles, **sections)

    return leaves, call


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__ if callable(f) else f[0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_recognised_layout_runs_the_kernel_and_computes_what_upstream_does(function, dtype):
    """Cos and sin are independent here, as they never are in a model: no relation between angles is relied upon."""
    facts = FUNCTIONS[function]
    function = function if callable(function) else of_upstream(*function)
    rotation = recognise_rotation("f", function)
    assert rotation == expected("f", facts)
    ours = rotary_function(function, rotation)
    for layout in rotation.layouts:
        for rotary_dim in (16, 8) if rotation.partial else (16,):
            leaves, call = arguments(function, rotation, layout, dtype, rotary_dim)
            reset_launches()
            check_call(partial(call, ours), partial(call, function), leaves, str(layout), terms=2)
            assert launches() == ({"_rope_kernel": 2} if INTERPRET or DEVICE.type == "cuda" else {}), layout


@pytest.mark.parametrize("module", ["qwen2_vl", "deepseek_v2"])
def test_a_compiled_program_is_one_graph(module, monkeypatch):
    monkeypatch.setitem(INDUCTOR_UP_TO, "rope", -1)
    (name,) = (key[1] for key in FUNCTIONS if isinstance(key, tuple) and key[0] == module)
    function = of_upstream(module, name)
    ours = rotary_function(function, rotation := recognise_rotation(name, function))
    leaves, call = arguments(function, rotation, rotation.layouts[0], torch.float32, 16)

    def run(*tensors):
        *tensors, cos, sin = tensors
        return ours(*tensors, *((torch.complex(cos, sin),) if "freqs_cis" in names else (cos, sin)))

    names = inspect.signature(function).parameters
    ours.__globals__["upstream"] = None  # it is not called
    torch._dynamo.reset()
    check_call(torch.compile(run, fullgraph=True, backend="aot_eager"), partial(call, function), leaves, terms=2)


# Faults that a rotation may have, each on a function that is recognised without it.


def wrong_sign_of_the_keys(f, q, k, cos, sin, **options):
    return f(q, k, cos, sin, **options)[0], f(q, k, cos, -sin, **options)[1]


FAULTS = {
    "the first row's angles": lambda f, q, k, cos, sin, **o: f(q, k, cos[:1], sin[:1], **o),
    "the previous token's angles": lambda f, q, k, cos, sin, **o: f(q, k, cos.roll(1, -2), sin, **o),
    "cos and sin exchanged": lambda f, q, k, cos, sin, **o: f(q, k, sin, cos, **o),
    "keys turned the other way": wrong_sign_of_the_keys,
    "keys not turned": lambda f, q, k, cos, sin, **o: (f(q, k, cos, sin, **o)[0], k),
    "columns the wrong way round": lambda f, q, k, cos, sin, **o: f(q, k, cos.flip(-1), sin, **o),
    "scaled": lambda f, q, k, cos, sin, **o: tuple(1.01 * x for x in f(q, k, cos, sin, **o)),
    "no gradient of the keys": lambda f, q, k, cos, sin, **o: (
        f(q, k, cos, sin, **o)[0],
        f(q, k.detach(), cos, sin, **o)[1] + 0 * k,
    ),
    "float32 of bfloat16": lambda f, q, k, cos, sin, **o: tuple(x.float() for x in f(q, k, cos, sin, **o)),
    "a third result": lambda f, q, k, cos, sin, **o: (*f(q, k, cos, sin, **o), q),
    "NaN": lambda f, q, k, cos, sin, **o: tuple(x * float("nan") for x in f(q, k, cos, sin, **o)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("function", [half, with_sections], ids=lambda f: f.__name__)
def test_a_fault_is_seen(fault, function):
    def faulty(q, k, cos, sin, unsqueeze_dim=1):
        return FAULTS[fault](function, q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    def faulty_with_sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        return FAULTS[fault](function, q, k, cos, sin, mrope_section=mrope_section, unsqueeze_dim=unsqueeze_dim)

    verdict = recognise_rotation("f", faulty_with_sections if function is with_sections else faulty)
    if (fault, function) == ("the first row's angles", with_sections):
        assert "cannot be probed" in verdict  # what is called a row there is a kind of position
    else:
        assert verdict == (
            "it returns torch.float32 for tensors and angles in torch.bfloat16"
            if fault == "float32 of bfloat16"
            else "it is none of the rotations that we know"
        )


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k, cos, sin, num_prefix=0: half(q, k, cos, sin), "its signature has num_prefix"),
        (lambda q, k, cos, sin, **options: half(q, k, cos, sin), "its signature has options"),
        (lambda q, k, v, cos, sin: half(q, k, cos, sin), r"it takes (q, k, v, cos, sin), not one or two tensors and "),
        (lambda cos, sin, q: half(q, q, cos, sin), r"it takes (cos, sin, q), not one or two tensors and "),
        (lambda q, k, cos, sin: half(q, k, cos, sin).nothing, "it cannot be probed (AttributeError: "),
        (lambda q, k, cos, sin: list(half(q, k, cos, sin)), "it is none of the rotations that we know"),
        (lambda x, cos, sin: half(x, x, cos, sin)[:1], "it is none of the rotations that we know"),
    ],
)
def test_what_another_signature_or_result_has_is_refused_with_the_reason(function, reason):
    verdict = recognise_rotation("f", function)
    assert isinstance(verdict, str), verdict
    assert verdict.startswith(reason), verdict


def refused(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, -2 * sin, unsqueeze_dim)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(16, 16)

    def forward(self, x, cos, sin):
        x = self.q(x)[:, None]
        return half(x, x, cos, sin)[0] + refused(x, x, cos, sin)[0]


def test_of_two_rotary_functions_the_one_that_is_refused_is_listed():
    assert rotary_names(Attention) == {"half": half, "refused": refused}
    report = liger_kernels.patch(torch.nn.Sequential(Attention()))
    assert [item.formula for item in report.replaced] == ["half"]
    assert [item.reason for item in report.left] == ["refused: it is none of the rotations that we know"]


# Whole models of the real classes. tests/test_patching_zoo.py compares all of them; here the rotation must have run.

MODELS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "gptj": "GPTJForCausalLM",
}


@pytest.mark.parametrize("family", MODELS)
def test_every_attention_of_a_model_rotates_by_the_kernel(family):
    model = built(family, MODELS[family])
    report = liger_kernels.patch(model, ["rope"])
    train(model)
    attentions = [item.path for item in report.replaced if item.path.endswith("attn")]
    assert len(attentions) == model.config.get_text_config().num_hidden_layers
    assert not [item for item in report.left if "rotation" in item.reason or "it takes" in item.reason], report
    report.forwards = 1
    idle = {path for path, part in model.named_modules() if getattr(part, "use_rope", True) == 0}
    assert {item.path for item in never_ran(model, report)} & {*attentions} == idle


# Upstream's own rotary function answers every call that is not of the form that was probed.


def queries_or_both(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotated = q * cos + rotate_half(q) * sin
    return rotated if k is None else (rotated, k * cos + rotate_half(k) * sin)


CALLS = {
    "all by position": lambda f, q, k, cos, sin: f(q, k, cos, sin),
    "heads after the sequence": lambda f, q, k, cos, sin: f(
        q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2
    ),
    "the axis of the heads by position": lambda f, q, k, cos, sin: f(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2),
    "as many heads as tokens": lambda f, q, k, cos, sin: f(
        q.transpose(1, 2)[:, :4], q.transpose(1, 2)[:, :4], cos[:, :4], sin[:, :4], unsqueeze_dim=2
    ),
    "angles by name": lambda f, q, k, cos, sin: f(q, k, cos=cos, sin=sin),
    "all by name": lambda f, q, k, cos, sin: f(sin=sin, cos=cos, k=k, q=q, unsqueeze_dim=1),
    "queries alone": lambda f, q, k, cos, sin: f(q, cos=cos, sin=sin),
    "None for the keys": lambda f, q, k, cos, sin: f(q, None, cos, sin),
    "angles without a batch": lambda f, q, k, cos, sin: f(q, k, cos[0], sin[0], unsqueeze_dim=0),
    "by name and by position": lambda f, q, k, cos, sin: f(q, k, cos, sin=sin),
    "one angle for every token": lambda f, q, k, cos, sin: f(q, k, cos[:, :1], sin[:, :1]),
    "one row's angles": lambda f, q, k, cos, sin: f(q, k, cos[:1], sin[:1]),
    "fewer rows of keys": lambda f, q, k, cos, sin: f(q, k[:1], cos[:1], sin[:1]),
    "a head of odd size": lambda f, q, k, cos, sin: f(q[..., :7], k[..., :7], cos[..., :7], sin[..., :7]),
    "no heads": lambda f, q, k, cos, sin: f(q[:, 0], k[:, 0], cos, sin, unsqueeze_dim=0),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_a_rotary_function_gives_upstreams_result(call):
    rotation = recognise_rotation("queries_or_both", queries_or_both)
    assert rotation == expected("queries_or_both", {})
    ours = rotary_function(queries_or_both, rotation)
    torch.manual_seed(0)
    tensors = (torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), *torch.randn(2, 2, 5, 8))
    torch.testing.assert_close(CALLS[call](ours, *tensors), CALLS[call](queries_or_both, *tensors))


def at_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """With a table of every position there is, as old versions of transformers had it."""
    cos, sin = (x if position_ids is None else x[0][position_ids] for x in (cos, sin))
    return half(q, k, cos, sin, unsqueeze_dim)


@pytest.mark.parametrize("positions", [None, torch.tensor([[4, 3, 2, 1, 0]])], ids=["none", "some"])
def test_positions_that_a_function_is_given_are_used_by_upstream(positions):
    ours = rotary_function(at_positions, recognise_rotation("at_positions", at_positions))
    arguments = (*(torch.randn(1, heads, 5, 8) for heads in (4, 2)), *torch.randn(2, 1, 5, 8), positions)
    reset_launches()
    torch.testing.assert_close(ours(*arguments), at_positions(*arguments))
    assert bool(launches()) == (INTERPRET and positions is None)


def test_a_missing_argument_is_upstreams_error():
    ours = rotary_function(half, HALF)
    with pytest.raises(TypeError, match=r"half\(\) missing"):
        ours(torch.randn(2, 4, 5, 8))
