"""Patches to judge: our own with each of the two losses (the default), and those of the released liger-kernel."""

from __future__ import annotations

from typing import Any

BUILT_IN = ("convergence.patches:fused_linear", "convergence.patches:fused_cross_entropy")


def fused_linear(model: Any) -> Any:
    """Everything, with the loss computed from hidden states: logits never exist."""
    import liger_kernels

    return liger_kernels.patch(model)


def fused_linear_small(model: Any) -> Any:
    """As ``fused_linear``, with the loss in slabs of the vocabulary, which hold the least memory."""
    import liger_kernels

    return liger_kernels.patch(model, memory="small")


def offloaded(model: Any) -> Any:
    """As ``fused_linear``, with the inputs of checkpointed layers in the host's memory: for a set-up with
    checkpointing. In mini models they are smaller than what is moved elsewhere."""
    import liger_kernels
    from liger_kernels.patching import offload

    offload.SMALLEST = 1
    return liger_kernels.patch(model, offload="layers")


def recomputed(model: Any) -> Any:
    """As ``fused_linear``, with gated MLPs that save their input alone, and go by tiles that mini models have several
    of."""
    import liger_kernels
    from liger_kernels.ops.lora import gated_mlp

    gated_mlp.MOST_TOKENS = 24
    return liger_kernels.patch(model, recompute="mlp")


def invariant(model: Any) -> Any:
    """As ``fused_linear``, with products whose rows do not depend on the other rows."""
    import liger_kernels

    return liger_kernels.patch(model, invariant=True)


def fused_cross_entropy(model: Any) -> Any:
    """Everything but the fused head: logits exist, and their loss is fused."""
    import liger_kernels

    return liger_kernels.patch(model, kernels=[k for k in liger_kernels.KERNELS if k != "linear_cross_entropy"])


def liger_kernel_instance(model: Any) -> None:
    """The released ``liger-kernel`` applied to a model that exists, for ``--scope instance``.

    Raises:
        NotImplementedError: it has nothing for this model type, where it would only log and leave the model alone.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _liger_kernel_function(model)
    _apply_liger_kernel_to_instance(model=model)


def liger_kernel_class(model: Any) -> None:
    """The released ``liger-kernel`` applied before the model exists, for ``--scope class``.

    Raises:
        NotImplementedError: it has nothing for this model type.
    """
    _liger_kernel_function(model)()


def _liger_kernel_function(model: Any) -> Any:
    """Its ``apply_liger_kernel_to_<family>`` for the type of ``model``."""
    import importlib.metadata

    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind, known = model.config.model_type, MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in known:
        version = importlib.metadata.version("liger-kernel")
        raise NotImplementedError(f"liger-kernel {version} knows no model type {kind!r}; it knows {', '.join(known)}")
    return known[kind]
