"""Releases of other packages as patches of the proof: ``--patch matrix.released:head --scope class``.

liger-kernel is called as its own documentation says, with every option but one off, so that one fault shows at a time.
Of unsloth_zoo there is the function with which it replaces a method of the Trainer.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from pathlib import Path
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


def count_of_packed_rows(model: Any) -> None:
    """unsloth_zoo's count of a step's targets, by which the loss is divided. The lengths of a row's samples go to it
    under the name that unsloth's collator gives them, and no further."""
    import torch
    import transformers

    counted = _loss_utils()._unsloth_get_batch_samples

    def get_batch_samples(self: Any, batches: Any, *args: Any) -> Any:
        def told(batch: dict[str, Any]) -> dict[str, Any]:
            starts = (batch["position_ids"] == 0).flatten().nonzero().flatten()
            ends = torch.tensor([batch["position_ids"].numel()])
            return {**batch, "packed_seq_lengths": torch.cat((starts, ends)).diff()}

        samples, items = counted(self, map(told, batches), *args)
        for batch in samples:
            del batch["packed_seq_lengths"]
        return samples, items

    setattr(transformers.Trainer, "get_batch_samples", get_batch_samples)  # noqa: B010, a method to mypy


def _loss_utils() -> Any:
    """``unsloth_zoo.loss_utils`` without the package around it, which refuses a machine without a GPU."""
    spec = importlib.util.find_spec("unsloth_zoo")
    if spec is None or not spec.submodule_search_locations:
        raise NotImplementedError("unsloth_zoo is not installed")
    root, on_a_cpu = Path(spec.submodule_search_locations[0]), {"DEVICE_TYPE": "cpu", "DEVICE_TYPE_TORCH": "cpu"}
    for name in ("unsloth_zoo", "unsloth_zoo.temporary_patches", "unsloth_zoo.device_type"):
        module: Any = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        vars(module).update(on_a_cpu)
        sys.modules[name] = module
    return importlib.import_module("unsloth_zoo.loss_utils")


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
