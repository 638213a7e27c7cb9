"""Modules whose tensors have several dtypes, as transformers loads some parts of a 16-bit model in float32.

Whatever dtypes the input and each parameter have, a patched module returns what the unpatched one does, in its dtype,
or raises what it raises.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense, T5LayerNorm

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels.patching.recipes.rotary_call import rotary_function
from liger_kernels.patching.recipes.rotation import recognise_rotation
from liger_kernels.patching.swap import RAN
from tests.patching_checks import DEVICE, VOCAB, batch, built, tiny

HIDDEN = 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class InFloat32(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps).to(x.dtype)


class InputAsWeight(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class GatedFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(HIDDEN) + 0.5), 1e-6

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        norm = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * norm * F.silu(gate.float())).to(x.dtype)


class GatedOfTheGate(GatedFloat):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x, gate).to(torch.promote_types(x.dtype, self.weight.dtype))


class CastsIn(LlamaMLP):
    """Its input becomes what its projections are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.gate_proj.weight.dtype))


class CastsBack(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        product = self.act_fn(self.gate_proj(x)).float() * self.up_proj(x).float()
        return self.down_proj(product.to(self.down_proj.weight.dtype)).to(x.dtype)


def config(cls: type, **more: Any) -> Any:
    return cls(hidden_size=HIDDEN, intermediate_size=40, num_attention_heads=2, num_key_value_heads=2, **more)


def t5_mlp() -> nn.Module:
    options = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    return T5DenseGatedActDense(transformers.T5Config(d_model=HIDDEN, d_ff=40, **options))


def experts(family: str, name: str) -> Callable[[], nn.Module]:
    return lambda: next(m for m in built(family, name).modules() if type(m).__name__.endswith("Experts"))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaRMSNorm(HIDDEN),
    "gemma": lambda: GemmaRMSNorm(HIDDEN),
    "olmo2": lambda: Olmo2RMSNorm(HIDDEN),
    "t5": lambda: T5LayerNorm(HIDDEN),
    "RMSNorm": lambda: nn.RMSNorm(HIDDEN, eps=1e-6),
    "RMSNorm without eps": lambda: nn.RMSNorm(HIDDEN),
    "LayerNorm": lambda: nn.LayerNorm(HIDDEN),
    "LayerNorm without bias": lambda: nn.LayerNorm(HIDDEN, bias=False),
    "cohere": lambda: CohereLayerNorm(HIDDEN),
    "nemotron": lambda: NemotronLayerNorm1P(HIDDEN),
    "in float32": lambda: InFloat32(HIDDEN),
    "input as weight": lambda: InputAsWeight(HIDDEN),
    "bamba": lambda: BambaRMSNormGated(HIDDEN, *[HIDDEN] * ("group_size" in signature(BambaRMSNormGated).parameters)),
    "gated in float32": GatedFloat,
    "gated, another dtype": GatedOfTheGate,
    "llama mlp": lambda: LlamaMLP(config(transformers.LlamaConfig)),
    "phi3 mlp": lambda: Phi3MLP(config(transformers.Phi3Config, pad_token_id=0)),
    "t5 mlp": t5_mlp,
    "mlp that casts its input": lambda: CastsIn(config(transformers.LlamaConfig)),
    "mlp that casts back": lambda: CastsBack(config(transformers.LlamaConfig)),
    "mlp with biases": lambda: LlamaMLP(config(transformers.LlamaConfig, mlp_bias=True)),
    "mixtral": experts("mixtral", "MixtralForCausalLM"),
    "gpt-oss": experts("gpt_oss", "GptOssForCausalLM"),
}


LEFT = ("gated, another dtype",)


def inputs_of(module: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if type(module).__name__.endswith("Experts"):
        hidden = module.gate_up_proj.shape[1 if module.is_transposed else 2]
        ids = torch.tensor([[0, 1], [1, 3], [2, 0]])
        weights = torch.rand(3, 2, generator=generator)
        return [torch.randn(3, hidden, generator=generator).to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)]
    x = torch.randn(2, 5, HIDDEN, generator=generator)
    x[0, 0] *= 1e-3  # where eps decides
    return [x.to(DEVICE)] * (2 if "Gated" in type(module).__name__ and "T5" not in type(module).__name__ else 1)


Combination = tuple[torch.dtype, ...]


