"""Triton kernels for training Hugging Face causal language models, and one call that patches a model with them.

Everything is loaded on first use: ``import liger_kernels`` needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "patch": "liger_kernels.patching",
    "unpatch": "liger_kernels.patching",
    "patched": "liger_kernels.patching",
    "status": "liger_kernels.patching",
    "PatchReport": "liger_kernels.patching",
    "KERNELS": "liger_kernels.patching",
    "packing_denominator": "liger_kernels.patching",
    "report": "liger_kernels.environment",
    "fit": "liger_kernels.fitting",
    "PackingLossMixin": "liger_kernels.integrations.packing",
    "AutoLigerKernelForCausalLM": "liger_kernels.integrations",
    "revert_liger_kernel": "liger_kernels.integrations",
    **{
        f"apply_liger_kernel_to_{family}": "liger_kernels.integrations"
        for family in ("llama", "gemma", "gemma2", "gemma3", "mistral", "mixtral", "qwen2", "qwen3", "phi3")
    },
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from liger_kernels.environment import report as report
    from liger_kernels.fitting import fit as fit
    from liger_kernels.integrations import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
    from liger_kernels.integrations import revert_liger_kernel as revert_liger_kernel
    from liger_kernels.integrations.packing import PackingLossMixin as PackingLossMixin
    from liger_kernels.patching import KERNELS as KERNELS
    from liger_kernels.patching import PatchReport as PatchReport
    from liger_kernels.patching import packing_denominator as packing_denominator
    from liger_kernels.patching import patch as patch
    from liger_kernels.patching import patched as patched
    from liger_kernels.patching import status as status
    from liger_kernels.patching import unpatch as unpatch


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
