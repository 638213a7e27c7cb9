"""Which modules of a model are replaced: each is asked of every registered recogniser, and replaced or left."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain

import torch
from torch import nn

from liger_kernels.ops.runtime.arguments import checked
from liger_kernels.patching.following import follows_class, runs_inside, who_replaced
from liger_kernels.patching.logits.head import LOSSES
from liger_kernels.patching.lora.dora import DORA
from liger_kernels.patching.lora.experts import LORA_EXPERTS
from liger_kernels.patching.lora.layer import LORA
from liger_kernels.patching.reads import reads_training
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.experts import EXPERTS
from liger_kernels.patching.recipes.glu import GATED_MLPS
from liger_kernels.patching.recipes.linear import KERNEL as INVARIANT_LINEAR
from liger_kernels.patching.recipes.linear import LINEARS
from liger_kernels.patching.recipes.norms import NORMS
from liger_kernels.patching.recipes.probe import describe, module_of
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict
from liger_kernels.patching.recipes.rotary import ROTATIONS
from liger_kernels.patching.report import Left, PatchReport
from liger_kernels.patching.swap import Recipe, Undo, recipe_of, replace, restore, runs_inside_hook

# The last is asked first, and the first recipe wins: a recogniser may take what an earlier one would leave.
_recognisers: list[Recogniser] = [NORMS, ROTATIONS, GATED_MLPS, EXPERTS, LORA, DORA, LORA_EXPERTS]


# What multiplies by itself, and in invariant models leaves that to the linear layers of an adapter.
_OF_ADAPTERS = (LORA, DORA, LORA_EXPERTS)


def kernel_names() -> tuple[str, ...]:
    """Every kernel that ``patch`` can use now."""
    return (*chain.from_iterable(recogniser.kernels for recogniser in _recognisers), *LOSSES)


@checked
def register(recogniser: Recogniser) -> Callable[[], None]:
    """Let :func:`liger_kernels.patch` use the kernels of ``recogniser`` from now on, in this process.

    It is asked before those that are there. Its kernels are among those that ``patch`` uses by default.

    Returns:
        What ends it. Models that are patched stay patched.

    Raises:
        TypeError: ``recogniser`` is no :class:`Recogniser`.
        ValueError: one of its names is taken.
    """
    taken = sorted(set(recogniser.kernels) & set(kernel_names()))
    if taken:
        raise ValueError(f"there are kernels named {taken} already; give the recogniser's kernels other names")
    _recognisers.append(recogniser)
    return lambda: _recognisers.remove(recogniser)


def patch_modules(model: nn.Module, report: PatchReport, undo: Undo) -> None:
    """Replace or leave every module for itself. Each distinct one is probed once.

    What cannot be looked at, for whatever reason, is left. What was replaced before and has changed since is looked at
    anew.
    """
    verdicts: dict[Hashable, Verdict] = {}
    wanted = {*report.kernels, *([INVARIANT_LINEAR] if report.invariant else [])}
    for path, module in list(model.named_modules()):
        name = type(module).__name__
        before = recipe_of(module)
        if before is not None and before.changed(module) is not None:
            restore([(module, type(module)._liger_kernels_base)])
        try:
            recipe, reasons = _verdict(module, wanted, verdicts)
            if recipe is not None:
                drop_kept_method(module)
                if has_own_forward(module):
                    recipe, reasons = None, (own_forward(module),)
        except Exception as error:  # an attribute that raises, a signature that lies: one odd module is no obstacle
            recipe, reasons = None, (f"it cannot be examined ({describe(error)})",)
        if recipe is not None:
            replace(path, module, recipe, report, undo)
        report.left += [Left(path, name, reason) for reason in reasons]


def _verdict(
    module: nn.Module, wanted: set[str], verdicts: dict[Hashable, Verdict]
) -> tuple[Recipe | None, tuple[str, ...]]:
    """The recipe for ``module``, if there is one, and why all or some of it is left."""
    patched = recipe_of(module)
    if patched is not None:
        return None, patched.left
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None, ()
    if isinstance(module, torch.jit.ScriptModule):
        return None, _scripted(module)
    reasons: tuple[str, ...] = ()
    invariant = INVARIANT_LINEAR in wanted
    for recogniser in reversed([*_recognisers, *([LINEARS] if invariant else [])]):
        if wanted.isdisjoint(recogniser.kernels) or not recogniser.candidate(module):
            continue
        if invariant and recogniser in _OF_ADAPTERS:
            return None, (*reasons, "invariant=True: PEFT computes it, by linear layers in blocks of rows")
        key = (recogniser, recogniser.key(module))
        if key not in verdicts:
            verdicts[key] = _recognised(recogniser, module)
        verdict = verdicts[key]
        if isinstance(verdict, Recipe):
            return verdict if verdict.kernel in wanted else None, (*reasons, *verdict.left)
        reasons += verdict
    return None, reasons


def _recognised(recogniser: Recogniser, module: nn.Module) -> Verdict:
    """The verdict of training, if it is that of evaluation, too, where the module asks for its mode."""
    verdict = recogniser.recognise(module)
    if isinstance(verdict, Recipe) and verdict.live is not None and reads_training(module):
        with probe.evaluating():
            if recogniser.recognise(module) != verdict:
                return ("in evaluation it computes something else than in training",)
    return verdict


def _scripted(module: nn.Module) -> tuple[str, ...]:
    parameters = list(module.parameters(recurse=False))
    is_norm = not list(module.children()) and bool(parameters) and all(p.dim() == 1 for p in parameters)
    return ("it is a TorchScript module, whose forward cannot be replaced",) if is_norm else ()


def carries_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward of somebody's.

    The class's own method, kept there, hides nothing. accelerate's hooks run around the class's own, which they keep.
    """
    if "forward" not in module.__dict__ or _keeps_own_method(module):
        return False
    return not runs_inside_hook(module)


def drop_kept_method(module: nn.Module) -> None:
    """Remove the class's own forward from the instance: transformers, when it has captured hidden states, leaves it
    there."""
    if "forward" in module.__dict__ and _keeps_own_method(module):
        del module.__dict__["forward"]


def _keeps_own_method(module: nn.Module) -> bool:
    return follows_class(module.__dict__["forward"], module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward that was not seen to run that of its class."""
    return carries_forward(module) and not runs_inside(module)


def own_forward(module: nn.Module) -> str:
    """Who replaced the forward of an instance, and what to do about it where something can be done."""
    own = module.__dict__["forward"]
    origin, who = module_of(own), who_replaced(module)
    if origin.startswith("transformers.") and "parallel" in origin:
        return "the tensor parallel plan that transformers loaded it with (tp_plan, ep_plan) runs its forward"
    if hasattr(type(module), "kernel_layer_name") or who == "kernels":
        return (
            f"a kernel of the Hub ({who}) replaced its forward (use_kernels=True or kernelize()): load the "
            "model with use_kernels=False"
        )
    if hasattr(own, "_torchdynamo_orig_callable"):
        return "its forward was compiled on the instance: patch the model before torch.compile"
    return f"{who} replaced its forward on the instance: patch the model before that"
