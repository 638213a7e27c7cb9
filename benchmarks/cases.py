"""What is measured: each op at the shapes of the documentation, with its eager formula and its truth.

Bytes are those of a perfect kernel: each input read once, each output written once, in forward and in backward (a loss:
in one pass for both). ``flops`` counts floating-point operations, roughly where no matrix product is among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from liger_kernels import ops
from liger_kernels.ops.loss.schedules.chosen import balanced_because

Tensors = tuple[torch.Tensor, ...]

EPS = 1e-6
# Of the labels, as in instruction tuning, where the prompts' are ignored.
SHARE = 0.3
MASKED = " (30% of the labels)"
# By beta.
DIVERGENCES = {0.0: "KL", 0.5: "JSD"}
# Of a loss; float64 logits of all rows would not fit. The other ops are compared over all rows.
CHECKED_ROWS = 384


@dataclass(frozen=True)
class Site:
    """Where inputs are made, and in which dtype."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype).requires_grad_()

    def targets(self, rows: int, classes: int, masked: bool = False) -> torch.Tensor:
        targets = torch.randint(classes, (rows,), device=self.device)
        if masked:
            targets[torch.randperm(rows, device=self.device)[counted(targets) :]] = -100
        return targets

    def row_weights(self, rows: int) -> Tensors:
        """The weight of each row and their sum, as a loss of packed rows takes them."""
        weight = torch.rand(rows, device=self.device)
        return weight, weight.sum()


@dataclass(frozen=True)
class BenchmarkCase:
    """One op at one shape.

    ``inputs(rows)`` makes leaf tensors; ``ours``, ``eager`` and ``truth`` take them and return a tensor or several.
    ``eager`` is what a model runs without kernels, ``truth`` is right in float64; without one, ``eager`` is. Peers are
    found by ``formula``: cases that differ only in how ours goes about it share one, and its results.
    """

    formula: str
    shape: str
    rows: int
    inputs: Callable[[int], Tensors] = field(repr=False)
    ours: Callable[..., Any] = field(repr=False)
    eager: Callable[..., Any] = field(repr=False)
    bytes: int
    flops: int
    truth: Callable[..., Any] | None = field(default=None, repr=False)
    memory: str | None = None
    checked_rows: int | None = None

    @property
    def op(self) -> str:
        return f"{self.formula} ({self.memory})" if self.memory else self.formula

    @property
    def name(self) -> str:
        """What is asked for on the command line."""
        return self.formula.split()[0]


def counted(targets: torch.Tensor) -> int:
    """How many of masked ``targets`` count. A trainer asks the device for it at the beginning of the forward."""
    return round(SHARE * len(targets))


