"""Releases of liger-kernel as patches of the proof, one kernel each: ``--patch matrix.released:head --scope class``.

They are called as their own documentation says, with every option but one off, so that one fault shows at a time.
"""

from __future__ import annotations

import inspect
import types
from typing import Any


def head(model: Any) -> None:
    _apply(model, "fused_linear_cross_entropy")


def head_of_one_model(model: Any) -> None:
    """To the model alone: ``--scope instance``."""
    _apply(model, "fused_linear_cross_entropy", given={"model": model})


def head_and_norms(model: Any) -> None:
    """For a trainer that never asks the head for a loss: the norms show that the patch is there."""
    _apply(model, "fused_linear_cross_entropy", "rms_norm")


def loss(model: Any) -> None:
    _apply(model, "cross_entropy")


def norms(model: Any) -> None:
    _apply(model, "rms_norm")


def norms_of_one_model(model: Any) -> None:
    """To the model alone: ``--scope instance``."""
    _apply(model, "rms_norm", given={"model": model})


def rope(model: Any) -> None:
    _apply(model, "rope")


def glu(model: Any) -> None:
    _apply(model, "swiglu", "geglu")


def everything(model: Any) -> None:
    """To the model alone, with the defaults: ``--scope instance``."""
    _import()
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def _apply(model: Any, *wanted: str, given: dict[str, Any] | None = None) -> None:
    patches = _import()
    function = getattr(patches, f"apply_liger_kernel_to_{model.config.model_type}", None)
    if function is None:
        raise NotImplementedError(f"this liger-kernel knows no model type {model.config.model_type!r}")
    options = {name for name, p in inspect.signature(function).parameters.items() if isinstance(p.default, bool)}
    if not options & set(wanted):
        raise NotImplementedError(f"{function.__name__} has none of {', '.join(wanted)}; it has {', '.join(options)}")
    function(**{name: name in wanted for name in options}, **given or {})


def _import() -> Any:
    """``liger_kernel.transformers.monkey_patch``. On a machine without a GPU, releases of before 0.5.5 ask for
    ``torch.hip.is_available()``, which torch does not have."""
    import torch

    if not hasattr(torch, "hip"):
        torch.hip = types.SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    from liger_kernel.transformers import monkey_patch

    return monkey_patch
