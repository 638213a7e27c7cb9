"""Linear cross entropy in chunks of tokens; which schedule is for what stands in linear_cross_entropy.py.

"mean" and "sum": every row's upstream gradient is the same number, so the forward already knows the gradient up to that
number. Per chunk: logits by one GEMM, then one kernel takes the loss and overwrites the logits by dloss/dlogits, then
one GEMM each for grad_hidden and grad_weight; grad_weight and grad_bias are summed over the chunks in float32. The
divergence from a teacher takes the logits of two GEMMs, and two or three kernels for its rows before the one for its
gradient. Neither 1 / denominator nor the upstream gradient is in them: in float16 they would flush most of the logits'
gradient to zero. The backward multiplies both in, in float32, with one rounding to the gradient's dtype.

"none": the upstream gradient per row is only known in the backward. The logits of the first chunk stay until then, in
the buffer that the backward needs anyway. The backward computes those of every other chunk again. Where the rows are
expected to be summed (``summed``), the forward computes the gradients as for "sum". The backward takes these if each
row's upstream gradient is one number in memory, which says that they are equal, and else computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._row_blocks import multiply_rows
from liger_kernels.ops._split_sum import SplitSum, rounded
from liger_kernels.ops.divergence.rows import backward_divergence, forward_divergence
from liger_kernels.ops.loss.mean import mean
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.rows import IdGrads, Rows, backward_rows, finish_ids, forward_rows
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


class _GradientSums(NamedTuple):
    """The gradients of one pass over the chunks, each only if it is wanted (else without elements)."""

    hidden: Tensor  # in hidden's dtype: every chunk has rows of its own
    weight: SplitSum
    bias: Tensor  # float32

    @classmethod
    def empty(cls, call: Call, wanted: Needs) -> _GradientSums:
        hidden, weight = call.hidden, call.weight
        return cls(
            call.new(wanted.hidden, *hidden.shape),
            SplitSum.empty(wanted.weight, weight.shape, weight.dtype, hidden.device),
            call.new(wanted.bias, weight.shape[0], dtype=torch.float32),
        )

    @classmethod
    def of(cls, buffers: tuple[Tensor, ...]) -> _GradientSums:
        hidden, first, second, bias = buffers
        return cls(hidden, SplitSum(first, second), bias)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return self.hidden, *self.weight, self.bias

    def add(self, call: Call, wanted: Needs, start: int, stop: int, d_logits: Tensor, invariant: bool) -> None:
        """Those of one chunk. The first one writes what later ones add to."""
        rows, keep = call.hidden[start:stop], 1.0 if start else 0.0
        if wanted.hidden:
            multiply_rows(self.hidden[start:stop], d_logits, call.weight, invariant)
        if wanted.weight:
            self.weight.add(d_logits.t(), rows, keep)
        if wanted.bias and start:
            self.bias.add_(d_logits.sum(0, dtype=torch.float32))
        elif wanted.bias:
            torch.sum(d_logits, 0, dtype=torch.float32, out=self.bias)

    def zero_without(self, tokens: int) -> None:
        if not tokens:  # no chunk writes them
            for buffer in self.buffers:
                buffer.zero_()

    def rounded(self, needs: Needs, scale: Tensor, overwrite: bool) -> Gradients:
        """The gradients times ``scale``. With ``overwrite`` they get the memory of the sums: a second tensor next to
        the float32 sum of grad_weight would raise the peak."""
        dtype = self.hidden.dtype

        def finished(wanted: bool, t: Tensor) -> Tensor:
            in_place = not wanted or (overwrite and t.dtype == dtype)
            return rounded(t, scale, t if in_place else torch.empty(t.shape, dtype=dtype, device=t.device))

        grad_weight = self.weight.rounded(scale, dtype, overwrite) if needs.weight else self.weight.first
        return finished(needs.hidden, self.hidden), grad_weight, finished(needs.bias, self.bias)


_SUMS = 4  # tensors of them


class TokenChunks(NamedTuple):
    """The schedule "balanced"."""

    chunk_size: int
    observed: bool  # whether the forward keeps the logits' gradient for an observer
    invariant: bool = False  # whether the bits of a row do not depend on the other rows
    holds: bool = False  # whether the first chunk's logits stay until the backward of "none"
    summed: bool = False  # whether the caller expects to sum the rows of "none"; of a divergence only

    def allocate(self, call: Call) -> Output:
        tokens, (vocab, _), wanted = call.hidden.shape[0], call.weight.shape, self._wanted(call)
        rows = call.empty_rows(stats=any(call.needs) and not any(wanted))
        if self._holds(call):
            d_logits = logits_buffer(call, min(self.chunk_size, tokens), vocab)
        else:
            d_logits = call.new(self.observed and any(wanted), tokens, vocab)
        saved = rows.stats if self.reads(call.options) else None
        saved = call.new(True, dtype=torch.float32) if saved is None else saved  # of a mean, the denominator
        return Output(rows.loss, rows, (saved,), (*_GradientSums.empty(call, wanted).buffers, d_logits))

    def forward(self, call: Call) -> Output:
        wanted = self._wanted(call)
        output = self.allocate(call)
        rows, *buffers, d_logits = output.rows, *output.buffers
        sums = _GradientSums.of(tuple(buffers))
        tokens = len(call.hidden)
        sums.zero_without(tokens)
        thin, classes = call.thin(wanted), slice(None)
        holds = self._holds(call)
        buffer = d_logits if holds else logits_buffer(call, min(self.chunk_size, tokens), len(call.weight))
        row_weight, largest = call.row_weight, None
        if any(wanted) and row_weight is not None and self._scales(call):  # the weights' size, too, stays out
            (row_weight,), largest = _normalised(row_weight)
        of_teacher, ones = self._of_teacher(call), None
        if call.teacher is not None and any(wanted):
            ones = torch.ones((), dtype=torch.float32, device=call.hidden.device)
        chunks = [*self._chunks(tokens)]
        for start, stop in [*chunks[1:], *chunks[:1]] if holds else chunks:  # the last one's logits stay
            added = None if thin is None else thin.added(slice(start, stop), classes)
            logits = logits_of(call.hidden[start:stop], call.weight, call.bias, buffer, added, self.invariant)
            if call.teacher is not None:
                self._divergence(call, logits, of_teacher(start, stop), start, rows, ones)
            else:
                forward_rows(
                    logits,
                    call.targets[start:stop],
                    call.class_weight,
                    None if row_weight is None else row_weight[start:stop],
                    call.options,
                    rows.chunk(start, stop),
                    grad=logits if any(wanted) else None,
                    ids=None if call.ids is None else call.ids[start:stop],
                )
            sums.add(call, wanted, start, stop, logits, self.invariant)
            if thin is not None:
                thin.add(logits, slice(start, stop), classes, self.invariant)
            if d_logits.dim() == 2 and not holds:
                d_logits[start:stop] = logits
        finish_ids(output.rows, call.ids, call.targets, call.options.ignore_index, call.classes)
        if call.options.reduction == "none":
            return output
        denominator = call.mean_denominator()
        denominator = denominator if largest is None else denominator / largest
        output = output._replace(loss=mean(rows.loss, denominator), saved=(denominator,))
        return output if thin is None else output._replace(buffers=(*output.buffers, *thin.gradients()))

    def split(self, state: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(state[:1]), tuple(state[1:6])

    def reads(self, options: LossOptions) -> bool:
        return options.reduction == "none"

    def backward(
        self,
        call: Call,
        saved: tuple[Tensor, ...],
        buffers: tuple[Tensor, ...] | None,
        upstream: Upstream,
        overwrite: bool,
    ) -> Gradients:
        scale = self._scale(call, saved[0], upstream)
        if self.reads(call.options) and (scale is None or buffers is None):
            free = buffers if overwrite else None
            held = free[_SUMS] if free is not None and self._holds(call) else None
            sums = _GradientSums.of(free[:_SUMS]) if free is not None and self.summed else None
            return self._recomputed(call, saved[0], upstream, held, sums)
        assert scale is not None
        assert buffers is not None  # only the last pass overwrites them
        d_logits, first, low = buffers[_SUMS], buffers[:_SUMS], buffers[_SUMS + 1 :]
        if current_observer() is not None and d_logits.dim() == 2:
            for start, stop in self._chunks(len(d_logits)):
                call.observe(start, d_logits[start:stop].float() * scale)
        return *_GradientSums.of(first).rounded(call.needs, scale, overwrite), *[t * scale for t in low]

    def allocate_gradients(self, call: Call, buffers: tuple[Tensor, ...]) -> Gradients:
        if self.reads(call.options):
            return new_gradients(call)
        hidden, first, second, bias, _ = buffers
        rows = first.shape[0] + (second.shape[0] if call.needs.weight else 0)
        return torch.empty_like(hidden), hidden.new_empty((rows, *first.shape[1:])), hidden.new_empty(bias.shape)

    def _recomputed(
        self, call: Call, stats: Tensor, upstream: Upstream, held: Tensor | None, sums: _GradientSums | None
    ) -> Gradients:
        """The backward of "none". It overwrites ``held``, the logits of the first chunk, if they are known, and the
        memory of ``sums``, if there is any."""
        # The upstream gradient's size stays out of the 16-bit logits' gradient here, too.
        grad_loss = upstream.loss.to(torch.float32)
        grad_loss = grad_loss if call.row_weight is None else grad_loss * call.row_weight
        grads = [grad_loss] if upstream.grad_entropy is None else [grad_loss, upstream.grad_entropy.to(torch.float32)]
        ids = call.id_grads(upstream)
        if ids is not None:
            grads += [ids.grads, ids.totals]
        grads, scale = _normalised(*grads) if self._scales(call) else (grads, stats.new_ones(()))
        if ids is not None:
            ids = IdGrads(ids.ids, *grads[-2:])
        grad_loss, grad_entropy = grads[0], None if upstream.grad_entropy is None else grads[1]
        tokens = len(call.hidden)
        buffer = logits_buffer(call, min(self.chunk_size, tokens), len(call.weight)) if held is None else held
        sums = _GradientSums.empty(call, call.needs) if sums is None else sums
        sums.zero_without(tokens)
        thin, classes = call.thin(call.needs), slice(None)
        of_teacher = self._of_teacher(call)
        for start, stop in self._chunks(tokens):
            if start or held is None:
                added = None if thin is None else thin.added(slice(start, stop), classes)
                logits = logits_of(call.hidden[start:stop], call.weight, call.bias, buffer, added, self.invariant)
            else:
                logits = held[:stop, : len(call.weight)]
            entropy = None if upstream.entropy is None else upstream.entropy[start:stop]
            of_entropy = entropy, None if grad_entropy is None else grad_entropy[start:stop]
            of_rows = stats[:, start:stop], grad_loss[start:stop]  # the row weights, too
            if call.teacher is not None:
                given = call.targets[start:stop], call.options, call.teacher
                backward_divergence(logits, of_teacher(start, stop), *given, *of_rows, *of_entropy)
            else:
                backward_rows(
                    logits,
                    call.targets[start:stop],
                    call.class_weight,
                    call.options,
                    *of_rows,
                    grad=logits,
                    entropy=of_entropy[0],
                    grad_entropy=of_entropy[1],
                    ids=None if ids is None else ids.chunk(start, stop),
                )
            if current_observer() is not None:
                call.observe(start, logits.float() * scale)
            sums.add(call, call.needs, start, stop, logits, self.invariant)
            if thin is not None:
                thin.add(logits, slice(start, stop), classes, self.invariant)
        low = () if thin is None else [t * scale for t in thin.gradients()]
        return *sums.rounded(call.needs, scale, overwrite=True), *low

    def _wanted(self, call: Call) -> Needs:
        """Which gradients the forward computes."""
        return NO_GRADIENTS if call.options.reduction == "none" and not self.summed else call.needs

    def _scale(self, call: Call, saved: Tensor, upstream: Upstream) -> Tensor | None:
        """What multiplies the gradients that the forward computed, 0-d; None if they are not those of ``upstream``."""
        grad = upstream.loss.to(torch.float32)
        if call.options.reduction != "none":
            return grad / saved
        is_sum = self.summed and upstream.grad_entropy is None and grad.stride() == (0,) and len(grad) > 0
        return grad[0] if is_sum else None

    def _holds(self, call: Call) -> bool:
        return self.holds and call.teacher is None and call.options.reduction == "none"

    def _scales(self, call: Call) -> bool:
        """Whether the gradients of rows are in units of the largest one, which is the batch's. float16 has to."""
        return not self.invariant or call.hidden.dtype == torch.float16

    def _divergence(
        self, call: Call, logits: Tensor, of_teacher: Tensor, start: int, rows: Rows, upstream: Tensor | None
    ) -> None:
        """Fill the ``rows`` of a chunk from the logits of both heads. With ``upstream``, 0-d, that times the
        divergence's gradient overwrites the student's logits."""
        stop = start + len(logits)
        rows = rows.chunk(start, stop)

        def parts(again: bool) -> list[tuple[Tensor, Tensor]]:
            return [(logits, of_teacher)]

        assert call.teacher is not None
        given = call.targets[start:stop], call.options, call.teacher
        forward_divergence(parts, *given, rows)
        if upstream is not None:
            assert rows.stats is not None
            backward_divergence(logits, of_teacher, *given, rows.stats, upstream, None, None)

    def _of_teacher(self, call: Call) -> Callable[[int, int], Tensor]:
        """The logits of a teacher's head for some rows; the next ones overwrite them."""
        teacher, shape = call.teacher, (min(self.chunk_size, len(call.hidden)), padded(len(call.weight)))
        buffer = None if teacher is None else teacher.new(*shape)

        def logits(start: int, stop: int) -> Tensor:
            assert teacher is not None
            assert buffer is not None
            return logits_of(teacher.hidden[start:stop], teacher.weight, teacher.bias, buffer)

        return logits

    def _chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        for start in range(0, tokens, self.chunk_size):
            yield start, min(start + self.chunk_size, tokens)


def _normalised(*weights: Tensor) -> tuple[list[Tensor], Tensor]:
    """``weights`` in units of the largest magnitude in them, and that, 0-d; 1 for no or only zero weights."""
    magnitudes = [weight.abs().amax() for weight in weights if weight.numel()]
    largest = torch.stack([*magnitudes, weights[0].new_zeros(())]).amax()
    largest = largest.masked_fill(largest == 0, 1.0)
    return [weight / largest for weight in weights], largest
