"""The plan of slabs: which classes each slab has, and where its logits lie. It holds numbers, no tensors."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from liger_kernels.ops.loss.schedules.schedule import Needs, padded
from liger_kernels.ops.runtime.tiling import choice

# Logits that need no memory of their own may be wider, at most by this factor. 8192 x 2048 x 262144 on an H200:
# factor   1     2     4     8
# ms       58.4  54.8  54.9  54.5
WIDER = 8


class SlabSizes(NamedTuple):
    """How wide slabs are.

    Attributes:
        forward: classes of a slab of "small" whose logits need memory of their own.
        backward: the same while grad_weight exists, too.
        step: widths are multiples of it, so that a product nearly fills whole waves of an H200's multiprocessors.
        worth: bytes that a first slab must save; otherwise "fast" has one slab, which is faster. H200, bfloat16:

                shape                   one slab   two slabs   saved
                8192 x 4096 x 128256    38.5 ms    39.1 ms     656 MiB
                8192 x 2048 x 262144    41.7       41.4        816
                8192 x 2048 x 128256    20.2       20.7        400
                2048 x 4096 x 128256    9.9        10.7        332
                512 x 2048 x 128256     2.0        2.5         100
        chunk: "balanced" in slabs needs no more memory than chunks of that many tokens.
    """

    forward: int
    backward: int
    step: int = 1024
    worth: int = 2**29
    chunk: int = 1024


@choice("slabs")
def slab_sizes(tokens: int, hidden_size: int) -> SlabSizes:
    """Every slab reads and writes the float32 grad_hidden once. Wider slabs do so less often, but their logits need
    more memory. While grad_weight exists, they have at most 64 MiB in 16 bits, or 1024 classes if that is more."""
    columns = max(2048, -(-hidden_size // 256) * 256)
    return SlabSizes(columns, min(columns, max(1024, 2**25 // max(tokens, 1) // 1024 * 1024)))


def _fit(tokens: int, hidden_size: int, classes: int, step: int) -> int:
    """The largest slab at the start of the last ``classes`` whose logits fit into grad_weight, behind its own rows."""
    return max(0, (classes * hidden_size - step) // (tokens + hidden_size) // step * step)


def kept_by_fast(tokens: int, hidden_size: int, vocab: int, itemsize: int) -> int:
    """Classes of the first slab of "fast". Its rows of grad_weight hold the float32 sum of grad_hidden. 0 if it would
    save too little memory."""
    sizes = slab_sizes(tokens, hidden_size)
    size = _fit(tokens, hidden_size, vocab, _step(sizes.forward, sizes.step))
    return size if size and tokens * size * itemsize >= sizes.worth and size * itemsize >= 4 * tokens else 0


def kept_by_small(tokens: int, hidden_size: int, vocab: int) -> int:
    """Classes of the first slab of "small": as many as fit, because it is not computed twice."""
    sizes = slab_sizes(tokens, hidden_size)
    size = _fit(tokens, hidden_size, vocab, _step(sizes.backward, sizes.step))
    return size if size > sizes.backward else 0


def held_by_balanced(
    tokens: int, hidden_size: int, vocab: int, itemsize: int, in_grad_weight: bool, heads: int = 1
) -> int:
    """Classes of the last slab of "balanced", whose logits fit into what token chunks hold beyond the gradients.

    Token chunks hold the logits of one chunk. In 16 bits they also hold the second half of the float32 sum of
    grad_weight, less that of grad_hidden, which slabs hold. 0 if a slab of "small" is as wide."""
    sizes = slab_sizes(tokens, hidden_size)
    spared = itemsize * vocab * sizes.chunk
    if itemsize < 4:
        spared += 2 * hidden_size * (vocab * in_grad_weight - tokens) // heads
    step = _step(sizes.forward, sizes.step)
    held = spared // (itemsize * max(tokens, 1)) // step * step
    return held if held > sizes.forward else 0


def _step(columns: int, step: int) -> int:
    return padded(min(columns, step))


class SlabPlace(enum.Enum):
    """Where the logits of a part lie."""

    BEHIND = "behind its rows of grad_weight"
    FIRST_ROWS = "in the first rows of grad_weight"
    LAST = "in the buffer of the last part"
    SHARED = "in a buffer that the next part overwrites"


class SlabPart(NamedTuple):
    """A range of classes, whose logits are computed by one product.

    Attributes:
        first: the first class, counted from the weight's first row.
        stop: the last class + 1.
        stride: the columns of the memory.
        forward: where the logits lie in the forward.
        backward: where they lie in the backward.
        stays: whether the logits are kept until the backward. Otherwise the backward computes them again.
    """

    first: int
    stop: int
    stride: int
    forward: SlabPlace
    backward: SlabPlace
    stays: bool


class SlabPlan(NamedTuple):
    """The parts of the vocabulary, and where their logits lie. ``print`` shows it.

    Attributes:
        parts: in the order of the forward.
        grad_weight_last: whether grad_weight is written after grad_hidden is summed. All logits stay then, and the
            first part's rows of grad_weight are free for the sum ("fast").
    """

    parts: tuple[SlabPart, ...]
    grad_weight_last: bool

    @property
    def whole(self) -> bool:
        """Whether there is one part, with all classes, and it stays."""
        return len(self.parts) == 1 and self.parts[0].stays

    @property
    def last_stays(self) -> bool:
        """Whether the last part stays. It may have no class, on a rank that has none."""
        return bool(self.parts) and self.parts[-1].stays

    def in_backward(self) -> list[SlabPart]:
        """The parts in the order of the backward: those that stay come first, because the others overwrite them."""
        return sorted(self.parts, key=lambda part: not part.stays)

    def __str__(self) -> str:
        lines = ["grad_weight is written last" if self.grad_weight_last else "each part writes its rows of grad_weight"]
        for part in self.parts:
            then = "stays" if part.stays else f"computed again {part.backward.value}"
            lines.append(f"classes {part.first} to {part.stop}, stride {part.stride}: {part.forward.value}, {then}")
        return "\n".join(lines)


class SlabNumbers(Protocol):
    """The integers of :class:`VocabularySlabs`, which says what each of them is."""

    @property
    def kept_classes(self) -> int: ...

    @property
    def held_classes(self) -> int: ...

    @property
    def slab(self) -> int: ...

    @property
    def backward_slab(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def invariant(self) -> bool: ...


def _parts_with_a_buffer(slabs: SlabNumbers, vocab: int) -> tuple[SlabPart, ...]:
    """The parts of "fast" and "balanced". The parts between use the last part's buffer."""
    kept, last = slabs.kept_classes, vocab - slabs.held_classes
    first = [SlabPart(0, kept, kept, SlabPlace.BEHIND, SlabPlace.BEHIND, stays=True)] if kept else []
    between = [
        SlabPart(begin, min(begin + slabs.slab, last), slabs.slab, SlabPlace.LAST, SlabPlace.LAST, stays=False)
        for begin in range(kept, last, slabs.slab or 1)
    ]
    return (
        *first,
        *between,
        SlabPart(last, vocab, padded(slabs.held_classes), SlabPlace.LAST, SlabPlace.LAST, stays=True),
    )


