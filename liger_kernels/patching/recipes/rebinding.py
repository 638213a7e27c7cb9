"""Let the methods of one class call other functions under the names of a module's globals.

A method finds a function as a global of its modeling module. Replacing that global would change every model of the
family in the process, so it is never touched: a copy of the method (the same code object) has globals that are an
overlay of the module's, in which only some names differ. Everything else is looked up in the module itself, at the
moment of the call.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from liger_kernels.patching.reads import Outside, global_names, outside_of


class _Overlay(dict):
    """Globals of a function: a few names of its own, every other one looked up in the live globals of a module.

    A name of its own stands for a function of the module, and holds as long as that one, and all that it calls, is what
    it was. After that the module's counts.

    The others are stored, too, as they are now: where the function is a frame of its own, as after a graph break inside
    it, Dynamo's guards read what is stored. So a program that was compiled does not see them change.
    """

    def __init__(self, live: dict[str, Any], own: dict[str, Any]):
        # The interpreter looks __builtins__ up without asking __getitem__.
        super().__init__({"__builtins__": __builtins__, **live, **own})
        self.live, self.shared = live, live.keys() - own.keys()
        self.standing_for = {name: replaced_by(live, name) for name in own}

    def __getitem__(self, name: str) -> Any:
        if name in self.shared:
            return self.live[name]
        outside = self.standing_for.get(name)
        if outside is not None:
            for holder, key, value in outside:
                if (holder.get(key) if type(holder) is dict else getattr(holder, key)) is not value:
                    return self.live[name]
        return super().__getitem__(name)

    def __missing__(self, name: str) -> Any:
        return self.live[name]

    def __contains__(self, name: object) -> bool:
        return name in self.live if name in self.shared else super().__contains__(name) or name in self.live

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (this is what get means here)


def replaced_by(live: dict[str, Any], name: str) -> Outside:
    """The global function ``name``, and the functions and numbers outside of it that it uses."""
    return ((live, name, live[name]), *outside_of(live[name]))


def rebind(
    function: Any, replace: Callable[[str, Callable[..., Any]], Callable[..., Any] | None], outer: tuple[Any, ...] = ()
) -> Any:
    """``function`` with each global function for which ``replace(name, function)`` answers; itself if there is none.

    Decorated functions are followed into their closures; ``outer`` are the functions on the way, so that one that
    closes over itself ends.
    """
    if not isinstance(function, types.FunctionType) or function in outer:
        return function
    own: dict[str, Any] = {}
    for name in global_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and (new := replace(name, value)) is not None:
            own[name] = new
    cells = []
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # an empty cell
            inner = None
        rebound = rebind(inner, replace, (*outer, function))
        cells.append(cell if rebound is inner else types.CellType(rebound))
    if not own and all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    scope = _Overlay(function.__globals__, own) if own else function.__globals__
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, tuple(cells) or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__annotations__ = function.__annotations__
    copy.__doc__, copy.__module__, copy.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return copy


def methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods that ``cls`` has beyond those of torch's own classes, each as attribute look-up would find it."""
    seen: set[str] = set()
    for ancestor in cls.__mro__:
        if ancestor.__module__.startswith("torch.") or ancestor is object:
            continue  # FSDP2 puts a class of its own before that of the model
        for attribute, value in vars(ancestor).items():
            if attribute not in seen and isinstance(value, types.FunctionType) and attribute != "__init__":
                seen.add(attribute)
                yield attribute, value
