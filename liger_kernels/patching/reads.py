"""Finds what a forward may read, from its code: names of attributes, global functions, and closures.

The bytecode names every attribute, and a string constant may be a name for ``getattr``. An attribute that is not named
there cannot change the result of a forward. Examples are hooks, flags and marks that other packages put on a module.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

# A forward that names one of these may read any attribute, or any submodule.
_ALL_ATTRIBUTES = frozenset({"__dict__", "vars", "__getattribute__", "__getattr__"})
ALL_CHILDREN = frozenset({"_modules", "children", "modules", "named_children", "named_modules", "__iter__"})
_SCALARS = (bool, int, float, str)
_METHODS = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)


@dataclass
class Reads:
    """The values that some functions, and the functions that they call, may read.

    Attributes:
        names: names of attributes, of any object.
        all: whether any attribute may be read, because some code cannot be seen or asks for all attributes.
        values: (container, name) of every global function, class and number, and of every object in a closure.
    """

    names: set[str] = field(default_factory=set)
    all: bool = False
    values: list[tuple[Any, str]] = field(default_factory=list)


def reads_of(functions: Iterable[Any], cls: type) -> Reads:
    """The values that ``functions`` of the class ``cls``, and the methods and global functions that they name, may
    read."""
    found = Reads()
    todo, seen = list(functions), set()
    while todo:
        function = _plain(todo.pop())
        if function in seen:
            continue
        seen.add(function)
        if not isinstance(function, types.FunctionType):
            found.all = found.all or callable(function)
            continue
        names = names_in(function.__code__)
        found.all = found.all or not names.isdisjoint(_ALL_ATTRIBUTES)
        found.names |= names
        for holder, name, value in _outside(function):
            if isinstance(value, types.FunctionType):
                todo.append(value)
            elif (table := table_of(value)) is not None:
                found.names.update(*(names_in(f.__code__) for f in table.values() if isinstance(f, types.FunctionType)))
            found.values.append((holder, name))
        for ancestor in cls.__mro__:  # all classes, because `super()` names another class's method
            if ancestor not in (nn.Module, object):
                methods = (vars(ancestor)[name] for name in names & vars(ancestor).keys())
                todo += [method for method in methods if isinstance(method, _METHODS)]
    return found


Outside = tuple[tuple[Any, str, Any], ...]  # a dict or an object, a name, and the value that it had


def outside_of(function: Any) -> Outside:
    """The current globals and closures that ``function``, and the functions that it calls, use."""
    values = reads_of([function], object).values
    return tuple((h, name, h[name] if isinstance(h, dict) else getattr(h, name)) for h, name in values)


def reads_training(module: nn.Module) -> bool:
    """Whether the result of ``module`` may depend on the training mode of it or of a module inside."""
    return any("training" in reads_of([type(part).forward], type(part)).names for part in module.modules())


def _plain(function: Any) -> Any:
    """The plain function inside a property, partial or method."""
    for name in ("fget", "func", "__func__"):  # a property, a partial or a cached property, a method of some kind
        inner = None if isinstance(function, types.FunctionType) else getattr(function, name, None)
        if inner is not None:
            return _plain(inner)
    return function


def _outside(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """The values of ``function``'s closure and of its globals that are not torch's, with their containers."""
    for cell in function.__closure__ or ():
        try:
            yield cell, "cell_contents", cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    scope = function.__globals__
    if _is_torchs(scope.get("__name__")):
        return
    for name in global_names(function.__code__):
        value = scope.get(name)
        kept = isinstance(value, (types.FunctionType, type)) and not _is_torchs(value.__module__)
        if kept or type(value) in _SCALARS or table_of(value) is not None:
            yield scope, name, value


def table_of(value: Any) -> Mapping[Any, Any] | None:
    """``value``, if it is a table of functions to choose from."""
    is_table = isinstance(value, Mapping) and any(isinstance(item, types.FunctionType) for item in value.values())
    return value if is_table else None


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Every name of an attribute in ``code``, strings among its constants included."""
    names = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return frozenset(names)


@functools.cache
def global_names(code: types.CodeType) -> list[str]:
    """The global names in the order of the code. The order of a set would differ in every process."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += global_names(constant)
    return list(dict.fromkeys(names))


def _is_torchs(module: str | None) -> bool:
    return module is not None and (module == "torch" or module.startswith("torch."))
