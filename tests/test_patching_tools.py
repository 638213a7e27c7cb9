"""Tools that look into a model find in a patched one what they find in an unpatched one."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune
from transformers.models.llama import modeling_llama as llama

import liger_kernels
from liger_kernels.ops import launches, reset_launches
from tests.patching_checks import DEVICE, EVERYTHING, batch, gradients, tiny, train

PARTS = {
    "norm": lambda model: model.model.norm,
    "mlp": lambda model: model.model.layers[0].mlp,
    "head": lambda model: model.lm_head,
}


@pytest.fixture(scope="module")
def models():
    """The same model, unpatched and patched, whose attention has a forward derivative, too."""
    own = tiny("llama", num_hidden_layers=1, attn_implementation="eager").eval()
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    return own, patched


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        yield


def rows(tokens: int = 3) -> torch.Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def check_same(models: Any, run: Any, close: bool = False) -> None:
    """``run`` of both; of the patched it launches no kernel."""
    expected, found = (detached(run(model)) for model in (models[0], watched(models[1])))
    torch.testing.assert_close(found, expected, **({} if close else {"rtol": 0, "atol": 0}))
    assert launches() == {}


def watched(model: nn.Module) -> nn.Module:
    reset_launches()
    return model


def detached(found: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, found)


# Programs.


class Call(nn.Module):
    """The loss and the logits of a model as a tuple, which is all that torch.jit takes."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: Any = None) -> Any:
        out = self.model(input_ids=ids, labels=labels, use_cache=False)
        return out.logits if labels is None else (out.loss, out.logits)


def traced(model: nn.Module, *inputs: torch.Tensor) -> Any:
    return torch.jit.trace(Call(model), inputs, strict=False, check_trace=False)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torch_jit_trace(models, labels, training, tmp_path):
    """A program that others run, and from which gradients come."""
    given = batch() if labels else {"ids": batch()["input_ids"]}

    def run(model):
        program = traced(model.train(training), *given.values())
        found = program(*(value.flip(0) for value in given.values()))
        torch.jit.save(program, tmp_path / "program.pt")
        loaded = torch.jit.load(tmp_path / "program.pt")
        (found[0] if labels else found.sum()).backward()
        program.zero_grad()
        return found, loaded(*given.values())

    check_same(models, run)
    assert liger_kernels.status(models[1]).fallbacks == {}
    assert not liger_kernels.status(models[1]).left


@pytest.mark.parametrize("part", PARTS)
def test_programs_of_parts(models, part):
    def run(model):
        module, x = PARTS[part](model), rows()
        programs = (
            torch.jit.trace(module, (x,), check_trace=False),  # else it calls the module itself, too
            torch.jit.script(module),
            torch.fx.symbolic_trace(module),
            make_fx(module)(x),
            torch.export.export(module, (x,)).module(),
        )
        return [program(x.flip(0)) for program in programs]

    check_same(models, run, close=True)


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export(models, strict):
    given = {"labels": batch()["labels"], "use_cache": False}

    def run(model):
        program = torch.export.export(model, (batch()["input_ids"],), given, strict=strict)
        assert "liger" not in str(program.graph)
        out = program.module()(batch()["input_ids"], **given)
        return out.loss, out.logits

    check_same(models, run)


# Transforms of torch.func.


def loss_of(model: nn.Module, parameters: Any = None, ids: Any = None, labels: Any = None) -> torch.Tensor:
    given = batch() if ids is None else {"input_ids": ids, "labels": labels}
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    loss: torch.Tensor = functional_call(model, parameters, (), {**given, "use_cache": False}).loss
    return loss


def of_each_sample(model: nn.Module, function: Any) -> Any:
    return vmap(lambda ids, labels: function(ids[None], labels[None]))(*batch().values())


def ensemble(model: nn.Module) -> Any:
    parameters, buffers = stack_module_state([model, copy.deepcopy(model)])
    ids, labels = batch().values()
    return vmap(lambda p, b: loss_of(model, {**p, **b}, ids, labels))(parameters, buffers)