def combinations(module: nn.Module, inputs: list[Tensor]) -> Iterator[Combination]:
    """A dtype for each input and parameter. Where there are many, at most two dtypes at a time."""
    count = sum(t.is_floating_point() for t in inputs) + len(list(module.parameters()))
    for chosen in itertools.product(DTYPES, repeat=count):
        kinds = {*chosen}
        if count <= 3 or len(kinds) == 1 or (len(kinds) == 2 and (count < 6 or torch.float32 in kinds)):
            yield chosen


def cast(module: nn.Module, inputs: list[Tensor], chosen: Combination) -> list[Tensor]:
    """The inputs in their dtypes; the parameters get theirs in place."""
    kinds = iter(chosen)
    found = [t.to(next(kinds)).requires_grad_() if t.is_floating_point() else t for t in inputs]
    for parameter in module.parameters():
        parameter.data = parameter.data.to(next(kinds))
        parameter.grad = None
    return found


def run(module: Any, inputs: list[Tensor]) -> dict[str, Tensor] | type:
    """The output and every gradient, or what kind of error a call raises."""
    try:
        y = module(*inputs)
        y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view_as(y))
    except Exception as error:
        return type(error)
    found = {"output": y.detach(), **{n: p.grad for n, p in module.named_parameters() if p.grad is not None}}
    return {**found, **{f"input {n}": t.grad for n, t in enumerate(inputs) if t.grad is not None}}


def compare(ours: Any, own: Any, truth: dict[str, Tensor], chosen: Combination) -> None:
    assert type(ours) is type(own), (chosen, ours, own)
    if isinstance(own, type):
        assert ours is own, (chosen, ours, own)
        return
    assert ours.keys() == own.keys()
    coarsest = max(chosen, key=lambda dtype: torch.finfo(dtype).eps)
    for name, value in own.items():
        assert ours[name].dtype == value.dtype, (chosen, name)
        if bool(torch.isfinite(value).all()):
            three_way(ours[name], value, truth[name], coarsest, f"{chosen}: {name}", chain=4)


def three(make: Callable[[], nn.Module], around: Callable[[], Any] = contextlib.nullcontext) -> tuple[int, int]:
    """Compare in every combination of dtypes; in how many unpatched and kernel ran."""
    torch.manual_seed(0)
    plain = make().to(DEVICE)
    plain.requires_grad_()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    patched = copy.deepcopy(plain)
    liger_kernels.patch(patched)
    masters = [p.data.clone() for p in plain.parameters()]
    ran = worked = 0
    inputs = inputs_of(plain)
    for chosen in combinations(plain, inputs):
        for module in (plain, patched):
            for parameter, master in zip(module.parameters(), masters, strict=True):
                parameter.data = master
        patched.__dict__.pop(RAN, None)
        with around():
            own, ours = (run(m, cast(m, inputs, chosen)) for m in (plain, patched))
        truth: Any = None
        if not isinstance(own, type):
            exact = copy.deepcopy(plain)
            given = cast(exact, [t.detach() for t in cast(exact, inputs, chosen)], (torch.float64,) * len(chosen))
            truth = run(exact, given)
        compare(ours, own, truth, chosen)
        worked += not isinstance(own, type)
        ran += RAN in patched.__dict__ and not isinstance(own, type)
    return worked, ran


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_every_combination_of_dtypes_is_as_unpatched(name):
    worked, ran = three(MODULES[name])
    assert worked >= len(DTYPES)
    assert ran >= (0 if name in LEFT else 3)  # at least where all tensors have one of the dtypes of kernels


AUTOCAST = (
    "llama",
    "gemma",
    "t5",
    "RMSNorm",
    "LayerNorm",
    "in float32",
    "bamba",
    "llama mlp",
    "t5 mlp",
    "mlp that casts back",
)


@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_every_combination_of_dtypes_is_as_unpatched_under_autocast(name):
    three(MODULES[name], lambda: torch.autocast(DEVICE.type, dtype=torch.bfloat16))


