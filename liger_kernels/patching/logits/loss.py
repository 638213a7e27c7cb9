"""Which models get the fused loss, and which heads compute it from hidden states.

No recogniser finds them, because a head is whatever its model says it is, and head and model change together.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from liger_kernels.patching.logits.head import HeadRecipe, held_recipe, linears_to_choose_from, patched_heads
from liger_kernels.patching.logits.model import ModelRecipe
from liger_kernels.patching.lora.layer import is_lora_layer
from liger_kernels.patching.modules import drop_kept_method, has_own_forward, own_forward
from liger_kernels.patching.recipes.linear import LinearRecipe
from liger_kernels.patching.recipes.probe import describe
from liger_kernels.patching.report import Left, PatchReport
from liger_kernels.patching.swap import Undo, recipe_of, replace, restore


def patch_loss(model: nn.Module, path: str, owner: nn.Module, report: PatchReport, undo: Undo) -> None:
    """The head of ``owner`` and ``owner`` itself, where it is a Hugging Face model that computes a loss from logits."""

    def leave(path: str, module: Any, reason: str) -> None:
        report.left.append(Left(path, type(module).__name__, reason))

    try:
        if not _computes_loss(owner):
            return
        head, inputs = owner.get_output_embeddings(), owner.get_input_embeddings()  # type: ignore[operator]
    except Exception as error:  # a model's own code may raise whatever it likes
        leave(path, owner, f"its LM head cannot be looked up ({describe(error)})")
        return
    if not isinstance(head, nn.Module):
        if owner.base_model is not owner:  # what has no model inside is a base model: it has no loss
            leave(path, owner, "it has no LM head")
        return
    head_path = next((p for p, m in model.named_modules() if m is head), path)
    if isinstance(head, nn.Embedding) or head is inputs:
        leave(head_path, head, "it is the input embedding, too: no linear head")
        return
    if recipe_of(owner) is None:
        drop_kept_method(owner)
        if has_own_forward(owner):
            leave(path, owner, own_forward(owner))
            return
    if not patched_heads(head) or _is_adapted_since(head):
        of_hidden, of_logits = ("linear_cross_entropy" in report.kernels), ("cross_entropy" in report.kernels)
        linears = linears_to_choose_from(head) if of_hidden else []
        recipe: HeadRecipe | None = HeadRecipe(fused=True, memory=report.memory, invariant=report.invariant)
        if not linears:
            recipe = held_recipe(head, report.memory) if of_hidden and not report.invariant else None
            if of_hidden and recipe is None:
                also = ": it runs itself, and the loss over its logits is fused" if of_logits else ""
                leave(head_path, head, f"it is not a plain linear layer{also}")
            if recipe is None and not of_logits:
                return
        for linear in linears or [head]:
            base = getattr(linear, "base_layer", None)
            for module in (linear, None if isinstance(recipe_of(base), LinearRecipe) else base):
                if (
                    module is not None and recipe_of(module) is not None
                ):  # an adapter of a head, or a head that has got one since
                    restore([(module, vars(type(module))["_liger_kernels_base"])])
            replace(
                head_path, linear, recipe or HeadRecipe(False, None, report.invariant and bool(linears)), report, undo
            )
    if recipe_of(owner) is None:
        replace(path, owner, ModelRecipe(report.loss_reduction), report, undo)


def _is_adapted_since(head: nn.Module) -> bool:
    """Whether ``head`` is an adapter that was put around a head after the patch."""
    return is_lora_layer(head) and isinstance(recipe_of(head.base_layer), HeadRecipe)


def _computes_loss(owner: nn.Module) -> bool:
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(owner, PreTrainedModel) and "labels" in inspect.signature(type(owner).forward).parameters