def _parts_in_grad_weight(
    slabs: SlabNumbers, tokens: int, hidden_size: int, vocab: int, itemsize: int, needs: Needs
) -> tuple[SlabPart, ...]:
    """The parts of "small".

    A part is as wide in the forward as in the backward, because products of one shape have the same bits. The loss and
    the gradient then see the same logits. Otherwise, if one class has nearly all of the softmax, the gradient is wrong
    by the rounding of the logit itself: by 0.25 for a logit of 100 in bfloat16.

    In the backward every part writes its rows of grad_weight. The rows behind these hold the part's logits, while more
    than ``backward_slab`` classes fit there. Such parts need no memory, and wider parts read grad_hidden less often.
    """
    kept, columns = slabs.kept_classes, slabs.backward_slab
    if slabs.invariant:
        return tuple(
            SlabPart(first, min(first + columns, vocab), columns, SlabPlace.SHARED, SlabPlace.SHARED, stays=False)
            for first in range(0, vocab, columns)
        )
    if not needs.weight:
        columns = slabs.slab if any(needs) else 2 * slabs.slab  # without a gradient, little else is held
    step = _step(columns, slabs.step)
    # The forward has the first part's rows, or what it may allocate before grad_weight exists. It may also use as much
    # as the backward needs for the float32 sum of grad_hidden. 32768 x 4096 x 128256 on an H200:
    # without the latter   112 slabs   223 ms
    # with it               37         205
    room = kept * hidden_size // max(tokens, 1) if kept else 2 * slabs.slab
    room = max(room, needs.hidden * 4 * hidden_size // itemsize)
    widest = min(WIDER * columns, room // step * step)
    parts: list[SlabPart] = []
    first, forward = 0, SlabPlace.FIRST_ROWS  # the backward writes these rows
    while first < vocab:
        stays = bool(kept) and not first
        size = _fit(tokens, hidden_size, vocab - first, step) if needs.weight else 0
        size = size if stays else min(widest, size)
        narrow = size <= columns
        stop, stride = (min(first + columns, vocab), padded(min(columns, vocab))) if narrow else (first + size, size)
        if not stays and kept * hidden_size < tokens * stride:
            forward = SlabPlace.SHARED  # and for the parts behind it: none of them is wider
        backward = SlabPlace.SHARED if narrow else SlabPlace.BEHIND
        parts.append(SlabPart(first, stop, stride, SlabPlace.BEHIND if stays else forward, backward, stays))
        first = stop
    return tuple(parts)
