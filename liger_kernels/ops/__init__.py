"""The ops: each file holds one op's formula, its reference in plain torch, its Triton kernels and its public function.

The loss has a folder, because its parts share kernels, and so has what all ops run on. Every op takes CUDA, ROCm, XPU
and CPU tensors; see :mod:`liger_kernels.ops.runtime.dispatch` for which of them run a kernel.
"""

from liger_kernels.ops._experts import experts, experts_ref
from liger_kernels.ops._gated_rms_norm import gated_rms_norm, gated_rms_norm_ref
from liger_kernels.ops._glu import (
    geglu,
    geglu_linear,
    geglu_linear_ref,
    geglu_ref,
    swiglu,
    swiglu_linear,
    swiglu_linear_ref,
    swiglu_ref,
)
from liger_kernels.ops._layer_norm import layer_norm, layer_norm_ref
from liger_kernels.ops._packed_glu import GluFormula, packed_glu, packed_glu_ref
from liger_kernels.ops._rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from liger_kernels.ops._rope import rope, rope_ref
from liger_kernels.ops.divergence.linear_divergence import (
    DivergenceOutput,
    linear_divergence,
    linear_divergence_ref,
)
from liger_kernels.ops.lora.adapted_linears import adapted_linears, adapted_linears_ref
from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.dora_linear import dora_linear, dora_linear_ref
from liger_kernels.ops.lora.dora_norm import dora_norm, dora_norm_ref
from liger_kernels.ops.lora.experts import ExpertsAdapter
from liger_kernels.ops.lora.gated_mlp import gated_mlp, gated_mlp_ref
from liger_kernels.ops.lora.lora_linear import lora_linear, lora_linear_ref
from liger_kernels.ops.lora.projection import Projection
from liger_kernels.ops.loss.counted_rows import CountedTargets
from liger_kernels.ops.loss.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_ref
from liger_kernels.ops.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from liger_kernels.ops.loss.linear_log_probs import LogProbsOutput, linear_log_probs, linear_log_probs_ref
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.packing import PackedTargets, packing_weights
from liger_kernels.ops.loss.schedules.schedule import observe_logits_grad
from liger_kernels.ops.runtime.dispatch import launches, reset_launches

__all__ = [
    "CountedTargets",
    "CrossEntropyOutput",
    "DivergenceOutput",
    "ExpertsAdapter",
    "GluFormula",
    "LogProbsOutput",
    "LoraAdapter",
    "LossOptions",
    "PackedTargets",
    "Projection",
    "adapted_linears",
    "adapted_linears_ref",
    "add_rms_norm",
    "add_rms_norm_ref",
    "cross_entropy",
    "cross_entropy_ref",
    "dora_linear",
    "dora_linear_ref",
    "dora_norm",
    "dora_norm_ref",
    "experts",
    "experts_ref",
    "gated_mlp",
    "gated_mlp_ref",
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
    "linear_divergence",
    "linear_divergence_ref",
    "linear_log_probs",
    "linear_log_probs_ref",
    "lora_linear",
    "lora_linear_ref",
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
