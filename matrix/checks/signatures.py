"""Whether the forwards of a patched model accept exactly what upstream's do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def differs(patched: Callable[..., Any], upstream: Callable[..., Any]) -> str:
    """Why ``patched`` does not accept exactly what ``upstream`` does; empty when it does.

    A signature can be borrowed (``functools.wraps``), so code that is not upstream's must hand everything on.
    """
    expected, shown = (list(inspect.signature(function).parameters.values()) for function in (upstream, patched))
    if expected != shown:
        return f"it takes {', '.join(map(str, shown))} instead of {', '.join(map(str, expected))}"
    theirs, ours = (getattr(function, "__func__", function) for function in (upstream, patched))
    borrowed = hasattr(ours, "__wrapped__") or hasattr(ours, "__signature__")
    everything = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if borrowed and ours.__code__ is not theirs.__code__ and ours.__code__.co_flags & everything != everything:
        return "its signature is borrowed, and it does not hand everything on"
    return ""


def other_signatures(patched: Any, upstream: Any) -> list[str]:
    """Every module of ``patched`` whose forward does not accept exactly what its twin's in ``upstream`` does."""
    twins = dict(upstream.named_modules())
    found = ((path, differs(part.forward, twins[path].forward)) for path, part in patched.named_modules())
    return [f"{path or type(patched).__name__}.forward: {why}" for path, why in found if why]
