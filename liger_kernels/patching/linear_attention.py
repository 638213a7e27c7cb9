"""Linear attention that carries a state along a row: who computes it, and whether packed samples stay apart in it.

No kernel of this package computes it. A layer has two parts, each by the name of the function that its forward calls:
transformers takes the function of another package where that is installed, and one in plain torch otherwise. Each
carries something from one sample of a packed row to the next, unless it is told where samples begin. No position and
no attention mask tells it.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from torch import nn

from liger_kernels.patching.reads import reads_of
from liger_kernels.patching.report import Left


class _Part(NamedTuple):
    functions: frozenset[str]  # any of them is named in the forward
    what: str
    package: str  # as it is imported
    distribution: str  # as it is installed
    argument: str  # of the model's forward, that tells the package's function where samples begin


_PARTS = (
    _Part(
        frozenset({"chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"}),
        "gated delta rule",
        "fla",
        "flash-linear-attention",
        "cu_seq_lens_q",
    ),
    _Part(frozenset({"causal_conv1d_fn"}), "causal convolution", "causal_conv1d", "causal-conv1d", "seq_idx"),
)


def linear_attention(model: nn.Module) -> list[Left]:
    """The gated delta rules of ``model`` and their convolutions, and who computes each."""
    found: list[Left] = []
    names: dict[type, set[str]] = {}
    for path, module in model.named_modules():
        cls = type(module)
        if cls not in names:
            forward = getattr(cls, "forward", None)  # a class of TorchScript has none
            names[cls] = set() if forward is None else reads_of([forward], cls).names
        if names[cls] & _PARTS[0].functions:
            parts = [part for part in _PARTS if names[cls] & part.functions]
            found += [Left(path, f"{cls.__name__}: {part.what}", _who(part)) for part in parts]
    return found


def _who(part: _Part) -> str:
    if importlib.util.find_spec(part.package) is None:
        return (
            f"plain torch, because {part.distribution} is not installed; what it carries LEAKS from one sample of a "
            "packed row to the next"
        )
    return f"{part.distribution}; samples of a packed row stay apart only with {part.argument} in the model's forward"
