"""Runs trl's fused heads on our ops, from :func:`install` to :func:`uninstall`.

All of trl's trainers with a head of their own (trl 1.15 and later) call ``ChunkedLogProbFunction.apply``, which runs on
:func:`linear_log_probs`; its distillation trainer (1.16) calls ``ChunkedDivergenceFunction.apply``, which runs on
:func:`linear_divergence`. Each is replaced on the class, when trl imports its module, so every reference to the class
sees it. The first call compares trl's function with our reference; trl's function stays in use if it computes anything
else, and for every call that our kernels do not take. What surrounds the call (masks, metrics, casts, the gathering of
sharded weights) stays trl's. A kernel for given logits (1.16) is kept from lazy ones (trl_gathered.py).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from liger_kernels.trl_divergence import DivergenceReplacement
from liger_kernels.trl_function import FunctionReplacement, differences_of, evaluated
from liger_kernels.trl_gathered import KernelQuestion

__all__ = ["DIVERGENCE", "LOG_PROBS", "HeadReplacement", "current", "install", "question", "state", "uninstall"]

# trl's modules.
LOG_PROBS, DIVERGENCE = "trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence"
GATHERED = "trl.trainer.utils"
# What the apply of the first one's function returns, by position.
_RESULTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class HeadReplacement(FunctionReplacement):
    """The log-probabilities of a head."""

    runs, arguments = "linear_log_probs", 9

    def tensors(self, *args: Any) -> tuple[Any, ...]:
        return args[:4]

    def run(self, *args: Any) -> tuple[Any, ...]:
        from liger_kernels.ops import linear_log_probs

        return _as_trl_calls_it(linear_log_probs, *args)

    def differences(self, apply: Any) -> Iterator[str]:
        return _differences(apply)


def _as_trl_calls_it(op: Any, *arguments: Any) -> tuple[Any, ...]:
    """``op`` with the arguments and results of trl's function, whose targets are all classes: none is ignored."""
    hidden, weight, bias, targets, temperature, _chunk_size, softcap, logit_scale, outputs = arguments
    numbers = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    out = op(hidden, weight, targets, bias, **numbers, outputs=("log_probs", *outputs))
    return tuple([getattr(out, name) for name in _RESULTS])


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
        yield from differences_of(ours, theirs)


def _evaluated(apply: Any, tensors: Any, targets: Any, options: Any, upstream: Any) -> dict[str, Any]:
    """What ``apply`` returns, and the gradients of ``tensors``, by name."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    named = dict(zip(("hidden", "weight", "bias"), leaves, strict=True))
    return evaluated(_RESULTS, apply(*leaves, targets, *options), named, upstream)


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
        if fullname not in _FUNCTIONS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


# By module: the name of the class or function in it, and what replaces it.
_FUNCTIONS: dict[str, tuple[str, type[FunctionReplacement | KernelQuestion]]] = {
    LOG_PROBS: ("ChunkedLogProbFunction", HeadReplacement),
    DIVERGENCE: ("ChunkedDivergenceFunction", DivergenceReplacement),
    GATHERED: ("_supports_trl_loss_kernel", KernelQuestion),
}
_finder = _Finder()
_replacements: dict[str, FunctionReplacement | KernelQuestion] = {}


def install() -> None:
    """Replace the functions now, or when trl imports them. Installed already, they stay so."""
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    for module in _FUNCTIONS:
        if module in sys.modules:
            _replace(sys.modules[module])


def uninstall() -> None:
    """Undo :func:`install`: trl runs its own functions again."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for replacement in _replacements.values():
        replacement.undo()
    _replacements.clear()


def current(module: str = LOG_PROBS) -> FunctionReplacement | None:
    """What runs in place of the function of trl's ``module``: None before that is imported."""
    found = _replacements.get(module)
    return found if isinstance(found, FunctionReplacement) else None


def question() -> KernelQuestion | None:
    """What answers whether trl's kernel takes given logits: None before trl's module is imported."""
    found = _replacements.get(GATHERED)
    return found if isinstance(found, KernelQuestion) else None


def state(module: str = LOG_PROBS) -> str:
    """Whether the function of trl's ``module`` runs on our op: "on" and how often, or "off" and why."""
    if _finder not in sys.meta_path:
        return "off, liger_kernels.compat.install() was not called"
    if module in _replacements:
        return str(_replacements[module])
    if module in sys.modules:
        return f"off, {module} has no {_FUNCTIONS[module][0]}"
    return f"off so far, {module} (trl 1.{15 if module == LOG_PROBS else 16} and later) is not imported"


def _replace(module: types.ModuleType) -> None:
    name, replacement = _FUNCTIONS[module.__name__]
    function = getattr(module, name, None)
    if function is not None:
        _replacements[module.__name__] = replacement(function)
