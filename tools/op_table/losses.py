"""Rows of the table: losses over logits and over hidden states, and the weights of packed rows."""

from __future__ import annotations

from typing import Any

import torch

from liger_kernels import ops
from liger_kernels.ops.loss.cross_entropy import EXTRAS
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.linear_log_probs import OUTPUTS
from tools.op_table.row import RUNS, by_name, through

_LOGITS = {"logits": "nv:logits", "targets": "n:targets"}
_HEAD = {"hidden": "nk", "weight": "vk:head", "targets": "n:targets", "bias": "v"}
_WEIGHTS = {"class_weight": "v:share", "row_weight": "n:share"}
_DIVISOR = {"denominator": ":divisor"}
_IDS = {"ids": "ni:classes"}
_HEADS = {"hidden": "nk", "weight": "vk:head", "teacher_hidden": "nk:constant", "teacher_weight": "vk:teacher"}
_HEADS |= {"bias": "v", "teacher_bias": "v:constant", "mask": "n:mask"}
_SOME: dict[str, Any] = {"extras": ("log_probs", "entropy")}
_EVERYTHING: dict[str, Any] = {"reduction": "none", "softcap": 30.0, "z_loss": 1e-4, "extras": EXTRAS}

# A mean without a given denominator is another number in another batch, and so are the gradients that it divides.
# Without a reduction, the head has its upstream gradients in units of the batch's largest one.
_RUNS: dict[str, Any] = {"promised": (RUNS,)}
_UNASKED: dict[str, Any] = {"promised": None}
_OPERATOR: dict[str, Any] = {"promised": None, "in_program": 0}
_SPLIT: dict[str, Any] = {"in_program": None}
CROSS_ENTROPY = {
    "cross_entropy": by_name("cross_entropy", _LOGITS, _UNASKED),
    "cross_entropy, none": by_name("cross_entropy", _LOGITS, reduction="none", **_SOME),
    "cross_entropy, mean": by_name("cross_entropy", _LOGITS | _DIVISOR, **_SOME),
    "cross_entropy, everything": by_name("cross_entropy", _LOGITS, _UNASKED, label_smoothing=0.1, **_EVERYTHING),
    "cross_entropy, scaled": by_name(
        "cross_entropy", _LOGITS, _UNASKED, softcap=3.0, logit_scale=1.5, z_loss=0.01, label_smoothing=0.1
    ),
    "cross_entropy, weights": by_name("cross_entropy", _LOGITS | _WEIGHTS | _DIVISOR, _UNASKED, softcap=3.0, **_SOME),
    "cross_entropy, weights, none": by_name("cross_entropy", _LOGITS | _WEIGHTS, _UNASKED, reduction="none"),
}
LINEAR_CROSS_ENTROPY = {
    "linear_cross_entropy": by_name("linear_cross_entropy", _HEAD, _UNASKED),
    "linear_cross_entropy, none": by_name("linear_cross_entropy", _HEAD, _RUNS, reduction="none", **_SOME),
    "linear_cross_entropy, mean": by_name("linear_cross_entropy", _HEAD | _DIVISOR, _RUNS, **_SOME),
    "linear_cross_entropy, counted": by_name("linear_cross_entropy", _HEAD, _UNASKED, counted=4),
    **{
        f"linear_cross_entropy, {memory}": by_name(
            "linear_cross_entropy", _HEAD, _UNASKED if memory == "fast" else _OPERATOR, memory=memory
        )
        for memory in MEMORY
    },
    "linear_cross_entropy, everything": by_name(
        "linear_cross_entropy", _HEAD, _OPERATOR, memory="balanced", **_EVERYTHING
    ),
    "linear_cross_entropy, small, smoothed": by_name(
        "linear_cross_entropy", _HEAD, _OPERATOR, memory="small", softcap=3.0, label_smoothing=0.1
    ),
    **{
        f"linear_cross_entropy, {memory}, {reduction}": by_name(
            "linear_cross_entropy", _HEAD | _WEIGHTS | more, _UNASKED,
            memory=memory, reduction=reduction, softcap=3.0, **_SOME,
        )
        for memory in MEMORY
        for reduction, more in (("mean", _DIVISOR), ("none", {}))
    },
}  # fmt: skip
_ASKED: dict[str, Any] = {"outputs": OUTPUTS, "temperature": 0.7}
LOG_PROBS = {
    "linear_log_probs": by_name("linear_log_probs", _HEAD | _IDS, _RUNS | _SPLIT, **_ASKED),
    "linear_log_probs, invariant": by_name("linear_log_probs", _HEAD | _IDS, _SPLIT, invariant=True, **_ASKED),
    **{
        f"linear_log_probs, {memory}": by_name(
            "linear_log_probs", _HEAD | _IDS, _UNASKED | _SPLIT, memory=memory, outputs=OUTPUTS
        )
        for memory in MEMORY
    },
}
_BOTH: dict[str, Any] = {"beta": 0.3, "outputs": ops.DivergenceOutput._fields}
DIVERGENCE = {
    "linear_divergence": by_name("linear_divergence", _HEADS, _RUNS | _SPLIT, temperature=0.7, **_BOTH),
    **{
        f"linear_divergence, {memory}": by_name("linear_divergence", _HEADS, _UNASKED | _SPLIT, memory=memory, **_BOTH)
        for memory in MEMORY
    },
    **{
        f"linear_divergence, {memory}, mean": by_name(
            "linear_divergence", _HEADS | _DIVISOR, _UNASKED | _SPLIT, memory=memory, reduction="mean", **_BOTH
        )
        for memory in MEMORY
    },
}


def packed(labels: torch.Tensor, like: torch.Tensor, class_weight: torch.Tensor | None = None, *, op: Any) -> Any:
    """Every row is a sequence."""
    found = op(labels, class_weight=class_weight, dtype=like.dtype)
    return found.row_weight.view(labels.shape), found.counts.view(labels.shape), found.denominator


# Counts that are weighted by class are differences of running sums of float64. The sums begin with the batch, and a GPU
# adds them up in no fixed order.
_PACKED = "nl:labels,n:constant"
_OF_PACKED: dict[str, Any] = {"results": "row_weight counts denominator", "in_program": None}
PACKING = {
    "packing_weights": through(packed, "packing_weights", _PACKED, _OF_PACKED, loss_reduction="square"),
    "packing_weights, class_weight": through(
        packed, "packing_weights", f"{_PACKED},v:share", {**_OF_PACKED, "promised": ()}, loss_reduction="square"
    ),
    "packing_weights, seq_idx": by_name(
        "packing_weights", {"labels": "n:targets", "seq_idx": "n:sequences", "class_weight": "v:share"},
        {"promised": None, "in_program": None}, loss_reduction="square",
    ),
}  # fmt: skip
