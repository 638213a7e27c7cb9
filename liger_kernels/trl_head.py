"""Runs trl's fused LM head (trl 1.15 and later) on :func:`linear_log_probs`, from :func:`install` to :func:`uninstall`.

All of trl's trainers with such a head call ``ChunkedLogProbFunction.apply``. It is replaced on the class, when trl
imports its module, so every reference to the class sees it. The first call compares trl's function with
:func:`linear_log_probs_ref`; trl's function stays in use if it computes anything else, and for every call that our
kernels do not take. What surrounds the call (masks, metrics, casts, the gathering of sharded weights) stays trl's.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["HeadReplacement", "current", "install", "state", "uninstall"]

_MODULE = "trl.kernels.chunked_logprob"
_CLASS = "ChunkedLogProbFunction"
# What its apply takes and returns, by position.
_ARGUMENTS = 9
_RESULTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# The probe's numbers are of order 1. trl's function sums float64 inputs in float32, too.
_SAME = 1e-5


class HeadReplacement:
    """Stands in for the ``apply`` of trl's function.

    Attributes:
        function: trl's class.
        own: the ``apply`` that it had.
        difference: why trl's function is left alone; empty if it computes what ours does, None before the probe.
        ours: how many calls ran :func:`linear_log_probs`.
        theirs: how many ran trl's function, for ``reason``, that of the last one.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.own = function.apply
        self.difference: str | None = None
        self.ours = self.theirs = 0
        self.reason = ""
        self._ended = False

        # Dynamo traces trl's forward where it can. Where it cannot, it would go on to trace this, probe and all.
        @torch.compiler.disable
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass has a forward of its own, and somebody may have kept this function for longer than it is asked
            if cls is not function or self._ended:
                return self.own.__func__(cls, *args, **kwargs)
            return self(*args, **kwargs)

        self._before = vars(function).get("apply")
        self._apply: Any = classmethod(apply)
        function.apply = self._apply

    def undo(self) -> None:
        """Give the class its own ``apply`` back, unless somebody else has replaced it since. Kept, ours runs it."""
        self._ended = True
        if vars(self.function).get("apply") is not self._apply:
            return
        if self._before is None:
            del self.function.apply
        else:
            self.function.apply = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from liger_kernels.ops import linear_log_probs

        reason = f"it got {len(args) + len(kwargs)} arguments, not {_ARGUMENTS}"
        if len(args) == _ARGUMENTS and not kwargs:
            reason = _why_not(*args[:4]) or self.probed()
        if not reason:
            try:
                found = _as_trl_calls_it(linear_log_probs, *args)
                self.ours += 1
                return found
            except (TypeError, ValueError) as error:  # what ours refuses, such as two dtypes
                reason = " ".join(str(error).split())
        self.theirs += 1
        self.reason = reason
        return self.own(*args, **kwargs)

    def probed(self) -> str:
        """:attr:`difference`, after the probe."""
        if self.difference is None:
            self.difference = _difference(self.function, self.own)
        return self.difference

    def __str__(self) -> str:
        if self.probed():
            return f"off, trl's function is left alone: {self.difference}"
        left = f", {self.theirs} ran trl's function, the last one because {self.reason}" if self.theirs else ""
        return f"on, {self.ours} calls ran linear_log_probs{left}"


def _as_trl_calls_it(op: Any, *arguments: Any) -> tuple[Any, ...]:
    """``op`` with the arguments and results of trl's function, whose targets are all classes: none is ignored."""
    hidden, weight, bias, targets, temperature, _chunk_size, softcap, logit_scale, outputs = arguments
    numbers = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    out = op(hidden, weight, targets, bias, **numbers, outputs=("log_probs", *outputs))
    return tuple([getattr(out, name) for name in _RESULTS])


def _why_not(hidden: Any, weight: Any, bias: Any, targets: Any) -> str:
    """Why our kernels do not take these tensors; empty if they do, unless :func:`linear_log_probs` refuses them."""
    from liger_kernels.ops.runtime.dispatch import use_triton
    from liger_kernels.patching.recipes.probe import PLAIN

    for t in (hidden, weight, bias, targets):
        if t is not None and type(t) not in PLAIN:
            return f"a tensor is a {type(t).__name__}"
        if hasattr(t, "ds_id"):
            return "ZeRO-3 shards the weight, and trl's backward gathers it again"
    if not use_triton(hidden, opaque=True):  # our reference would hold all logits, trl's function holds a chunk
        return f"no kernel takes {hidden.dtype} on {hidden.device.type}"
    return ""


