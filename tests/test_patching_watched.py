"""What is changed on a patched module counts as it does on an unpatched one, and ``status`` says where it runs itself.

Every field of every recipe has its cases, and a search changes whatever real modules hold.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

import liger_kernels
from liger_kernels.patching.swap import RAN, Recipe, recipe_of
from matrix.checks import zoo
from tests.patching_checks import DEVICE, batch, built, tiny, train
from tests.watched_checks import (
    HIDDEN,
    CastsToItsWeight,
    Centred,
    Experts,
    Gated,
    GateOnly,
    Joint,
    Mlp,
    Norm,
    Swish,
    WithBuffer,
    differ,
    inputs_of,
    item,
    linear,
    of_class,
    other_forward,
    other_sizes,
    parameter,
    partial_gelu,
    run,
    same,
    setting,
    shift_in_place,
    twice,
)

# (recipe, field): (module, what changes, whether the kernel stops and ``status`` says so). The others are read at each
# call.
CASES: list[tuple[str, str, Callable[[], nn.Module], Callable[[Any], None], bool]] = [
    ("NormRecipe", "eps", Norm, setting("eps", 0.3), True),
    ("NormRecipe", "formula", Norm, of_class("_norm", lambda self, x: x * self.eps), True),
    ("NormRecipe", "formula", Norm, of_class("forward", other_forward), True),
    ("NormRecipe", "formula", Norm, setting("_norm", twice), True),
    ("NormRecipe", "formula", Norm, setting("gain", 3.0), True),
    ("NormRecipe", "formula", Norm, setting("config.use_cache", False), True),
    ("NormRecipe", "formula", Norm, item("options", "power", [4]), True),
    ("NormRecipe", "formula", Norm, lambda m: m.options["power"].__setitem__(0, 4), True),
    ("NormRecipe", "formula", WithBuffer, shift_in_place, True),
    ("NormRecipe", "formula", WithBuffer, setting("shift", functools.partial(torch.ones, HIDDEN, device=DEVICE)), True),
    ("NormRecipe", "weight", Norm, setting("weight", functools.partial(parameter, HIDDEN)), False),
    ("NormRecipe", "weight", Norm, setting("weight", functools.partial(parameter, 7, 1)), False),
    ("NormRecipe", "weight", Norm, setting("weight", None), True),
    ("NormRecipe", "weight", Norm, lambda m: delattr(m, "weight"), False),
    ("NormRecipe", "mixed", CastsToItsWeight, lambda m: m.bfloat16(), False),
    ("LayerNormRecipe", "eps", lambda: nn.LayerNorm(HIDDEN), setting("eps", 0.3), True),
    ("LayerNormRecipe", "weight", lambda: nn.LayerNorm(HIDDEN), setting("weight", None), True),
    ("LayerNormRecipe", "weight", lambda: nn.LayerNorm(HIDDEN), setting("normalized_shape", (7, HIDDEN)), True),
    ("LayerNormRecipe", "weight", Centred, setting("weight", functools.partial(parameter, HIDDEN)), False),
    ("LayerNormRecipe", "bias", lambda: nn.LayerNorm(HIDDEN, bias=False), setting("bias", parameter(HIDDEN)), True),
    ("LayerNormRecipe", "bias", lambda: nn.LayerNorm(HIDDEN), setting("bias", None), True),
    ("LayerNormRecipe", "zero_centered", Centred, setting("offset", 0), True),
    ("LayerNormRecipe", "bare", lambda: nn.LayerNorm(HIDDEN), of_class("forward", other_forward), True),
    ("LayerNormRecipe", "mixed", lambda: nn.LayerNorm(HIDDEN), lambda m: m.double(), False),
    ("GatedNormRecipe", "eps", Gated, setting("eps", 0.3), True),
    ("GatedNormRecipe", "formula", Gated, of_class("forward", other_forward), True),
    ("GatedNormRecipe", "weight", Gated, setting("weight", functools.partial(parameter, HIDDEN)), False),
    ("GatedNormRecipe", "activation", Gated, setting("act", torch.tanh), True),
    ("GatedNormRecipe", "activation", Gated, setting("act", functools.partial(lambda: nn.Tanh())), True),
    ("GatedNormRecipe", "gate_first", Gated, setting("first", True), True),
    ("GatedNormRecipe", "groups", Gated, setting("groups", 3), True),
    ("GatedNormRecipe", "mixed", Gated, lambda m: m.double(), False),
    ("GluRecipe", "activation", Mlp, setting("act", functools.partial(nn.Tanh)), True),
    ("GluRecipe", "activation", Mlp, setting("act", functools.partial(nn.GELU)), True),
    ("GluRecipe", "activation", Mlp, setting("act.beta", 2.0), True),
    ("GluRecipe", "activation", Mlp, item("act.steps", 0, 2.0), True),
    ("GluRecipe", "activation", Mlp, setting("act.forward", twice), True),
    ("GluRecipe", "activation", Mlp, lambda m: of_class("beta", 2.0)(m.act), True),
    ("GluRecipe", "activation", Mlp, lambda m: of_class("forward", other_forward)(m.act), True),
    ("GluRecipe", "activation", lambda: Mlp(F.silu), setting("act", F.gelu), True),
    ("GluRecipe", "activation", partial_gelu, item("act.keywords", "approximate", "tanh"), True),
    ("GluRecipe", "activation", lambda: Mlp(nn.GELU("tanh")), setting("act.approximate", "none"), True),
    ("GluRecipe", "activation", Mlp, setting("dropout.p", 1.0), True),
    ("GluRecipe", "activation", Mlp, setting("dropout", functools.partial(nn.Tanh)), True),
    ("GluRecipe", "gate", Mlp, setting("gate", functools.partial(linear, HIDDEN, 40)), False),
    ("GluRecipe", "gate", lambda: Mlp(bias=False), setting("gate.bias", functools.partial(parameter, 40)), False),
    ("GluRecipe", "up", Mlp, setting("up", functools.partial(linear, HIDDEN, 1)), False),
    ("GluRecipe", "down", Mlp, other_sizes, False),
    ("GluRecipe", "down", Mlp, setting("down", functools.partial(nn.Identity)), False),
    ("GluRecipe", "down", lambda: Mlp(bias=False), setting("down.bias", functools.partial(parameter, HIDDEN)), False),
    ("GluRecipe", "autocast", Mlp, lambda m: m.double(), False),
    ("GluRecipe", "gate_first", Joint, setting("swapped", True), True),
    ("ExpertsRecipe", "gate", Experts, setting("act", functools.partial(nn.GELU)), True),
    ("ExpertsRecipe", "gate", Experts, setting("limit", 0.1), True),
    ("ExpertsRecipe", "gate", Experts, setting("alpha", 2.0), True),
    ("ExpertsRecipe", "gate", GateOnly, setting("limit", 0.1), True),
    ("ExpertsRecipe", "gate", GateOnly, of_class("_apply_gate", lambda self, x: 2 * x.chunk(2, dim=-1)[0]), True),
    ("ExpertsRecipe", "whole", Experts, setting("num_experts", 2), True),
    ("ExpertsRecipe", "whole", Experts, setting("bias", functools.partial(parameter, HIDDEN)), True),
    ("ExpertsRecipe", "whole", Experts, setting("down", functools.partial(parameter, 4, HIDDEN, 20)), False),
    ("ExpertsRecipe", "mixed", Experts, lambda m: m.double(), False),
]  # fmt: skip


@pytest.fixture(autouse=True)
def classes_stay(monkeypatch):
    """What a case does to a class is undone."""
    for cls in (Norm, WithBuffer, Gated, Swish, Experts, GateOnly, nn.LayerNorm):
        for name in ("forward", "_norm", "beta", "_apply_gate"):
            if name in vars(cls):
                monkeypatch.setattr(cls, name, vars(cls)[name])


@pytest.mark.parametrize(
    ("recipe", "field", "make", "change", "named"),
    CASES,
    ids=[f"{n}-{case[0]}.{case[1]}" for n, case in enumerate(CASES)],
)
def test_a_change_counts_as_unpatched(recipe, field, make, change, named):
    torch.manual_seed(0)
    plain = make().to(DEVICE)
    patched = copy.deepcopy(plain)
    liger_kernels.patch(patched)
    assert type(recipe_of(patched)).__name__ == recipe
    before = run(patched)
    same(before, run(plain))
    assert RAN in patched.__dict__
    for module in (plain, patched):
        change(module)
    expected, found = run(plain), run(patched)
    assert differ(expected, before), "the change changes nothing"
    same(found, expected, **({"rtol": 0, "atol": 0} if named else {}))
    since = [left.reason for left in liger_kernels.status(patched).left if left.since]
    assert bool(since) is named, since
    liger_kernels.patch(patched)  # looks at it anew
    assert not [left for left in liger_kernels.status(patched).left if left.since]
    same(run(patched), expected)


def test_every_field_of_every_recipe_has_a_case():
    """Those of heads and models are below: they are read by upstream's own forward. The layout of adapters on experts
    is PEFT's, and no setting of the module."""
    fields = {
        (cls.__name__, field.name)
        for cls in Recipe.__subclasses__()
        if cls.live != None  # noqa: E711  (a property of a class)
        and cls.__module__.startswith("liger_kernels.")
        for field in dataclasses.fields(cls)
    }
    assert fields == {(recipe, field) for recipe, field, *_ in CASES} | {("LoraExpertsRecipe", "b_first")}


