"""What all schedules of linear cross entropy share: a call's arguments, the logits' buffer, and the observer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_kernels.ops._row_blocks import by_rows
from liger_kernels.ops.divergence.rows import Teacher
from liger_kernels.ops.lora.low_rank import LowRank, ThinProducts
from liger_kernels.ops.loss.counted_rows import CountedRows
from liger_kernels.ops.loss.mean import mean_denominator
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.rows import IdGrads, Rows, id_grads
from liger_kernels.ops.loss.vocab_parallel import VocabShard, classes_of
from liger_kernels.ops.runtime.ahead import foresees
from liger_kernels.ops.runtime.arguments import checked, describe

Observer = Callable[[int, Tensor], None]

# A plain global, not a context variable: the backward of a CUDA tensor runs in autograd's own thread.
_observer: Observer | None = None


@checked
@contextlib.contextmanager
def observe_logits_grad(observer: Observer) -> Iterator[None]:
    """Inside, every backward of :func:`linear_cross_entropy` calls ``observer(start_row, grad)`` for each chunk of
    rows, in order. ``grad`` is the float32 [rows, vocab] gradient of the head's raw output hidden @ weight^T + bias. If
    only the counted rows are multiplied, ``grad`` has all rows, and the rows outside the chunk are zero. The gradient
    is then the sum over all calls.

    The observer must be installed around the forward and the backward. It changes neither the schedule nor any computed
    number, but it costs memory for tokens x vocab numbers. The observer may keep ``grad``.
    """
    global _observer
    before = _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = before


def current_observer() -> Observer | None:
    """The observer, or None in a backward that only foresees its launches: such gradients have no numbers."""
    return None if foresees() else _observer


class Needs(NamedTuple):
    """The tensors that need a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    z: bool = False  # hidden @ a^T of the adapters
    b: bool = False


NO_GRADIENTS = Needs(hidden=False, weight=False, bias=False)


class Packed(NamedTuple):
    """A weight that is no matrix, and the function that makes a matrix of it."""

    weight: Tensor
    dense: Callable[[Tensor], Tensor]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        matrix: object = self.dense(self.weight)
        if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
            raise TypeError(
                f"dense returned {describe(matrix)}; it must return a matrix [vocab, hidden size] of floats"
            )
        return matrix.to(dtype)


