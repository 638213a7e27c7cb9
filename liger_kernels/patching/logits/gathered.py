"""Computes log-probabilities that a trainer gathers from the logits of a forward without labels, without these logits.

A trainer that computes its own loss (ORPO, CPO) calls the model without labels and gathers log-probabilities of tokens
from ``outputs.logits``. After :func:`install`, such a forward in training returns a lazy tensor with a known meaning
(:class:`Gathering`). The trainer's operations on it are recognised one by one:

- views of rows, casts, a scale (the temperature) and iteration over rows are recorded;
- ``log_softmax`` then ``gather``, or ``gather`` minus ``logsumexp``, also row by row and stacked, runs
  :func:`linear_log_probs` on hidden states and weight;
- ``cross_entropy`` runs :func:`linear_cross_entropy`;
- the mean of all logits, which trainers log, is the mean of the hidden states times the mean of the weight.

**Any other operation gets real logits**, and all later operations of this forward use them, too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernels.ops import LogProbsOutput, linear_log_probs
from liger_kernels.ops.lora.projection import as_it_is
from liger_kernels.ops.loss.linear_log_probs import MOST_IDS
from liger_kernels.ops.runtime.dispatch import use_triton
from liger_kernels.patching.logits.deferred import DeferredLogits
from liger_kernels.patching.logits.head import HeadRecipe, is_fsdp2, patched_heads
from liger_kernels.patching.logits.held_head import HeldHead
from liger_kernels.patching.logits.lazy import Computation, LazyTensor, Unchanged, defer, is_here
from liger_kernels.patching.logits.linked import replayed
from liger_kernels.patching.logits.product import Product, Request, autocast
from liger_kernels.patching.logits.split_head import has_plan
from liger_kernels.patching.swap import mark_run, recipe_of, runs_inside_hook

# No class has this index, so linear_log_probs ignores no row.
NO_ROW = torch.iinfo(torch.int32).min
# The number of logits in one block of a mean.
_BLOCK = 2**24


class _Switch:
    on = False
    calls = 0  # of linear_log_probs


def install() -> None:
    """Let forwards in training without labels return lazy logits, from which log-probabilities can be gathered."""
    _Switch.on, _Switch.calls = True, 0


def uninstall() -> None:
    """Undo :func:`install`. Lazy tensors that a forward has already returned stay lazy."""
    _Switch.on = False


def state() -> str:
    """ "on" and how often :func:`linear_log_probs` ran, or "off" and why."""
    if not _Switch.on:
        return "off, liger_kernels.compat.install() was not called"
    return f"on, {_Switch.calls} calls ran linear_log_probs"


def gathers_from(model: Any) -> bool:
    """Whether a forward of ``model`` without labels should return lazy logits.

    The answer is no if the head's weight is freed or moved after the forward (FSDP, ZeRO-3, offload, a plan), or if no
    kernel runs.
    """
    if not _Switch.on or torch.compiler.is_compiling() or not model.training or not torch.is_grad_enabled():
        return False
    outer = model.get_output_embeddings()
    heads, parameters = patched_heads(outer), list(outer.parameters())  # a replica of nn.DataParallel has none
    return (
        bool(heads and parameters)
        and all(_is_kept(head) for head in heads)
        and all(use_triton(p, opaque=True) for p in parameters if p.is_floating_point())
        and all(type(p) is nn.Parameter and not _is_managed(p) for p in parameters)
        and not any(is_fsdp2(type(module)) for module in model.modules())
    )


def _is_kept(head: Any) -> bool:
    recipe = recipe_of(head)
    fused = isinstance(recipe, HeadRecipe) and recipe.fused
    return fused and not runs_inside_hook(head) and not has_plan(head)


def _is_managed(parameter: Any) -> bool:
    """Whether DeepSpeed (ZeRO-3) or FSDP1 keeps ``parameter``."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_fsdp_flattened")


def has_no_values(logits: Any) -> bool:
    """Whether ``logits`` are lazy logits from which log-probabilities can still be gathered without computing them."""
    meaning = logits._computation.meaning if isinstance(logits, LazyTensor) else None
    return isinstance(meaning, Gathering) and meaning.kind == "logits" and not meaning.source.is_used()


