"""What a patched model is now. Wrappers copy modules, swap them and move them, and other packages patch models, too."""

from __future__ import annotations

from typing import Any

from torch import nn

from liger_kernels.patching.following import who_replaced
from liger_kernels.patching.linear_attention import linear_attention
from liger_kernels.patching.logits.head import HeadRecipe, patched_heads
from liger_kernels.patching.logits.model import ModelRecipe
from liger_kernels.patching.logits.split_head import has_plan, why_unfused
from liger_kernels.patching.lora.dora import DORA, is_dora_layer
from liger_kernels.patching.lora.experts import LORA_EXPERTS
from liger_kernels.patching.lora.layer import LORA, adapts_experts, is_lora_layer
from liger_kernels.patching.modules import carries_forward, has_own_forward
from liger_kernels.patching.recipes.linear import not_invariant
from liger_kernels.patching.recipes.probe import package_of
from liger_kernels.patching.report import Left, PatchReport, Replacement
from liger_kernels.patching.swap import RAN, recipe_of

_ADAPTED_SINCE = "it got its adapter after patch(), and PEFT computes that: call patch(model) again"


def as_of_now(report: PatchReport, model: nn.Module) -> PatchReport:
    """``report``, with what is replaced in ``model`` now and what has changed since :func:`liger_kernels.patch`."""
    replaced, since = [], []
    before = [left for left in report.left if not left.since]
    kinds = {LORA: is_lora_layer, DORA: is_dora_layer, LORA_EXPERTS: adapts_experts}
    adapted = [kind for recogniser, kind in kinds.items() if not set(recogniser.kernels).isdisjoint(report.kernels)]
    for path, module in model.named_modules():
        recipe = recipe_of(module)
        if recipe is None:
            if any(kind(module) for kind in adapted) and not any(_is_of(left, path) for left in before):
                since.append(Left(path, type(module).__name__, _ADAPTED_SINCE, since=True))
            continue
        reason = _changed(module, recipe)
        if reason is not None:
            since.append(Left(path, type(module).__name__, reason, since=True))
        elif not isinstance(recipe, ModelRecipe):
            replaced.append(Replacement(path, recipe.kernel, type(module).__name__, recipe.detail))
    report.replaced = replaced
    report.left = before + since
    report.never_ran = never_ran(model, report)
    report.not_invariant = not_invariant(model) if report.invariant else []
    report.linear_attention = linear_attention(model)
    return report


def _is_of(left: Left, path: str) -> bool:
    """Whether ``left`` was found at ``path``, or there before something was wrapped around the model."""
    return left.path != "" and f".{path}".endswith(f".{left.path}")


def _changed(module: Any, recipe: Any) -> str | None:
    """Why the kernel of ``module`` does not run there any more, or is not what its class asks for now."""
    fused_head = isinstance(recipe, HeadRecipe) and recipe.fused
    if fused_head and has_plan(module):
        return why_unfused(module)
    if fused_head and carries_forward(module):
        who = who_replaced(module)
        return f"{who} replaced its forward on the instance after patch(): it computes its logits, whose loss is fused"
    own = not isinstance(recipe, HeadRecipe) and has_own_forward(module)
    if own and not _has_compiled_forward(module):
        return (
            f"{who_replaced(module)} replaced its forward on the instance after patch(), and this package's has not "
            "been seen to run inside it"
        )
    cls: Any = next(c for c in type(module).__mro__ if "_liger_kernels_base" in vars(c))  # FSDP2 puts one before it
    now, before = cls._liger_kernels_base.forward, cls._liger_kernels_base_forward
    if before is not now:
        who = package_of(now, until=lambda function: function is before) or "somebody"
        return (
            f"{who} replaced the forward of its class after patch(), and that one runs: call patch(model) to look at "
            "it anew"
        )
    if (why := recipe.changed(module)) is not None:
        return why
    if isinstance(recipe, ModelRecipe) and not patched_heads(module.get_output_embeddings()):
        return "its LM head was replaced after patch(), and computes logits: call patch(model) again"
    return None


def never_ran(model: nn.Module, report: PatchReport) -> list[Replacement]:
    """What of ``report.replaced`` has never run its kernel, although the model's forward has run.

    What torch compiles does not mark itself, so nothing is said of it.
    """
    if not report.forwards:
        return []
    modules = dict(model.named_modules())
    compiled = tuple(f"{path}." if path else "" for path, module in modules.items() if _is_compiled(module))
    return [
        item
        for item in report.replaced
        if item.path in modules and not f"{item.path}.".startswith(compiled) and RAN not in modules[item.path].__dict__
    ]


def _is_compiled(module: nn.Module) -> bool:
    return (
        module.__dict__.get("_compiled_call_impl") is not None
        or type(module).__module__.startswith("torch._dynamo")
        or _has_compiled_forward(module)
    )


def _has_compiled_forward(module: nn.Module) -> bool:
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
