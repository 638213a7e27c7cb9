"""What the recognisers of norms, gated MLPs and rotary functions share."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Two float64 evaluations of one formula, one of which may pass through float32 somewhere (many upstream functions
# upcast to float32 whatever comes in), differ by some roundoffs of float32 (6e-8 each).
SAME_FORMULA = 1e-6


def bare_copy(module: nn.Module, **members: Any) -> nn.Module:
    """A shallow copy of ``module`` without hooks, in which the parameters and submodules named are replaced.

    The copy shares nothing that probing could change: its containers of parameters, submodules and hooks are its own.
    """
    clone: Any = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    for container in ("_parameters", "_buffers", "_modules"):
        clone.__dict__[container] = dict(module.__dict__[container])
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            clone.__dict__[name] = OrderedDict()
        elif isinstance(value, (list, dict, set)) and name not in ("_parameters", "_buffers", "_modules"):
            clone.__dict__[name] = copy.copy(value)
    for name, value in members.items():
        clone.__dict__["_parameters" if isinstance(value, nn.Parameter) else "_modules"][name] = value
    return clone


def takes_one_tensor(function: Callable[..., Any]) -> bool:
    """Whether a ``forward`` has exactly one parameter besides ``self``.

    The signature is part of the formula: a norm that also takes a gate is not an RMSNorm, however it behaves without.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    return len(parameters) == 1 and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def relative_difference(a: Any, b: torch.Tensor) -> float:
    """Largest difference of ``a`` from ``b``, over the largest element of ``b``; infinite where they cannot compare."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return float("inf")
    difference = (a.double() - b.double()).abs().max() / b.double().abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def describe(error: BaseException) -> str:
    """One line that says what went wrong, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:100]}"
