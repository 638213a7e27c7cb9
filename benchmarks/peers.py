"""What else computes these ops: one table for each package, formula -> arm -> a callable with our op's arguments.

An arm is named after its peer; further settings of one peer are arms of their own, ``peer-setting``. A package is
imported when its table is asked for, so that none is needed.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.case import BenchmarkCase
from benchmarks.cases import EPS
from benchmarks.loss_cases import DIVERGENCES, MASKED

Arms = dict[str, Callable[..., Any]]
LLAMA, GEMMA = "rms_norm (cast_then_scale)", "rms_norm (offset_scale_then_cast)"


def liger() -> dict[str, Arms]:
    from liger_kernel.ops import (
        LigerCrossEntropyFunction,
        LigerFusedAddRMSNormFunction,
        LigerFusedLinearCrossEntropyFunction,
        LigerFusedLinearJSDFunction,
        LigerFusedLinearScaledCrossEntropyFunction,
        LigerGELUMulFunction,
        LigerLayerNormFunction,
        LigerRMSNormFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    def head(accum_dtype: torch.dtype | None) -> Callable[..., Any]:
        # bias, class weights, ignored index, z-loss, label smoothing, reduction, softcap, return the z-loss
        middle = (None, None, -100, 0.0, 0.0, "mean", None, False)
        return lambda hidden, weight, targets: LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, targets, *middle, accum_dtype
        )[0]

    def both(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        # temperature, ignored index, tiles at a time, entropy. On Hopper it needs the package nvidia-cutlass-dsl.
        loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, 1.0, -100, 1, True)
        return -loss, entropy

    def divergence(beta: float) -> Callable[..., Any]:
        # no labels, beta
        return lambda *heads: LigerFusedLinearJSDFunction.apply(*heads, None, beta)

    return {
        LLAMA: {"liger": lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama")},
        GEMMA: {"liger": lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 1.0, "gemma")},
        "add_rms_norm": {"liger": lambda *inputs: LigerFusedAddRMSNormFunction.apply(*inputs, EPS, 0.0, "llama")},
        "layer_norm": {"liger": lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)},
        "rope": {"liger": LigerRopeFunction.apply},
        "swiglu": {"liger": LigerSiLUMulFunction.apply},
        "geglu": {"liger": LigerGELUMulFunction.apply},
        "cross_entropy": {"liger": lambda logits, targets: LigerCrossEntropyFunction.apply(logits, targets, None)[0]},
        "linear_cross_entropy": {"liger": head(None), "liger-fp32": head(torch.float32)},
        f"linear_cross_entropy{MASKED}": {"liger": head(None)},
        "linear_log_probs": {"liger": both},
        f"linear_log_probs{MASKED}": {"liger": both, "liger-counted": of_counted_rows(both)},
        **{f"linear_divergence ({name})": {"liger": divergence(beta)} for beta, name in DIVERGENCES.items()},
    }


def fla() -> dict[str, Arms]:
    from fla.modules.activations import swiglu
    from fla.modules.fused_cross_entropy import cross_entropy_loss
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.layernorm import rms_norm
    from fla.modules.norm.layernorm_gated import rmsnorm_fn
    from fla.modules.rotary import rotary_embedding

    def first(groups: int, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rmsnorm_fn(x, weight, None, gate, EPS, x.shape[-1] // groups, norm_before_gate=False)

    def head(wide: bool) -> Callable[..., Any]:
        return lambda hidden, weight, targets: fused_linear_cross_entropy_loss(
            hidden, targets, weight, accumulate_grad_in_fp32=wide
        )

    return {
        LLAMA: {"fla": lambda x, weight: rms_norm(x, weight, None, eps=EPS)},
        "add_rms_norm": {"fla": lambda x, residual, weight: rms_norm(x, weight, None, residual, EPS, True)},
        "gated_rms_norm": {"fla": lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, eps=EPS)},
        **{
            f"gated_rms_norm (gate first{', 8 groups' * (groups > 1)})": {"fla": partial(first, groups)}
            for groups in (1, 8)
        },
        "rope": {"fla": _by_tensor(rotary_embedding)},
        "swiglu": {"fla": swiglu},
        "cross_entropy": {"fla": lambda logits, targets: cross_entropy_loss(logits, targets)[0].mean()},
        "linear_cross_entropy": {"fla": head(True), "fla-bf16": head(False)},
    }


def quack() -> dict[str, Arms]:
    from quack.cross_entropy import cross_entropy
    from quack.rmsnorm import rmsnorm
    from quack.rotary import apply_rotary_emb

    def head(name: str, *middle: Any) -> Callable[..., Any]:
        def arm(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            # Its matrix products are not importable beside every version of what they are built with; the rest is.
            module = importlib.import_module("quack.linear_cross_entropy")
            return getattr(module, name)(hidden, weight, *middle, targets)

        return arm

    return {
        LLAMA: {"quack": lambda x, weight: rmsnorm(x, weight, eps=EPS)},
        GEMMA: {"quack": lambda x, weight: rmsnorm(x, weight, eps=EPS, weight_offset=1.0)},
        "add_rms_norm": {
            "quack": lambda x, residual, weight: rmsnorm(x, weight, None, residual, eps=EPS, prenorm=True)
        },
        "rope": {"quack": _by_tensor(apply_rotary_emb)},
        "cross_entropy": {"quack": cross_entropy},
        "linear_cross_entropy": {
            "quack": head("chunked_linear_cross_entropy"),
            "quack-unchunked": head("linear_cross_entropy_func", None),  # no bias
        },
    }


def cce() -> dict[str, Arms]:
    from cut_cross_entropy import linear_cross_entropy

    def exact(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, targets, filter_eps=None)  # the default skips small gradients

    return {"linear_cross_entropy": {"cce": exact}}


def trl() -> dict[str, Arms]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    try:
        importlib.import_module("trl.trainer.utils")
    except ImportError:
        # The backward asks this module, and with it all trainers and what they need, for one context manager. It
        # gathers what DeepSpeed shards, and there is nothing sharded here.
        stand_in = types.ModuleType("trl.trainer.utils")
        stand_in.maybe_gather_lm_head_ctx = lambda *parameters: nullcontext()  # type: ignore[attr-defined]
        sys.modules["trl.trainer.utils"] = stand_in

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, outputs: tuple[str, ...] = ()) -> Any:
        # no bias, temperature 1, the trainers' 32768 classes at once, no softcap, scale 1
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, outputs)

    def head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -run(hidden, weight, targets)[0].sum() / targets.numel()

    def both(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        return run(hidden, weight, targets, ("entropy",))[:2]

    def divergence(beta: float) -> Callable[..., Any]:
        def arm(hidden: torch.Tensor, weight: torch.Tensor, *teacher: torch.Tensor) -> torch.Tensor:
            heads = hidden, weight, None, *teacher, None
            return (
                importlib.import_module("trl.kernels.chunked_divergence")
                .ChunkedDivergenceFunction.apply(*heads, beta)[0]
                .mean()
            )

        return arm

    def head_of_counted(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        counts = targets != -100
        return head(hidden[counts], weight, targets[counts])

    return {
        "linear_cross_entropy": {"trl": head},
        f"linear_cross_entropy{MASKED}": {"trl": head_of_counted},
        "linear_log_probs": {"trl": both},
        f"linear_log_probs{MASKED}": {"trl": of_counted_rows(both)},
        **{f"linear_divergence ({name})": {"trl": divergence(beta)} for beta, name in DIVERGENCES.items()},
    }


def of_counted_rows(both: Callable[..., Any]) -> Callable[..., Any]:
    """``both``, given only the rows that count, as its caller has to do it."""

    def arm(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        counts = targets != -100
        found = both(hidden[counts], weight, targets[counts])
        return tuple(x.new_zeros(counts.shape).masked_scatter(counts, x) for x in found)

    return arm


PACKAGES = {package.__name__: package for package in (liger, fla, cce, quack, trl)}
PEERS = ("eager", "compile", *PACKAGES)
# The name that each is installed under.
DISTRIBUTIONS = {
    "liger": "liger-kernel",
    "fla": "fla-core",
    "cce": "cut-cross-entropy",
    "quack": "quack-kernels",
    "trl": "trl",
}


def _by_tensor(rotate: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A rotation of one [batch, seq, heads, dim] by half-width tables, as ours of two [batch, heads, seq, dim]."""

    def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tables = [table[0, :, : table.shape[-1] // 2] for table in (cos, sin)]
        return tuple(rotate(x.transpose(1, 2), *tables).transpose(1, 2) for x in (q, k))

    return rope


class Table:
    """The arms of the peers asked for; ``skipped`` says why a peer has none.

    Args:
        peers: of :data:`PEERS`.
        packages: peer -> its table; a test gives its own.
    """

    def __init__(self, peers: Iterable[str], packages: dict[str, Callable[[], dict[str, Arms]]] = PACKAGES) -> None:
        self.peers = list(peers)
        self.skipped: dict[str, str] = {}
        self._tables: dict[str, dict[str, Arms]] = {}
        for peer in self.peers:
            if peer in packages:
                try:
                    self._tables[peer] = packages[peer]()
                except ModuleNotFoundError as error:
                    self.skipped[peer] = f"skipped: {error.name} is not installed"
                except Exception as error:  # whatever a package does while it is imported, the others are measured
                    self.skipped[peer] = f"skipped: its import failed: {type(error).__name__}: {error}"

    @property
    def loaded(self) -> list[str]:
        """The peers whose package could be imported."""
        return list(self._tables)

    def arms(self, case: BenchmarkCase) -> Arms:
        """Arm -> callable, for the peers that have such an op."""
        found: Arms = {}
        for peer in self.peers:
            if peer == "eager":
                found["eager"] = case.eager
            elif peer == "compile":
                torch.compiler.reset()  # every shape is a program of its own
                found["compile"] = torch.compile(case.eager, dynamic=False)
            else:
                found |= self._tables.get(peer, {}).get(case.formula, {})
        return found
