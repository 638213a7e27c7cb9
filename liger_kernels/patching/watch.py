"""Checks whether a patched module still is what was recognised.

A recipe holds the findings of a probe: an eps, an activation, a limit. Upstream's forward reads such values from the
module at each call. So :class:`Watch` keeps every value that upstream's forward may read (``reads.py``, ``look.py``).
:func:`unchanged` compares these values at each call, by identity. If a value differs, the module runs upstream's
forward, and ``status`` says what changed. Only another ``patch`` recognises the module again. A forward never does: a
probe takes milliseconds, and the formula would depend on the time of the probe.

Parameters are not compared, because they train and sharding replaces them. A recipe's forward reads them at each call.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from typing import Any

import torch
from torch import nn

from liger_kernels.patching.look import ABSENT, SCALARS, Known, Look, Way

# The attribute of a patched module with its watch. A deep copy or a pickle of the module has a separate watch.
WATCH = "_liger_kernels_watch"


class Watch:
    """The values that upstream's forward could read when a module was recognised, by path.

    A watch holds no object that refers to the module, so there are no reference cycles.
    """

    def __init__(self, found: dict[str, Any], ways: dict[str, Way], unknown: tuple[str, ...] = ()):
        self.found = found
        self.ways = ways
        # The values that Dynamo can read and compare.
        kinds = ((path, _kind(found[path])) for path in ways if path in found)
        self.traced = tuple((kind, ways[path], found[path]) for path, kind in kinds if kind is not None)
        self.unknown = unknown  # paths that a pickle could not hold; the first value that is found counts
        self.known = Known()

    @classmethod
    def of(cls, module: nn.Module) -> Watch:
        """The watch of a module that has just been patched."""
        look = Look(module)
        return cls(look.found, look.ways)

    def examine(self, module: nn.Module) -> str | None:
        """Why ``module`` is not what was recognised; None if it is."""
        look = Look(module)
        if self.unknown:
            self.found.update({path: look.found[path] for path in self.unknown if path in look.found})
            self.unknown = ()
        reason = _difference(self.found, look.found)
        self.known = look.known(reason)
        return reason

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch(copy.deepcopy(self.found, memo), self.ways, self.unknown)

    def __reduce__(self) -> Any:
        """Pickle the values that have a value or a name to be found by. For all others, the first value found after
        loading counts."""
        plain = {path: value for path, value in self.found.items() if _is_pickled(value)}
        return Watch, (plain, self.ways, (*self.unknown, *(path for path in self.found if path not in plain)))


def unchanged(module: nn.Module) -> bool:
    """Whether every value that upstream's forward may read is the same as when ``module`` was recognised."""
    if torch.compiler.is_compiling():
        return _unchanged_in_a_program(module)
    state = module.__dict__
    watch = state[WATCH]
    size, own, containers, attributes, inside, sizes, versions, reason = watch.known
    if len(state) != size:
        return watch.examine(module) is None
    try:
        for name, value in own:
            if state[name] is not value:
                return watch.examine(module) is None
        for name, container, size in containers:
            if state[name] is not container or len(container) != size:
                return watch.examine(module) is None
        for owner, name, value in attributes:
            if getattr(owner, name) is not value:
                return watch.examine(module) is None
        for mapping, key, value in inside:
            if mapping[key] is not value:
                return watch.examine(module) is None
        for container, size in sizes:
            if len(container) != size:
                return watch.examine(module) is None
        for tensor, version in versions:
            if tensor._version != version:
                return watch.examine(module) is None
    except (KeyError, IndexError, AttributeError):  # a watched value is gone
        return watch.examine(module) is None
    return reason is None


def _unchanged_in_a_program(module: Any) -> bool:
    """:func:`unchanged` for Dynamo: each value that is read becomes a guard of the program."""
    watch = module.__dict__[WATCH]
    for kind, way, value in watch.traced:
        found = module
        for is_item, name in way:
            found = found[name] if is_item else getattr(found, name, None)
        if kind == "type":
            found = getattr(type(found), "_liger_kernels_base", type(found))
        if kind == "size":
            found = type(found), len(found)
        if kind in ("number", "size"):
            if found != value:
                return False
        elif kind == "partial":
            if type(found) is not functools.partial or found.func is not value.func or found.args != value.args:
                return False
            if found.keywords != value.keywords:
                return False
        elif found is not value:
            return False
    return watch.known.reason is None


def changed(module: nn.Module) -> str | None:
    """A report's text on what changed since recognition; None if nothing changed, or nothing is watched."""
    watch = module.__dict__.get(WATCH)
    return None if watch is None else watch.examine(module)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    for path in [*before, *(path for path in now if path not in before)]:
        was, has = before.get(path, ABSENT), now.get(path, ABSENT)
        if not _same(was, has):
            return (
                f"its {path} was {_short(was)} when it was recognised and is {_short(has)} now: it runs its own "
                "forward; call patch(model) again"
            )
    return None


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        meta = a.device.type == "meta" or b.device.type == "meta"
        return not meta and a.shape == b.shape and bool(torch.equal(a.to(b), b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (*SCALARS, tuple)):
        return repr(a) == repr(b)  # 0.0 and -0.0 differ
    if isinstance(a, functools.partial):
        return True  # look.py lists its parts, which are compared
    return isinstance(a, types.MethodType) and a == b


def _kind(value: Any) -> str | None:
    """How a compiled program compares ``value``; None if it cannot."""
    if isinstance(value, type):
        return "type"
    if isinstance(value, (bool, int, float, str, type(None))):
        return "number"
    if type(value) is tuple:
        return "size"
    if type(value) is functools.partial:
        return "partial"
    return "object" if callable(value) else None


def _is_pickled(value: Any) -> bool:
    """Whether a pickle of ``value`` means the same after loading."""
    if isinstance(value, (type, types.FunctionType)):
        holder: Any = sys.modules.get(value.__module__)
        for name in value.__qualname__.split("."):
            holder = getattr(holder, name, None)
        return holder is value
    return isinstance(value, (*SCALARS, tuple, torch.Tensor))


def _short(value: Any) -> str:
    if value is ABSENT:
        return "not there"
    name = getattr(value, "__qualname__", None)
    if isinstance(value, torch.Tensor):
        return "another tensor" if value.numel() > 1 else f"a tensor of {value.tolist()}"
    return name if isinstance(name, str) else repr(value)[:60]