def of_counted(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` over hidden, weight and targets, which is told how many targets count."""
    return lambda *inputs, **options: op(*inputs, counted=counted(inputs[2]), **options)


def norm(site: Site, rows: int, hidden: int, formula: str) -> BenchmarkCase:
    return BenchmarkCase(
        f"rms_norm ({formula})",
        f"{rows}x{hidden}",
        rows,
        lambda n: (site.randn(n, hidden), site.randn(hidden)),
        partial(ops.rms_norm, eps=EPS, formula=formula),
        partial(ops.rms_norm_ref, eps=EPS, formula=formula),
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
        ops.add_rms_norm,
        ops.add_rms_norm_ref,
        8 * rows * hidden * site.dtype.itemsize,
        14 * rows * hidden,
    )


def layer_norm(site: Site, rows: int, hidden: int) -> BenchmarkCase:
    return BenchmarkCase(
        "layer_norm",
        f"{rows}x{hidden}",
        rows,
        lambda n: (site.randn(n, hidden), site.randn(hidden), site.randn(hidden)),
        partial(ops.layer_norm, eps=EPS),
        lambda x, weight, bias: F.layer_norm(x, (hidden,), weight, bias, EPS),
        5 * rows * hidden * site.dtype.itemsize,
        16 * rows * hidden,
        partial(ops.layer_norm_ref, eps=EPS),
    )


def gated_norm(site: Site, rows: int, hidden: int, groups: int = 1, **options: Any) -> BenchmarkCase:
    """As in a linear attention, whose rows are heads, or gated first in groups, as in a state-space model."""
    order = f" (gate first{f', {groups} groups' * (groups > 1)})" if options.get("gate_first") else ""
    return BenchmarkCase(
        f"gated_rms_norm{order}",
        f"{rows}x{hidden}",
        rows,
        lambda n: (site.randn(n, hidden), site.randn(n, hidden), site.randn(hidden)),
        partial(ops.gated_rms_norm, eps=EPS, groups=groups, **options),
        partial(ops.gated_rms_norm_ref, eps=EPS, groups=groups, **options),
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
        partial(ops.rope, **options),
        partial(ops.rope_ref, **options),
        4 * elements * site.dtype.itemsize,
        6 * elements,
    )


def glu(site: Site, name: str, rows: int, inner: int) -> BenchmarkCase:
    return BenchmarkCase(
        name,
        f"{rows}x{inner}",
        rows,
        lambda n: (site.randn(n, inner), site.randn(n, inner)),
        getattr(ops, name),
        getattr(ops, f"{name}_ref"),
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
        partial(ops.packed_glu, gate=gate),
        partial(ops.packed_glu_ref, gate=gate),
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

    parameters = 3 * n_experts * features * hidden
    return BenchmarkCase(
        "experts",
        f"{tokens} tokens, {choices} of {n_experts} x {features} x {hidden}",
        tokens,
        inputs,
        ops.experts,
        transformers,
        (3 * parameters + 4 * tokens * hidden) * site.dtype.itemsize,
        18 * tokens * choices * features * hidden,
        ops.experts_ref,
        checked_rows=CHECKED_ROWS,
    )


def glu_linear(site: Site, name: str, rows: int, inner: int, hidden: int) -> BenchmarkCase:
    """The unit with the linear layer behind it, whose three products are nearly all of its operations."""
    return BenchmarkCase(
        f"{name}_linear",
        f"{rows}x{inner}x{hidden}",
        rows,
        lambda n: (site.randn(n, inner), site.randn(n, inner), site.randn(hidden, inner, scale=inner**-0.5)),
        getattr(ops, f"{name}_linear"),
        getattr(ops, f"{name}_linear_ref"),
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

    adapter_bytes = 4 * rank * (inputs + outputs) * (dtype or site.dtype).itemsize
    return BenchmarkCase(
        f"lora_linear{f' ({dtype} adapter)'.replace('torch.', '') if dtype else ''}",
        f"{rows}x{inputs}x{outputs}",
        rows,
        leaves,
        of(ops.lora_linear),
        lora_chain,
        (3 * rows * inputs + 2 * rows * outputs + 2 * inputs * outputs) * site.dtype.itemsize + adapter_bytes,
        4 * rows * inputs * outputs + 6 * rows * rank * (inputs + outputs),
        of(ops.lora_linear_ref),
    )


def float_loss(logits: torch.Tensor, targets: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """The loss as models of transformers compute it; ``weights`` are those of the rows, and their sum."""
    if not weights:
        return F.cross_entropy(logits.float(), targets)
    row_weight, denominator = weights
    return (F.cross_entropy(logits.float(), targets, reduction="none") * row_weight).sum() / denominator


def linear_float_loss(hidden: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return float_loss(F.linear(hidden, weight), *rest)


def weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """``loss`` whose last two arguments are its row weights and denominator."""
    return lambda *inputs: loss(*inputs[:-2], row_weight=inputs[-2], denominator=inputs[-1])


def loss(site: Site, rows: int, vocab: int, weights: bool = False) -> BenchmarkCase:
    def inputs(n: int) -> Tensors:
        drawn = site.randn(n, vocab, scale=3), site.targets(n, vocab)
        return (*drawn, *site.row_weights(n)) if weights else drawn

    return BenchmarkCase(
        "cross_entropy (row_weight)" if weights else "cross_entropy",
        f"{rows}x{vocab}",
        rows,
        inputs,
        weighted(ops.cross_entropy) if weights else ops.cross_entropy,
        float_loss,
        2 * rows * vocab * site.dtype.itemsize,
        8 * rows * vocab,
        weighted(ops.cross_entropy_ref) if weights else ops.cross_entropy_ref,
        checked_rows=CHECKED_ROWS,
    )


def computed_again(rows: int, hidden: int, vocab: int) -> int:
    """Of how many classes the schedule "small" computes the logits twice: others stay in grad_weight's memory."""
    return vocab - vocab * hidden // (rows + hidden) // 1024 * 1024


def head(
    site: Site,
    formula: str,
    shape: tuple[int, int, int],
    ours: Callable[..., Any],
    eager: Callable[..., Any],
    truth: Callable[..., Any],
    memory: str | None,
    masked: bool,
    weights: bool = False,
) -> BenchmarkCase:
    """An op that computes its logits itself, of ``shape`` tokens x hidden size x classes."""
    rows, hidden, vocab = shape

    def inputs(n: int) -> Tensors:
        targets = site.targets(n, vocab, masked)
        leaves = site.randn(n, hidden), site.randn(vocab, hidden, scale=hidden**-0.5), targets
        return (*leaves, *site.row_weights(n)) if weights else leaves

    ours = of_counted(ours) if masked else ours
    multiplied = round(rows * SHARE) if masked else rows
    again = memory == "small" and balanced_because(site.dtype, 0.0, memory) is None
    return BenchmarkCase(
        f"{formula}{' (row_weight)' if weights else ''}{MASKED if masked else ''}",
        "x".join(map(str, shape)),
        rows,
        inputs,
        weighted(ours) if weights else ours,
        eager,
        2 * (rows + vocab) * hidden * site.dtype.itemsize,
        2 * multiplied * hidden * (3 * vocab + (computed_again(multiplied, hidden, vocab) if again else 0)),
        weighted(truth) if weights else truth,
        memory,
        CHECKED_ROWS,
    )


def linear_loss(
    site: Site,
    rows: int,
    hidden: int,
    vocab: int,
    weights: bool = False,
    memory: str | None = None,
    masked: bool = False,
) -> BenchmarkCase:
    ours, truth = partial(ops.linear_cross_entropy, memory=memory), ops.linear_cross_entropy_ref
    shape = rows, hidden, vocab
    return head(site, "linear_cross_entropy", shape, ours, linear_float_loss, truth, memory, masked, weights)


def float_log_probs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Tensors:
    """Log-probabilities and entropy as they are written in plain torch."""
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    counts = targets >= 0
    log_probs, entropy = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return log_probs.where(counts, 0), entropy.where(counts, 0)


def linear_log_probs(
    site: Site, rows: int, hidden: int, vocab: int, memory: str | None = None, masked: bool = False
) -> BenchmarkCase:
    """Log-probabilities and entropy, both with gradient."""

    def both(op: Callable[..., Any]) -> Callable[..., Tensors]:
        return lambda *tensors, **options: op(*tensors, outputs=("log_probs", "entropy"), **options)[:2]

    ours, truth = both(partial(ops.linear_log_probs, memory=memory)), both(ops.linear_log_probs_ref)
    return head(site, "linear_log_probs", (rows, hidden, vocab), ours, float_log_probs, truth, memory, masked)


def log_probs_of_ids(site: Site, rows: int, hidden: int, vocab: int, ids: int, memory: str) -> BenchmarkCase:
    """Log-probabilities of the targets and of chosen classes, both with gradient."""

    def inputs(n: int) -> Tensors:
        leaves = site.randn(n, hidden), site.randn(vocab, hidden, scale=hidden**-0.5), site.targets(n, vocab)
        return (*leaves, torch.randint(vocab, (n, ids), device=site.device))

    def both(op: Callable[..., Any]) -> Callable[..., Tensors]:
        def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> Tensors:
            out = op(hidden, weight, targets, ids=ids)
            return out.log_probs, out.id_log_probs

        return run

    def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> Tensors:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        return log_p.gather(1, targets[:, None])[:, 0], log_p.gather(1, ids)

    shape, ours = (rows, hidden, vocab), partial(ops.linear_log_probs, memory=memory)
    truth = both(ops.linear_log_probs_ref)
    plain = head(site, f"linear_log_probs ({ids} ids)", shape, both(ours), eager, truth, memory, masked=False)
    return replace(plain, inputs=inputs)


def float_divergence(beta: float) -> Callable[..., torch.Tensor]:
    """The mean divergence as it is written in plain torch."""

    def eager(h: torch.Tensor, w: torch.Tensor, teacher_h: torch.Tensor, teacher_w: torch.Tensor) -> torch.Tensor:
        log_p, log_q = (F.linear(x, weight).float().log_softmax(-1) for x, weight in ((h, w), (teacher_h, teacher_w)))
        if beta == 0.0:
            return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        of_student, of_teacher = (
            F.kl_div(log_m, log, reduction="batchmean", log_target=True) for log in (log_p, log_q)
        )
        return (1 - beta) * of_student + beta * of_teacher

    return eager


def linear_divergence(
    site: Site, rows: int, hidden: int, teacher_hidden: int, vocab: int, beta: float, memory: str
) -> BenchmarkCase:
    """The mean of the rows' divergences, as a trainer takes it; liger-kernel's heads return nothing else."""

    def inputs(n: int) -> Tensors:
        teacher = site.randn(n, teacher_hidden), site.randn(vocab, teacher_hidden, scale=teacher_hidden**-0.5)
        student = site.randn(n, hidden), site.randn(vocab, hidden, scale=hidden**-0.5)
        return (*student, *(t.detach() for t in teacher))

    def mean(op: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda *heads: op(*heads, beta).divergence.mean()

    # Of student and teacher; where logits are not kept, a mixture is one pass more.
    again = (0, 0) if memory == "fast" else (1, 1) if beta in (0.0, 1.0) else (2, 2)
    return BenchmarkCase(
        f"linear_divergence ({DIVERGENCES[beta]})",
        f"{rows}x{hidden},{teacher_hidden}x{vocab}",
        rows,
        inputs,
        mean(partial(ops.linear_divergence, memory=memory)),
        float_divergence(beta),
        2 * (rows + vocab) * (hidden + teacher_hidden) * site.dtype.itemsize,
        2 * rows * vocab * ((3 + again[0]) * hidden + (1 + again[1]) * teacher_hidden),
        mean(ops.linear_divergence_ref),
        memory,
        CHECKED_ROWS,
    )


def packing(site: Site, rows: int, longest: int) -> BenchmarkCase:
    """Targets, row weights and denominator of one packed row; forward only."""

    def inputs(n: int) -> Tensors:
        most = min(longest, n // 4)
        lengths = torch.randint(1, most + 1, (8 * n // most,))  # four times as many tokens as are taken
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[:n]
        labels = torch.randint(100, (1, n)).masked_fill(torch.rand(1, n) < 0.3, -100)
        return labels.to(site.device), positions[None].to(site.device)

    def ours(labels: torch.Tensor, positions: torch.Tensor) -> Tensors:
        found = ops.packing_weights(labels, position_ids=positions, loss_reduction="square")
        return found.row_weight, found.denominator

    def eager(labels: torch.Tensor, positions: torch.Tensor) -> Tensors:
        index = (positions[0] == 0).cumsum(0)
        goes_on = F.pad(index[1:] == index[:-1], (0, 1))
        counted = goes_on & (labels[0].roll(-1) != -100)
        counts = torch.bincount(index, weights=counted.double())[index]
        weight = torch.where(counted, counts.clamp(min=1).rsqrt(), 0.0)
        return weight.float(), weight.sum().float()

    return BenchmarkCase("packing_weights", f"{rows} tokens", rows, inputs, ours, eager, rows * 32, rows * 4)


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