class _NotRecordedError(Exception):
    """The operation needs real logits."""


class Source(Product):
    """The product of one forward without labels, after that forward. Its lazy tensors can still compute the logits."""

    def __init__(self, product: Product, held: tuple[Tensor, HeldHead]) -> None:
        super().__init__(product.hidden, product.head, product.outer, product.forward, product.memory, losses=None)
        self.autocast, self.grad = product.autocast, product.grad
        self.held: tuple[Tensor, HeldHead] = held
        self.unchanged = Unchanged(held[0], *held[1].tensors())
        self.real = False  # whether a caller got values
        self.members: list[weakref.ref[LazyTensor]] = []

    def compute(self, reason: str | None) -> Tensor:
        raise _NotRecordedError

    def ask(self, request: Request, held: tuple[Tensor, HeldHead] | None = None) -> Any:
        """The answer to ``request``, from the hidden states and weights of the head, or from ``held``."""
        hidden, weights = held or self.held
        if not all(x is None or is_here(x) for x in (hidden, *weights.tensors())):
            raise _NotRecordedError
        self.unchanged(True)
        mark_run(self.head)
        request.wants_lazy = False
        with autocast(self.hidden.device, self.autocast):
            return request.answer(hidden, weights)

    def tensors(self) -> list[LazyTensor]:
        """The lazy tensors that are still alive."""
        found = [lazy for ref in self.members if (lazy := ref()) is not None]
        self.members = [weakref.ref(lazy) for lazy in found]
        return found

    def make_real(self) -> None:
        """Compute all lazy tensors. The caller may change one in place, and its views must see the change."""
        if not self.real:
            self.real = True
            for lazy in self.tensors():
                lazy.computed()

    def is_used(self) -> bool:
        """Whether a caller got values, or waits for a gradient of the logits."""
        return self.real or any(lazy._backward_hooks or lazy.retains_grad for lazy in self.tensors())


@dataclass
class _LogProbs(Request):
    """:func:`linear_log_probs` of ``targets`` [rows, K], in place of a loss."""

    outputs: tuple[str, ...] = ("log_probs",)

    def answer(self, hidden: Tensor, weights: HeldHead) -> LogProbsOutput:
        self.answered = True
        hidden, weight, bias, how = self.operands(hidden, weights)
        _Switch.calls += 1
        run = functools.partial(linear_log_probs, hidden.reshape(-1, hidden.shape[-1]), weight, bias=bias)
        run = functools.partial(run, ignore_index=NO_ROW, **how, **self.options)
        first = self.targets[:, 0].contiguous()
        if self.targets.shape[-1] == 1:
            return run(targets=first, outputs=self.outputs)
        return run(targets=first, outputs=(), ids=self.targets)


