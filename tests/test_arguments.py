"""Every parameter of every public function: what cannot be meant raises an error that names it.

The functions are found in ``__all__``, their parameters in their signatures. What a good error is stands in
:func:`complaint`, and which of the wrong values a parameter takes in :data:`MEANT`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import liger_kernels
import liger_kernels.compat
from liger_kernels import integrations, ops, patching
from liger_kernels.patching.recipes.recogniser import Recogniser
from tools import op_table

WRONG: dict[str, Any] = {
    "None": None,
    "a list": [1, None],
    "an empty list": [],
    "a string": "text",
    "a bool": True,
    "an int": 3,
    "a float": 2.5,
    "a dict": {"a": 1},
    "a tensor": torch.tensor(1.0),
    "an object": object(),
    "a class": dict,
}
NUMBER, SWITCH, INT, OPTIONAL = {"an int", "a float"}, {"a bool"}, {"an int"}, {"None"}
# Which of them are values that a parameter takes, whatever comes of them; by its name, where it is not in every
# function the same by "function.name".
MEANT: dict[str, set[str]] = {
    **dict.fromkeys(
        ("eps", "logit_scale", "teacher_logit_scale", "z_loss", "temperature", "alpha", "offset", "scale"), NUMBER
    ),
    **dict.fromkeys(("softcap", "teacher_softcap", "limit"), NUMBER | OPTIONAL),
    **dict.fromkeys(("ignore_index", "groups"), INT),
    **dict.fromkeys(("rotary_dim", "chunk_size", "counted"), INT | OPTIONAL),
    **dict.fromkeys(
        ("gate_first", "zero_centered", "inverse", "keep_dtype", "trailing", "interleaved", "invariant", "summed"),
        SWITCH,
    ),
    **dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "layer_norm"), SWITCH),
    **dict.fromkeys(("swiglu", "geglu", "is_packed"), SWITCH),
    **dict.fromkeys(
        ("bias", "teacher_bias", "gate_up_bias", "down_bias", "class_weight", "row_weight", "mask"), OPTIONAL
    ),
    **dict.fromkeys(
        ("cu_seqlens", "seq_idx", "position_ids", "seq_token_counts", "group", "k", "memory", "offload", "recompute"),
        OPTIONAL,
    ),
    "gated_mlp.recompute": SWITCH,
    **{f"linear_log_probs{end}.outputs": {"an empty list"} for end in ("", "_ref")},  # the calls have ids, too
    **{name: set() for name in ("label_smoothing", "beta")},
    "denominator": OPTIONAL | {"a tensor"},
    "dtype": OPTIONAL,
    "packing_weights.dtype": set(),
    "shift_labels": OPTIONAL,
    **{f"fit.{name}": INT | OPTIONAL for name in ("lora", "qlora", "tokens")},
    "fit.gpu": NUMBER | OPTIONAL,
    "fit.batch": INT,
    "fit.checkpointing": SWITCH,
    **{f"fit.{name}": OPTIONAL for name in ("full", "sizes")},
    "kernels": OPTIONAL | {"an empty list"},
    "Recogniser.kernels": {"an empty list"},
    "extras": {"an empty list"},
    **{name: {"an empty list"} for name in ("adapters", "gate_up_adapters", "down_adapters")},
    **{name: {"a class"} for name in ("base", "dense")},  # which can be called
    "dropped": OPTIONAL,
    "observer": {"a class"},  # which can be called
    **{name: {"a class"} for name in ("candidate", "recognise", "key")},
    "pretrained_model_name_or_path": {"a string"},
    **{f"{op}{end}.weight": OPTIONAL for op in ("rms_norm", "add_rms_norm", "layer_norm") for end in ("", "_ref")},
    **{f"linear_log_probs{end}.ids": OPTIONAL for end in ("", "_ref")},
    **{f"{op}{end}.gate": OPTIONAL for op in ("packed_glu", "experts") for end in ("", "_ref")},
    # None says that models are patched as they are built.
    **{f"{name}.model": OPTIONAL for name in integrations.__all__ if not name.endswith("instance")},
}
# What nobody calls: results, values, and functions without parameters, which are found not to have any.
RESULTS = {
    "CrossEntropyOutput",
    "DivergenceOutput",
    "LogProbsOutput",
    "PackedTargets",
    "PatchReport",
    "Left",
    "Replacement",
}
# Its methods are a Trainer's to call, and LossOptions are checked where they are given to an op.
RESULTS |= {"PackingLossMixin", "LossOptions"}


def valid() -> dict[str, dict[str, Any]]:
    """The arguments of a call of each function that no other makes unnecessary."""
    x, ids = torch.randn(4, 8), torch.tensor([[0, 1], [1, 2], [2, 0], [1, 1]])
    targets = torch.tensor([1, -100, 3, 0])
    head = {"hidden": x, "weight": torch.randn(5, 8), "targets": targets, "bias": torch.randn(5)}
    weights = {"class_weight": torch.ones(5), "row_weight": torch.ones(4)}
    experts = {"gate_up": torch.randn(3, 12, 8), "down": torch.randn(3, 8, 6)}
    biases = {"gate_up_bias": torch.randn(3, 12), "down_bias": torch.randn(3, 8)}
    of_up = {"a": torch.randn(3, 2, 8), "b": torch.randn(3, 12, 2)}
    of_down = ops.ExpertsAdapter(torch.randn(3, 2, 6), torch.randn(3, 8, 2))
    of_both = {"gate_up_adapters": [ops.ExpertsAdapter(**of_up)], "down_adapters": [of_down]}
    adapter = {"a": torch.randn(3, 8), "b": torch.randn(6, 3), "bias": torch.randn(6), "dropped": x}
    plain = ops.LoraAdapter(torch.randn(3, 8), torch.randn(6, 3))
    projection = ops.Projection(torch.randn(6, 8))
    by_op: dict[str, dict[str, Any]] = {}
    for op in op_table.OPS.values():  # the first row of an op has the most tensors
        leaves = op.leaves(4, torch.float32, torch.device("cpu"), columns=8)
        by_op.setdefault(op.op.func.__name__, {**op.named([leaf.detach() for leaf in leaves])})
    by_op = {name: given for name, given in by_op.items() if name in ops.__all__}
    by_op |= {
        "lora_linear": {"x": x, "base": nn.Linear(8, 6), "adapters": [ops.LoraAdapter(**adapter)]},
        "dora_linear": {
            **{"x": x, "base": nn.Linear(8, 6), "adapter": plain},
            **{"magnitude": torch.rand(6), "norm": torch.rand(6), "bias": torch.rand(6)},
        },
        "dora_norm": {"weight": torch.randn(6, 8), "adapter": plain},
        "adapted_linears": {"x": x, "projections": [projection]},
        "gated_mlp": {"x": x, "gate": projection, "up": projection, "down": ops.Projection(torch.randn(8, 6))},
        "experts": {"hidden": x, "ids": ids, "weights": torch.rand(4, 2), **experts, **biases, **of_both},
        "cross_entropy": {"logits": torch.randn(4, 5), "targets": targets, **weights},
        "linear_cross_entropy": {**head, **weights},
        "linear_divergence": {
            **{name: t for name, t in head.items() if name != "targets"},
            **{"teacher_hidden": x, "teacher_weight": torch.randn(5, 8), "teacher_bias": torch.randn(5)},
            **{"beta": 0.3, "mask": targets >= 0},
        },
        "linear_log_probs": {**head, "ids": ids[:, :1]},
    }
    model = nn.Linear(2, 2)
    recogniser = {"kernels": ("nothing",), "candidate": bool, "recognise": bool}
    return {
        **{f"{name}{end}": given for name, given in by_op.items() for end in ("", "_ref")},
        "packing_weights": {"labels": targets, "seq_idx": torch.tensor([0, 0, 1, 1])},
        "CountedTargets": {"targets": targets},
        "GluFormula": {},
        "LoraAdapter": adapter,
        "ExpertsAdapter": of_up,
        "Projection": {"weight": torch.randn(6, 8), "adapters": [ops.LoraAdapter(adapter["a"], adapter["b"])]},
        "observe_logits_grad": {"observer": print},
        "patch": {"model": model},
        "patched": {"model": model},
        "unpatch": {"model": model},
        "status": {"model": model},
        "check_options": {"kernels": None, "loss_reduction": "token", "memory": None},
        "register": {"recogniser": Recogniser(**recogniser)},
        "Recogniser": recogniser,
        "fit": {"model": small_config(), "full": "sgd", "tokens": 4},
        "packing_denominator": {
            "batches": [{"labels": targets[None], "position_ids": torch.arange(4)[None]}],
            "loss_reduction": "sample",
        },
        "from_pretrained": {"pretrained_model_name_or_path": "nowhere"},
        "from_config": {"config": small_config()},
        "apply_liger_kernel_to_instance": {"model": model},
        **{name: {"model": model} for name in integrations.__all__ if re.fullmatch(r"apply_\w+_to_(?!inst)\w+", name)},
    }


def small_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)


def functions() -> dict[str, Callable[..., Any]]:
    """Every public function with a parameter, by name."""
    found = {"Recogniser": Recogniser}
    for module in (liger_kernels, ops, patching, integrations, liger_kernels.compat):
        for name in module.__all__:
            value = getattr(module, name)
            if name == "AutoLigerKernelForCausalLM":
                found |= {"from_pretrained": value.from_pretrained, "from_config": value.from_config}
            elif callable(value) and name not in RESULTS and inspect.signature(value).parameters:
                found[name] = value
    return found


FUNCTIONS = functions()


def parameters(name: str) -> list[str]:
    every = inspect.signature(FUNCTIONS[name]).parameters.values()
    return [p.name for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def complaint(function: Callable[..., Any], arguments: dict[str, Any], names: tuple[str, ...]) -> str:
    """What is wrong with the error of a wrong call; empty for a good one: a TypeError or a ValueError that has one of
    ``names`` in it as a word, and no address of an object."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**arguments)
            with result if isinstance(result, contextlib.AbstractContextManager) else contextlib.nullcontext():
                pass
    except (TypeError, ValueError) as error:
        text = str(error)
        if "0x" in text or "unhashable" in text or "unexpected keyword" in text:
            return text
        return "" if any(re.search(rf"\b{name}\b", text) for name in names) else f"names none of {names}: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def assert_good(found: Iterator[tuple[str, str]]) -> None:
    """No complaints, by what was wrong."""
    bad = [f"{what}: {text.splitlines()[0][:150]}" for what, text in found if text]
    assert not bad, "\n".join(["", *bad])


