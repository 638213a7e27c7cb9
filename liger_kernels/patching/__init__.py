"""Patch a model with kernels, and undo it. No model family is named here: see each recogniser for what it accepts."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator

from torch import nn

from liger_kernels.ops.loss.linear_cross_entropy import Memory
from liger_kernels.ops.loss.packing import LossReduction
from liger_kernels.ops.runtime.arguments import checked, describe
from liger_kernels.patching.blocks import held, hold, hold_as, let_go, patched_for_good
from liger_kernels.patching.census import as_of_now
from liger_kernels.patching.logits.head import LOSSES
from liger_kernels.patching.logits.loss import patch_loss
from liger_kernels.patching.logits.model import ModelRecipe
from liger_kernels.patching.logits.packing import packing_denominator
from liger_kernels.patching.modules import drop_kept_method, kernel_names, patch_modules, register
from liger_kernels.patching.offload import Offload
from liger_kernels.patching.recipes.glu import GluRecipe
from liger_kernels.patching.recipes.recogniser import Recogniser
from liger_kernels.patching.recompute import Recompute
from liger_kernels.patching.rehearsal import wake_compiler
from liger_kernels.patching.report import REPORT, Left, PatchReport, Replacement
from liger_kernels.patching.swap import Recipe, Undo, forget, recipe_of, restore
from liger_kernels.tested_torch import warn_of_a_newer_torch

__all__ = [
    "KERNELS",
    "Left",
    "PatchReport",
    "Recipe",
    "Recogniser",
    "Replacement",
    "check_options",
    "packing_denominator",
    "patch",
    "patched",
    "register",
    "status",
    "unpatch",
]

KERNELS = kernel_names()  # of this package
_CALLER = 4  # where a warning of patch() points, past the check of its arguments
# Two threads that patch one model would give it two subclasses, one of the other.
_one_at_a_time = threading.RLock()


@checked
def patch(
    model: nn.Module,
    kernels: Iterable[str] | None = None,
    loss_reduction: LossReduction = "token",
    memory: Memory | None = None,
    offload: Offload | None = None,
    recompute: Recompute | None = None,
    invariant: bool = False,
) -> PatchReport:
    """Let ``model`` run on this package's kernels, in place; other models of its family stay as they are.

    Each module is recognised by what it computes and replaced only where a kernel computes the same; the rest is left
    alone and listed in the report. Parameters, hooks, ``state_dict`` keys and ``isinstance`` relations stay. A model
    that is patched already stays as it is and its report comes back.

    Args:
        model: any ``nn.Module``; a Hugging Face causal language model (also inside a PEFT or DDP wrapper) gets the
            fused loss, too. It may be on any device, the meta device included, and in any dtype.
        kernels: which of :data:`KERNELS`, and of those that :func:`register` added, to use; all by default.
            ``linear_cross_entropy`` computes the loss from hidden states; without it, ``cross_entropy`` fuses the loss
            of the head's logits.
        loss_reduction: what the model's own loss averages over where a row holds several samples: "token" as
            transformers does; "sample", every sample alike; "square", a sample of n targets by the root of n
            (docs/how-to/packed-samples.md). The last two take ``cu_seq_lens_q``, ``seq_idx`` or ``position_ids`` with
            the labels, and ``num_items_in_batch`` in their own unit (:func:`packing_denominator`,
            :class:`PackingLossMixin`).
        memory: the schedule of ``linear_cross_entropy``: "fast" holds the logits of up to 8192 tokens, "balanced" of
            1024 to 4096 (with ``invariant`` to 5120), "small" hardly any, and computes them twice; None lets shape and
            dtype choose between the first two. Where a step cannot take it (float16; label smoothing with "small"),
            "balanced" runs, and ``fallbacks`` counts it. A head whose loss is not fused has no use for it, and a
            warning says so.
        offload: "layers" keeps the inputs of checkpointed layers in the host's memory (docs/how-to/memory.md), 2 bytes
            a feature, layer and token in 16 bits, copied while the GPU computes. A step without activation
            checkpointing runs without it; ``fallbacks`` counts it, and a warning says so once. Where no pinned memory
            is left, the step raises ``RuntimeError``.
        recompute: "mlp" lets a gated MLP save its input alone while it trains, and compute the rest again in the
            backward, by tiles of 4096 or 8192 tokens (docs/how-to/memory.md). Where tiles would be noticed, by a hook
            on a projection for one, the MLP saves what it always saves, and ``fallbacks`` counts why.
        invariant: the bits of a row depend on this row alone, not on how many rows there are, in everything that the
            patch computes: products of the head, of experts and of every plain linear layer go in blocks of 1024 rows
            (docs/explanation/invariant.md). Adapters are left to PEFT's own linear layers, which go in blocks, too.
            ``not_invariant`` of the report says what remains, such as attention.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, ``kernels`` is a single string, or another argument is of a type
            that makes no sense.
        ValueError: an unknown kernel, loss reduction, schedule, offload or recompute, a schedule without
            ``linear_cross_entropy`` among the kernels, a model that is patched already with others, or one without a
            loss that could be weighted.
    """
    warn_of_a_newer_torch()
    wanted = check_options(kernels, loss_reduction, memory)
    with _one_at_a_time:
        wake_compiler(model)
        asked = PatchReport(wanted, loss_reduction=loss_reduction, memory=memory, offload=offload, recompute=recompute)
        asked.invariant = invariant
        report = _patch(model, asked)
    _warn_of_no_effect(model, report)
    return report


def _warn_of_no_effect(model: nn.Module, report: PatchReport) -> None:
    """Warn the caller of ``patch`` if it replaced nothing, and of each option that changes nothing."""
    name, recipes = type(model).__name__, [recipe_of(module) for module in model.modules()]
    if not report.replaced:
        warnings.warn(
            f"liger_kernels.patch() replaced nothing in this {name} (kernels={list(report.kernels)}): "
            "it will run exactly as before. print() the report for the reasons.",
            stacklevel=_CALLER,
        )
    elif report.memory is not None and not report.fuses_head:
        warnings.warn(
            f"memory={report.memory!r} has no effect in this {name}: its loss is not computed from hidden "
            "states. print() the report for the reasons.",
            stacklevel=_CALLER,
        )
    if report.offload is not None and not any(isinstance(recipe, ModelRecipe) for recipe in recipes):
        warnings.warn(
            f"offload={report.offload!r} has no effect in this {name}: it takes a causal language model of "
            "transformers and, among the kernels, linear_cross_entropy or cross_entropy",
            stacklevel=_CALLER,
        )
    if report.recompute is not None and not any(isinstance(recipe, GluRecipe) for recipe in recipes):
        warnings.warn(
            f"recompute={report.recompute!r} has no effect in this {name}: no gated MLP runs on a kernel. "
            "print() the report for the reasons.",
            stacklevel=_CALLER,
        )


def _patch(model: nn.Module, report: PatchReport) -> PatchReport:
    """Patch what is not patched yet. Returns ``report``, or the one that the model had."""
    known = status(model)
    if known is not None:
        _check_same_options(known, report)
    undo: Undo = []
    try:
        patch_modules(model, report, undo)
        if set(LOSSES) & set(report.kernels):
            for path, owner in list(model.named_modules()):
                patch_loss(model, path, owner, report, undo)
        if report.loss_reduction != "token" and not any(
            isinstance(recipe_of(module), ModelRecipe) for module in model.modules()
        ):
            raise ValueError(
                f"loss_reduction={report.loss_reduction!r}: this {type(model).__name__} has no loss whose rows could "
                "be weighted; it takes a causal language model of transformers and, among the kernels, "
                f"linear_cross_entropy or cross_entropy\n{as_of_now(report, model)}"
            )
    except BaseException:  # Ctrl-C, too, leaves the model as it was
        restore(undo)
        raise
    if known is not None:  # the rest of the model has a report already
        known.left, report = report.left, known
        rest = next((module for module in model.modules() if module.__dict__.get(REPORT) is report), model)
        for module, _ in undo:
            module.__dict__[REPORT] = report
            hold_as(rest, module)
    for module in model.modules():
        if recipe_of(module) is not None:
            drop_kept_method(module)
    as_of_now(report, model)
    if not report.replaced:
        model.__dict__[REPORT] = report
    return report


@checked
def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`: every object gets its own class back. A model that is not patched stays as it is.

    It does not matter whether ``model`` is what was patched, what wraps it, or what is inside. A method that somebody
    kept of a patched module does from now on what the module's own class does. A forward with activation checkpointing
    is recomputed as the model is then, so its backward belongs before this.

    Raises:
        RuntimeError: something gave a patched module yet another class since (``fully_shard``, say); nothing is undone.
    """
    with _one_at_a_time:
        _unpatch(list(model.modules()))


