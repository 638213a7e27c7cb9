"""The names that users of transformers know, each a thin alias of :mod:`liger_kernels.patching`.

``apply_liger_kernel_to_<family>()`` with a model patches that model. Without one it is called before the model exists:
from then on every model of that family is patched as it is built, on the meta device, too, so that ``from_pretrained``
loads its weights into the patched model. ``revert_liger_kernel()`` ends that.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Any, NamedTuple

from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from liger_kernels.integrations.packing import PackingLossMixin
from liger_kernels.ops.loss.linear_cross_entropy import Memory
from liger_kernels.ops.loss.packing import LossReduction
from liger_kernels.ops.runtime.arguments import checked
from liger_kernels.patching import PatchReport, check_options, patch, status
from liger_kernels.patching.modules import kernel_names
from liger_kernels.patching.offload import Offload
from liger_kernels.patching.recompute import Recompute

__all__ = [
    "AutoLigerKernelForCausalLM",
    "PackingLossMixin",
    "apply_liger_kernel_to_gemma",
    "apply_liger_kernel_to_gemma2",
    "apply_liger_kernel_to_gemma3",
    "apply_liger_kernel_to_instance",
    "apply_liger_kernel_to_llama",
    "apply_liger_kernel_to_mistral",
    "apply_liger_kernel_to_mixtral",
    "apply_liger_kernel_to_phi3",
    "apply_liger_kernel_to_qwen2",
    "apply_liger_kernel_to_qwen3",
    "revert_liger_kernel",
]


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """``AutoModelForCausalLM`` whose models come back patched.

    ``from_pretrained`` and ``from_config`` take what upstream's take, and ``kernels=``, ``loss_reduction=``,
    ``memory=``, ``offload=``, ``recompute=`` and ``invariant=`` of :func:`liger_kernels.patch`.
    """

    @classmethod
    @checked
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        kernels: Iterable[str] | None = None,
        loss_reduction: LossReduction = "token",
        memory: Memory | None = None,
        offload: Offload | None = None,
        recompute: Recompute | None = None,
        invariant: bool = False,
        **kwargs: Any,
    ) -> Any:
        """``AutoModelForCausalLM.from_pretrained`` of all other arguments, patched with ``kernels`` (all by default).

        Raises:
            TypeError, ValueError: as :func:`liger_kernels.patch` does for its options, before anything is loaded.
        """
        wanted = check_options(kernels, loss_reduction, memory)
        loaded = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
        patch(model, wanted, loss_reduction, memory, offload, recompute, invariant)
        return loaded

    @classmethod
    @checked
    def from_config(
        cls,
        config: PretrainedConfig,
        *args: Any,
        kernels: Iterable[str] | None = None,
        loss_reduction: LossReduction = "token",
        memory: Memory | None = None,
        offload: Offload | None = None,
        recompute: Recompute | None = None,
        invariant: bool = False,
        **kwargs: Any,
    ) -> Any:
        """``AutoModelForCausalLM.from_config`` of all other arguments, patched with ``kernels`` (all by default).

        Raises:
            TypeError, ValueError: as :func:`liger_kernels.patch` does for its options, before anything is built.
        """
        wanted = check_options(kernels, loss_reduction, memory)
        model = AutoModelForCausalLM.from_config(config, *args, **kwargs)
        patch(model, wanted, loss_reduction, memory, offload, recompute, invariant)
        return model


class _Building(threading.local):
    depth = 0


_building = _Building()


class _Applied(NamedTuple):
    original: Callable[..., None]  # the constructor
    kernels: list[str]
    memory: str | None


_applied: dict[type, _Applied] = {}


def _patch_when_built(cls: type, kernels: list[str], memory: str | None) -> None:
    """Let the constructor of ``cls`` patch what it has built. Called again, the last options count."""
    original = _applied[cls].original if cls in _applied else cls.__init__  # type: ignore[misc]
    _applied[cls] = _Applied(original, kernels, memory)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _building.depth += 1
        try:
            original(self, *args, **kwargs)
        finally:
            _building.depth -= 1
        now = _applied.get(cls)  # None for whoever kept this constructor: deepspeed.zero.Init puts back what it found
        if _building.depth == 0 and now is not None:  # the outermost model patches all of its parts
            patch(self, now.kernels, memory=now.memory)

    cls.__init__ = init  # type: ignore[misc]


def revert_liger_kernel() -> None:
    """End what ``apply_liger_kernel_to_<family>()`` without a model began. Models that were built stay patched."""
    while _applied:
        cls, applied = _applied.popitem()
        cls.__init__ = applied.original  # type: ignore[misc]


@checked
def apply_liger_kernel_to_instance(
    model: nn.Module,
    *,
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    swiglu: bool = True,
    geglu: bool = True,
    memory: Memory | None = None,
    offload: Offload | None = None,
    recompute: Recompute | None = None,
    invariant: bool = False,
) -> PatchReport:
    """Patch ``model``, of any family, as the ``use_liger_kernel`` flag of a trainer does, with its configuration.

    A model that has been patched before with at least these kernels stays as it is. ``memory``, ``offload``,
    ``recompute`` and ``invariant`` are those of :func:`liger_kernels.patch`.

    Returns:
        Its :class:`liger_kernels.PatchReport`.

    Raises:
        TypeError: another switch than these, or an argument of another type.
        ValueError: both losses are asked for, an unknown ``memory``, ``offload`` or ``recompute``, a ``memory`` without
            the fused linear loss, or the model is patched already without one of the kernels or with others of these
            options.
    """
    kernels = _kernels(
        memory,
        rope=rope,
        cross_entropy=cross_entropy,
        fused_linear_cross_entropy=fused_linear_cross_entropy,
        rms_norm=rms_norm,
        layer_norm=layer_norm,
        swiglu=swiglu,
        geglu=geglu,
    )
    report = status(model)
    if report is None or not set(kernels) <= set(report.kernels):
        return patch(model, kernels, "token", memory, offload, recompute, invariant)
    given = {"memory": memory, "offload": offload, "recompute": recompute}
    wanted: Any = {name: getattr(report, name) if value is None else value for name, value in given.items()}
    return patch(model, report.kernels, report.loss_reduction, **wanted, invariant=invariant or report.invariant)


def _kernels(memory: str | None, **switches: bool) -> list[str]:
    """The kernels that are on: those of these switches, and those that have none."""
    if switches["cross_entropy"] and switches["fused_linear_cross_entropy"]:
        raise ValueError(
            "cross_entropy and fused_linear_cross_entropy cannot both be True: the fused linear loss leaves no logits "
            "for the other; choose one"
        )
    switches["linear_cross_entropy"] = switches["fused_linear_cross_entropy"]
    switches["gated_rms_norm"] = switches["rms_norm"]  # trainers have no switch of its own
    kernels = [name for name in kernel_names() if switches.get(name, True)]
    check_options(kernels, "token", memory)
    return kernels


def _apply(family: str, model: nn.Module | None, memory: str | None, **switches: bool) -> PatchReport | None:
    kernels = _kernels(memory, **switches)
    if model is not None:
        return patch(model, kernels, memory=memory)
    name = f"transformers.models.{family}.modeling_{family}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"the installed transformers has no {family} ({name}); install one that has") from error
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if issubclass(cls, PreTrainedModel) and cls.__module__ == name and "__init__" in vars(cls):
            _patch_when_built(cls, kernels, memory)
    return None


_DOC = """Patch {family} models: ``model``, or with ``model=None`` every one that is built from now on.

    Args:
        rope, rms_norm, {activation}: whether to use these kernels.
        cross_entropy: fuse the loss of the head's logits. Not together with ``fused_linear_cross_entropy``.
        fused_linear_cross_entropy: compute the loss from hidden states, without logits.
        model: the model to patch, in place.
        memory: the schedule of the fused linear loss, as in :func:`liger_kernels.patch`.

    Returns:
        The :class:`liger_kernels.PatchReport` of ``model``; None without one.

    Raises:
        TypeError: an argument of another type.
        ValueError: both losses are asked for, an unknown ``memory`` or one without the fused linear loss, or the
            installed transformers has no {family}.
    """


def _alias(family: str, activation: str) -> Callable[..., PatchReport | None]:
    """The function of one family. ``activation`` is the one that the family has, and so the one with a switch."""
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": True}
    switches = {"rope": True, **losses, "rms_norm": True, activation: True}
    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=on, annotation=bool) for name, on in switches.items()
    ]
    last = {"model": Parameter.POSITIONAL_OR_KEYWORD, "memory": Parameter.KEYWORD_ONLY}
    types = {"model": nn.Module | None, "memory": Memory | None}
    parameters += [Parameter(name, kind, default=None, annotation=types[name]) for name, kind in last.items()]
    signature = inspect.Signature(parameters)

    def apply(*args: Any, **kwargs: Any) -> PatchReport | None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return _apply(family, **{"swiglu": False, "geglu": False, **given.arguments})

    apply.__signature__ = signature  # type: ignore[attr-defined]
    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{family}"
    apply.__doc__ = _DOC.format(family=family, activation=activation)
    return checked(apply)


apply_liger_kernel_to_llama = _alias("llama", "swiglu")
apply_liger_kernel_to_mistral = _alias("mistral", "swiglu")
apply_liger_kernel_to_mixtral = _alias("mixtral", "swiglu")
apply_liger_kernel_to_qwen2 = _alias("qwen2", "swiglu")
apply_liger_kernel_to_qwen3 = _alias("qwen3", "swiglu")
apply_liger_kernel_to_phi3 = _alias("phi3", "swiglu")
apply_liger_kernel_to_gemma = _alias("gemma", "geglu")
apply_liger_kernel_to_gemma2 = _alias("gemma2", "geglu")
apply_liger_kernel_to_gemma3 = _alias("gemma3", "geglu")
