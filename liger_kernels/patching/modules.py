"""Norms, gated MLPs and rotary functions of a model: each module is recognised for itself, and replaced or left."""

from __future__ import annotations

from typing import Any

from torch import nn

from liger_kernels.patching.glu import is_glu_candidate, recognise_glu
from liger_kernels.patching.norms import is_norm_candidate, recognise_norm
from liger_kernels.patching.report import Left, PatchReport
from liger_kernels.patching.rotary import RopeRecipe, Rotation, recognise_rotation, rotary_names
from liger_kernels.patching.swap import Recipe, Undo, recipe_of, replace

OWN_FORWARD = "its forward was replaced on the instance (by accelerate or a device map?): patch the model before that"


def patch_modules(model: nn.Module, report: PatchReport, undo: Undo) -> None:
    """Norms, gated MLPs and rotary embeddings: every module for itself, each distinct one probed once."""
    wanted = set(report.kernels)
    verdicts: dict[Any, Recipe | str] = {}
    for path, module in model.named_modules():
        cls = type(module)
        if recipe_of(module) is not None or cls.__module__.startswith("torch.nn.modules.container"):
            continue
        verdict: Recipe | str | None = None
        if is_norm_candidate(module):
            if "rms_norm" in wanted:
                key = (cls, *_shape_and_settings(module))
                if key not in verdicts:
                    verdicts[key] = recognise_norm(module)
                verdict = verdicts[key]
        elif is_glu_candidate(module):
            if {"swiglu", "geglu"} & wanted:
                verdict = recognise_glu(module)
                if isinstance(verdict, Recipe) and verdict.kernel not in wanted:
                    continue
        elif "rope" in wanted and module._modules:
            if cls not in verdicts:
                verdicts[cls] = _recognise_rope(cls)
            verdict = verdicts[cls] or None
        if isinstance(verdict, Recipe) and has_own_forward(module):
            verdict = OWN_FORWARD
        if isinstance(verdict, str):
            report.left.append(Left(path, cls.__name__, verdict))
        elif verdict is not None:
            replace(path, module, verdict, report, undo)


def _shape_and_settings(module: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    settings = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and k != "training"}
    return shapes, tuple(sorted(settings.items()))


def _recognise_rope(cls: type) -> RopeRecipe | str:
    """The recipe for an attention class; why not; or an empty string where it calls no rotary function."""
    verdicts = {name: recognise_rotation(name, function) for name, function in rotary_names(cls).items()}
    rotations = tuple(verdict for verdict in verdicts.values() if isinstance(verdict, Rotation))
    if rotations:
        return RopeRecipe(rotations)
    return "; ".join(f"{name}: {verdict}" for name, verdict in verdicts.items())


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward that hides the one of its class.

    transformers, when it has captured hidden states, leaves the class's own method behind on the instance; that hides
    nothing and goes.
    """
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is type(module).forward and own.__self__ is module:
        del module.__dict__["forward"]
    return "forward" in module.__dict__