def _unpatch(modules: list[nn.Module]) -> None:
    undo: Undo = []
    for module in modules:
        if recipe_of(module) is not None:
            base = vars(type(module)).get("_liger_kernels_base")
            if base is None:
                raise RuntimeError(
                    f"a patched module has been given the class {type(module).__module__}.{type(module).__name__} "
                    "after it was patched; undo that first, then unpatch(model)"
                )
            undo.append((module, base))
    restore(undo)
    for module in modules:
        forget(module)


@checked
@contextlib.contextmanager
def patched(
    model: nn.Module,
    kernels: Iterable[str] | None = None,
    loss_reduction: LossReduction = "token",
    memory: Memory | None = None,
    offload: Offload | None = None,
    recompute: Recompute | None = None,
    invariant: bool = False,
) -> Iterator[PatchReport]:
    """``with patched(model) as report:`` runs the model patched inside the block, and as it was after it.

    What was patched before stays patched after the block. Blocks may overlap, in several threads, too: whatever the
    order in which they end, a module stays patched until the last block that holds it ends. An explicit
    :func:`unpatch` inside ends all of them at once. What :func:`patch` adds to a model inside a block ends with the
    block; what it patches after such an ``unpatch`` stays.

    Raises:
        TypeError, ValueError: as :func:`patch`, for other options than those of an open block, too.
        RuntimeError: as :func:`unpatch`, at the end of the block.
    """
    with _one_at_a_time:
        for_good, before = patched_for_good(model), held(model)
        report = patch(model, kernels, loss_reduction, memory, offload, recompute, invariant)
        block = hold((m for m in model.modules() if REPORT in m.__dict__ and m not in for_good), before)
    try:
        yield report
    finally:
        with _one_at_a_time:
            _unpatch(let_go(model, block))