def test_every_public_function_has_a_valid_call() -> None:
    assert set(valid()) == set(FUNCTIONS)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith(("from_", "apply_", "register"))])
def test_a_valid_call_is_one(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FUNCTIONS[name](**valid()[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_cannot_be_meant_is_named(name: str) -> None:
    """Each parameter in turn gets each wrong value."""

    def wrong() -> Iterator[tuple[str, str]]:
        given = valid()[name]
        for parameter in parameters(name):
            meant = MEANT.get(f"{name}.{parameter}", MEANT.get(parameter, set()))
            for label, value in WRONG.items():
                if label not in meant:
                    yield f"{parameter}={label}", complaint(FUNCTIONS[name], {**given, parameter: value}, (parameter,))

    assert_good(wrong())


OPS = [name for name, given in valid().items() if any(isinstance(value, torch.Tensor) for value in given.values())]


@pytest.mark.parametrize("name", OPS)
def test_a_dtype_that_makes_no_sense_is_named(name: str) -> None:
    """Each tensor in turn gets another kind of dtype."""

    def wrong() -> Iterator[tuple[str, str]]:
        given = valid()[name]
        for parameter, t in given.items():
            if not isinstance(t, torch.Tensor):
                continue
            other = torch.int64 if t.is_floating_point() else torch.float32
            for dtype in {other, torch.bool, torch.complex64} - {t.dtype}:
                arguments = {**given, parameter: torch.ones(t.shape).to(dtype)}
                yield f"{parameter} of {dtype}", complaint(FUNCTIONS[name], arguments, (parameter,))

    assert_good(wrong())


@pytest.mark.parametrize("name", [name for name in OPS if len(valid()[name]) > 1])
def test_another_device_is_named(name: str) -> None:
    """Each tensor in turn lies on another device than the others."""

    def wrong() -> Iterator[tuple[str, str]]:
        given = valid()[name]
        for parameter, t in given.items():
            if not isinstance(t, torch.Tensor):
                continue
            arguments = {**given, parameter: t.to("meta")}
            yield parameter, complaint(FUNCTIONS[name], arguments, tuple(given))

    assert_good(wrong())


# Of any number of dimensions, or with columns that only an op compares, or that nothing has to fit to.
ANY_SHAPE = {"CountedTargets", "ExpertsAdapter"}
ANY_SHAPE |= {f"{name}{end}" for name, op in op_table.FIRST.items() if op.dims == "nk" for end in ("", "_ref")}


@pytest.mark.parametrize("name", [name for name in OPS if name not in ANY_SHAPE])
def test_a_shape_that_does_not_fit_is_named(name: str) -> None:
    """Each tensor in turn has one column less. The error may name what it does not fit to."""

    def wrong() -> Iterator[tuple[str, str]]:
        given = valid()[name]
        tensors = tuple(given)
        for parameter, t in given.items():
            if not isinstance(t, torch.Tensor):
                continue
            arguments = {**given, parameter: t[..., :-1]}
            yield f"{parameter} of {list(t.shape)} cut", complaint(FUNCTIONS[name], arguments, (*tensors, "rotary_dim"))

    assert_good(wrong())


def test_what_a_patch_warns_of_points_at_the_caller() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        liger_kernels.patch(nn.Linear(2, 2))
    assert [warning.filename for warning in found] == [__file__]


NO_NUMBERS = {
    **dict.fromkeys(("eps", "z_loss"), (math.nan, math.inf, -math.inf, -1e-6)),
    **dict.fromkeys(("temperature", "softcap", "teacher_softcap"), (math.nan, math.inf, -math.inf, -1.0, 0.0)),
    **dict.fromkeys(
        ("logit_scale", "teacher_logit_scale", "alpha", "offset", "scale"), (math.nan, math.inf, -math.inf)
    ),
    **dict.fromkeys(("label_smoothing", "beta"), (math.nan, math.inf, -0.1, 1.1)),
    "limit": (math.nan, -math.inf, -1.0, 0.0),
    "groups": (-1, 0, 3),
    "rotary_dim": (-2, 0, 3, 100),
    "chunk_size": (-1, 0),
    "counted": (-1, 2, 5),  # of four rows, of which three count
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_that_makes_no_sense_is_named(name: str) -> None:
    def wrong() -> Iterator[tuple[str, str]]:
        given = valid()[name]
        for parameter in parameters(name):
            for value in NO_NUMBERS.get(parameter, ()):
                yield f"{parameter}={value}", complaint(FUNCTIONS[name], {**given, parameter: value}, (parameter,))

    assert_good(wrong())
