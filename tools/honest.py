"""Honest candidates: everything that may differ between two correct runs of one model, and nothing that may not.

Each :class:`Honest` row says how a candidate differs from the baseline: which patch it runs, from which replica's
initial weights it starts (one unit in the last place off), and what is changed around it (launch shapes, chunks).
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from convergence import ours
from convergence.arms.quantities import HIDDEN, HIDDEN_GRADIENT, HIDDEN_STATES, Failure, Finding
from convergence.arms.train import train
from convergence.arms.trajectory import Trajectory
from convergence.case import DTYPES, References, more_pairs, references
from convergence.judge.arms import by_more
from convergence.judge.compare import Pair, compare
from convergence.judge.tolerance import NEAR, REPLICAS
from convergence.judge.verdict import Verdict
from convergence.models.models import MODELS
from convergence.models.rows import find
from convergence.models.scale import PROFILE, Shape
from convergence.patches import fused_cross_entropy, fused_linear, fused_linear_small

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Honest:
    """One way to be honest; ``replica`` counts from 1, 0 is the baseline's own weights. ``reversed`` says that the rows
    of every batch are in reverse order inside."""

    name: str
    patch: Callable[[Any], Any]
    replica: int = 0
    around: Context = contextlib.nullcontext
    reversed: bool = False


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
def head_tiled(**choices: Callable[..., Any]) -> Iterator[None]:
    """The fused head takes its rows as ``choices`` say, where the proof would have them in chunks."""
    from liger_kernels.ops.runtime.tiling import tiled

    as_chosen = mock.patch.object(ours, "head_in_chunks", return_value=contextlib.nullcontext())
    with as_chosen, tiled(**choices):
        yield


def chunks(count: int) -> contextlib.AbstractContextManager[None]:
    """The fused head takes its rows in ``count`` chunks, or in one."""

    def in_chunks(choose: Callable[..., Any], tokens: int, *others: Any) -> tuple[str, int]:
        return "fast" if count == 1 else "balanced", max(1, -(-tokens // count))

    return head_tiled(schedule=in_chunks)


def slabs(count: int) -> contextlib.AbstractContextManager[None]:
    """The schedule that slices the vocabulary takes ``count`` slabs for each that it would take."""

    def narrow(choose: Callable[..., Any], tokens: int, hidden_size: int) -> Any:
        sizes = choose(tokens, hidden_size)
        narrower = {name: max(1, getattr(sizes, name) // count) for name in ("forward", "backward", "step")}
        return sizes._replace(**narrower)

    return head_tiled(slabs=narrow)


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Every kernel with half as many rows in a program, and half as many lanes, in blocks of 128 columns where it goes
    through a row in blocks.

    The sums of cross entropy go through a wide row in blocks of half the size instead. Of 151,936 classes, a lane would
    add up 1,187 blocks of 128 one after another. What is less than half a unit of the sum so far is lost, always the
    same way, and no launch shape adds up so many: that is another algorithm, whose gradients are too large by parts in
    ten million, and not another order. The proof sees that.
    """
    from liger_kernels.ops.runtime.tiling import next_power_of_2, tiled

    def halved(rows: str = "ROWS", **changes: int) -> Callable[..., dict[str, int]]:
        def shape(choose: Callable[..., dict[str, int]], *args: Any, **kwargs: Any) -> dict[str, int]:
            chosen = choose(*args, **kwargs)
            warps = max(1, chosen["num_warps"] // 2)
            return {**chosen, rows: max(1, chosen[rows] // 2), **changes, "num_warps": warps}

        return shape

    def in_few_blocks(choose: Callable[..., dict[str, int]], logits: torch.Tensor, passes: int) -> dict[str, int]:
        shape = halved()(choose, logits, passes)
        return {**shape, "BLOCK": max(128, min(shape["BLOCK"] // 2, next_power_of_2(logits.shape[-1]) // 16))}

    def columns_in_blocks(choose: Any, n_rows: int, n_cols: int) -> tuple[tuple[int], int, dict[str, int]]:
        blocks = -(-n_cols // 128)
        return (-(-n_rows // 64) * blocks,), blocks, {"ROWS": 64, "BLOCK": 128, "num_warps": 2}

    with tiled(
        norm=halved(),
        rope=halved("TOKENS"),
        cross_entropy=in_few_blocks,
        glu=columns_in_blocks,
        experts=halved(BLOCK=128),
        mean=halved("BLOCK"),
    ):
        yield


def candidates(model: str, dtype: str = "float32") -> list[Honest]:
    """Every honest candidate of ``model`` in ``dtype``."""
    row = find(model)
    if isinstance(row, Shape):
        return _at_scale(row, dtype)
    rows = []
    for patch in (fused_linear, fused_cross_entropy):
        rows += [Honest(f"{patch.__name__}, replica {r}", patch, r) for r in range(REPLICAS + 1)]
        rows += [
            Honest(f"{patch.__name__}, rows reversed", functools.partial(permuted, patch), reversed=True),
            Honest(f"{patch.__name__}, small tiles", patch, around=small_tiles),
        ]
        if MODELS[model].attention == "sdpa":  # the other way would lose Gemma 2's cap, which sdpa does not know
            rows.append(Honest(f"{patch.__name__}, eager attention", functools.partial(eager_attention, patch)))
    rows += [Honest(f"fused_linear, {n} chunks", fused_linear, around=functools.partial(chunks, n)) for n in (1, 2, 11)]
    reversed_only = functools.partial(permuted, unpatched)
    rows += [
        Honest(f"unpatched, rows reversed, replica {r}", reversed_only, r, reversed=True) for r in range(REPLICAS + 1)
    ]
    return rows


def _at_scale(shape: Shape, dtype: str) -> list[Honest]:
    """One step is observed there, so the rounding of each start is one draw of the noise: what differs starts from
    different weights. References cost ten times what a candidate costs, so there are many of one seed."""
    rows = [Honest(f"fused_linear, replica {r}", fused_linear, r) for r in (0, 1, 2, 4)]
    rows += [Honest(f"fused_cross_entropy, replica {r}", fused_cross_entropy, r) for r in (0, 2, 4)]
    rows += [
        Honest(f"fused_linear, {n} chunks, replica {r}", fused_linear, r, functools.partial(chunks, n))
        for r, n in enumerate((3, 5, 11))  # at no shape what it would take by itself
    ]
    rows += [
        Honest("fused_linear, small tiles, replica 3", fused_linear, 3, small_tiles),
        Honest("fused_cross_entropy, small tiles, replica 5", fused_cross_entropy, 5, small_tiles),
    ]
    if dtype != "float16":  # where the patch would take another schedule
        rows += [Honest(f"fused_linear_small, replica {r}", fused_linear_small, r) for r in (0, 1)]
        narrow = functools.partial(slabs, 2)
        rows.append(Honest("fused_linear_small, narrow slabs, replica 4", fused_linear_small, 4, narrow))
    if shape.rows > 1:
        rows += [
            Honest(
                f"{patch.__name__}, rows reversed, replica {r}", functools.partial(permuted, patch), r, reversed=True
            )
            for r, patch in enumerate((unpatched, fused_linear, fused_cross_entropy), start=3)
        ]
    return rows


@functools.lru_cache(maxsize=1)
def _references(model: str, dtype: str, device: str, seed: int, tf32: bool) -> References:
    _references.cache_clear()  # before others are trained: at real size these are much of a GPU's memory
    profile = PROFILE if isinstance(find(model), Shape) else "hard"
    with tensor_float_32(tf32):
        return references.__wrapped__(model, dtype, profile, device, seed)


def _more(reference: References, model: str, dtype: str, device: str, tf32: bool) -> list[Pair]:
    with tensor_float_32(tf32):
        return more_pairs(reference, model, dtype, "hard", device)


@contextlib.contextmanager
def tensor_float_32(enabled: bool) -> Iterator[None]:
    """Whether float32 matrix products of a GPU may round their operands to ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextlib.contextmanager
def as_users_run(model: str) -> Iterator[None]:
    """At real size, without the deterministic operations of PyTorch that the tests ask for."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before and not find(model).is_long, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)


def put_back(candidate: Trajectory) -> None:
    """Give the rows of what was observed inside the backbone the order that every other arm has them in."""
    for quantity, by_step in candidate.values.items():
        if quantity.kind in (HIDDEN_STATES, HIDDEN_GRADIENT) and quantity != HIDDEN:
            by_step.update({step: value.flip(0) for step, value in by_step.items()})


def judge(honest: Honest, model: str, dtype: str, device: str, seed: int, tf32: bool = False) -> Verdict:
    """The verdict on one honest candidate; it fails one that raises. One that starts at a replica's weights has that
    replica's truth."""
    with as_users_run(model):
        reference = _references(model, dtype, device, seed, tf32)
        pairs = list(reference.pairs)
        own = pairs.pop(honest.replica)
        nudge = honest.replica - 1 if honest.replica else None
        raised, candidate = Verdict(), None
        try:
            with honest.around(), tensor_float_32(tf32):
                candidate = train(reference.run(DTYPES[dtype], torch.device(device), patch=honest.patch, nudge=nudge))
            candidate.model = None
            if honest.reversed:
                put_back(candidate)
        except Exception as error:  # the frames hold the model: nobody may hold them
            failure = Failure("candidate", "", Finding.RAISED, f"{type(error).__name__}: {error}")
            raised = Verdict(failures=[failure])
        if find(model).is_long:  # a patched model is a cycle, and the next arm may need all the memory there is
            gc.collect()
        if candidate is None:
            return raised
        seen, more = candidate, None
        if not find(model).is_long:
            more = functools.partial(_more, reference, model, dtype, device, tf32)
        return by_more([own, *pairs], more, lambda pairs: compare(pairs, seen, DTYPES[dtype]), NEAR)
