"""A failed case names its culprit: kernel, module and pass are those that were made faulty."""

from __future__ import annotations

import pytest
import torch

from convergence import report
from convergence.case import Case, prove

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CULPRITS = [
    ("one_norm_forward", "rms_norm", "model.layers.1.input_layernorm", "forward"),
    ("norm_weight_gradient", "rms_norm", "all 5 (model.layers.0.input_layernorm, ...)", "backward"),
    ("rope_gradient", "rope", "all 2 (model.layers.0.self_attn, ...)", "backward"),
    ("one_glu_gradient", "swiglu", "model.layers.0.mlp", "backward"),
    ("cross_entropy_gradient", "cross_entropy", "lm_head", "backward"),
    ("head_weight_gradient", "linear_cross_entropy", "lm_head", "backward"),
    ("raises_in_the_backward_pass", "rms_norm", "model.layers.1.post_attention_layernorm", "backward"),
    ("wrapper_of_the_model", "LlamaForCausalLM", "the model itself", "forward"),
    ("one_foreign_norm", "LlamaRMSNorm", "model.layers.0.post_attention_layernorm", "forward"),
    ("only_together", "LlamaRMSNorm and LlamaMLP", "", ""),
    ("torchs_own_loss", "", "", ""),
]
FIRST = {
    "one_norm_forward": "loss",
    "norm_weight_gradient": "gradient of model.norm.weight",
    "rope_gradient": "gradient of model.layers.1.self_attn.q_proj.weight",
    "one_glu_gradient": "gradient of model.layers.0.post_attention_layernorm.weight",
    "cross_entropy_gradient": "gradient of the logits",
    "head_weight_gradient": "gradient of lm_head.weight",
    "raises_in_the_backward_pass": "",
}


# The last decorator varies slowest: truth and baseline are trained once for each dtype.
@pytest.mark.parametrize(("fault", "kernel", "module", "which"), CULPRITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_culprit_is_named(fault, kernel, module, which, dtype):
    record = prove(Case("llama-untied", dtype, f"tests.blame_faults:{fault}", "plain", DEVICE))
    assert record.verdict == "different"
    (row,) = record.blame
    assert (row["kernel"], row["module"], row["pass"]) == (kernel, module, which), row
    assert row["tensor"] == FIRST.get(fault, "loss")
    assert row["step"] == ("initial: plain 0" if row["tensor"] else "")
    expected = {"only_together": "no kernel alone", "torchs_own_loss": "outside of every module"}
    assert expected.get(fault, f"{kernel} alone: different") in row["note"]
    assert row["note"] in report.failure(record)