# Of a whole model: rotary functions, the head, and what upstream's own forward reads.


def no_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return 2 * q, k


def without_rope(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return self.v_proj(hidden_states).repeat(1, 1, 2), None


def bigger_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.cat([model.lm_head.weight.detach(), torch.ones(3, 32, device=DEVICE)]))
    model.config.vocab_size = model.vocab_size = 70


def head_of_another_kind(model: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    head = Doubled(32, model.config.vocab_size, bias=False, device=DEVICE)
    head.weight = model.lm_head.weight
    model.lm_head = head


def own_loss(self: Any, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return logits.float().logsumexp(-1).mean()


OF_MODELS: dict[str, tuple[str, str, str | None, Callable[[Any, Any], None], str | None]] = {
    "rotary function": ("llama", "llama", "apply_rotary_pos_emb", lambda m: no_rotation, "the apply_rotary_pos_emb of"),
    "helper of the rotary function": ("llama", "llama", "rotate_half", lambda m: twice, "the rotate_half of"),
    "forward of the attention": (
        "llama", "llama", "LlamaAttention.forward", lambda m: without_rope, "forward of its class"),
    "forward of the norm": ("llama", "llama", "LlamaRMSNorm.forward", lambda m: other_forward, "forward of its class"),
    "forward of the MLP": ("llama", "llama", "LlamaMLP.forward", lambda m: other_forward, "forward of its class"),
    "soft cap": ("gemma2", "gemma2", None, lambda m: setattr(m.config, "final_logit_softcapping", 2.0), None),
    "size of the head": ("llama", "llama", None, bigger_head, None),
    "bias of the head": ("llama", "llama", None, lambda m: m.lm_head.register_parameter("bias", parameter(67)), None),
    "kind of the head": ("llama", "llama", None, head_of_another_kind, "its LM head was replaced"),
    "loss function": ("llama", "llama", None, lambda m: setattr(m, "loss_function", own_loss.__get__(m)), None),
}  # fmt: skip


@pytest.mark.parametrize("case", list(OF_MODELS))
def test_a_change_of_a_model_counts_as_unpatched(case, monkeypatch):
    family, file, name, change, reason = OF_MODELS[case]
    plain, patched = tiny(family), tiny(family)
    liger_kernels.patch(patched)
    before = train(patched)
    if name is None:
        for model in (plain, patched):
            change(model)
    else:
        monkeypatch.setattr(f"transformers.models.{file}.modeling_{file}.{name}", change(plain))
    expected = train(plain)
    assert differ(expected, before), "the change changes nothing"
    torch.testing.assert_close(train(patched), expected)
    since = [left.reason for left in liger_kernels.status(patched).left if left.since]
    assert any(reason in found for found in since) if reason else not since, since
    liger_kernels.patch(patched)
    torch.testing.assert_close(train(patched), expected)


def test_another_way_to_multiply_experts_is_said():
    plain = built("mixtral", "MixtralForCausalLM")
    patched = copy.deepcopy(plain)
    liger_kernels.patch(patched)
    inputs = {name: t.to(DEVICE) for name, t in zoo.tiny_batch(plain).items()}
    for name, left in (("batched_mm", True), ("grouped_mm", False), ("eager", False)):
        for model in (plain, patched):
            model.set_experts_implementation(name)
        torch.testing.assert_close(patched(**inputs).loss, plain(**inputs).loss)
        reasons = [item.reason for item in liger_kernels.status(patched).left]
        assert any("experts_implementation='batched_mm'" in reason for reason in reasons) is left
        if not left:  # whichever way it is, the whole sum is recognised
            again = copy.deepcopy(plain)
            assert any("sum of weight" in item.formula for item in liger_kernels.patch(again).replaced)


# Real modules, and whatever they hold.

FAMILIES = (
    ("llama", "LlamaForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"),
    ("qwen3_next", "Qwen3NextForCausalLM"),
    ("bamba", "BambaForCausalLM"),
    ("cohere", "CohereForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("nemotron", "NemotronForCausalLM"),
    ("glm4_moe", "Glm4MoeForCausalLM"),
    ("starcoder2", "Starcoder2ForCausalLM"),
    ("falcon_h1", "FalconH1ForCausalLM"),
    ("olmo2", "Olmo2ForCausalLM"),
    ("exaone4", "Exaone4ForCausalLM"),
    ("gemma3n", "Gemma3nForCausalLM"),
    ("seed_oss", "SeedOssForCausalLM"),
)
SEEN: set[type] = set()


def other_value(value: Any) -> Any:
    if type(value) is bool:
        return not value
    if type(value) in (int, float):
        return value + 1
    return "gelu" if type(value) is str else None


def changes_of(module: Any) -> list[tuple[str, Callable[[Any], None]]]:
    """Every number, flag and name that ``module``, what is inside, and its configuration hold, and every activation."""
    found: list[tuple[str, Callable[[Any], None]]] = []
    linears = {name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    for path, part in [*module.named_modules(), ("config", getattr(module, "config", None))]:
        if part is None or path in linears:
            continue
        for name, value in vars(part).items():
            where = f"{path}.{name}" if path else name
            if name.startswith("_") or name == "training" or name in vars(nn.Module()):
                continue
            if other_value(value) is not None:
                found.append((where, setting(where, other_value(value))))
            elif callable(value):
                found.append((where, setting(where, torch.tanh)))
        if part is not module and path != "config" and not part._parameters and not part._modules:
            found.append((path, setting(path, nn.Tanh())))
    return found


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_whatever_a_real_module_holds_counts_when_it_changes(family, name):
    model = built(family, name)
    given: dict[str, tuple[Any, ...]] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: given.update({path: (*args, *kwargs.values())})

    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    handles = [m.register_forward_pre_hook(keep(p), with_kwargs=True) for p, m in model.named_modules()]
    with torch.no_grad():
        model(**{n: t.to(DEVICE) for n, t in zoo.tiny_batch(model).items()})
    for handle in handles:
        handle.remove()
    tried = 0
    for path, module in patched.named_modules():
        recipe, plain = recipe_of(module), model.get_submodule(path)
        if recipe is None or recipe.live is None or path not in given or type(plain) in SEEN:
            continue
        SEEN.add(type(plain))
        given_here = tuple(t.detach() for t in given[path])
        unchanged = run(plain, *given_here)
        for where, change in changes_of(plain):
            one, other = copy.deepcopy(plain), copy.deepcopy(module)
            try:
                change(one)
            except Exception:  # a configuration checks its values
                continue
            change(other)
            expected = run(one, *given_here)
            try:
                same(run(other, *given_here), expected)
            except AssertionError as error:
                raise AssertionError(f"{path}: {where}\n{error}") from None
            tried += 1
            if differ(expected, unchanged):
                assert liger_kernels.status(other).left, f"{path}: {where} counts, and status does not say so"
    assert tried or family != "llama"


# What does not count, and what the watch costs.


def as_infrastructure_does(model: nn.Module) -> None:
    for n, module in enumerate(model.modules()):
        module._is_hf_initialized = True
        module._hf_hook = module.ds_id = module._fsdp_wrapped = object()
        for name, value in (("gradient_checkpointing", True), ("layer_idx", n)):
            if not hasattr(module, name):
                setattr(module, name, value)
        if recipe_of(module) is not None:
            module.register_forward_pre_hook(lambda module, args: None)


def other_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                module._parameters[name] = nn.Parameter(value.detach().clone())


UNCHANGED: dict[str, Callable[[Any], Any]] = {
    "infrastructure": as_infrastructure_does,
    "other parameters": other_parameters,
    "there and back": lambda model: model.to("meta").to_empty(device=DEVICE) and None,
    "bfloat16": lambda model: model.bfloat16() and None,
    "a copy": copy.deepcopy,
    "a pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "equal settings": lambda model: [setattr(m, "variance_epsilon", float("1e-6")) for m in model.modules()] and None,
    "an equal activation": lambda model: setting("act_fn", SiLUActivation())(model.model.layers[0].mlp),
}  # fmt: skip


@pytest.mark.parametrize("what", list(UNCHANGED))
def test_what_changes_nothing_does_not_count(what):
    model = tiny("llama")
    liger_kernels.patch(model)
    model = UNCHANGED[what](model) or model
    for module in model.modules():
        module.__dict__.pop(RAN, None)
    report = liger_kernels.status(model)
    report.forwards = 0
    model(**batch()).loss.backward()
    assert not liger_kernels.status(model).left
    assert not liger_kernels.status(model).never_ran


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_has_a_watch_of_its_own(through):
    model = tiny("llama")
    liger_kernels.patch(model)
    other = through(model)
    other.model.norm.variance_epsilon = 0.3
    other.model.layers[1].mlp.act_fn = nn.Tanh()
    plain = copy.deepcopy(other)
    liger_kernels.unpatch(plain)
    torch.testing.assert_close(train(other), train(plain))
    assert [left.path for left in liger_kernels.status(other).left] == ["model.layers.1.mlp", "model.norm"]
    assert not liger_kernels.status(model).left


def test_what_is_changed_back_runs_its_kernel_again():
    model = tiny("llama")
    liger_kernels.patch(model)
    norm = model.model.norm
    for eps, left in ((0.3, ["model.norm"]), (1e-6, [])):
        norm.variance_epsilon = eps
        norm.__dict__.pop(RAN, None)
        model(**batch())
        assert [item.path for item in liger_kernels.status(model).left] == left
        assert (RAN in norm.__dict__) is not bool(left)


def test_dropout_in_an_mlp_counts_in_either_mode():
    """Refused where it drops; where it does not, both modes are the same."""
    assert liger_kernels.patch(Mlp(dropout=0.5)).left
    torch.manual_seed(0)
    plain = Mlp()
    patched = copy.deepcopy(plain)
    liger_kernels.patch(patched)
    for p in (0.0, 0.5, 0.0):
        for training in (True, False):
            for module in (plain, patched):
                module.dropout.p = p
                module.train(training)
            same(run(patched), run(plain))


class InTraining(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x


class Learns(nn.Module):
    """SiLU as long as it has not learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class LearnsItsGate(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("make", [InTraining, lambda: Mlp(Learns()), LearnsItsGate], ids=["mode", "activation", "gate"])
@pytest.mark.filterwarnings("ignore:.*replaced nothing")
def test_what_will_change_by_itself_is_not_replaced(make):
    module = make()
    assert liger_kernels.patch(module).left
    assert recipe_of(module) is None


def test_a_watch_keeps_no_module_alive():
    model = tiny("llama")
    liger_kernels.patch(model)
    train(model)
    dead = [weakref.ref(module) for module in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not [ref() for ref in dead if ref() is not None]
    finally:
        gc.enable()


def test_a_compiled_program_sees_a_change(monkeypatch):
    """A kernel that runs in a program: everything it was compiled for is a guard."""
    from liger_kernels.ops.runtime.compiling import INDUCTOR_UP_TO

    monkeypatch.setitem(INDUCTOR_UP_TO, "swiglu", -1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Mlp().to(DEVICE)
    patched = copy.deepcopy(plain)
    liger_kernels.patch(patched)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    x = inputs_of(plain)[0]
    torch.testing.assert_close(compiled(x), plain(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x)
    for change in (
        item("act.steps", 0, 3.0),
        setting("act.beta", 2.0),
        setting("act", nn.GELU("tanh")),
        setting("act", nn.GELU("none")),
    ):
        change(plain), change(patched)
        torch.testing.assert_close(compiled(x), plain(x))
