"""The built-in patches that ``pytest convergence`` judges by default: our own, with each of the two losses."""

from __future__ import annotations

from typing import Any

BUILT_IN = ("convergence.patches:fused_linear", "convergence.patches:fused_cross_entropy")


def fused_linear(model: Any) -> Any:
    """Everything, with the loss computed from hidden states: logits never exist."""
    import liger_kernels

    return liger_kernels.patch(model)


def fused_cross_entropy(model: Any) -> Any:
    """Everything but the fused head: logits exist, and their loss is fused."""
    import liger_kernels

    return liger_kernels.patch(model, kernels=[k for k in liger_kernels.KERNELS if k != "linear_cross_entropy"])
