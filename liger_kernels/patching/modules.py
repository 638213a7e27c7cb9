"""Norms, gated MLPs and rotary functions of a model: each module is recognised for itself, and replaced or left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from liger_kernels.patching.glu import is_glu_candidate, other_mlp, packed_experts, recognise_glu
from liger_kernels.patching.norms import is_norm_candidate, looks_like_norm, normalises, recognise_norm
from liger_kernels.patching.probe import describe, module_of, true_shape
from liger_kernels.patching.report import Left, PatchReport, Replacement
from liger_kernels.patching.rotary import RopeRecipe, Rotation, recognise_rotation, rotary_names
from liger_kernels.patching.swap import RAN, Recipe, Undo, base_of, recipe_of, replace

# What a module gets: a recipe or None, and the reasons why all or some of it is left.
Verdict = tuple[Recipe | None, tuple[str, ...]]
_NOTHING: Verdict = (None, ())
_SCALARS = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def patch_modules(model: nn.Module, report: PatchReport, undo: Undo) -> None:
    """Norms, gated MLPs and rotary embeddings: every module for itself, each distinct one probed once.

    What cannot be looked at, for whatever reason, is left.
    """
    verdicts: dict[Any, Verdict] = {}
    for path, module in list(model.named_modules()):
        name = type(module).__name__
        try:
            recipe, reasons = _verdict(module, set(report.kernels), verdicts)
            if recipe is not None and has_own_forward(module):
                recipe, reasons = None, (own_forward(module),)
        except Exception as error:  # an attribute that raises, a signature that lies: one odd module is no obstacle
            recipe, reasons = None, (f"it cannot be examined ({describe(error)})",)
        if recipe is not None:
            replace(path, module, recipe, report, undo)
        report.left += [Left(path, name, reason) for reason in reasons]


def _verdict(module: nn.Module, wanted: set[str], verdicts: dict[Any, Verdict]) -> Verdict:
    cls = type(module)
    if isinstance(recipe_of(module), RopeRecipe):  # patched before: what was left of it still is
        return None, _once(verdicts, cls, _rope, base_of(module) or cls)[1]
    if recipe_of(module) is not None or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return _NOTHING
    if isinstance(module, torch.jit.ScriptModule):
        return _scripted(module)
    if is_norm_candidate(module):
        return _once(verdicts, (cls, *_shape_and_settings(module)), _norm, module) if "rms_norm" in wanted else _NOTHING
    recipe, reasons = _NOTHING
    if {"swiglu", "geglu"} & wanted:
        recipe, reasons = _mlp(module, verdicts)
        if recipe is not None:
            return (recipe if recipe.kernel in wanted else None), ()
    if "rope" in wanted and module._modules:
        recipe, others = _once(verdicts, cls, _rope, cls)
        reasons += others
    return recipe, reasons


def _once(verdicts: dict[Any, Verdict], key: Any, judge: Any, subject: Any) -> Verdict:
    if key not in verdicts:
        verdicts[key] = judge(subject)
    return verdicts[key]


def _norm(module: nn.Module) -> Verdict:
    verdict = recognise_norm(module)
    if isinstance(verdict, Recipe):
        return verdict, ()
    return None, (_with_origin(verdict, type(module)),) if looks_like_norm(module) or normalises(module) else ()


def _mlp(module: nn.Module, verdicts: dict[Any, Verdict]) -> Verdict:
    if is_glu_candidate(module):
        return _once(verdicts, _fingerprint(module), _glu, module)
    reason = packed_experts(module) or other_mlp(module)
    return None, () if reason is None else (reason,)


def _glu(module: nn.Module) -> Verdict:
    verdict = recognise_glu(module)
    return (verdict, ()) if isinstance(verdict, Recipe) else (None, (_with_origin(verdict, type(module)),))


def _rope(cls: type) -> Verdict:
    """The recipe for an attention class, and why those of its rotary functions are left that are none of ours."""
    verdicts = {name: recognise_rotation(name, function) for name, function in rotary_names(cls).items()}
    rotations = tuple(verdict for verdict in verdicts.values() if isinstance(verdict, Rotation))
    reasons = tuple(f"{name}: {verdict}" for name, verdict in verdicts.items() if isinstance(verdict, str))
    return RopeRecipe(rotations) if rotations else None, reasons


def _scripted(module: nn.Module) -> Verdict:
    parameters = list(module.parameters(recurse=False))
    is_norm = not list(module.children()) and bool(parameters) and all(p.dim() == 1 for p in parameters)
    return None, ("it is a TorchScript module, whose forward cannot be replaced",) if is_norm else ()


def _shape_and_settings(module: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, None if p is None else true_shape(p)) for name, p in module._parameters.items())
    settings = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and k != "training"}
    return shapes, tuple(sorted(settings.items()))


def _fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """The same for two MLPs only if they compute the same: objects that they do not share make them different.

    The weights of projections do not count: a probe has its own.
    """
    own = vars(module)
    settings = tuple((k, v if isinstance(v, _SCALARS) else id(v)) for k, v in own.items() if k not in _OF_EVERY_MODULE)
    tensors = () if hasattr(module, "in_features") else (*module._parameters.values(), *module._buffers.values())
    children = tuple((k, None if child is None else _fingerprint(child)) for k, child in module._modules.items())
    return type(module), settings, tuple(id(tensor) for tensor in tensors), children


def _with_origin(reason: str, cls: type) -> str:
    """``reason``, and which package the forward is of, where another than the one that defines the class."""
    definer = next((c for c in cls.__mro__ if "forward" in vars(c)), cls)
    package = package_of(vars(definer).get("forward"))
    return reason if package in ("", _root(definer.__module__)) else f"its forward is {package}'s: {reason}"


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward that hides the one of its class.

    transformers, when it has captured hidden states, leaves the class's own method behind on the instance; that hides
    nothing and goes.
    """
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is type(module).forward and own.__self__ is module:
        del module.__dict__["forward"]
    return "forward" in module.__dict__


