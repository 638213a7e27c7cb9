"""What the schedules of the linear cross entropy share: a call's arguments, the logits' buffer, the observer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops._cross_entropy_rows import LossOptions, Rows
from liger_kernels.ops._mean import mean_denominator

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
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    z_loss: float
    reduction: str
    extras: str
    needs_hidden: bool
    needs_weight: bool
    needs_bias: bool

    @property
    def options(self) -> LossOptions:
        return LossOptions(self.ignore_index, self.label_smoothing, self.softcap, self.logit_scale, self.z_loss)

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        """Whether hidden, weight and bias need a gradient."""
        return self.needs_hidden, self.needs_weight, self.needs_bias

    def rows(self, stats: bool) -> Rows:
        return Rows.empty(len(self.hidden), self.hidden.device, tuple(self.extras.split()), stats)

    def divisor(self) -> Tensor:
        """What the sum of the rows' losses is divided by, 0-d float32."""
        if self.reduction != "mean":
            return torch.ones((), dtype=torch.float32, device=self.hidden.device)
        return mean_denominator(
            self.targets, self.class_weight, self.row_weight, self.denominator, self.ignore_index, len(self.weight)
        )


# The schema's spelling of the same. A float or an int of a call is no tensor, and so none of the traced program's.
ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? row_weight, "
    "Tensor? denominator, int ignore_index, float label_smoothing, float? softcap, float logit_scale, float z_loss, "
    "str reduction, str extras, bool needs_hidden, bool needs_weight, bool needs_bias"
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
    asked, tokens = call.extras.split(), call.hidden.shape[0]

    def new(present: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        return call.hidden.new_empty(tokens if present else 0, dtype=dtype)

    scalar = call.hidden.new_empty((), dtype=torch.float32)
    return (
        new(True) if call.reduction == "none" else torch.empty_like(scalar),
        new("log_probs" in asked),
        new("entropy" in asked),
        new("token_accuracy" in asked or "predicted_tokens" in asked, torch.int64),
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
