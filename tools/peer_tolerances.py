"""``python -m tools.peer_tolerances`` writes docs/evidence/peer-tolerances.md: what tests of other packages accept."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from convergence.peers import PEERS
from convergence.tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "peer-tolerances.md"
_INTRO = """\
# What other packages' own tests accept

[Other packages, judged by the proof](peers.md) holds them to bounds that it measures in each case
([how](power.md#where-the-bounds-come-from)). This table has the numbers that they set for
themselves: the tests nearest to what is judged there. A package may have others. rtol and atol are
those of `torch.allclose`. Read on 2026-11-25, and written by `python -m tools.peer_tolerances`.
"""


class Tolerance(NamedTuple):
    """One test of a peer.

    Attributes:
        patch: whose, as ``convergence.peers`` names it.
        compared: what is compared with what.
        accepts: per dtype.
        source: the file, and in what it was read. Empty where no test was found.
    """

    patch: str
    compared: str
    accepts: str = ""
    source: str = ""


_LIGER = "sdist 0.8.5"
_CCE = "sdist 25.1.1"
_TORCH = "wheel of torch 2.13.0"
ROWS = (
    Tolerance(
        "liger_kernel",
        "a small Llama 3 with and without the patch, 32 steps of AdamW: the loss of every step",
        "float32 rtol 2e-5, atol 1e-8; bfloat16 rtol 0.05, atol 0.01",
        f"`test/convergence/{{fp32,bf16}}/test_mini_models.py`, {_LIGER}",
    ),
    Tolerance(
        "liger_kernel",
        "the same: the 20 largest log-probabilities of an evaluation",
        "float32 rtol 1e-5, atol 5e-3; bfloat16 rtol 0.01, atol 0.1",
        "the same files",
    ),
    Tolerance(
        "liger_kernel",
        "the same: every parameter after the last step (no gradient is compared)",
        "float32 rtol 1e-5, atol 5e-3; bfloat16 rtol 0.01, atol 0.01",
        "the same files",
    ),
    Tolerance(
        "liger_kernel",
        "the fused loss (mean) and its gradients with PyTorch's in the same dtype",
        "float32 rtol 5e-4, atol 1e-5; bfloat16 rtol 0.05, atol 5e-3",
        f"`test/transformers/test_fused_linear_cross_entropy.py`, {_LIGER}",
    ),
    Tolerance("cce_patch", "a patched model"),
    Tolerance(
        "cce",
        "every loss with float32: at most PyTorch's own error in the same dtype, plus",
        "float32 1e-5; float16 1e-3; bfloat16 0.01",
        f"`tests/test_cce_loss_forward.py`, {_CCE}",
    ),
    Tolerance(
        "cce",
        "both gradients, the same way",
        "float16 1e-3; bfloat16 0.01; float32 is not tested",
        f"`tests/test_cce_loss_backward.py`, {_CCE}",
    ),
    Tolerance(
        "trl",
        "log-probabilities with PyTorch's in the same dtype, and the gradients of their sum",
        "float32 rtol 1e-5, atol 1e-5; bfloat16, gradients: rtol 0.02, atol 0.02",
        "`tests/test_kernels.py`, commit 01c5a6d of huggingface/trl (its releases carry no tests)",
    ),
    Tolerance(
        "fla",
        "the fused linear loss and its gradients with its own `FusedCrossEntropyLoss`: rms of the difference over rms",
        "bfloat16 0.01; float32 is not tested",
        "`tests/modules/test_cross_entropy.py`, commit 54c4473 of fla-org/flash-linear-attention",
    ),
    Tolerance(
        "fla",
        "`RMSNorm` and its gradients with `LlamaRMSNorm`: the same ratio",
        "float32 1e-3",
        "`tests/modules/test_layernorm.py`, commit 00759f7 of the same",
    ),
    Tolerance("fla", "`GatedMLP`"),
    Tolerance(
        "torch_head",
        "`OpInfo` of `linear_cross_entropy`; where it does not widen them, the defaults of `assert_close`",
        "float32 rtol 1.3e-6, atol 1e-5; bfloat16 rtol 0.016, atol 1e-5",
        f"`torch/testing/_internal/common_methods_invocations.py`, `torch/testing/_comparison.py`, {_TORCH}",
    ),
    Tolerance(
        "torch_compile",
        "`same`, as PyTorch's benchmarks of whole models call it: rms error with float64 by the uncompiled one's",
        "2 times it, 3 times in 16 bits or below 1,000 elements, plus 1e-5; or `allclose` with rtol, atol 1e-4",
        f"`torch/_dynamo/utils.py`, {_TORCH}",
    ),
    Tolerance(
        "use_kernels",
        "ten generated tokens of a Llama 3.2 with one of two expected texts",
        "no numbers",
        "`tests/kernels/test_kernels.py`, commit 00bb9e3 of huggingface/transformers",
    ),
    Tolerance(
        "unsloth",
        "RMSNorm with `LlamaRMSNorm`: the largest element of expected less got, of the gradient of the input",
        "float16 and bfloat16 0.05",
        "`unsloth/kernels/rms_layernorm.py`, wheel 2026.10.9",
    ),
    Tolerance(
        "unsloth",
        "the chunked loss and its gradients with float64",
        "float32 loss rtol 1e-5, atol 1e-6; gradients rtol 1e-4, atol 1e-7",
        "`tests/test_chunked_ce.py`, sdist of unsloth_zoo 2026.10.9",
    ),
)


def page() -> str:
    shown = [
        (peer.name, row.compared, row.accepts or "not found", row.source or "-")
        for peer in PEERS.values()
        for row in ROWS
        if row.patch == peer.patch
    ]
    return "\n".join([_INTRO, *markdown(("what", "compared", "accepts", "read in"), shown)]) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
