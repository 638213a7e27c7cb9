"""Which schedule a linear head runs in. ``linear_cross_entropy.py`` says what each of them is for."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernels.ops._row_blocks import rows_of_block
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.schedules.schedule import Needs, Schedule, current_observer
from liger_kernels.ops.loss.schedules.token_chunks import TokenChunks
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs
from liger_kernels.ops.loss.vocab_parallel import VocabShard
from liger_kernels.ops.runtime.tiling import choice

# Tokens of a chunk of "fast". One larger chunk is slower than several of this size, and holds more.
FAST_CHUNK = 8192


def _chunk_of_balanced(hidden_size: int, sums: bool) -> int:
    """Tokens of a chunk. If ``sums``, every chunk reads and writes the float32 sum of grad_weight, so large chunks are
    faster. That sum is as large as the logits of 2 * hidden_size tokens. A large chunk would need too much memory next
    to the sum of a narrow head, and where there is no sum."""
    if sums and hidden_size >= 4096:
        return 4096
    return 2048 if hidden_size >= 2048 else 1024


def _chunk_of_two_heads(hidden_size: int, sums: bool) -> int:
    """Tokens of a chunk whose gradients the forward computes, from the logits of two heads: half as many as of one, or
    if ``sums``, as many as take 3/8 of the memory of the float32 sum of grad_weight in 16 bits."""
    if sums:
        return max(512, 3 * hidden_size // 8 // 128 * 128)
    return _chunk_of_balanced(hidden_size, sums=False) // 2


@choice("schedule")
def _default_schedule(
    tokens: int, hidden_size: int, dtype: torch.dtype, sums: bool, chunk: int, heads: int = 1
) -> tuple[str, int]:
    """The schedule and the chunk size if neither is given: "fast" where it needs no more memory than the smallest
    token chunks, else chunks of ``chunk`` tokens.

    Token chunks hold the logits of C tokens. In 16 bits, if ``sums``, they also hold the float32 sum of grad_weight,
    which is as large as the logits of 2 * hidden_size tokens. A compiled program holds the kept logits and their
    gradient, both, so there the limit is hidden_size tokens."""
    smallest = min(chunk, _chunk_of_balanced(hidden_size, sums=False))
    few = smallest + (0 if dtype == torch.float32 or not sums else 2 * hidden_size // heads)
    if torch.compiler.is_compiling():
        few = min(few, hidden_size)
    return "fast" if tokens <= few else "balanced", chunk


def balanced_because(dtype: torch.dtype, label_smoothing: float, memory: str | None) -> str | None:
    """Why "balanced" runs instead of ``memory``: the name of what ``memory`` does not support. None if it runs.

    Args:
        dtype: of the product. Under autocast, autocast's dtype.
    """
    if memory in ("fast", "small") and dtype == torch.float16:
        return "float16"
    if memory == "small" and label_smoothing:
        return "label smoothing"
    return None


def unsharded_because(dtype: torch.dtype, label_smoothing: float) -> str | None:
    """Why a head runs in token chunks only, and not with classes that are split over ranks. None if it can."""
    return balanced_because(dtype, label_smoothing, "small")


def choose_schedule(
    hidden: Tensor,
    vocab: int,
    options: LossOptions,
    needs: Needs,
    chunk_size: int | None,
    memory: str | None,
    shard: VocabShard | None = None,
    heads: int = 1,
    invariant: bool = False,
    summed: bool = False,
) -> tuple[str, Schedule]:
    """A name of :data:`MEMORY` and what it is here: from the arguments, their shape and dtype only, so that a result
    never depends on the state of the machine. ``heads``: how many have logits, of which the first has gradients.
    ``invariant``: one in which the bits of a row do not depend on the other rows. ``summed``: as in
    :class:`TokenChunks`."""
    tokens, hidden_size = hidden.shape
    if memory is not None and chunk_size is not None:
        raise ValueError(
            f"memory is {memory!r} and chunk_size is {chunk_size}; give one of them: a chunk size is token chunks of "
            "that size"
        )
    if shard is not None and chunk_size is not None:
        raise ValueError(
            f"chunk_size is {chunk_size} and a group is given, which goes in slabs of classes: leave it out"
        )
    per_row, compiled = options.reduction == "none", torch.compiler.is_compiling()
    summed = summed and per_row and any(needs) and shard is None and not compiled
    early = not per_row or summed  # the forward may compute the gradients
    # Without a gradient of the weight, chunks compute no product more than kept logits do.
    sums = needs.weight or not early or not needs.hidden
    if heads > 1 and early:
        chunk = _chunk_of_two_heads(hidden_size, needs.weight)
    else:
        chunk = _chunk_of_balanced(hidden_size, needs.weight and heads == 1)
    if chunk_size is not None:
        chunk = chunk_size
        memory = "fast" if tokens <= chunk else "balanced"
    elif memory is None:
        memory, chunk = _default_schedule(tokens, hidden_size, hidden.dtype, sums, chunk, heads)
    if balanced_because(hidden.dtype, options.label_smoothing, memory) is not None:
        memory = "balanced"
    if invariant:
        if chunk_size is None and needs.weight:
            chunk += rows_of_block()
        return _of_any_rows(memory, chunk, hidden_size, vocab, shard, per_row and any(needs))
    if memory == "fast" and not any(needs):  # nothing to keep logits for
        memory = "balanced"
    if memory == "fast" and tokens > FAST_CHUNK and chunk_size is None and shard is None and early:
        memory, chunk = "balanced", FAST_CHUNK  # else chunks would compute the logits again
    # A compiled program would copy grad_weight with the kept logits.
    in_grad_weight, shape = needs.weight and not compiled, (tokens, hidden_size, vocab)
    if memory == "fast":
        in_grad_weight = in_grad_weight and not options.label_smoothing and shard is None
        return memory, VocabularySlabs.fast(*shape, hidden.dtype.itemsize, in_grad_weight)
    if memory == "small" or (shard is not None and not any(needs)):
        return memory, VocabularySlabs.small(*shape, in_grad_weight)
    late = not early and any(needs) and not compiled  # gradients of which the forward knows nothing
    in_chunks = chunk_size is not None or unsharded_because(hidden.dtype, options.label_smoothing) is not None
    if shard is None and (in_chunks or not late):
        return memory, TokenChunks(chunk, current_observer() is not None, holds=late, summed=summed)
    return memory, VocabularySlabs.balanced(*shape, hidden.dtype.itemsize, in_grad_weight, heads)


def _of_any_rows(
    memory: str, chunk: int, hidden_size: int, vocab: int, shard: VocabShard | None, late: bool
) -> tuple[str, Schedule]:
    """What ``memory`` is where the number of rows may decide nothing that shows. "fast" and "balanced" have the same
    bits, with gradients and without, so that shape and dtype may still choose between these. ``late``: the gradients
    are computed in the backward. Chunks are a block longer where each adds to the sum of grad_weight: in one run, held
    chunks of 2048, 3072 and 4096 rows took 1.17, 1.12 and 1.11 of the time of the default (8192 x 2048 x 128256, H200).
    """
    if memory == "small" or shard is not None:
        return "small", VocabularySlabs.of_any_rows(hidden_size, vocab, all_stay=False)
    if memory == "fast" and late:
        return memory, VocabularySlabs.of_any_rows(hidden_size, vocab, all_stay=True)
    return "balanced", TokenChunks(chunk, current_observer() is not None, invariant=True, holds=late)