@checked
def status(model: nn.Module) -> PatchReport | None:
    """The report of :func:`patch` for this model, as of now; None when it is not patched.

    A wrapper (PEFT, DDP, FSDP) and what it wraps share one report.
    """
    for module in model.modules():
        if recipe_of(module) is not None:
            return as_of_now(module.__dict__[REPORT], model)
    return model.__dict__.get(REPORT)


def _check_same_options(known: PatchReport, asked: PatchReport) -> None:
    for name in ("kernels", "loss_reduction", "memory", "offload", "recompute", "invariant"):
        before, value = getattr(known, name), getattr(asked, name)
        if before != value:
            raise ValueError(
                f"this model is already patched with {name}={before!r}, not {value!r}; call unpatch(model) first"
            )


@checked
def check_options(
    kernels: Iterable[str] | None, loss_reduction: LossReduction, memory: Memory | None
) -> tuple[str, ...]:
    """The names of ``kernels``, in order; raises what :func:`patch` does for its options, whatever the model."""
    existing = kernel_names()
    names = list(existing if kernels is None else kernels)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"kernels has {describe(name)} in it; it must be a list of names: {list(existing)}")
    unknown = sorted(set(names) - set(existing))
    if unknown:
        raise ValueError(f"unknown kernels {unknown}; there are {list(existing)}")
    wanted = tuple(name for name in existing if name in names)
    if memory is not None and "linear_cross_entropy" not in wanted:
        raise ValueError(
            f"memory={memory!r} is a schedule of linear_cross_entropy, which is not among kernels={list(wanted)}; add "
            "it, or leave memory out"
        )
    return wanted
