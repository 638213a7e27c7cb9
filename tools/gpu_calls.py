"""A call of every op on a GPU, by name: what makes no host wait, and what compute-sanitizer looks at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from liger_kernels import ops
from tools.slabs import slabs_of

BF16 = torch.bfloat16


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)


def norm(formula: str) -> Any:
    return ops.rms_norm(new(96, 256), new(256), formula=formula)


def rotated() -> tuple[torch.Tensor, ...]:
    cos, sin = (torch.randn(1, 16, 64, dtype=BF16, device="cuda") for _ in range(2))
    return ops.rope(new(2, 4, 16, 64), new(2, 2, 16, 64), cos, sin)


def routed() -> torch.Tensor:
    ids = torch.randint(5, (96, 2), device="cuda")  # of 6: one that has no token
    return ops.experts(new(96, 64), ids, new(96, 2), new(6, 64, 64), new(6, 64, 32))


def adapted() -> torch.Tensor:
    adapter = ops.LoraAdapter(new(8, 256, dtype=torch.float32), new(64, 8, dtype=torch.float32))
    weight = new(64, 256)
    return ops.lora_linear(new(96, 256), lambda x: torch.nn.functional.linear(x, weight), [adapter])


def decomposed() -> torch.Tensor:
    adapter = ops.LoraAdapter(new(8, 256, dtype=torch.float32), new(64, 8, dtype=torch.float32))
    weight, magnitude = new(64, 256), new(64, dtype=torch.float32)
    norm = ops.dora_norm(weight, adapter)
    return ops.dora_linear(new(96, 256), lambda x: torch.nn.functional.linear(x, weight), adapter, magnitude, norm)


def projection(inputs: int, outputs: int) -> ops.Projection:
    adapter = ops.LoraAdapter(new(8, inputs, dtype=torch.float32), new(outputs, 8, dtype=torch.float32))
    return ops.Projection(new(outputs, inputs), None, [adapter])


def targets(rows: int = 96, vocab: int = 1000, device: str = "cuda") -> torch.Tensor:
    return torch.randint(vocab, (rows,), device=device).masked_fill_(torch.rand(rows, device=device) < 0.3, -100)


def loss(**options: Any) -> Any:
    return ops.cross_entropy(new(96, 1000), targets(), **options)


def head_loss(**options: Any) -> Any:
    return ops.linear_cross_entropy(new(96, 64), new(1000, 64), targets(), new(1000), **options)


def head_loss_in_two_slabs() -> Any:
    with slabs_of(128):
        return head_loss(memory="fast")


EXTRAS = ("token_accuracy", "predicted_tokens", "entropy", "log_probs")
CALLS: dict[str, Callable[[], Any]] = {
    **{f"rms_norm {f}": partial(norm, f) for f in ("cast_then_scale", "scale_then_cast", "offset_scale_then_cast")},
    "layer_norm": lambda: ops.layer_norm(new(96, 256), new(256), new(256)),
    "gated_rms_norm": lambda: ops.gated_rms_norm(new(96, 256), new(96, 256), new(256)),
    "gated_rms_norm first, in groups": lambda: ops.gated_rms_norm(
        new(96, 256), new(96, 256), new(256), gate_first=True, groups=4
    ),
    "add_rms_norm": lambda: ops.add_rms_norm(new(96, 256), new(96, 256), new(256)),
    "rope": rotated,
    "swiglu": lambda: ops.swiglu(new(96, 256), new(96, 256)),
    "geglu": lambda: ops.geglu(new(96, 256), new(96, 256)),
    "experts": routed,
    "packed_glu": lambda: ops.packed_glu(new(96, 256), ops.GluFormula(limit=7.0, offset=1.0, interleaved=True)),
    "swiglu_linear": lambda: ops.swiglu_linear(new(96, 256), new(96, 256), new(64, 256), new(64)),
    "geglu_linear": lambda: ops.geglu_linear(new(96, 256), new(96, 256), new(64, 256)),
    "lora_linear": adapted,
    "adapted_linears": lambda: torch.cat(
        ops.adapted_linears(new(96, 256), [projection(256, 64), projection(256, 32)]), dim=-1
    ),
    "dora_linear": decomposed,
    "gated_mlp": lambda: ops.gated_mlp(new(96, 64), projection(64, 128), projection(64, 128), projection(128, 64)),
    "cross_entropy": loss,
    "cross_entropy none, everything": lambda: loss(
        reduction="none", label_smoothing=0.1, softcap=30.0, z_loss=1e-4, extras=EXTRAS
    ),
    **{f"linear_cross_entropy {m}": partial(head_loss, memory=m) for m in ("fast", "balanced", "small")},
    "linear_cross_entropy fast, in two slabs": head_loss_in_two_slabs,
    "linear_cross_entropy none, everything": lambda: head_loss(
        reduction="none", softcap=30.0, z_loss=1e-4, extras=EXTRAS, memory="balanced"
    ),
}
