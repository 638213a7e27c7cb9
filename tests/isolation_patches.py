"""Patches that must not run in the process of truth and baseline: they change it, end it, or never return."""

from __future__ import annotations

import copy
import functools
import os
import signal
import time
import types
from typing import Any

import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import liger_kernels
from tests.convergence_faults import honest, rms_norm


def class_forward(model: Any) -> None:
    """The forward of a class, by another formula: every model of the process computes by it."""
    modeling_llama.LlamaRMSNorm.forward = rms_norm


def method_of_tensors(model: Any) -> None:
    """A symbol that no fingerprint looks at, in which only rounding differs."""
    model.model.norm.forward = types.MethodType(rms_norm, model.model.norm)
    torch.Tensor.pow = lambda x, exponent: x * x
    torch.rsqrt = lambda x: 1 / x.sqrt()


def makes_a_model(model: Any) -> Any:
    """Returns another model, and leaves the one that it was given as it was."""
    made = copy.deepcopy(model)
    liger_kernels.patch(made)
    return made


def makes_a_copy(model: Any) -> Any:
    return copy.deepcopy(model)


def patches_one_and_makes_a_copy(model: Any) -> Any:
    made = copy.deepcopy(model)
    liger_kernels.patch(model)
    return made


def makes_a_model_of_another_norm(model: Any) -> Any:
    made = copy.deepcopy(model)
    made.model.norm.forward = types.MethodType(lambda self, x: 1.01 * rms_norm(self, x), made.model.norm)
    return made


def class_without_logits(model: Any) -> None:
    """Models of this class return no logits while they train with labels, as several fused losses do."""
    forward = modeling_llama.LlamaForCausalLM.forward

    @functools.wraps(forward)
    def without_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        if self.training and kwargs.get("labels") is not None:
            outputs.logits = None
        return outputs

    modeling_llama.LlamaForCausalLM.forward = without_logits


def class_replaced(model: Any) -> None:
    """A class of the modeling module: only models that are constructed later have it."""
    modeling_llama.LlamaRMSNorm = type("OtherRMSNorm", (modeling_llama.LlamaRMSNorm,), {"forward": rms_norm})


def class_replaced_by_a_wrong_one(model: Any) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return 1.01 * rms_norm(self, hidden_states)

    modeling_llama.LlamaRMSNorm = type("WrongRMSNorm", (modeling_llama.LlamaRMSNorm,), {"forward": forward})


def another_family(model: Any) -> None:
    """Changes classes, but none that a Llama has anything to do with."""
    modeling_mistral.MistralRMSNorm.forward = rms_norm


def has_no_kernel(model: Any) -> None:
    raise NotImplementedError("no kernel for this device")


def _first_norm(model: Any, forward: Any) -> None:
    norm = next(module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm")
    norm.forward = types.MethodType(forward, norm)


def raises_in_training(model: Any) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        raise TypeError("unexpected keyword argument")

    _first_norm(model, forward)


def crashes_in_training(model: Any) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError

    _first_norm(model, forward)


def leaves(model: Any) -> None:
    os._exit(0)


def hangs(model: Any) -> None:
    _first_norm(model, lambda self, hidden_states: time.sleep(1e6))


def _changes_only(change: Any) -> Any:
    """A patch that computes what it should, and changes something for the whole process."""

    def patch(model: Any) -> Any:
        change()
        return honest(model)

    return patch


switches_benchmarks_on = _changes_only(lambda: setattr(torch.backends.cudnn, "benchmark", True))
makes_algorithms_deterministic = _changes_only(
    lambda: torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)
)
sets_precision = _changes_only(lambda: torch.set_float32_matmul_precision("medium"))
sets_a_variable = _changes_only(lambda: os.environ.update(TOKENIZERS_PARALLELISM="true"))
goes_elsewhere = _changes_only(lambda: os.chdir("/"))
hooks_all_modules = _changes_only(
    lambda: torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
)
seeds = _changes_only(lambda: torch.manual_seed(0))
draws = _changes_only(lambda: torch.rand(1))
replaces_a_function = _changes_only(lambda: setattr(torch, "svd", torch.linalg.svd))
replaces_a_class = _changes_only(lambda: setattr(transformers, "LlamaForCausalLM", object))


# What a checkpoint of the model would be, and what other models' tools find in it.


def renames_a_key(model: Any) -> None:
    def rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["model.norm.scale"] = state.pop("model.norm.weight")

    model.register_state_dict_post_hook(rename)


def adds_a_buffer(model: Any) -> None:
    model.model.norm.register_buffer("cache", torch.zeros(3))


def adds_a_buffer_later(model: Any) -> None:
    """In the first forward."""
    model.model.norm.register_forward_pre_hook(lambda module, args: module.register_buffer("cache", torch.zeros(3)))


def reorders_the_keys(model: Any) -> None:
    norm = model.model._modules.pop("norm")
    model.model._modules = {"norm": norm, **model.model._modules}


def widens_a_weight(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.double()


def splits_a_weight(model: Any) -> None:
    """Two parameters that were one train apart."""
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())


def shares_a_weight(model: Any) -> None:
    one, other = (layer.input_layernorm for layer in model.model.layers)
    one.weight.data = other.weight.data


# What a step made, and who keeps it.

KEPT: list[Any] = []


def keeps_logits(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: KEPT.append(output.detach()))


def keeps_hidden_states(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, args: KEPT.append(args[0].detach().flatten()))


def keeps_outputs(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: KEPT.append(output))


def keeps_the_graph(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: KEPT.append(output.loss and output.loss.grad_fn))


def keeps_a_cycle(model: Any) -> None:
    """Python's collector frees it, whenever that runs."""

    def hook(module: Any, args: Any, output: Any) -> None:
        output.__dict__["itself"] = [output]

    model.register_forward_hook(hook)