def casts_to_the_tensors(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    q, k = apply_rotary_pos_emb(q.float(), k.float(), cos, sin, unsqueeze_dim)
    return q.to(dtype), k.to(dtype)


def casts_the_table(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, cos.to(q.dtype), sin.to(q.dtype), unsqueeze_dim)


def table_decides(q, k, cos, sin, unsqueeze_dim=1):
    q, k = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return q.to(cos.dtype), k.to(cos.dtype)


ROTATIONS = (apply_rotary_pos_emb, casts_to_the_tensors, casts_the_table, table_decides)


@pytest.mark.parametrize("function", ROTATIONS, ids=lambda f: f.__name__)
def test_a_rotary_function_in_every_combination_of_dtypes(function):
    rotation = recognise_rotation("f", function)
    ours = function if isinstance(rotation, str) else rotary_function(function, rotation)
    torch.manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    master = [torch.randn(shape, device=DEVICE) for shape in shapes]

    def call(f: Any, tensors: list[Tensor]) -> dict[str, Tensor] | type:
        q, k = (t.requires_grad_() for t in tensors[:2])
        try:
            results = f(q, k, *tensors[2:])
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        except Exception as error:
            return type(error)
        return {"q": results[0].detach(), "k": results[1].detach(), "q's": q.grad, "k's": k.grad}

    for chosen in itertools.product(DTYPES, repeat=4):
        cast_to = lambda: [t.to(d, copy=True) for t, d in zip(master, chosen, strict=True)]  # noqa: E731, B023
        own, found = call(function, cast_to()), call(ours, cast_to())
        truth: Any = call(function, [t.double() for t in cast_to()])
        compare(found, own, truth, chosen)


# Whole models, in dtypes as transformers loads them, or as users cast them.


def norms_in_float32(model: nn.Module) -> None:
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.float()


class CastingHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def casting_head(model: Any) -> None:
    head = CastingHead(32, VOCAB, bias=False, device=DEVICE)
    head.weight = nn.Parameter(model.lm_head.weight.detach().float())
    model.lm_head = head


def model_that_casts(model: Any) -> None:
    """As some models of transformers do: ``self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()``."""
    model.lm_head.float()
    cls = type(model)

    def forward(self: Any, input_ids: Any = None, labels: Any = None) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def biased_head(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.ones(VOCAB, device=DEVICE))


OF_MODELS: dict[str, Callable[[Any], Any]] = {
    "norms in float32": norms_in_float32,
    "head in float32": lambda model: model.lm_head.float(),
    "head that casts": casting_head,
    "model that casts for its head": model_that_casts,
    "head's bias in float32": biased_head,
    "body in float32": lambda model: model.model.float(),
    "down in float32": lambda model: model.model.layers[0].mlp.down_proj.float(),
    "gate in float16": lambda model: model.model.layers[0].mlp.gate_proj.half(),
    "embeddings in float32": lambda model: model.model.embed_tokens.float(),
}  # fmt: skip


def step(model: Any) -> dict[str, Tensor] | type:
    try:
        out = model(**batch())
        out.loss.backward()
    except Exception as error:
        return type(error)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **found}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("case", list(OF_MODELS))
def test_a_model_of_several_dtypes_trains_as_unpatched(case, autocast):
    plain = tiny("llama").bfloat16()
    OF_MODELS[case](plain)
    exact = copy.deepcopy(plain).double()
    patched = copy.deepcopy(plain)
    liger_kernels.patch(patched)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=autocast):
        own, ours = step(plain), step(patched)
    truth: Any = None if isinstance(own, type) else step(exact)
    compare_models(ours, own, truth)


def compare_models(ours: Any, own: Any, truth: Any) -> None:
    assert type(ours) is type(own), (ours, own)
    if isinstance(own, type):
        assert ours is own
        return
    assert ours.keys() == own.keys()
    for name, value in own.items():
        assert ours[name].dtype == value.dtype, name
        three_way(ours[name], value, truth[name], torch.bfloat16, name, chain=64)


def test_a_model_that_transformers_loads_in_two_dtypes_trains_as_unpatched(tmp_path):
    """T5 keeps the projection down in float32, and casts what comes to it."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    options = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **options)).save_pretrained(tmp_path)
    load = transformers.T5ForConditionalGeneration.from_pretrained
    plain = load(tmp_path, dtype=torch.float16).to(DEVICE).train()
    assert {p.dtype for p in plain.parameters()} == {torch.float16, torch.float32}
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    assert "geglu" in liger_kernels.patch(patched).counts()
    compare_models(step(patched), step(plain), step(exact))
    assert not [left for left in liger_kernels.status(patched).left if left.since]


def test_a_model_that_is_cast_after_its_patch_runs_its_kernels():
    model = tiny("llama")
    report = liger_kernels.patch(model)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        for module in model.modules():
            module.__dict__.pop(RAN, None)
        assert not isinstance(step(model), type)
        assert not liger_kernels.status(model).never_ran
        assert not report.left