class Call(NamedTuple):
    """The arguments of a call, checked. In a backward, tensors that the backward does not read may be None."""

    hidden: Tensor  # [tokens, hidden size]
    weight: Tensor  # [vocab, hidden size]
    bias: Tensor | None  # [vocab]
    targets: Tensor  # [tokens]
    class_weight: Tensor | None  # [classes], float32
    row_weight: Tensor | None  # [tokens], float32
    denominator: Tensor | None  # 0-d
    options: LossOptions
    needs: Needs
    taken: CountedRows | None = None  # the caller's rows that these are, if not all
    shard: VocabShard | None = None  # the classes that the weight has, if not all
    low: LowRank | None = None  # the adapters' part of the logits
    packed: Packed | None = None  # the tensor that the weight was made of
    ids: Tensor | None = None  # [tokens, K]: the classes whose log-probabilities are asked for, -1 for none
    teacher: Teacher | None = None  # the loss is the divergence from this head; every target is 0 or ignore_index then

    def tensors(self) -> tuple[Tensor | None, ...]:
        tensors: tuple[Any, ...] = (*self,)[:_FIRST]  # Dynamo of torch 2.8 takes no slice of a named tuple
        of_teacher = (None, None, None) if self.teacher is None else (*self.teacher,)[:_OF_TEACHER]
        return *tensors, self.ids, *of_teacher

    def for_backward(self, schedule: Schedule) -> tuple[Tensor | None, ...]:
        """:meth:`tensors`, with None for every tensor that the backward does not read. The denominator is always None,
        because the caller may fill it again. A packed weight replaces its matrix."""
        if not schedule.reads(self.options):
            return (None,) * TENSORS
        weight = self.weight if self.packed is None else self.packed.weight
        return self._replace(denominator=None, weight=weight).tensors()

    def thin(self, needs: Needs) -> ThinProducts | None:
        """The adapters' products in a pass over the logits, or None without adapters."""
        return None if self.low is None else ThinProducts(self.low, self.hidden.dtype, needs.z, needs.b)

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor | None],
        options: LossOptions,
        needs: Needs,
        teacher: Sequence[float] | None = None,
    ) -> Call:
        """The call whose :meth:`tensors` these are; ``teacher`` has the numbers of its teacher."""
        fields: Any = *tensors[:_FIRST], options, needs
        rest = tensors[_FIRST:]
        known = None if teacher is None else Teacher.of_numbers(rest[1:], teacher)
        return cls(*fields)._replace(ids=rest[0] if rest else None, teacher=known)

    def observe(self, start: int, grad: Tensor) -> None:
        """Hand the float32 gradient of the logits from row ``start`` on to the observer."""
        observer = current_observer()
        if observer is None:
            return
        if self.taken is None or self.taken.rows is None:
            observer(start, grad)
        else:
            rows = self.taken.rows[start : start + len(grad)]
            observer(0, grad.new_zeros((self.taken.of, grad.shape[1])).index_copy_(0, rows, grad))

    def mean_denominator(self) -> Tensor:
        """The divisor of the sum of the rows' losses, 0-d float32."""
        if self.options.reduction != "mean":
            return torch.ones((), dtype=torch.float32, device=self.hidden.device)
        weights = self.class_weight, self.row_weight, self.denominator
        return mean_denominator(self.targets, *weights, self.options.ignore_index, self.classes)

    @property
    def classes(self) -> int:
        """The number of classes on all ranks."""
        return classes_of(self.weight, self.shard)

    def of_rows(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """targets, class_weight and row_weight."""
        return self.targets, self.class_weight, self.row_weight

    def empty_rows(self, stats: bool) -> Rows:
        """Empty memory for the numbers that the forward writes for each row."""
        if self.teacher is not None:
            return self.teacher.empty_rows(self.hidden.shape[0], self.hidden.device, self.options)
        n_ids = 0 if self.ids is None else self.ids.shape[1]
        return Rows.empty(self.hidden.shape[0], self.hidden.device, self.options, stats, n_ids)

    def id_grads(self, upstream: Upstream) -> IdGrads | None:
        """The gradients that the backward adds for the chosen classes."""
        if self.ids is None or upstream.ids is None:
            return None
        return id_grads(self.ids, self.targets, upstream.ids, self.options.ignore_index, self.classes)

    def new(self, wanted: bool, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor, without elements unless ``wanted``, by default of hidden's dtype."""
        return torch.empty(shape if wanted else (0,), dtype=dtype or self.hidden.dtype, device=self.hidden.device)


_FIRST, _OF_TEACHER = 7, 3  # fields of a call and of a teacher that are tensors
TENSORS = _FIRST + 1 + _OF_TEACHER  # of a call


class Output(NamedTuple):
    """The result of a schedule's forward."""

    loss: Tensor  # float32, 0-d or [tokens]
    rows: Rows
    saved: tuple[Tensor, ...]  # for the backward, in addition to the arguments
    buffers: tuple[Tensor, ...]  # for the backward, which may overwrite them

    def fake(self, reduction: str) -> Output:
        """The output of :meth:`Schedule.allocate`, with the loss after ``reduction``."""
        return self if reduction == "none" else self._replace(loss=self.loss.new_empty(()))


class Upstream(NamedTuple):
    """The gradients that come into a backward."""

    loss: Tensor  # the gradient of the loss, 0-d or [tokens]
    entropy: Tensor | None = None  # the rows' entropy, [tokens]
    grad_entropy: Tensor | None = None  # [tokens]
    ids: Tensor | None = None  # the gradient of the chosen classes' log-probabilities, [tokens, K]


# The gradients of hidden, weight and bias, then those of z and b if there are adapters. A gradient that is not needed
# has no elements.
Gradients = tuple[Tensor, ...]


class Schedule(Protocol):
    """A schedule fixes the order of the products, and the tensors that stay in memory between forward and backward.

    A schedule is a NamedTuple of ints, because a ``torch.library`` operator accepts lists of ints.
    """

    def allocate(self, call: Call) -> Output:
        """Everything that :meth:`forward` returns, uninitialised. With fake tensors it gives shapes and dtypes."""

    def forward(self, call: Call) -> Output: ...

    def split(self, state: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Split a flat ``state`` into the ``saved`` and ``buffers`` of an output. Tensors behind them are ignored."""

    def reads(self, options: LossOptions) -> bool:
        """Whether the backward reads the arguments of the call."""

    def backward(
        self,
        call: Call,
        saved: tuple[Tensor, ...],
        buffers: tuple[Tensor, ...] | None,
        upstream: Upstream,
        overwrite: bool,
    ) -> Gradients:
        """The gradients of the arguments.

        Args:
            buffers: the buffers of the forward, or None if an earlier pass overwrote them.
            overwrite: whether this pass may overwrite the ``buffers`` and return them.
        """

    def allocate_gradients(self, call: Call, buffers: tuple[Tensor, ...]) -> Gradients:
        """Everything that :meth:`backward` returns, uninitialised."""


def new_gradients(call: Call) -> Gradients:
    """Uninitialised gradients of the arguments."""
    hidden, weight, needs = call.hidden, call.weight, call.needs
    return (
        call.new(needs.hidden, *hidden.shape),
        call.new(needs.weight, *weight.shape),
        call.new(needs.bias, weight.shape[0]),
    )


def padded(vocab: int) -> int:
    """The length of a row of logits with padding. Tensor cores want rows that begin at multiples of 16 bytes."""
    return -(-vocab // 8) * 8


def logits_buffer(call: Call, rows: int, classes: int) -> Tensor:
    """[rows, classes with padding], uninitialised."""
    return call.new(True, rows, padded(classes))


def logits_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    buffer: Tensor,
    added: tuple[Tensor, Tensor] | None = None,
    invariant: bool = False,
) -> Tensor:
    """The logits [rows, vocab], in ``buffer``. They include the product of ``added``, [rows, ranks] and [vocab, ranks].
    With ``invariant``, the bits of a row do not depend on the other rows."""

    # Every GEMM of the schedules is given its ``out``, which also keeps autocast from casting its operands again.
    def product(out: Tensor, hidden: Tensor, *zs: Tensor) -> None:
        first = bias
        for z in zs:
            first = torch.mm(z, b.t(), out=out) if bias is None else torch.addmm(bias, z, b.t(), out=out)
        if first is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(first, hidden, weight.t(), out=out)

    zs, b = ((), weight) if added is None else (added[:1], added[1])
    out = buffer[: len(hidden), : len(weight)]
    by_rows(invariant, product, out, hidden, *zs)
    return out
