"""The ops: each file holds one op's formula, its reference in plain torch, its Triton kernels and its public function.

Every op takes CUDA, ROCm, XPU and CPU tensors; see :mod:`liger_kernels.ops._runtime` for which of them run a kernel.
"""

from liger_kernels.ops._counted_rows import CountedTargets
from liger_kernels.ops._linear import observe_logits_grad
from liger_kernels.ops._loss_options import LossOptions
from liger_kernels.ops._runtime import launches, reset_launches
from liger_kernels.ops.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_ref
from liger_kernels.ops.gated_rms_norm import gated_rms_norm, gated_rms_norm_ref
from liger_kernels.ops.glu import (
    geglu,
    geglu_linear,
    geglu_linear_ref,
    geglu_ref,
    swiglu,
    swiglu_linear,
    swiglu_linear_ref,
    swiglu_ref,
)
from liger_kernels.ops.layer_norm import layer_norm, layer_norm_ref
from liger_kernels.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from liger_kernels.ops.linear_log_probs import LogProbsOutput, linear_log_probs, linear_log_probs_ref
from liger_kernels.ops.packed_glu import Gate, packed_glu, packed_glu_ref
from liger_kernels.ops.packing import PackedTargets, packing_weights
from liger_kernels.ops.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from liger_kernels.ops.rope import rope, rope_ref

__all__ = [
    "CountedTargets",
    "CrossEntropyOutput",
    "Gate",
    "LogProbsOutput",
    "LossOptions",
    "PackedTargets",
    "add_rms_norm",
    "add_rms_norm_ref",
    "cross_entropy",
    "cross_entropy_ref",
    "gated_rms_norm",
    "gated_rms_norm_ref",
    "geglu",
    "geglu_linear",
    "geglu_linear_ref",
    "geglu_ref",
    "launches",
    "layer_norm",
    "layer_norm_ref",
    "linear_cross_entropy",
    "linear_cross_entropy_ref",
    "linear_log_probs",
    "linear_log_probs_ref",
    "observe_logits_grad",
    "packed_glu",
    "packed_glu_ref",
    "packing_weights",
    "reset_launches",
    "rms_norm",
    "rms_norm_ref",
    "rope",
    "rope_ref",
    "swiglu",
    "swiglu_linear",
    "swiglu_linear_ref",
    "swiglu_ref",
]
