"""What the patching tests share: tiny models of the core families, and the comparison with the unpatched model."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels.patching.logits import gathered

VOCAB = 67
# Kernels run on the GPU, or in the interpreter; on a CPU beside a GPU only references do.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNFUSED = [kernel for kernel in liger_kernels.KERNELS if kernel != "linear_cross_entropy"]
# The core families, and what a patch replaces in a tiny model of each.
EVERYTHING = {
    "llama": {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "gemma": {"rms_norm": 5, "rope": 2, "geglu": 2, "linear_cross_entropy": 1},
    "gemma2": {"rms_norm": 9, "rope": 2, "geglu": 2, "linear_cross_entropy": 1},
    "gemma3": {"rms_norm": 13, "rope": 2, "geglu": 2, "linear_cross_entropy": 1},
}


CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),  # gate and up in one projection
}


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A causal LM of ``family`` in training mode, with norm weights that are neither 0 nor 1."""
    import transformers

    config, cls, options = CLASSES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(getattr(transformers, config)(**{**SIZES, **options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(2)  # logits that are not all alike
    if model.device.type != "meta":
        model.to(DEVICE)
    return model.train()


@functools.cache
def _built(family: str, name: str) -> Any:
    from matrix.checks import zoo
    from matrix.checks.classes import ModelClass

    try:
        return zoo.build(ModelClass(f"transformers.models.{family}.modeling_{family}", name), DEVICE)
    except (AttributeError, zoo.CannotShrink) as error:
        return f"transformers {transformers.__version__} has no such class in the zoo: {error}"


def built(family: str, name: str) -> Any:
    """A tiny model of the class ``name`` of transformers; skips the test where this version has none."""
    found = _built(family, name)
    if isinstance(found, str):
        pytest.skip(found)
    return copy.deepcopy(found)


def batch(seed: int = 0, rows: int = 2, length: int = 9, device: torch.device = DEVICE) -> dict[str, torch.Tensor]:
    """Token ids, and labels with ignored ones in the middle and at the end of a row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, 3] = labels[-1, -2:] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


@contextlib.contextmanager
def gathering() -> Iterator[None]:
    """Inside, forwards without labels return lazy logits. The trainers' tests have it on for their whole process."""
    before = gathered._Switch.on
    gathered.install()
    try:
        yield
    finally:
        gathered._Switch.on = before


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and every parameter's gradient, by name; the model's own gradients are cleared."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach().clone(), **found}


def train(model: Any, **extra: Any) -> dict[str, torch.Tensor]:
    """One training step on the usual batch: loss and gradients."""
    return gradients(model, model(**batch(), **extra).loss)


def with_loss(model: Any, own: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """``model`` with a forward, as an upstream model might have, whose loss and logits are ``own(logits, labels)``."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def forward(self: Any, input_ids: Any = None, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutputWithPast(*own(logits, labels))

    model.__class__ = type("Changed", (type(model),), {"forward": forward})
    return model


def variant(cls: type, **methods: Any) -> type:
    """A subclass of ``cls`` with some ``methods`` of its own."""
    return type("Variant", (cls,), methods)


def fallbacks(model: Any) -> dict[str, int]:
    return dict(liger_kernels.status(model).fallbacks)


def check_same(
    model: nn.Module,
    run: Callable[[Any], dict[str, torch.Tensor]],
    kernels: list[str] | None = None,
    patch: Callable[[Any], Any] | None = None,
) -> Any:
    """Run ``run`` on the model in float64, in float32, and in float32 patched; compare the three. Returns the patched.

    ``model`` itself stays as it is.
    """
    candidate = copy.deepcopy(model)
    (patch or (lambda m: liger_kernels.patch(m, kernels)))(candidate)
    truth = run(copy.deepcopy(model).double())
    own = run(copy.deepcopy(model))
    ours = run(candidate)
    compare(model, ours, own, truth)
    return candidate


def compare(
    model: nn.Module, ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> None:
    """The three-way rule for everything that a run of ``model`` gave, in float32."""
    assert ours.keys() == own.keys() == truth.keys()
    chain = sum(1 for module in model.modules() if not module._modules)  # each leaf rounds at least once
    for name, value in truth.items():
        three_way(ours[name], own[name], value, torch.float32, name, chain)


def upstream_symbols(*models: nn.Module) -> dict[str, int]:
    """The identity of everything that a patch could leave changed behind: modules, their classes, torch's functions."""
    found: dict[str, int] = {}
    modules = {type(part).__module__ for model in models for part in model.modules()}
    for name in modules | {"transformers.loss.loss_utils", "transformers.modeling_utils", F.__name__}:
        for symbol, value in vars(sys.modules[name]).items():
            found[f"{name}.{symbol}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{symbol}.{key}": id(member) for key, member in vars(value).items()})
            found[f"{name}.{symbol}.__code__"] = id(getattr(value, "__code__", None))
    return found


def unlisted(model: nn.Module, report: liger_kernels.PatchReport) -> list[tuple[str, str]]:
    """The norms and blocks of experts, by the names of their classes, that a report neither replaces nor leaves.

    What contains a listed one (a gated norm around a norm, a block around its experts) needs no entry of its own.
    """
    listed = {item.path for found in (report.left, report.replaced) for item in found}
    return [
        (path, type(module).__name__)
        for path, module in model.named_modules()
        if type(module).__name__.endswith(("Norm", "NormGated", "Norm1P", "Experts"))
        and not any(path == other or other.startswith(f"{path}.") for other in listed)
    ]