TRANSFORMS = {
    "grad": lambda model: grad(lambda p: loss_of(model, p))(dict(model.named_parameters())),
    "vjp": lambda model: vjp(lambda p: loss_of(model, p), dict(model.named_parameters()))[1](torch.ones(()).to(DEVICE)),
    "jvp": lambda model: jvp(
        lambda p: loss_of(model, p),
        (dict(model.named_parameters()),),
        ({name: torch.ones_like(p) for name, p in model.named_parameters()},),
    ),
    "vmap": lambda model: of_each_sample(model, lambda ids, labels: loss_of(model, None, ids, labels)),
    "gradients of each sample": lambda model: of_each_sample(
        model,
        lambda ids, labels: grad(lambda p: loss_of(model, p, ids, labels))(dict(model.named_parameters())),
    ),
    "ensemble": ensemble,
    **{name: lambda model, part=part: grad(lambda x: part(model)(x).sum())(rows()) for name, part in PARTS.items()},
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(models, transform):
    check_same(models, TRANSFORMS[transform])


def test_functional_call_alone_runs_kernels(models):
    """It is no transform: other parameters, and everything else as ever."""
    found = []
    for model in models:
        reset_launches()
        doubled = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
        out = functional_call(model, doubled, (), batch())
        found.append((out.loss.detach(), out.logits.detach(), torch.autograd.grad(out.loss, list(doubled.values()))))
    torch.testing.assert_close(*found)
    assert launches()


def test_weighted_rows_are_not_left_unweighted():
    model = tiny("llama", num_hidden_layers=1)
    liger_kernels.patch(model, loss_reduction="sample")
    says = r"loss_reduction='sample': torch.jit.trace, torch.export .* unpatch the model, or patch it with"
    with pytest.raises(RuntimeError, match=says):
        traced(model, *batch().values())
    with pytest.raises(RuntimeError, match=says):
        TRANSFORMS["grad"](model)
    with pytest.raises(Exception, match=says):
        torch.export.export(model, (batch()["input_ids"],), {"labels": batch()["labels"]}, strict=False)


# Classes.


def test_what_asks_for_a_class_or_its_name(models):
    from accelerate.utils.dataclasses import get_module_class_from_name
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
    from transformers.trainer_pt_utils import get_parameter_names

    classes = {llama.LlamaForCausalLM, llama.LlamaRMSNorm, llama.LlamaMLP, llama.LlamaAttention, nn.Linear}

    def run(model):
        policies = (
            lambda module: transformer_auto_wrap_policy(module, False, 0, transformer_layer_cls=classes),
            lambda module: ModuleWrapPolicy(classes)(module, False, 0),
            lambda module: isinstance(module, tuple(classes)),
            lambda module: type(module).__name__ in {cls.__name__ for cls in classes},
            lambda module: type(module).__module__ in {cls.__module__ for cls in classes},
            lambda module: isinstance(module, get_module_class_from_name(model, type(module).__name__)),
        )
        found = [[name for name, module in model.named_modules() if policy(module)] for policy in policies]
        names = [get_parameter_names(model, [cls]) for cls in classes]
        return found, names, model._no_split_modules, repr(model), [issubclass(type(model), cls) for cls in classes]

    assert run(models[0]) == run(models[1])


def initialised(model: nn.Module) -> Any:
    torch.manual_seed(3)
    model.apply(model._init_weights)
    return dict(model.named_parameters())


def saved(model: nn.Module, tmp_path: Any) -> Any:
    model.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())["architectures"], sorted(
        f.name for f in tmp_path.iterdir()
    )


def test_initialisation_and_files(models, tmp_path):
    check_same([copy.deepcopy(model) for model in models], initialised)
    assert saved(models[0], tmp_path / "own") == saved(models[1], tmp_path / "patched")


@pytest.mark.parametrize("part", PARTS)
def test_parametrisations_and_pruning(part):
    """They give the module another class, or compute its weight before each call."""

    def run(model):
        module = PARTS[part](model)
        module = module.gate_proj if part == "mlp" else module
        parametrize.register_parametrization(module, "weight", nn.Identity())
        found = [train(model)]
        parametrize.remove_parametrizations(module, "weight")
        prune.l1_unstructured(module, "weight", 0.2)
        return [*found, train(model)]

    model = tiny("llama", num_hidden_layers=1)
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    torch.testing.assert_close(run(patched), run(model))


ADAPTERS = {
    "LoRA of the head": ("LoraConfig", {"r": 2, "target_modules": ["lm_head"]}),
    "LoRA of a regular expression": ("LoraConfig", {"r": 2, "target_modules": r".*(_proj|lm_head)"}),
    "LoRA of all linear layers": ("LoraConfig", {"r": 2, "target_modules": "all-linear"}),
    "LoRA of the MLP, a norm trained": (
        "LoraConfig",
        {"r": 2, "target_modules": ["gate_proj", "down_proj"], "modules_to_save": ["norm"]},
    ),
    "LNTuning": ("LNTuningConfig", {"target_modules": ["norm", "input_layernorm"]}),
    "IA3": ("IA3Config", {"target_modules": ["down_proj", "lm_head"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": ["lm_head"]}),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": ["lm_head"]}),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_of_a_model_that_was_patched_before(adapter):
    peft = pytest.importorskip("peft", reason="this version of transformers is tested without peft")
    config, options = ADAPTERS[adapter]

    def run(model):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(model, getattr(peft, config)(**options))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name or "hada_w2" in name:  # which begin at 0
                nn.init.normal_(parameter, std=0.1)
        names = [(name, type(module).__name__) for name, module in wrapped.named_modules()]
        found = train(wrapped), wrapped.state_dict(), peft.get_peft_model_state_dict(wrapped)
        merged = wrapped.merge_and_unload()
        return [*found, merged(**batch()).loss.detach()], names, [type(m).__name__ for m in merged.modules()]

    own = tiny("llama", num_hidden_layers=1)
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched)
    found, expected = run(patched), run(own)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_the_exact_class_is_another_one_until_unpatch():
    """What cannot be: the report says where such tools belong."""
    model = tiny("llama")
    exact = [type(module) for module in model.modules()]
    report = liger_kernels.patch(model)
    assert report.counts() == EVERYTHING["llama"]
    assert type(model.lm_head) is not nn.Linear
    assert "the exact class" in str(report)
    liger_kernels.unpatch(model)
    assert [type(module) for module in model.modules()] == exact
    quantized = torch.ao.quantization.quantize_dynamic(model.cpu().eval(), {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    left = {item.path for item in liger_kernels.patch(quantized).left}
    assert "lm_head" in left
    loss = quantized(**{name: value.cpu() for name, value in batch().items()}).loss
    assert torch.isfinite(loss)


def test_copies_of_weights_in_optimizers_and_averages(models):
    from torch.optim.swa_utils import AveragedModel

    def run(model):
        averaged = AveragedModel(copy.deepcopy(model))
        averaged.update_parameters(model)
        return gradients(averaged, averaged(**batch()).loss)

    found, expected = run(models[1]), run(models[0])
    torch.testing.assert_close(found, expected)
