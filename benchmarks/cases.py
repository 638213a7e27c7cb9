"""What is measured: each op at the shapes of the documentation, with its eager formula and its truth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import CHECKED_ROWS, BenchmarkCase, Site, Tensors, pair
from benchmarks.loss_cases import (
    DIVERGENCES,
    linear_divergence,
    linear_log_probs,
    linear_loss,
    log_probs_of_ids,
    loss,
    packing,
)
from liger_kernels import ops

EPS = 1e-6


def norm(site: Site, rows: int, hidden: int, formula: str) -> BenchmarkCase:
    return BenchmarkCase(
        f"rms_norm ({formula})",
        f"{rows}x{hidden}",
        rows,
        lambda n: (site.randn(n, hidden), site.randn(hidden)),
        *pair("rms_norm", eps=EPS, formula=formula),
        5 * rows * hidden * site.dtype.itemsize,
        12 * rows * hidden,
    )


def add_norm(site: Site, rows: int, hidden: int) -> BenchmarkCase:
    """Both results are used, as in a model: the sum is the next block's residual."""
    return BenchmarkCase(
        "add_rms_norm",
        f"{rows}x{hidden}",
        rows,
        lambda n: (site.randn(n, hidden), site.randn(n, hidden), site.randn(hidden)),
        *pair("add_rms_norm"),
        8 * rows * hidden * site.dtype.itemsize,
        14 * rows * hidden,
    )


def layer_norm(site: Site, rows: int, hidden: int) -> BenchmarkCase:
    ours, truth = pair("layer_norm", eps=EPS)
    return BenchmarkCase(
        "layer_norm",
        f"{rows}x{hidden}",
        rows,
        lambda n: (site.randn(n, hidden), site.randn(hidden), site.randn(hidden)),
        ours,
        lambda x, weight, bias: F.layer_norm(x, (hidden,), weight, bias, EPS),
        5 * rows * hidden * site.dtype.itemsize,
        16 * rows * hidden,
        truth,
    )


def gated_norm(site: Site, rows: int, hidden: int, groups: int = 1, **options: Any) -> BenchmarkCase:
    """As in a linear attention, whose rows are heads, or gated first in groups, as in a state-space model."""
    order = f" (gate first{f', {groups} groups' * (groups > 1)})" if options.get("gate_first") else ""
    return BenchmarkCase(
        f"gated_rms_norm{order}",
        f"{rows}x{hidden}",
        rows,
        lambda n: (site.randn(n, hidden), site.randn(n, hidden), site.randn(hidden)),
        *pair("gated_rms_norm", eps=EPS, groups=groups, **options),
        8 * rows * hidden * site.dtype.itemsize,
        30 * rows * hidden,
    )


