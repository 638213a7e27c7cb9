"""Honest candidates: everything that may differ between two correct runs of one model, and nothing that may not.

Each :class:`Honest` row says how a candidate differs from the baseline: which patch it runs, from which replica's
initial weights it starts (one unit in the last place off), and what is changed around it (launch shapes, chunks).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from convergence import ours
from convergence.case import DTYPES, References, references
from convergence.compare import Verdict, compare
from convergence.models import MODELS
from convergence.patches import fused_cross_entropy, fused_linear
from convergence.tolerance import REPLICAS
from convergence.train import train

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Honest:
    """One way to be honest; ``replica`` counts from 1, 0 is the baseline's own weights."""

    name: str
    patch: Callable[[Any], Any]
    replica: int = 0
    around: Context = contextlib.nullcontext


def unpatched(model: Any) -> None:
    """Changes nothing."""


def permuted(patch: Callable[[Any], Any], model: Any) -> None:
    """``patch``, with the rows of every batch in reverse order inside the backbone: sums over rows add up another
    way."""
    patch(model)
    backbone = model.get_decoder()
    forward = backbone.forward

    @functools.wraps(forward)
    def reversed_rows(**kwargs: Any) -> Any:
        rows = len(kwargs["input_ids"])
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == rows:
                kwargs[name] = value.flip(0)
        outputs = forward(**kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state.flip(0)
        return outputs

    backbone.forward = reversed_rows


def eager_attention(patch: Callable[[Any], Any], model: Any) -> None:
    """``patch``, with attention by matrix products and a softmax instead of a fused kernel."""
    model.set_attn_implementation("eager")
    patch(model)


@contextlib.contextmanager
def chunks(count: int) -> Iterator[None]:
    """The fused head takes its rows in ``count`` chunks, or in one."""
    from tests.linear_cross_entropy_checks import chunks_of

    @contextlib.contextmanager
    def in_chunks(model: Any, tokens: int) -> Iterator[None]:
        with chunks_of(-(-tokens // count)):
            yield

    with mock.patch.object(ours, "head_in_chunks", in_chunks):
        yield


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Every kernel with half as many rows in a program, in blocks of 128 columns where it goes through a row in
    blocks."""
    from liger_kernels.ops._tiling import tiled

    def halved(rows: str = "ROWS", **changes: int) -> Callable[..., dict[str, int]]:
        def shape(choose: Callable[..., dict[str, int]], *args: Any, **kwargs: Any) -> dict[str, int]:
            chosen = choose(*args, **kwargs)
            return {**chosen, rows: max(1, chosen[rows] // 2), **changes, "num_warps": 2}

        return shape

    def columns_in_blocks(choose: Any, n_rows: int, n_cols: int) -> tuple[tuple[int], int, dict[str, int]]:
        blocks = -(-n_cols // 128)
        return (-(-n_rows // 64) * blocks,), blocks, {"ROWS": 64, "BLOCK": 128, "num_warps": 2}

    with tiled(norm=halved(), rope=halved("TOKENS"), cross_entropy=halved(BLOCK=128), glu=columns_in_blocks):
        yield


def candidates(model: str) -> list[Honest]:
    """Every honest candidate of ``model``."""
    rows = []
    for patch in (fused_linear, fused_cross_entropy):
        rows += [Honest(f"{patch.__name__}, replica {r}", patch, r) for r in range(REPLICAS + 1)]
        rows += [
            Honest(f"{patch.__name__}, rows reversed", functools.partial(permuted, patch)),
            Honest(f"{patch.__name__}, small tiles", patch, around=small_tiles),
        ]
        if MODELS[model].attention == "sdpa":  # the other way would lose Gemma 2's cap, which sdpa does not know
            rows.append(Honest(f"{patch.__name__}, eager attention", functools.partial(eager_attention, patch)))
    rows += [Honest(f"fused_linear, {n} chunks", fused_linear, around=lambda n=n: chunks(n)) for n in (1, 2, 11)]
    reversed_only = functools.partial(permuted, unpatched)
    rows += [Honest(f"unpatched, rows reversed, replica {r}", reversed_only, r) for r in range(REPLICAS + 1)]
    return rows


@functools.lru_cache(maxsize=1)
def _references(model: str, dtype: str, device: str, seed: int, tf32: bool) -> References:
    with tensor_float_32(tf32):
        return references.__wrapped__(model, dtype, "hard", device, seed)


@contextlib.contextmanager
def tensor_float_32(enabled: bool) -> Iterator[None]:
    """Whether float32 matrix products of a GPU may round their operands to ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def judge(honest: Honest, model: str, dtype: str, device: str, seed: int, tf32: bool = False) -> Verdict:
    """The verdict on one honest candidate. One that starts at a replica's weights has that replica's truth."""
    reference = _references(model, dtype, device, seed, tf32)
    pairs = list(reference.pairs)
    own = pairs.pop(honest.replica)
    nudge = honest.replica - 1 if honest.replica else None
    with honest.around(), tensor_float_32(tf32):
        candidate = train(reference.run(DTYPES[dtype], torch.device(device), patch=honest.patch, nudge=nudge))
    candidate.model = None
    return compare([own, *pairs], candidate, DTYPES[dtype])