@dataclass
class _Mean(Request):
    """The mean of all logits, in place of a loss."""

    def answer(self, hidden: Tensor, weights: HeldHead) -> Tensor:
        self.answered = True
        hidden, weight, bias, how = self.operands(hidden, weights)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        scale, cap = self.options["logit_scale"], self.options["softcap"]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if cap is None and not how["adapters"] and how["dense"] is as_it_is:  # the mean of a product
            mean = (hidden.mean(0, dtype=wide) * weight.mean(0, dtype=wide)).sum()
            return scale * (mean if bias is None else mean + bias.mean(dtype=wide))
        if torch.is_grad_enabled():
            raise _NotRecordedError
        head = HeldHead(weight, bias, how["adapters"], how["dense"])
        total, classes = torch.zeros((), dtype=wide, device=hidden.device), len(weight)
        for block in hidden.split(max(1, _BLOCK // classes)):
            z = scale * head.logits(block).to(wide)
            total += (z if cap is None else cap * torch.tanh(z / cap)).mean(-1).sum()
        return total / len(hidden)


@dataclass(eq=False)
class Gathering:
    """The meaning of one lazy tensor.

    Attributes:
        source: the product that the tensor comes from.
        kind: "logits"; "log_softmax"; "logits_of" or "log_probs_of" the classes ``index``; "logsumexp".
        logits: the recorded logits that the tensor is made from.
        index: int64 [..., K].
        trailing: whether the last dimension stands for K, or for the one number of a row.
        row: if the tensor is one row, the logits of all rows and the row's number.
    """

    source: Source
    kind: str
    logits: DeferredLogits
    index: Tensor | None = None
    trailing: bool = True
    row: tuple[DeferredLogits, int] | None = None

    def real(self, lazy: Any) -> Tensor | None:
        """The value of an unpatched model. Views of the logits must be views of the same tensor for autograd, too."""
        if self.kind == "log_probs_of":
            return None
        self.source.make_real()
        what = lazy._computation
        if lazy._real is not None or lazy._backward_hooks or lazy.retains_grad:
            return lazy._real
        with torch.set_grad_enabled(lazy.requires_grad):
            return what.compute(*[x.computed() for x in what.inputs])

    def after(self, lazy: Any, function: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        step = _STEPS[self.kind].get(name)
        if step is None or self.source.is_used():
            return NotImplemented
        given = (self, name, lazy, *args) if name == "stack" else (self, name, *args)
        try:
            bound = inspect.signature(step).bind(*given, **kwargs)
        except TypeError:  # an unknown argument
            return NotImplemented
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and lazy.requires_grad):
                return step(*bound.args, **bound.kwargs)
        except _NotRecordedError:
            return NotImplemented

    def made(self, lazy: Any, compute: Any, shape: Any, dtype: Any = None, **changes: Any) -> Any:
        """A lazy tensor made from ``lazy``. Its meaning is this meaning with ``changes``."""
        what = Computation(tuple(shape), dtype or lazy.dtype, lazy.device, compute, (lazy,))
        return _member(replace(self, **{"row": None, **changes}), what)

    # Views, casts and scales.

    def detach(self, name: str, lazy: Any) -> Any:
        with torch.no_grad():
            return self.made(lazy, torch.detach, lazy.shape, row=self.row)

    def record(self, name: str, lazy: Any, *args: Any, **kwargs: Any) -> Any:
        after = getattr(self.logits, name)(*args, **kwargs)
        if after is self.logits:
            return lazy
        return self.made(lazy, _replay(after), after.shape, after.dtype, logits=after)

    def getitem(self, name: str, lazy: Any, index: Any) -> Any:
        if type(index) is int:
            if len(lazy.shape) < 2 or not -len(lazy) <= index < len(lazy):
                raise _NotRecordedError
            i = index % len(lazy)
            after, row = self.logits.row(i), (self.logits, i)
            return self.made(lazy, _replay(after), after.shape, logits=after, row=row)
        after = self.logits[index]
        if self.kind == "log_softmax" and after.shape[-1] != self.logits.shape[-1]:
            raise _NotRecordedError
        return self.made(lazy, _replay(after), after.shape, logits=after)

    def unbind(self, name: str, lazy: Any, dim: int = 0) -> Any:
        if dim != 0:
            raise _NotRecordedError
        rows = tuple([self.getitem(name, lazy, i) for i in range(len(lazy))])
        return iter(rows) if name == "__iter__" else rows

    def chunk(self, name: str, lazy: Any, chunks: int, dim: int = 0) -> Any:
        if dim != 0 or chunks < 1 or not len(lazy):
            raise _NotRecordedError
        size = -(-len(lazy) // chunks)
        return tuple([self.getitem(name, lazy, slice(i, i + size)) for i in range(0, len(lazy), size)])

    # Operations over all classes.

    def log_softmax(self, name: str, lazy: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        _check_last(lazy, dim)
        logits = self._as(functools.partial(torch.log_softmax, dim=-1, dtype=dtype))
        compute = functools.partial(torch.log_softmax, dim=-1, dtype=logits.dtype)
        return self.made(lazy, compute, lazy.shape, logits.dtype, kind="log_softmax", logits=logits, row=self.row)

    def logsumexp(self, name: str, lazy: Any, dim: Any, keepdim: bool = False) -> Any:
        _check_last(lazy, dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim)
        shape = (*lazy.shape[:-1], 1) if keepdim else lazy.shape[:-1]
        compute = functools.partial(torch.logsumexp, dim=-1, keepdim=keepdim)
        dtype = _dtype_of(compute, self.logits)
        return self.made(lazy, compute, shape, dtype, kind="logsumexp", trailing=keepdim, row=self.row)

    def cross_entropy(self, name: str, lazy: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        logits = self._as(lambda x: F.cross_entropy(x, torch.empty(0, dtype=torch.int64, device=x.device)))
        return F.cross_entropy(logits, target, *args, **kwargs)  # type: ignore[arg-type]

    def mean(self, name: str, lazy: Any) -> Any:
        return self.source.ask(_Mean(self.source, None, *_of(self.logits))).to(lazy.dtype)

    def _as(self, function: Any) -> DeferredLogits:
        """The logits in the dtype of the result of ``function``."""
        return _in(_dtype_of(function, self.logits), self.logits)

    # Operations on one number for each chosen class of a row.

    def gather(self, name: str, lazy: Any, dim: int, index: Tensor, sparse_grad: bool = False) -> Any:
        _check_last(lazy, dim)
        fits = type(index) is Tensor and index.dtype == torch.int64 and index.device == lazy.device and not sparse_grad
        if not fits or index.shape[:-1] != lazy.shape[:-1] or not 1 <= index.shape[-1] <= MOST_IDS:
            raise _NotRecordedError
        if self.kind == "logits":
            compute = functools.partial(torch.gather, dim=-1, index=index)
            return self.made(lazy, compute, index.shape, kind="logits_of", index=index, row=self.row)
        found = replace(self, kind="log_probs_of", index=index)
        return found.log_probs() if self.row is None else found.waiting()

    def squeeze(self, name: str, lazy: Any, dim: int) -> Any:
        if not self.trailing or dim not in (-1, len(lazy.shape) - 1) or lazy.shape[-1] != 1:
            raise _NotRecordedError
        return self._with(lazy, False, lazy.shape[:-1])

    def unsqueeze(self, name: str, lazy: Any, dim: int) -> Any:
        if self.trailing or dim not in (-1, len(lazy.shape)):
            raise _NotRecordedError
        return self._with(lazy, True, (*lazy.shape, 1))

    def _with(self, lazy: Any, trailing: bool, shape: Any) -> Any:
        if self.kind == "log_probs_of":
            return replace(self, trailing=trailing).waiting()
        return self.made(lazy, lambda x: x.reshape(shape), shape, trailing=trailing, row=self.row)

    def stack(self, name: str, lazy: Any, tensors: Any, dim: int = 0) -> Any:
        """Stack all rows of one tensor, in their order."""
        meanings = [t._computation.meaning if isinstance(t, LazyTensor) else None for t in tensors]
        found = [m for m in meanings if isinstance(m, Gathering) and m.source is self.source and m.row is not None]
        whole = None if self.row is None else self.row[0]
        alike = all(m.kind == self.kind and m.trailing == self.trailing for m in found)
        alike = alike and all(t.requires_grad == lazy.requires_grad and t.dtype == lazy.dtype for t in tensors)
        order = [m.row[1] for m in found if m.row is not None and m.row[0] is whole]
        if whole is None or not alike or dim != 0 or len(found) != len(tensors) or order != list(range(len(whole))):
            raise _NotRecordedError
        if self.kind == "log_probs_of":
            index = torch.stack([m.index for m in found if m.index is not None])
            return replace(self, logits=_in(lazy.dtype, whole), index=index, row=None).log_probs()
        shape = (len(found), *lazy.shape)
        what = Computation(shape, lazy.dtype, lazy.device, lambda *rows: torch.stack(rows), tuple(tensors))
        return _member(replace(self, logits=whole, row=None), what)

    def minus(self, name: str, lazy: Any, other: Any) -> Any:
        """Log-probabilities: the logits of classes minus logsumexp."""
        sums = other._computation.meaning if isinstance(other, LazyTensor) else None
        if not isinstance(sums, Gathering) or sums.kind != "logsumexp" or sums.logits is not self.logits:
            raise _NotRecordedError
        if sums.trailing != self.trailing or lazy.requires_grad != other.requires_grad:
            raise _NotRecordedError
        logits = _in(torch.promote_types(lazy.dtype, other.dtype), self.logits)
        return replace(self, kind="log_probs_of", logits=logits, row=None).log_probs()

    # Computation.

    def log_probs(self, held: tuple[Tensor, HeldHead] | None = None) -> Tensor:
        """The log-probabilities of the classes ``index``, by :func:`linear_log_probs`."""
        logits, index = self.logits, self.index
        assert index is not None
        targets = index.reshape(-1, index.shape[-1])
        out = self.source.ask(_LogProbs(self.source, targets, *_of(logits)), held)
        found = out.log_probs if out.id_log_probs is None else out.id_log_probs
        return found.view(index.shape if self.trailing else index.shape[:-1]).to(logits.dtype)

    def waiting(self) -> Any:
        """The lazy log-probabilities of one row, which wait until they are stacked with other rows."""
        assert self.index is not None
        hidden, weights = self.source.held
        scales, dense = [one.scale for one in weights.adapters], weights.dense

        def compute(hidden: Tensor, *tensors: Any) -> Tensor:
            return self.log_probs((hidden, HeldHead.of_tensors(scales, dense, *tensors)))

        shape = self.index.shape if self.trailing else self.index.shape[:-1]
        logits = self.logits
        what = Computation(tuple(shape), logits.dtype, logits.device, compute, (hidden, *weights.tensors()))
        return _member(self, what)


def _of(logits: DeferredLogits) -> tuple[Any, ...]:
    """The arguments of a request for these logits."""
    how = {"logit_scale": logits._scale, "softcap": logits._cap}
    return logits._views, logits._vocabulary, logits._bias, how


def _dtype_of(function: Any, logits: DeferredLogits) -> torch.dtype:
    """The dtype of ``function(logits)``. Under autocast it depends on function and device."""
    result: Tensor = function(torch.empty(0, 1, dtype=logits.dtype, device=logits.device))
    return result.dtype


def _in(dtype: torch.dtype, logits: DeferredLogits) -> DeferredLogits:
    cast: DeferredLogits = logits if dtype == logits.dtype else logits.to(dtype)
    return cast


def _replay(after: DeferredLogits) -> Any:
    return functools.partial(replayed, after._trail[-1:])


def _check_last(lazy: Any, dim: Any) -> None:
    if type(dim) is not int or dim not in (-1, len(lazy.shape) - 1):
        raise _NotRecordedError


def _member(meaning: Gathering, what: Computation) -> Any:
    what.meaning = meaning
    lazy = defer(what)
    if meaning.kind != "log_probs_of":
        meaning.source.members.append(weakref.ref(lazy))
    return lazy


def gathered_from(logits: DeferredLogits) -> Any:
    """The tensor that leaves the forward in place of ``logits``. It has a meaning if the logits were not computed."""
    tensor, product = logits.released(), logits._product
    if not isinstance(tensor, LazyTensor) or product.held is None:
        return tensor
    recorded = copy.copy(logits)
    recorded._product = source = Source(product, product.held)
    what = Computation(tuple(tensor.shape), tensor.dtype, tensor.device, lambda x: x.view_as(x), (tensor,))
    return _member(Gathering(source, "logits", recorded), what)


_G = Gathering
_ANY = {"detach": _G.detach}
_VIEWS = {"__getitem__": _G.getitem, "unbind": _G.unbind, "__iter__": _G.unbind, "chunk": _G.chunk}
_RECORDED = "float to type view reshape flatten contiguous tanh mul multiply __mul__ __rmul__ div divide __truediv__"
_ONES = {"squeeze": _G.squeeze, "unsqueeze": _G.unsqueeze, "stack": _G.stack}
# By kind: the known functions by name.
_STEPS: dict[str, dict[str, Any]] = {
    "logits": {
        **dict.fromkeys(_RECORDED.split(), _G.record),
        **{"log_softmax": _G.log_softmax, "logsumexp": _G.logsumexp, "gather": _G.gather},
        **{"cross_entropy": _G.cross_entropy, "mean": _G.mean},
        **_ANY,
        **_VIEWS,
    },
    "log_softmax": {"gather": _G.gather, **_ANY, **_VIEWS},
    "logits_of": {"sub": _G.minus, "__sub__": _G.minus, **_ANY, **_ONES},
    "logsumexp": {**_ANY, **_ONES},
    "log_probs_of": _ONES,
}
