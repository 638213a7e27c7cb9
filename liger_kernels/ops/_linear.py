"""What the schedules of the linear cross entropy share: a call's arguments, the logits' buffer, the observer, and
float32 sums that are rounded in their own memory."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._cross_entropy_rows import Rows
from liger_kernels.ops._loss_options import LossOptions
from liger_kernels.ops._mean import mean_denominator
from liger_kernels.ops._runtime import INTERPRET, cdiv, launch, next_power_of_2, tl, triton

Observer = Callable[[int, Tensor], None]

# A plain global, not a context variable: the backward of a CUDA tensor runs in autograd's own thread.
_observer: Observer | None = None


@contextlib.contextmanager
def observe_logits_grad(observer: Observer) -> Iterator[None]:
    """While installed, every backward of :func:`linear_cross_entropy` calls ``observer(start_row, grad)``, chunk by
    chunk in the order of the rows, with the float32 [rows, vocab] gradient of the head's raw output
    hidden @ weight^T + bias.

    It must be installed around the forward and the backward. It changes neither the schedule nor any computed number;
    it costs tokens x vocab memory. ``grad`` is the observer's to keep.
    """
    global _observer
    before = _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = before


def current_observer() -> Observer | None:
    return _observer


class Call(NamedTuple):
    """The arguments that every schedule's operator begins with, in the order of :data:`ARGUMENTS`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weight: Tensor | None
    row_weight: Tensor | None
    denominator: Tensor | None
    numbers: list[float]
    reduction: str
    extras: str
    needs_hidden: bool
    needs_weight: bool
    needs_bias: bool

    @property
    def options(self) -> LossOptions:
        return LossOptions.of_numbers(self.numbers, self.reduction, self.extras)

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        """Whether hidden, weight and bias need a gradient."""
        return self.needs_hidden, self.needs_weight, self.needs_bias

    def rows(self, stats: bool) -> Rows:
        return Rows.empty(len(self.hidden), self.hidden.device, self.options, stats)

    def divisor(self) -> Tensor:
        """What the sum of the rows' losses is divided by, 0-d float32."""
        if self.reduction != "mean":
            return torch.ones((), dtype=torch.float32, device=self.hidden.device)
        given, ignore_index = self.denominator, self.options.ignore_index
        return mean_denominator(self.targets, self.class_weight, self.row_weight, given, ignore_index, len(self.weight))


# The schema's spelling of the same. A float or an int of a call is no tensor, and so none of the traced program's.
ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? row_weight, "
    "Tensor? denominator, float[] numbers, str reduction, str extras, "
    "bool needs_hidden, bool needs_weight, bool needs_bias"
)
TENSORS = 7  # the tensors among them, which come first


