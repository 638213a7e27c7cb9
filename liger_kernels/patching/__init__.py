"""Patch a model with kernels, and undo it. No model family is named here: see each recogniser for what it accepts."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from liger_kernels.ops.linear_cross_entropy import MEMORY
from liger_kernels.patching.glu import is_glu_candidate, recognise_glu
from liger_kernels.patching.head import HeadRecipe, ModelRecipe, patched_heads
from liger_kernels.patching.norms import is_norm_candidate, recognise_norm
from liger_kernels.patching.packing import check_loss_reduction, packing_denominator
from liger_kernels.patching.report import Left, PatchReport, Replacement
from liger_kernels.patching.rotary import RopeRecipe, Rotation, recognise_rotation, rotary_names
from liger_kernels.patching.swap import Recipe, patched_class, recipe_of

__all__ = [
    "KERNELS",
    "Left",
    "PatchReport",
    "Replacement",
    "check_options",
    "packing_denominator",
    "patch",
    "patched",
    "status",
    "unpatch",
]

KERNELS = ("rms_norm", "rope", "swiglu", "geglu", "cross_entropy", "linear_cross_entropy")


_OWN_FORWARD = "its forward was replaced on the instance (by accelerate or a device map?): patch the model before that"


@dataclass
class _State:
    """What a patched model remembers: its report, the undo list, and who holds this state.

    The undo list has every object whose class was changed, its class before and the recipe of its class since.
    """

    report: PatchReport
    undo: list[tuple[nn.Module, type, Recipe]] = field(default_factory=list)
    holders: list[nn.Module] = field(default_factory=list)

    @property
    def fallbacks(self) -> Any:
        return self.report.fallbacks


def patch(
    model: nn.Module,
    kernels: Iterable[str] | None = None,
    loss_reduction: str = "token",
    memory: str | None = None,
) -> PatchReport:
    """Let ``model`` run on this package's kernels, in place; other models of its family stay as they are.

    Each module is recognised by what it computes and replaced only where a kernel computes the same; the rest is left
    alone and listed in the report. Parameters, hooks, ``state_dict`` keys and ``isinstance`` relations stay. A model
    that is patched already stays as it is and its report comes back.

    Args:
        model: any ``nn.Module``; a Hugging Face causal language model (also inside a PEFT or DDP wrapper) gets the
            fused loss, too. It may be on any device, the meta device included, and in any dtype.
        kernels: which of :data:`KERNELS` to use; all of them by default. ``linear_cross_entropy`` computes the loss
            from hidden states; without it, ``cross_entropy`` fuses the loss of the head's logits.
        loss_reduction: what the model's own loss averages over where a row holds several samples: "token" as
            transformers does; "sample", every sample alike; "square", a sample of n targets by the root of n
            (docs/packing.md). The last two take ``cu_seq_lens_q``, ``seq_idx`` or ``position_ids`` with the labels, and
            ``num_items_in_batch`` in their own unit (:func:`packing_denominator`, :class:`PackingLossMixin`).
        memory: the schedule of ``linear_cross_entropy``: "fast" holds the logits of up to 8192 tokens, "balanced" of
            1024 or 2048, "small" hardly any, and computes them twice; None lets shape and dtype choose between the
            first two. Where a step cannot take it (float16; label smoothing with "small"), "balanced" runs, and
            ``fallbacks`` counts it. A head whose loss is not fused has no use for it, and a warning says so.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, or ``kernels`` is a single string.
        ValueError: an unknown kernel, loss reduction or schedule, a schedule without ``linear_cross_entropy`` among the
            kernels, a model that is patched already with others, or one without a loss that could be weighted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch() takes a torch.nn.Module, not {type(model).__name__}; load or build the model first")
    wanted = check_options(kernels, loss_reduction, memory)
    state: _State | None = model.__dict__.get("_liger_kernels")
    if state is not None:
        if set(state.report.kernels) != set(wanted):
            raise ValueError(
                f"this model is already patched with kernels={list(state.report.kernels)}, not {list(wanted)}; "
                "call unpatch(model) first"
            )
        for name, given in (("loss_reduction", loss_reduction), ("memory", memory)):
            before = getattr(state.report, name)
            if before != given:
                raise ValueError(
                    f"this model is already patched with {name}={before!r}, not {given!r}; call unpatch(model) first"
                )
        return state.report
    state = _State(PatchReport(wanted, loss_reduction=loss_reduction, memory=memory))
    _patch_modules(model, state)
    if {"cross_entropy", "linear_cross_entropy"} & set(wanted):
        for path, owner in list(model.named_modules()):
            _patch_loss(model, path, owner, state)
    _hold(model, state)
    if loss_reduction != "token" and not any(isinstance(recipe, ModelRecipe) for _, _, recipe in state.undo):
        unpatch(model)
        raise ValueError(
            f"loss_reduction={loss_reduction!r}: this {type(model).__name__} has no loss whose rows could be weighted; "
            "it takes a causal language model of transformers and, among the kernels, linear_cross_entropy or "
            f"cross_entropy\n{state.report}"
        )
    if not state.report.replaced:
        warnings.warn(
            f"liger_kernels.patch() replaced nothing in this {type(model).__name__} (kernels={list(wanted)}): "
            "it will run exactly as before. print() the report for the reasons.",
            stacklevel=2,
        )
    elif memory is not None and not state.report.fuses_head:
        warnings.warn(
            f"memory={memory!r} has no effect in this {type(model).__name__}: its loss is not computed from hidden "
            "states. print() the report for the reasons.",
            stacklevel=2,
        )
    return state.report


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`: every object gets its own class back. A model that is not patched stays as it is.

    Raises:
        RuntimeError: something gave a patched module yet another class since (``fully_shard``, say); nothing is undone.
    """
    state: _State | None = model.__dict__.get("_liger_kernels")
    if state is None:
        return
    for module, base, recipe in state.undo:
        if type(module) is not patched_class(base, recipe):
            raise RuntimeError(
                f"a {base.__name__} has been given the class {type(module).__module__}.{type(module).__name__} after "
                "it was patched; undo that first, then unpatch(model)"
            )
    for module, base, _ in reversed(state.undo):
        module.__class__ = base
        for name in ("armed", "extras", "packing", "request", "weighted"):
            module.__dict__.pop(f"_liger_kernels_{name}", None)
    for holder in state.holders:
        holder.__dict__.pop("_liger_kernels", None)


@contextlib.contextmanager
def patched(
    model: nn.Module,
    kernels: Iterable[str] | None = None,
    loss_reduction: str = "token",
    memory: str | None = None,
) -> Iterator[PatchReport]:
    """``with patched(model) as report:`` runs the model patched inside the block, and as it was after it.

    A model that was patched before stays patched after the block.
    """
    before = status(model)
    report = patch(model, kernels, loss_reduction, memory)
    try:
        yield report
    finally:
        if before is None:
            unpatch(model)


def status(model: nn.Module) -> PatchReport | None:
    """The report of :func:`patch` for this model, with the fallbacks counted since; None when it is not patched."""
    state: _State | None = model.__dict__.get("_liger_kernels")
    return state.report if state is not None else None


def check_options(kernels: Iterable[str] | None, loss_reduction: str, memory: str | None) -> tuple[str, ...]:
    """The names of ``kernels``, in order; raises what :func:`patch` does for its options, whatever the model."""
    wanted = _kernel_names(kernels)
    check_loss_reduction(loss_reduction)
    if memory is not None and memory not in MEMORY:
        raise ValueError(f"memory is {memory!r}; it must be one of {', '.join(map(repr, MEMORY))}, or None to choose")
    if memory is not None and "linear_cross_entropy" not in wanted:
        raise ValueError(
            f"memory={memory!r} is a schedule of linear_cross_entropy, which is not among kernels={list(wanted)}; add "
            "it, or leave memory out"
        )
    return wanted


def _kernel_names(kernels: Iterable[str] | None) -> tuple[str, ...]:
    if kernels is None:
        return KERNELS
    if isinstance(kernels, str):
        raise TypeError(f"kernels is a list of names, not the string {kernels!r}: kernels=[{kernels!r}]")
    names = set(kernels)
    unknown = sorted(str(name) for name in names - set(KERNELS))
    if unknown:
        raise ValueError(f"unknown kernels {unknown}; there are {list(KERNELS)}")
    return tuple(name for name in KERNELS if name in names)


def _patch_modules(model: nn.Module, state: _State) -> None:
    """Norms, gated MLPs and rotary embeddings: every module for itself, each distinct one probed once."""
    wanted = set(state.report.kernels)
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
        if isinstance(verdict, Recipe) and _has_own_forward(module):
            verdict = _OWN_FORWARD
        if isinstance(verdict, str):
            state.report.left.append(Left(path, cls.__name__, verdict))
        elif verdict is not None:
            _replace(path, module, verdict, state)


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


def _patch_loss(model: nn.Module, path: str, owner: nn.Module, state: _State) -> None:
    """The head of ``owner`` and ``owner`` itself, where it is a Hugging Face model that computes a loss from logits."""
    if recipe_of(owner) is not None or not _computes_loss(owner):
        return
    head = owner.get_output_embeddings()  # type: ignore[operator]
    head_path = next((p for p, m in model.named_modules() if m is head), path)
    if not isinstance(head, nn.Module):
        state.report.left.append(Left(path, type(owner).__name__, "it has no LM head"))
        return
    if _has_own_forward(owner):
        state.report.left.append(Left(path, type(owner).__name__, _OWN_FORWARD))
        return
    fused = "linear_cross_entropy" in state.report.kernels
    if not patched_heads(head):
        plain = _plain_linears(head) if fused else []
        if plain:
            for linear in plain:
                _replace(head_path, linear, HeadRecipe(fused=True, memory=state.report.memory), state)
        elif "cross_entropy" in state.report.kernels:
            if fused:
                reason = "it is not a plain linear layer: it runs itself, and the loss over its logits is fused"
                state.report.left.append(Left(head_path, type(head).__name__, reason))
            _replace(head_path, head, HeadRecipe(fused=False), state)
        else:
            state.report.left.append(Left(head_path, type(head).__name__, "it is not a plain linear layer"))
            return
    _replace(path, owner, ModelRecipe(state.report.loss_reduction), state, listed=False)
    _hold(owner, state)


def _hold(module: nn.Module, state: _State) -> None:
    if not any(holder is module for holder in state.holders):
        module.__dict__["_liger_kernels"] = state
        state.holders.append(module)


def _computes_loss(owner: nn.Module) -> bool:
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(owner, PreTrainedModel) and "labels" in inspect.signature(type(owner).forward).parameters


def _plain_linears(head: nn.Module) -> list[nn.Module]:
    """The head itself, or the full-size linear layers of a wrapper that has no other parameters (modules_to_save).

    A wrapper with parameters of its own (LoRA) changes the logits and is not opened.
    """
    if type(head) is nn.Linear:
        return [head]
    linears = [module for module in head.modules() if type(module) is nn.Linear]
    own = {id(p) for p in head.parameters()} - {id(p) for linear in linears for p in linear.parameters()}
    sizes = {(linear.in_features, linear.out_features) for linear in linears}
    return list(linears) if not own and len(sizes) == 1 else []


def _has_own_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward that hides the one of its class.

    transformers, when it has captured hidden states, leaves the class's own method behind on the instance; that hides
    nothing and goes.
    """
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is type(module).forward and own.__self__ is module:
        del module.__dict__["forward"]
    return "forward" in module.__dict__


def _replace(path: str, module: nn.Module, recipe: Recipe, state: _State, listed: bool = True) -> None:
    base: Any = type(module)
    module.__class__ = patched_class(base, recipe)
    state.undo.append((module, base, recipe))
    if listed:
        state.report.replaced.append(Replacement(path, recipe.kernel, base.__name__, recipe.detail))
