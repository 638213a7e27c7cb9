"""How far the adapters' gradients are from float64, with the same weights, adapters and inputs.

"model dA" and "model dB" are those of a step of the model. There the roundings of the base hide what an arm does with
its adapters. So each projection is measured by itself, too: a layer's parts get a random input and a random upstream
gradient, the same in all arms. Those of q, k, v and o then depend on no other rounding. The gradients of gate, up and
down are behind the rounding of the product between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters.job import TRUTH, AdapterJob
from benchmarks.adapters.model import autocast, batch, generator
from benchmarks.models import step
from convergence.arms.float64 import InFloat64

Gradients = dict[str, torch.Tensor | None]  # of each adapter, on the CPU, by "model" or "parts" and its name


def outcome(model: Any, job: AdapterJob) -> Gradients:
    """The gradients of a step, and those of the parts."""
    with InFloat64() if job.arm == TRUTH else nullcontext():
        step(model, batch(model.config, job.lengths[0], job), partial(autocast, job))
        gradients = dict(taken(model, "model"))
        model.zero_grad(set_to_none=True)
        for n, layer in enumerate(model.get_base_model().model.layers):
            for part in ("qkv", "o", "mlp"):
                run_part(layer, part, f"{part} of layer {n}", job)
        gradients |= taken(model, "parts")
    return gradients


def taken(model: Any, of: str) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, p in model.named_parameters():
        if p.requires_grad:
            yield f"{of}.{name[name.index('layers.') :]}", None if p.grad is None else p.grad.detach().cpu().double()


def run_part(layer: Any, part: str, name: str, job: AdapterJob) -> None:
    """Forward and backward of a part of a decoder layer."""
    attention = layer.self_attn
    width = attention.o_proj.in_features if part == "o" else attention.q_proj.in_features
    x = drawn(name, width, job).requires_grad_()
    with autocast(job):
        outputs = called(layer, part, x)
    upstream = [drawn(f"{name}, gradient {i}", y.shape[-1], job).to(y.dtype) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, upstream)


def drawn(name: str, width: int, job: AdapterJob) -> torch.Tensor:
    """Random numbers [1, tokens, width] that bfloat16 holds."""
    values = torch.empty(1, job.lengths[0], width, device=job.device).normal_(generator=generator(name, job.device))
    return values.to(torch.bfloat16).to(job.dtype)


def called(layer: Any, part: str, x: torch.Tensor) -> list[torch.Tensor]:
    """What a part makes of ``x``. Packages that write an attention anew give it ``apply_qkv`` and ``apply_o``."""
    attention = layer.self_attn
    if part == "mlp":
        return [layer.mlp(x)]
    if apply := getattr(attention, f"apply_{part}", None):
        outputs = apply(x) if inspect.ismethod(apply) else apply(attention, x)
        return [outputs] if part == "o" else list(outputs)
    if part == "o":
        return [attention.o_proj(x)]
    return [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]


def keep_truth(truth: Gradients, folder: Path) -> None:
    torch.save(truth, folder / "truth.pt")


def errors(mine: Gradients, folder: Path) -> dict[str, float]:
    """Of "model dA", "q_proj dA" and so on: the norm of the difference over the truth's, all layers together.

    Raises:
        ValueError: an adapter has no gradient, or is on one side alone.
    """
    theirs = torch.load(folder / "truth.pt", weights_only=True)
    missing = sorted({name for name, gradient in mine.items() if gradient is None} | (mine.keys() ^ theirs.keys()))
    if missing:
        raise ValueError(f"there is no gradient of {missing[0]} and {len(missing) - 1} others")
    squares: dict[str, list[float]] = {}
    for name, exact in theirs.items():
        of, *_, projection, matrix, _, _ = name.split(".")
        sums = squares.setdefault(f"{'model' if of == 'model' else projection} d{matrix[-1]}", [0.0, 0.0])
        sums[0] += float((mine[name] - exact).square().sum())
        sums[1] += float(exact.square().sum())
    return {kind: (wrong / size) ** 0.5 for kind, (wrong, size) in squares.items()}