def _difference(function: Any, apply: Any) -> str:
    """How trl's function differs from :func:`linear_log_probs_ref`; empty if it does not."""
    from liger_kernels.patching.recipes.probe import describe, probing

    try:
        takes = len(inspect.signature(function.forward).parameters) - 1  # without ctx
        if takes != _ARGUMENTS:
            return f"its forward takes {takes} arguments, not {_ARGUMENTS}"
        with probing():
            return next(_differences(apply), "")
    except Exception as error:  # whatever a function that has changed raises
        return describe(error)


def _differences(apply: Any) -> Iterator[str]:
    from liger_kernels.ops import linear_log_probs_ref
    from liger_kernels.patching.recipes.probe import randn

    hidden, weight, bias = (randn(*shape, dtype=torch.float64) for shape in ((6, 4), (7, 4), (7,)))
    hidden[:2] = 0.0  # all logits of these rows are equal without a bias, and the first class is the top one
    targets = torch.tensor([0, 3, 6, 1, 2, 5])
    upstream = randn(2, 6, dtype=torch.float64)
    three = 3  # classes of a chunk, so that the last one is not full
    reference = functools.partial(_as_trl_calls_it, linear_log_probs_ref)
    for tensors, options in (
        ((hidden, weight, bias), (0.7, three, 1.5, 1.3, _RESULTS)),
        ((hidden, weight, None), (1.0, three, None, 1.0, ("is_top1",))),
    ):
        ours = _evaluated(reference, tensors, targets, options, upstream)
        theirs = _evaluated(apply, tensors, targets, options, upstream)
        for name, expected in ours.items():
            found = theirs[name]
            if found is None or expected is None:
                if found is not expected:
                    yield f"{name} is {'missing' if found is None else 'there unasked'}"
            elif found.shape != expected.shape:
                yield f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
            elif found.requires_grad != expected.requires_grad:
                yield f"{name} has {'a' if found.requires_grad else 'no'} gradient"
            elif not (off := float((found.double() - expected.double()).abs().max())) <= _SAME:
                yield f"{name} is off by {off:.1g}"


def _evaluated(apply: Any, tensors: Any, targets: Any, options: Any, upstream: Any) -> dict[str, Any]:
    """What ``apply`` returns, and the gradients of ``tensors``, by name."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    found = dict(zip(_RESULTS, apply(*leaves, targets, *options), strict=True))
    outputs = [(t, g) for t, g in zip(found.values(), upstream, strict=False) if t is not None and t.requires_grad]
    torch.autograd.backward([t for t, _ in outputs], [g.to(t.dtype) for t, g in outputs])
    named = zip(("hidden", "weight", "bias"), leaves, strict=True)
    return found | {f"the gradient of {name}": None if t is None else t.grad for name, t in named}


class _Loader:
    """Stands in for the loader of trl's module, and replaces the function in what that has loaded."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own  # from here on it is like any other module
        self._own.exec_module(module)
        if _finder in sys.meta_path:
            _replace(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the import of trl's module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


_finder = _Finder()
_replacement: HeadReplacement | None = None


def install() -> None:
    """Replace the function now, or when trl imports it. Installed already, it stays so."""
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    if _MODULE in sys.modules:
        _replace(sys.modules[_MODULE])


def uninstall() -> None:
    """Undo :func:`install`: trl runs its own function again."""
    global _replacement
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    if _replacement is not None:
        _replacement.undo()
    _replacement = None


def current() -> HeadReplacement | None:
    """What is in place: None before trl's module is imported."""
    return _replacement


def state() -> str:
    """Whether trl's head runs on :func:`linear_log_probs`: "on" and how often, or "off" and why."""
    if _finder not in sys.meta_path:
        return "off, liger_kernels.compat.install() was not called"
    if _replacement is not None:
        return str(_replacement)
    if _MODULE in sys.modules:
        return f"off, {_MODULE} has no {_CLASS}"
    return f"off so far, {_MODULE} (trl 1.15 and later) is not imported"


def _replace(module: types.ModuleType) -> None:
    global _replacement
    function = getattr(module, _CLASS, None)
    if function is not None:
        _replacement = HeadReplacement(function)