def own_forward(module: nn.Module) -> str:
    """Who replaced the forward of an instance, and what to do about it where something can be done."""
    own = module.__dict__["forward"]
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        hooks = (hook, *getattr(hook, "hooks", ()))
        offloads = any(getattr(h, "offload", False) for h in hooks)
        return (
            f"accelerate's {type(hook).__name__} runs its forward{' and offloads its weights' if offloads else ''}: "
            "load it without device_map, and patch the model before accelerate dispatches it"
        )
    origin = module_of(own)
    if origin.startswith("transformers.") and "parallel" in origin:
        return "the tensor parallel plan that transformers loaded it with (tp_plan, ep_plan) runs its forward"
    if hasattr(type(module), "kernel_layer_name") or _root(origin) == "kernels":
        return (
            f"a kernel of the Hub ({_root(origin)}) replaced its forward (use_kernels=True or kernelize()): load the "
            "model with use_kernels=False"
        )
    if hasattr(own, "_torchdynamo_orig_callable"):
        return "its forward was compiled on the instance: patch the model before torch.compile"
    return f"{_root(origin) or 'somebody'} replaced its forward on the instance: patch the model before that"


def package_of(function: Any) -> str:
    """The package that ``function`` comes from."""
    return _root(module_of(function))


def _root(module: str) -> str:
    return module.partition(".")[0]


def never_ran(model: nn.Module, report: PatchReport) -> list[Replacement]:
    """What of ``report.replaced`` has never run its kernel, although the model's forward has run.

    What torch compiles does not mark itself, so nothing is said of it.
    """
    if not report.forwards:
        return []
    modules = dict(_not_compiled(model))
    return [r for r in report.replaced if r.path in modules and RAN not in modules[r.path].__dict__]


def _not_compiled(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    compiled: set[str] = set()
    for path, module in model.named_modules():
        own = module.__dict__
        if (
            own.get("_compiled_call_impl") is not None
            or type(module).__module__.startswith("torch._dynamo")
            or hasattr(own.get("forward"), "_torchdynamo_orig_callable")
        ):
            compiled.add(path)
        elif path and ("" in compiled or _ancestors(path) & compiled):
            continue
        if path not in compiled:
            yield path, module


def _ancestors(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}
