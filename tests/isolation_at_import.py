"""A module that patches while it is imported; the function that ``--patch`` names has nothing left to do."""

from __future__ import annotations

from typing import Any

from transformers.models.llama import modeling_llama

from tests.convergence_faults import rms_norm

modeling_llama.LlamaRMSNorm.forward = rms_norm


def patch(model: Any) -> None:
    """Everything has happened already."""