def present(t: Tensor | None, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """``t``, or a tensor without elements: an operator's schema knows no optional result."""
    return torch.empty(0, dtype=dtype, device=device) if t is None else t


def beside(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs, entropy, predicted."""
    device = rows.loss.device
    return present(rows.log_probs, device), present(rows.entropy, device), present(rows.predicted, device, torch.int64)


def fake_rows(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, log_probs, entropy, predicted and divisor, in shape and dtype."""
    options, tokens = call.options, call.hidden.shape[0]

    def new(present: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        return call.hidden.new_empty(tokens if present else 0, dtype=dtype)

    scalar = call.hidden.new_empty((), dtype=torch.float32)
    return (
        new(True) if call.reduction == "none" else torch.empty_like(scalar),
        new("log_probs" in options.extras),
        new("entropy" in options.extras),
        new(options.predicts(), torch.int64),
        scalar,
    )


def fake_gradients(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """d hidden, d weight and d bias in shape and dtype."""
    hidden, weight = call.hidden, call.weight
    return (
        hidden.new_empty(hidden.shape if call.needs_hidden else (0,)),
        weight.new_empty(weight.shape if call.needs_weight else (0,)),
        hidden.new_empty((weight.shape[0],) if call.needs_bias else (0,)),
    )


def padded(vocab: int) -> int:
    """Tensor cores want rows that begin at multiples of 16 bytes, which those of an odd vocabulary do only with some
    padding."""
    return -(-vocab // 8) * 8


def logits_buffer(hidden: Tensor, weight: Tensor, rows: int) -> Tensor:
    """[rows, vocab with padding], uninitialised."""
    return torch.empty((rows, padded(len(weight))), dtype=hidden.dtype, device=hidden.device)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """The logits [rows, vocab], in ``buffer``."""
    out = buffer[: len(hidden), : len(weight)]
    # Every GEMM of the schedules is given its ``out``, which also keeps autocast from casting its operands again.
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def add_product(out: Tensor, a: Tensor, b: Tensor, keep: float) -> None:
    """float32 ``out`` becomes keep * out + a @ b, summed in float32. With 0, ``out`` is not read."""
    if a.dtype != torch.float32 and a.is_cuda and torch.version.hip is None:
        torch.addmm(out, a, b, beta=keep, out_dtype=torch.float32, out=out)
    else:  # no GEMM here reads 16 bits and writes 32
        torch.addmm(out, a.float(), b.float(), beta=keep, out=out)


@triton.jit
def _round_kernel(wide_ptr, scale_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """torch's own product of two dtypes into a third takes four times as long as the memory needs. ``scale_ptr`` may be
    None: 1."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(wide_ptr + i, mask=i < n).to(tl.float32)
    if scale_ptr is not None:
        wide *= tl.load(scale_ptr)
    tl.store(out_ptr + i, wide.to(out_ptr.dtype.element_ty), mask=i < n)


def rounded(wide: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """``out``, which may be ``wide``, becomes it times the 0-d float32 ``scale`` (default 1), in float32 and rounded
    once; both are contiguous."""
    n = wide.numel()
    # 16 bytes of a 16-bit result a lane; the interpreter's programs cost about a millisecond each, whatever their size.
    block = min(next_power_of_2(n), 1 << 20) if INTERPRET else 1024
    launch(_round_kernel, (cdiv(n, block),), wide.device, wide, scale, out, n, BLOCK=block, num_warps=4)
    return out


APART = 2**22  # the numbers at the front that are copied before they are rounded; every launch doubles what is done


Shape = tuple[int, ...]


def halves(shape: Shape, dtype: torch.dtype) -> tuple[Shape, Shape]:
    """The shapes of two float32 tensors that hold the rows of ``shape`` until :func:`round_halves` makes them
    ``dtype``."""
    rows = shape[0] if dtype == torch.float32 else -(-shape[0] // 2)
    return (rows, *shape[1:]), (shape[0] - rows, *shape[1:])


def add_to_halves(sums: tuple[Tensor, Tensor], a: Tensor, b: Tensor, keep: float) -> None:
    """:func:`add_product` over the rows of both. A view of ``a`` must not outlive it: ``a`` is a slab of logits, whose
    memory goes before the sums are rounded."""
    for part, rows in zip(sums, a.split([len(part) for part in sums]), strict=True):
        if len(part):
            add_product(part, rows, b, keep)


def over_first_half(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """``dtype`` [rows of both, ...] in the memory of ``first``."""
    shape = first.shape[0] + second.shape[0], *first.shape[1:]
    return first if dtype == torch.float32 else first.view(dtype).view(-1)[: math.prod(shape)].view(shape)


def round_halves(first: Tensor, second: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """``out`` becomes the rows of both times the 0-d ``scale``. It may be :func:`over_first_half` of them, so that a
    float32 sum is never held beside the result."""
    flat, front = first.view(-1), out.view(-1)
    n = first.numel()
    if front.data_ptr() != flat.data_ptr() or out.dtype == first.dtype:
        rounded(flat, scale, front[:n])
    else:
        ends = [0]
        while ends[-1] < n:
            ends.append(min(2 * ends[-1] or APART, n))
        for start, stop in itertools.pairwise(ends):  # number i goes where number i / 2 was, which must have been read
            rounded(flat[start:stop] if start else flat[:stop].clone(), scale, front[start:stop])
    rounded(second.view(-1), scale, front[n:])
    return out