def rope(
    site: Site, batch: int, seq: int, heads: int, kv_heads: int, dim: int, kind: str = "", **options: Any
) -> BenchmarkCase:
    """One of another kind than Llama's (``options``) has tables in float32."""

    def inputs(rows: int) -> Tensors:
        angles = torch.rand(1, rows, dim // 2, device=site.device) * 6.3
        dtype = torch.float32 if options else site.dtype
        cos, sin = (f(angles).repeat(1, 1, 2).to(dtype) for f in (torch.cos, torch.sin))
        # attention projects to [batch, seq, heads * dim] and rotates a transposed view of that
        q, k = (site.randn(batch, rows, h, dim).transpose(1, 2).detach() for h in (heads, kv_heads))
        return q.requires_grad_(), k.requires_grad_(), cos, sin

    elements = batch * seq * (heads + kv_heads) * dim
    return BenchmarkCase(
        f"rope{kind}",
        f"{batch}x{seq}, {heads}/{kv_heads} heads x {dim}",
        seq,
        inputs,
        *pair("rope", **options),
        4 * elements * site.dtype.itemsize,
        6 * elements,
    )


def glu(site: Site, name: str, rows: int, inner: int) -> BenchmarkCase:
    return BenchmarkCase(
        name,
        f"{rows}x{inner}",
        rows,
        lambda n: (site.randn(n, inner), site.randn(n, inner)),
        *pair(name),
        8 * rows * inner * site.dtype.itemsize,
        20 * rows * inner,
    )


def packed_glu(site: Site, rows: int, features: int, gate: ops.GluFormula) -> BenchmarkCase:
    """Gate and up in one tensor, as the experts of a mixture have them."""
    return BenchmarkCase(
        f"packed_glu ({gate})",
        f"{rows}x{features}",
        rows,
        lambda n: (site.randn(n, 2 * features),),
        *pair("packed_glu", gate=gate),
        8 * rows * features * site.dtype.itemsize,
        30 * rows * features,
    )


def experts(site: Site, tokens: int, hidden: int, features: int, n_experts: int, choices: int) -> BenchmarkCase:
    """Tokens at random experts. Nearly all of the operations are those of two grouped products and their gradients."""

    def inputs(n: int) -> Tensors:
        ids = torch.rand(n, n_experts, device=site.device).topk(choices).indices
        shapes = (n_experts, 2 * features, hidden), (n_experts, hidden, features)
        gate_up, down = (site.randn(*shape, scale=shape[2] ** -0.5) for shape in shapes)
        return site.randn(n, hidden), ids, site.randn(n, choices, scale=choices**-0.5), gate_up, down

    def transformers(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor) -> Any:
        from transformers.integrations.moe import grouped_mm_experts_forward

        module: Any = torch.nn.Module()
        settings = {"num_experts": n_experts, "has_gate": True, "_apply_gate": ops.packed_glu_ref}
        off = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
        vars(module).update(settings, **dict.fromkeys(off, False))
        vars(module).update(zip(("gate_up_proj", "down_proj"), parameters, strict=True))
        return grouped_mm_experts_forward(module, hidden, ids, weights)

    ours, truth = pair("experts")
    parameters = 3 * n_experts * features * hidden
    return BenchmarkCase(
        "experts",
        f"{tokens} tokens, {choices} of {n_experts} x {features} x {hidden}",
        tokens,
        inputs,
        ours,
        transformers,
        (3 * parameters + 4 * tokens * hidden) * site.dtype.itemsize,
        18 * tokens * choices * features * hidden,
        truth,
        checked_rows=CHECKED_ROWS,
    )


def glu_linear(site: Site, name: str, rows: int, inner: int, hidden: int) -> BenchmarkCase:
    """The unit with the linear layer behind it, whose three products are nearly all of its operations."""
    return BenchmarkCase(
        f"{name}_linear",
        f"{rows}x{inner}x{hidden}",
        rows,
        lambda n: (site.randn(n, inner), site.randn(n, inner), site.randn(hidden, inner, scale=inner**-0.5)),
        *pair(f"{name}_linear"),
        (6 * rows * inner + 2 * rows * hidden + 2 * hidden * inner) * site.dtype.itemsize,
        6 * rows * inner * hidden + 20 * rows * inner,
    )


def lora_chain(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """A linear layer with an adapter as PEFT computes it."""
    y = F.linear(x, weight)
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(y.dtype)


def lora(site: Site, rows: int, inputs: int, outputs: int, dtype: torch.dtype | None = None) -> BenchmarkCase:
    """A frozen layer with an adapter of rank 16 in ``dtype``, or in the layer's. The base's products are most of it."""
    rank = 16

    def leaves(n: int) -> Tensors:
        weight = site.randn(outputs, inputs, scale=inputs**-0.5).detach()
        adapter = site.randn(rank, inputs, scale=inputs**-0.5), site.randn(outputs, rank, scale=0.1)
        return site.randn(n, inputs), weight, *(p.detach().to(dtype or site.dtype).requires_grad_() for p in adapter)

    def of(op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, weight, a, b: op(x, partial(F.linear, weight=weight), [ops.LoraAdapter(a, b)])

    ours, truth = map(of, pair("lora_linear"))
    adapter_bytes = 4 * rank * (inputs + outputs) * (dtype or site.dtype).itemsize
    return BenchmarkCase(
        f"lora_linear{f' ({dtype} adapter)'.replace('torch.', '') if dtype else ''}",
        f"{rows}x{inputs}x{outputs}",
        rows,
        leaves,
        ours,
        lora_chain,
        (3 * rows * inputs + 2 * rows * outputs + 2 * inputs * outputs) * site.dtype.itemsize + adapter_bytes,
        4 * rows * inputs * outputs + 6 * rows * rank * (inputs + outputs),
        truth,
    )


def cases(site: Site) -> list[BenchmarkCase]:
    """All of them. Nothing is allocated before a case's ``inputs`` are called."""
    heads = ((8192, 4096, 128256), (8192, 2048, 262144), (32768, 4096, 128256))
    return [
        *(norm(site, *shape, "cast_then_scale") for shape in ((2048, 4096), (8192, 2048), (8192, 4096))),
        norm(site, 8192, 4096, "offset_scale_then_cast"),
        *(norm(site, *shape, "cast_then_scale") for shape in ((8192, 8192), (32768, 4096))),
        *(add_norm(site, *shape) for shape in ((2048, 4096), (8192, 4096), (32768, 4096))),
        *(layer_norm(site, *shape) for shape in ((2048, 4096), (8192, 1152), (8192, 4096), (32768, 4096))),
        gated_norm(site, 262144, 128),
        *(gated_norm(site, 8192, 8192, groups, gate_first=True) for groups in (1, 8)),
        rope(site, 4, 8192, 32, 8, 128),
        rope(site, 2, 4096, 128, 1, 64, " (DeepSeek)", pairing="interleaved_to_half_repeat", keep_dtype=True),
        rope(site, 1, 16384, 16, 16, 80, " (vision)", keep_dtype=True),
        glu(site, "swiglu", 8192, 11008),
        glu(site, "geglu", 8192, 14336),
        experts(site, 8192, 2048, 768, 128, 8),
        packed_glu(site, 65536, 768, ops.GluFormula()),
        packed_glu(site, 32768, 2880, ops.GluFormula(alpha=1.702, limit=7.0, offset=1.0, interleaved=True)),
        glu_linear(site, "swiglu", 8192, 8192, 2048),
        *[
            lora(site, 8192, *shape, dtype)
            for shape in ((4096, 4096), (4096, 14336), (14336, 4096))
            for dtype in (torch.float32, None)
        ],
        *(loss(site, 8192, vocab) for vocab in (32768, 128256, 262144)),
        loss(site, 8192, 128256, weights=True),
        *[
            linear_loss(site, *shape, memory=memory)
            for shape in heads
            for memory in (None, "fast", "balanced", "small")
        ],
        linear_loss(site, *heads[0], weights=True),
        *[linear_loss(site, *shape, masked=True) for shape in heads[:2]],
        *[
            linear_log_probs(site, *shape, memory=memory)
            for shape in (*heads[:2], (8192, 2048, 128256))
            for memory in ("fast", "balanced", "small")
        ],
        *[linear_log_probs(site, *shape, masked=True) for shape in heads[:2]],
        *[log_probs_of_ids(site, 8192, 2048, 128256, 64, memory) for memory in ("fast", "balanced", "small")],
        *[
            linear_divergence(site, 8192, 2048, 4096, 128256, beta, memory)
            for beta in DIVERGENCES
            for memory in ("fast", "balanced", "small")
        ],
        packing(site, 1 << 20, 4096),
    ]
