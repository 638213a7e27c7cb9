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

``slab_plan.py`` says how wide slabs are and where the logits of each lie.
"""

from __future__ import annotations

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
from liger_kernels.ops.loss.schedules.slab_plan import (
    SlabPart,
    SlabPlace,
    SlabPlan,
    _parts_in_grad_weight,
    _parts_with_a_buffer,
    _step,
    held_by_balanced,
    kept_by_fast,
    kept_by_small,
    slab_sizes,
)


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
        slabs that are computed twice, as "small". A block has few rows, so its slabs are wide. In one run, slabs of
        2048, 4096 and 8192 classes took 2.27, 1.26 and 1.08 of the time of "small" (8192 x 2048 x 128256, H200).
        """
        if all_stay:
            return cls(0, vocab, invariant=True)
        columns = 4 * slab_sizes(0, hidden_size).forward
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
        if call.teacher is None:
            self._losses(call, output)
        else:
            self._divergence(call, output)
        denominator = call.mean_denominator()
        loss = output.loss if call.options.reduction == "none" else mean(output.loss, denominator)
        return output._replace(loss=loss, saved=(denominator, output.saved[1]))

    def _losses(self, call: Call, output: Output) -> None:
        """Fill the rows of ``output``."""
        rows, buffers = output.rows, output.buffers
        carry, shard, classes, plan = None, call.shard, call.classes, self.plan_of(call)
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

    def _divergence(self, call: Call, output: Output) -> None:
        """Fill the rows of ``output`` with the divergence from a teacher's head."""
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
        of_rows = upstream.loss if call.teacher is None else upstream.loss / denominator  # "none" divides by 1
        for (first, stop, *_), logits, of_teacher in slabs:
            if call.teacher is not None:
                assert of_teacher is not None
                given = call.targets, call.options, call.teacher, stats
                backward_divergence(logits, of_teacher, *given, of_rows, *of_entropy)
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
