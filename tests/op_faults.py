"""An honest op in plain torch, and broken ones: each is found by the check that is meant for it, and by no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from liger_kernels import ops


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x) times a weight for each column."""
    return x * torch.sigmoid(x) * weight


def inputs(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    x, weight = torch.randn(rows, columns), torch.randn(columns)
    return tuple(t.to(device, dtype).requires_grad_() for t in (x, weight))


class Honest(torch.autograd.Function):
    """The parts that a fault replaces are methods of their own."""

    @classmethod
    def value(cls, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.sigmoid(wide) * weight.float()).to(torch.result_type(x, weight))

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return cls.value(x, weight)

    @classmethod
    def gradients(cls, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide, gate = x.float(), torch.sigmoid(x.float())
        grad_x = dy.float() * weight.float() * gate * (1 + wide * (1 - gate))
        return grad_x.to(x.dtype), (dy.float() * wide * gate).sum(0).to(weight.dtype)

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        return cls.gradients(*ctx.saved_tensors, dy)


class LastRowsGradient(Honest):
    @classmethod
    def gradients(cls, x, weight, dy):
        grad_x, grad_weight = super().gradients(x, weight, dy)
        grad_x[-1:] *= 1.01
        return grad_x, grad_weight


class TooLargeInBfloat16(Honest):
    """By less than one unit of roundoff, which no single element shows."""

    @classmethod
    def value(cls, x, weight):
        factor = 1.008 if x.dtype == torch.bfloat16 else 1.0
        return (super().value(x.float(), weight.float()) * factor).to(torch.result_type(x, weight))


class OddColumns(Honest):
    """A vector of two at a time leaves the last element."""

    @classmethod
    def value(cls, x, weight):
        y = super().value(x, weight)
        if x.shape[1] % 2 and x.shape[1] > 1:
            y[:, -1] = 0
        return y


class WrongWithoutDeterministicAlgorithms(Honest):
    """Training runs take this path."""

    @classmethod
    def value(cls, x, weight):
        return super().value(x, weight) + (not torch.are_deterministic_algorithms_enabled())


class Raises(Honest):
    @classmethod
    def value(cls, x, weight):
        raise RuntimeError("no kernel for this device")


class ReadsRowsInPlace(Honest):
    """As if a row began where the one before ends."""

    @classmethod
    def value(cls, x, weight):
        dense = x.as_strided(x.shape, (x.shape[1], 1)) if x.numel() and 0 not in x.stride() else x
        return super().value(dense, weight)


class ReadsGradientInPlace(Honest):
    @classmethod
    def gradients(cls, x, weight, dy):
        if dy.numel() and dy.stride(1) > 1:
            dy = dy.as_strided(dy.shape, (dy.stride(0), 1))
        return super().gradients(x, weight, dy)


class WantsDense(Honest):
    @classmethod
    def value(cls, x, weight):
        return super().value(x.view(-1), weight.repeat(len(x))).view(x.shape) if x.numel() else super().value(x, weight)


class NeedsARow(Honest):
    @classmethod
    def value(cls, x, weight):
        assert bool(x.shape[0]), "an empty grid"
        return super().value(x, weight)


class DividesByARow(Honest):
    """A scale against overflow that nobody looks at where it is 0."""

    @classmethod
    def value(cls, x, weight):
        scale = x.float().abs().amax(-1, keepdim=True)
        wide = x.float() / scale * scale
        return super().value(wide, weight).to(torch.result_type(x, weight)) if x.numel() else x * weight


class OnlyBothGradients(Honest):
    @classmethod
    def backward(cls, ctx, dy):
        grad_x, grad_weight = super().backward(ctx, dy)
        return (grad_x, grad_weight) if ctx.needs_input_grad[0] else (None, 2 * grad_weight)


class RoundsUnderAutocast(Honest):
    @classmethod
    def value(cls, x, weight):
        if torch.is_autocast_enabled(x.device.type):
            return super().value(x.bfloat16(), weight).to(x.dtype)
        return super().value(x, weight)


class BackwardOverSaved(Honest):
    """The second backward reads what the first one has left."""

    @classmethod
    def forward(cls, ctx, x, weight):
        ctx.save_for_backward(x.clone(), weight)
        return cls.value(x, weight)

    @classmethod
    def backward(cls, ctx, dy):
        x, weight = ctx.saved_tensors
        found = cls.gradients(x, weight, dy)
        x.mul_(2.0)
        return found


class OneWorkspace(Honest):
    """The next call overwrites what this one has saved."""

    workspace: ClassVar[dict[tuple[Any, ...], torch.Tensor]] = {}

    @classmethod
    def forward(cls, ctx, x, weight):
        key = (x.shape, x.dtype)
        kept = cls.workspace.setdefault(key, torch.empty_like(x)).copy_(x)
        ctx.kept, ctx.weight = kept, weight
        return cls.value(x, weight)

    @classmethod
    def backward(cls, ctx, dy):
        return cls.gradients(ctx.kept, ctx.weight, dy)


class LastBitOfTheRun(Honest):
    runs = 0

    @classmethod
    def value(cls, x, weight):
        cls.runs += 1
        y = super().value(x, weight)
        return y * (1 + torch.finfo(y.dtype).eps * (cls.runs % 2)) if y.dtype == torch.float32 else y


class AnswersTheHost(Honest):
    @classmethod
    def value(cls, x, weight):
        return super().value(x, weight) if not x.numel() or x.max().item() < 100 else x * weight


class SelectsByAMask(Honest):
    @classmethod
    def value(cls, x, weight):
        y = super().value(x, weight)
        y[x == 0] = y[x == 0]
        return y


class WritesANumberByAMask(Honest):
    """No fault: torch fills by the mask, and reads no count."""

    @classmethod
    def value(cls, x, weight):
        y = super().value(x, weight)
        y[x == 0] = 0
        return y


class OtherDtype(Honest):
    @classmethod
    def value(cls, x, weight):
        return super().value(x, weight).float()


class OtherShape(Honest):
    @classmethod
    def value(cls, x, weight):
        return super().value(x, weight).unsqueeze(0)


class AddsToNewMemory(Honest):
    """Which is mostly zero."""

    @classmethod
    def gradients(cls, x, weight, dy):
        grad_x, found = super().gradients(x, weight, dy)
        grad_weight = torch.empty_like(weight)
        grad_weight += found
        return grad_x, grad_weight


class LeavesRows(Honest):
    """Rows beyond the last whole block of four are nobody's."""

    @classmethod
    def value(cls, x, weight):
        y = torch.empty_like(x)
        whole = max(4, len(x) // 4 * 4)
        y[:whole] = super().value(x[:whole], weight)
        return y


class NoRowsNoGradient(Honest):
    """Nobody is launched, and nobody fills the weight's gradient."""

    @classmethod
    def gradients(cls, x, weight, dy):
        return super().gradients(x, weight, dy) if len(x) else (torch.empty_like(x), torch.empty_like(weight))


class OverInput(Honest):
    @classmethod
    def forward(cls, ctx, x, weight):
        ctx.save_for_backward(x.clone(), weight.clone())
        y = cls.value(x, weight)
        x.mul_(0.5)
        return y


class OverGradient(Honest):
    @classmethod
    def gradients(cls, x, weight, dy):
        found = super().gradients(x, weight, dy)
        dy.mul_(0.5)
        return found


class OverResult(Honest):
    """The backward takes the memory of the result for what it computes."""

    @classmethod
    def forward(cls, ctx, x, weight):
        y = cls.value(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.buffer = y.detach()
        return y

    @classmethod
    def backward(cls, ctx, dy):
        found = super().backward(ctx, dy)
        ctx.buffer.zero_()
        return found


class OverTheEdge(Honest):
    """A store without a mask."""

    @classmethod
    def value(cls, x, weight):
        y = super().value(x, weight)
        if x.numel() and x.stride(0) > x.shape[1] and x.stride(1) == 1:
            x.as_strided((1, 1), x.stride(), x.storage_offset() + x.shape[1]).zero_()
        return y


def copied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.clone()


def handed_on(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def residual_inputs(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The residual is overwritten, so it requires no gradient."""
    x, weight, residual = torch.randn(rows, columns), torch.randn(columns), torch.randn(rows, columns)
    x, weight, residual = (t.to(device, dtype) for t in (x, weight, residual))
    return x.requires_grad_(), weight.requires_grad_(), residual


def add_to(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The sum lies in ``residual``."""
    return residual.add_(x) * weight


def store_sum(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The stored sum has no graph."""
    y = residual + x
    residual.detach().copy_(y.detach())
    return y * weight


def store_123(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    y = (residual + x) * weight
    residual.detach().fill_(123.0)
    return y


def in_place_inputs(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, columns).to(device, dtype), torch.randn(columns).to(device, dtype).requires_grad_()


def scale_in_place(x: torch.Tensor, weight: torch.Tensor) -> None:
    x.mul_(weight)


def zero_in_place(x: torch.Tensor, weight: torch.Tensor) -> None:
    x.mul_(weight * 0)


class ScaleInPlace(torch.autograd.Function):
    """``scale_in_place`` as one function."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x.clone(), weight)
        ctx.mark_dirty(x)
        return x.copy_(x.float() * weight.float())

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        grad_weight = (dy.float() * x.float()).sum(0).to(weight.dtype)
        return (dy.float() * weight.float()).to(x.dtype), grad_weight


class WrongGradientInPlace(ScaleInPlace):
    @staticmethod
    def backward(ctx, dy):
        grad_x, grad_weight = ScaleInPlace.backward(ctx, dy)
        return grad_x, grad_weight * 1.5


def in_place(function: type[ScaleInPlace]) -> Callable[..., None]:
    def call(x: torch.Tensor, weight: torch.Tensor) -> None:
        function.apply(x, weight)

    return call


def wrong_without_grad(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Evaluation takes this path."""
    return plain(x, weight) * (1.0 if torch.is_grad_enabled() else 1.5)


def both_plain(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = plain(x, weight)
    return y, 2 * y


class Both(Honest):
    """Two results. A result that nobody uses has no gradient."""

    @classmethod
    def forward(cls, ctx, x, weight):
        ctx.set_materialize_grads(False)
        y = super().forward(ctx, x, weight)
        return y, 2 * y

    @classmethod
    def backward(cls, ctx, *upstream):
        if all(d is None for d in upstream):
            return None, None
        da, db = (0 if d is None else d for d in upstream)
        return super().backward(ctx, da + 2 * db)


class OnlyBothResults(Both):
    @classmethod
    def backward(cls, ctx, *upstream):
        return (None, None) if any(d is None for d in upstream) else super().backward(ctx, *upstream)


def stale_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Keeps the weight in float32. After a step of the optimizer, the kept weight is the old one."""
    wide = weight.__dict__.setdefault("wide", weight.float())
    return plain(x.float(), wide).to(torch.result_type(x, weight))


def detached(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return plain(x, weight).detach()


def two_results(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = plain(x, weight)
    return y, y.detach()


_lock = threading.Lock()


def locked(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A lock around a cache is nothing that Dynamo traces."""
    with _lock:
        return plain(x, weight)


def glu_inputs(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.randn(rows, columns).to(device, dtype).requires_grad_() for name in ("gate", "up")}


def twice(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    ops.swiglu(gate, up)
    return ops.swiglu(gate, up)


class More:
    """Launches one more in its second call."""

    calls = 0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return ops.swiglu(gate, up) if self.calls % 2 else twice(gate, up)


class OpFault(NamedTuple):
    """A broken op, and the one check that finds it."""

    check: str
    op: Callable[..., Any]
    reference: Callable[..., Any] = plain
    inputs: Callable[..., Any] = inputs
    options: Mapping[str, Any] = MappingProxyType({})


def _of(check: str, *functions: type[Honest]) -> dict[str, OpFault]:
    return {function.__name__: OpFault(check, function.apply) for function in functions}


FAULTS: dict[str, OpFault] = {
    **_of("accuracy", LastRowsGradient, TooLargeInBfloat16, OddColumns, Raises, WrongWithoutDeterministicAlgorithms),
    "stores 123": OpFault("accuracy", store_123, store_sum, residual_inputs, {"overwrites": "residual"}),
    "zeros": OpFault("accuracy", zero_in_place, scale_in_place, in_place_inputs, {"overwrites": "x"}),
    "a gradient of what it wrote": OpFault(
        "accuracy", in_place(WrongGradientInPlace), scale_in_place, in_place_inputs, {"overwrites": "x"}
    ),
    "a stale weight": OpFault("accuracy", stale_weight),
    **_of("strides", ReadsRowsInPlace, ReadsGradientInPlace, WantsDense),
    **_of("no rows", NeedsARow),
    **_of("rows of zeros", DividesByARow),
    **_of("frozen inputs", OnlyBothGradients),
    "only both results": OpFault("frozen inputs", OnlyBothResults.apply, both_plain),
    "wrong without grad": OpFault("frozen inputs", wrong_without_grad),
    **_of("autocast", RoundsUnderAutocast),
    "a lock": OpFault("compile", locked),
    **_of("retained graph", BackwardOverSaved, OneWorkspace),
    **_of("determinism", LastBitOfTheRun),
    "launched twice": OpFault("launches", twice, ops.swiglu_ref, glu_inputs, {"launches": 1}),
    "one more each time": OpFault("launches", More(), ops.swiglu_ref, glu_inputs),
    "a fallback": OpFault("launches", ops.swiglu_ref, ops.swiglu_ref, glu_inputs, {"launches": 1}),
    **_of("host synchronisation", AnswersTheHost, SelectsByAMask),
    **_of("results", OtherDtype, OtherShape),
    "detached": OpFault("results", detached),
    "two results": OpFault("results", two_results),
    **_of("memory", AddsToNewMemory, LeavesRows, NoRowsNoGradient),
    "handed on": OpFault("aliasing", handed_on, copied),
    **_of("clobbering", OverInput, OverGradient, OverResult, OverTheEdge),
}
