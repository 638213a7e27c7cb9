"""Linear cross entropy in slabs of the vocabulary. linear_cross_entropy.py says which schedule is for what.

A slab is a range of classes. The forward computes the logits of one slab after the other, for all tokens. It keeps a
few numbers a row, from which the loss follows. The backward overwrites each slab's logits by their gradient, rounded
once. One GEMM then writes the slab's rows of grad_weight, in the weight's dtype. grad_hidden is summed over the slabs
in float32.

The backward allocates grad_weight anyway. The forward allocates it early and keeps the first slab's logits there,
behind the rows of the first slab's classes. Three schedules differ in the other logits:

- "fast" keeps them all in one more buffer and computes nothing twice. It writes grad_weight last, so that the first
  rows of grad_weight can hold the sum of grad_hidden. If the first slab saves too little memory, all classes are one
  slab in that buffer, and each gradient is one GEMM. Label smoothing does the same: it sums the distances of all logits
  to the target's logit, which an early slab does not know yet.
- "balanced" keeps the logits of the last slab in such a buffer, which is as large as what token chunks would hold. The
  slabs between use the same buffer, before the last slab in the forward and after it in the backward. Their logits are
  computed twice. It runs for results of each row, and for classes that are split over ranks.
- "small" keeps no other logits. Each slab overwrites the logits of the one before: in the forward in the first rows of
  grad_weight, in the backward in the rows that are not written yet. The backward computes them again, by products of
  the same shapes. It does not support label smoothing.

A second backward pass (``retain_graph``) computes the logits again.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._row_blocks import multiply_rows
from liger_kernels.ops._split_sum import SplitSum, add_product, rounded
from liger_kernels.ops.divergence.rows import DivergenceStats, backward_divergence, forward_divergence, merged
from liger_kernels.ops.lora.low_rank import ThinProducts
from liger_kernels.ops.loss.mean import mean
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.rows import Slab, backward_rows, finish_ids, forward_rows
from liger_kernels.ops.loss.schedules.schedule import (
    NO_GRADIENTS,
    Call,
    Gradients,
    Needs,
    Output,
    Upstream,
    current_observer,
    logits_buffer,
    logits_of,
    new_gradients,
    padded,
)
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


class VocabularySlabs(NamedTuple):
    """The schedules in slabs, as five integers. :meth:`plan` makes the list of parts from them.

    Attributes:
        kept_classes: classes of the first slab, whose logits stay in grad_weight until the backward, or 0.
        held_classes: classes of the last slab, whose logits stay in a buffer of their own until the backward, or 0.
        slab: most classes of a slab between these two, whose logits need memory. 0: there is no such slab.
        backward_slab: the same if the weight has a gradient and no last slab is held.
        step: as in :class:`SlabSizes`; slabs that are narrower than it are multiples of 8 classes.
        invariant: whether the bits of a row do not depend on the other rows: products go in blocks of rows, and every
            slab between has ``slab`` classes.
    """

    kept_classes: int = 0
    held_classes: int = 0
    slab: int = 0
    backward_slab: int = 0
    step: int = 1024
    invariant: bool = False

    @property
    def _holds(self) -> bool:
        """Whether the last slab's logits are held. It may have no class, on a rank that has none."""
        return bool(self.held_classes) or not self.slab

    @classmethod
    def fast(cls, tokens: int, hidden_size: int, vocab: int, itemsize: int, in_grad_weight: bool) -> VocabularySlabs:
        kept = kept_by_fast(tokens, hidden_size, vocab, itemsize) if in_grad_weight else 0
        return cls(kept, vocab - kept)

    @classmethod
    def balanced(
        cls, tokens: int, hidden_size: int, vocab: int, itemsize: int, in_grad_weight: bool, heads: int = 1
    ) -> VocabularySlabs:
        """Slabs that need no more memory than token chunks."""
        kept = kept_by_small(tokens, hidden_size, vocab) if in_grad_weight else 0
        held = held_by_balanced(tokens, hidden_size, vocab, itemsize, in_grad_weight, heads)
        if not held:
            return cls.small(tokens, hidden_size, vocab, in_grad_weight)
        between = vocab - kept - held
        if between <= 0:
            return cls.fast(tokens, hidden_size, vocab, itemsize, in_grad_weight)
        sizes, n = slab_sizes(tokens, hidden_size), -(-between // held)
        step = _step(sizes.forward, sizes.step)
        return cls(kept, held, -(-between // (n * step)) * step)

    @classmethod
    def small(cls, tokens: int, hidden_size: int, vocab: int, in_grad_weight: bool) -> VocabularySlabs:
        sizes = slab_sizes(tokens, hidden_size)
        kept = kept_by_small(tokens, hidden_size, vocab) if in_grad_weight else 0
        return cls(kept, 0, sizes.forward, sizes.backward, sizes.step)

    @classmethod
    def of_any_rows(cls, hidden_size: int, vocab: int, all_stay: bool) -> VocabularySlabs:
        """The one whose plan is the same for any number of rows: one slab of all classes that stays, as "fast", or
        slabs that are computed twice, as "small"."""
        if all_stay:
            return cls(0, vocab, invariant=True)
        columns = slab_sizes(0, hidden_size).forward
        return cls(0, 0, columns, columns, invariant=True)

    def plan(self, tokens: int, hidden_size: int, vocab: int, itemsize: int, needs: Needs) -> SlabPlan:
        """The parts of a head of that shape; ``itemsize`` is that of its dtype in bytes."""
        return _plan(self, tokens, hidden_size, vocab, itemsize, needs)

    def plan_of(self, call: Call) -> SlabPlan:
        return _plan(self, *call.hidden.shape, len(call.weight), call.hidden.element_size(), call.needs)

    def allocate(self, call: Call) -> Output:
        tokens, (vocab, hidden_size), kept = call.hidden.shape[0], call.weight.shape, self.kept_classes
        rows = call.empty_rows(stats=any(call.needs))
        stats = call.new(False) if rows.stats is None else rows.stats
        grad_weight = call.new(bool(kept), vocab, hidden_size)
        other_logits = call.new(self._holds, tokens, padded(self.held_classes))
        buffers = grad_weight, other_logits, self._kept_of_teacher(call)
        return Output(rows.loss, rows, (call.new(True, dtype=torch.float32), stats), buffers)

    def _kept_of_teacher(self, call: Call) -> Tensor:
        """Memory for the teacher's logits of the parts that stay, one after the other."""
        if call.teacher is None or not (self.kept_classes or self._holds):
            return call.new(False)
        classes = self.kept_classes + padded(self.held_classes) * self._holds
        return call.teacher.new(len(call.hidden) * classes)

    def forward(self, call: Call) -> Output:
        output = self.allocate(call)
        rows, (_, stats), buffers = output.rows, output.saved, output.buffers
        carry, shard, classes, plan = None, call.shard, call.classes, self.plan_of(call)
        if call.teacher is not None:
            return self._divergence(call, output)
        thin = call.thin(NO_GRADIENTS)
        if not plan.whole or shard is not None:
            if "predicted_tokens" in rows.extras:
                rows.extras["predicted_tokens"].zero_()
            carry = Slab.no_class(len(call.hidden), call.hidden.device)
        for part, logits, _ in _logits_of_parts(call, plan.parts, buffers, thin=thin, invariant=self.invariant):
            slab = None if carry is None else Slab(self._first(call) + part.first, classes, carry)
            forward_rows(logits, *call.of_rows(), call.options, rows, slab=slab, ids=call.ids)
        if shard is not None and carry is not None:
            shard.merge(carry, rows.extras.get("predicted_tokens"))
            none = call.new(True, len(call.hidden), 1)[:, :0]  # what is known of the rows is in carry
            slab = Slab(classes, classes, carry)
            forward_rows(none, *call.of_rows(), call.options, rows, slab=slab)
            if rows.ids is not None:
                shard.add(rows.ids)
        finish_ids(rows, call.ids, call.targets, call.options.ignore_index, classes)
        denominator = call.mean_denominator()
        loss = rows.loss if call.options.reduction == "none" else mean(rows.loss, denominator)
        return Output(loss, rows, (denominator, stats), buffers)

    def _divergence(self, call: Call, output: Output) -> Output:
        """The forward of the divergence from a teacher's head."""
        teacher, shard, plan = call.teacher, call.shard, self.plan_of(call)
        assert teacher is not None

        def parts(again: bool) -> Iterator[tuple[Tensor, Tensor]]:
            for _, logits, of_teacher in _logits_of_parts(call, plan.parts, output.buffers, known=again, again=again):
                assert of_teacher is not None
                yield logits, of_teacher

        def merge(stats: Tensor, again: bool) -> None:
            assert shard is not None
            if again:
                shard.add(stats[DivergenceStats.MIXTURE :])
            else:
                stats.copy_(merged(shard.gathered(stats), teacher.mode))

        forward_divergence(parts, call.targets, call.options, teacher, output.rows, None if shard is None else merge)
        return output._replace(saved=(call.mean_denominator(), output.saved[1]))

    def split(self, state: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(state[:2]), tuple(state[2:5])

    def reads(self, options: LossOptions) -> bool:
        return True

    def backward(
        self,
        call: Call,
        saved: tuple[Tensor, ...],
        buffers: tuple[Tensor, ...] | None,
        upstream: Upstream,
        overwrite: bool,
    ) -> Gradients:
        plan = self.plan_of(call)
        known, thin = buffers is not None and any(part.stays for part in plan.parts), call.thin(call.needs)
        if buffers is None or not known:
            buffers = self.allocate(call).buffers
            if plan.last_stays:
                for _ in _logits_of_parts(call, plan.parts, buffers, thin=thin, invariant=self.invariant):
                    pass  # those that stay are known then
                known = True
        elif not overwrite:
            buffers = (*[t.clone() for t in buffers[:2]], buffers[2])  # nothing is written over the teacher's
        grad_weight, other_logits, of_teacher = buffers
        if not self.kept_classes:
            grad_weight = call.new(call.needs.weight, *call.weight.shape)
        buffers, how = (grad_weight, other_logits, of_teacher), {"backward": True, "known": known}
        slabs = _logits_of_parts(call, plan.in_backward(), buffers, thin=thin, invariant=self.invariant, **how)
        last = plan.grad_weight_last and call.shard is None
        gradients = self._gradients_of_kept if last else self._gradients_of_slabs
        grad_bias = call.new(call.needs.bias, len(call.weight))
        overwritten = self._overwritten(call, slabs, saved, upstream, grad_bias, thin)
        grad_hidden = gradients(call, overwritten, grad_weight)
        return grad_hidden, grad_weight, grad_bias, *(() if thin is None else thin.gradients())

    def allocate_gradients(self, call: Call, buffers: tuple[Tensor, ...]) -> Gradients:
        return new_gradients(call)

    def _first(self, call: Call) -> int:
        """The class of the weight's first row."""
        return 0 if call.shard is None else call.shard.first

    def _overwritten(
        self,
        call: Call,
        slabs: Iterable[tuple[SlabPart, Tensor, Tensor | None]],
        saved: tuple[Tensor, ...],
        upstream: Upstream,
        grad_bias: Tensor,
        thin: ThinProducts | None,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Overwrite the logits of ``slabs`` by their gradient, one slab after the other.

        Each gradient is also added to ``grad_bias``, to the adapters' sums, and shown to the observer."""
        (denominator, stats), vocab, observer = saved, len(call.weight), current_observer()
        known, ids = self.plan_of(call).whole and call.shard is None, call.id_grads(upstream)
        observed = call.new(observer is not None, len(call.hidden), vocab, dtype=torch.float32)
        of_entropy = upstream.entropy, upstream.grad_entropy
        for (first, stop, *_), logits, of_teacher in slabs:
            if call.teacher is not None:
                assert of_teacher is not None
                given = call.targets, call.options, call.teacher, stats
                backward_divergence(logits, of_teacher, *given, upstream.loss, *of_entropy)
            else:
                backward_rows(
                    logits,
                    call.targets,
                    call.class_weight,
                    call.options,
                    stats,
                    upstream.loss,
                    grad=logits,
                    denominator=denominator,
                    row_weight=call.row_weight,
                    entropy=upstream.entropy,
                    grad_entropy=upstream.grad_entropy,
                    ids=ids,
                    slab=None if known else Slab(self._first(call) + first, call.classes),
                )
            if observer is not None:
                observed[:, first:stop] = logits
            if call.needs.bias:
                torch.sum(logits, 0, out=grad_bias[first:stop])
            if thin is not None:
                thin.add(logits, slice(None), slice(first, stop), self.invariant)
            yield first, stop, logits
        if observer is not None:
            call.observe(0, observed if call.shard is None else call.shard.gather(observed))

    def _gradients_of_kept(self, call: Call, slabs: Iterator[tuple[int, int, Tensor]], grad_weight: Tensor) -> Tensor:
        """grad_hidden of "fast". ``grad_weight`` is written if it is needed."""
        hidden, weight, every = call.hidden, call.weight, list(slabs)
        grad_hidden = call.new(call.needs.hidden, *hidden.shape)
        if call.needs.hidden and len(every) == 1:
            multiply_rows(grad_hidden, every[0][2], weight, self.invariant)
        elif call.needs.hidden:
            sums = grad_weight[: self.kept_classes].view(-1).view(torch.float32)[: hidden.numel()].view(hidden.shape)
            for first, stop, d_logits in every:
                add_product(sums, d_logits, weight[first:stop], keep=1.0 if first else 0.0)
            rounded(sums, None, grad_hidden)
        if call.needs.weight:
            # In this order: the second slab's rows overlap the gradient of the first slab, whose own rows do not.
            for first, stop, d_logits in every:
                torch.mm(d_logits.t(), hidden, out=grad_weight[first:stop])
        return grad_hidden

    def _gradients_of_slabs(self, call: Call, slabs: Iterator[tuple[int, int, Tensor]], grad_weight: Tensor) -> Tensor:
        """grad_hidden of the other schedules, and of all schedules if the classes are split over ranks."""
        hidden, weight = call.hidden, call.weight
        sums = SplitSum.empty(call.needs.hidden, hidden.shape, hidden.dtype, hidden.device)
        logits, keep = None, 0.0
        if not len(weight):  # a rank without a class
            for part in sums:
                part.zero_()
        for first, stop, logits in slabs:
            if call.needs.weight:
                torch.mm(logits.t(), hidden, out=grad_weight[first:stop])
            if call.needs.hidden:
                sums.add(logits, weight[first:stop], keep, self.invariant)
            keep = 1.0
        del logits, slabs  # the slab's memory is freed before grad_hidden is rounded
        if call.shard is not None and call.needs.hidden:
            call.shard.add(*sums, invariant=self.invariant)
        if hidden.dtype == torch.float32 or not call.needs.hidden:
            return sums.first
        return sums.rounded(None, hidden.dtype, overwrite=True)


@functools.lru_cache(maxsize=256)
def _plan(slabs: VocabularySlabs, tokens: int, hidden_size: int, vocab: int, itemsize: int, needs: Needs) -> SlabPlan:
    if slabs._holds:
        return SlabPlan(_parts_with_a_buffer(slabs, vocab), grad_weight_last=not slabs.slab)
    return SlabPlan(_parts_in_grad_weight(slabs, tokens, hidden_size, vocab, itemsize, needs), grad_weight_last=False)


def _parts_with_a_buffer(slabs: VocabularySlabs, vocab: int) -> tuple[SlabPart, ...]:
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
    slabs: VocabularySlabs, tokens: int, hidden_size: int, vocab: int, itemsize: int, needs: Needs
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


def _logits_of_parts(
    call: Call,
    parts: Iterable[SlabPart],
    buffers: tuple[Tensor, ...],
    *,
    thin: ThinProducts | None = None,
    backward: bool = False,
    known: bool = False,
    again: bool = False,
    invariant: bool = False,
) -> Iterator[tuple[SlabPart, Tensor, Tensor | None]]:
    """Yield each part with its logits and the teacher's. The next part overwrites them unless they stay.

    Args:
        buffers: of the schedule's output.
        known: whether the logits that stay have been computed.
        again: whether this is the second pass of a forward.
        invariant: as in :class:`VocabularySlabs`.
    """
    grad_weight, other_logits, kept_of_teacher = buffers
    shared = None  # freed with this generator
    of_teacher = _of_teacher(call, kept_of_teacher, known)
    for part in parts:
        place = part.backward if backward else part.forward
        if again and place is SlabPlace.LAST and not part.stays:
            place = SlabPlace.SHARED  # the last part's logits lie there and stay
        if place is SlabPlace.SHARED and shared is None:
            shared = logits_buffer(call, len(call.hidden), part.stride)
        room = other_logits if shared is None or place is SlabPlace.LAST else shared
        buffer = _memory(call, part, place, grad_weight, room)
        if known and part.stays:
            yield part, buffer[:, : part.stop - part.first], of_teacher(part)
        else:
            bias = None if call.bias is None else call.bias[part.first : part.stop]
            added = None if thin is None else thin.added(slice(None), slice(part.first, part.stop))
            weight = call.weight[part.first : part.stop]
            logits = logits_of(call.hidden, weight, bias, buffer, added, invariant)
            yield part, logits, of_teacher(part)


def _of_teacher(call: Call, kept: Tensor, known: bool) -> Callable[[SlabPart], Tensor | None]:
    """A function of a part: the teacher's logits. They lie in ``kept`` if they stay; the next part overwrites the
    others."""
    teacher, tokens = call.teacher, len(call.hidden)
    if teacher is None:
        return lambda part: None
    shared: list[Tensor] = []

    def logits(part: SlabPart) -> Tensor:
        columns, classes = padded(part.stride), slice(part.first, part.stop)
        if part.stays:
            first = tokens * part.first if not part.first else len(kept) - tokens * columns
            buffer = kept[first : first + tokens * columns].view(tokens, columns)
            if known:
                return buffer[:, : part.stop - part.first]
        else:
            if not shared:
                shared.append(teacher.new(tokens * columns))
            buffer = shared[0][: tokens * columns].view(tokens, columns)
        bias = None if teacher.bias is None else teacher.bias[classes]
        return logits_of(teacher.hidden, teacher.weight[classes], bias, buffer)

    return logits


def _memory(call: Call, part: SlabPart, place: SlabPlace, grad_weight: Tensor, buffer: Tensor) -> Tensor:
    """Memory for the logits of ``part`` at ``place``, [tokens, stride]. ``buffer``: the last part's or the shared
    one."""
    tokens, stride = len(call.hidden), part.stride
    if place is SlabPlace.BEHIND:
        return _behind(call, grad_weight, part.stop, stride)
    flat = grad_weight.view(-1) if place is SlabPlace.FIRST_ROWS else buffer.view(-1)
    return flat[: tokens * stride].view(tokens, stride)


def _behind(call: Call, grad_weight: Tensor, stop: int, size: int) -> Tensor:
    """Memory for the logits of ``size`` classes in grad_weight, behind row ``stop``, at an aligned address."""
    tokens, hidden_size = call.hidden.shape
    begin = padded(stop * hidden_size)
    return grad_weight.view(-1)[begin : begin + tokens * size].view(tokens, size)
