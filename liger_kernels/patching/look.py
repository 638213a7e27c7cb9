"""Collects every value that the forward of a module may read now, by value and by identity."""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_kernels.patching.following import is_kept
from liger_kernels.patching.reads import ALL_CHILDREN, Reads, reads_of, table_of

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
ABSENT: Any = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_KINDS = ("_parameters", "_buffers", "_modules")
_THERE = "there"
_DEPTH = 4  # of objects inside objects

# The steps from a module to a value inside it. A step has a flag (is it an item?) and a name or key.
Way = tuple[tuple[bool, Any], ...]


class Known(NamedTuple):
    """A state of a module that was compared by value. Later, identities tell whether the module still has this
    state."""

    size: int = -1  # of the module's __dict__; -1 matches no module
    own: tuple[tuple[str, Any], ...] = ()  # the names and values in the module's __dict__
    containers: tuple[tuple[str, Any, int], ...] = ()  # of parameters and so on: name, container, size
    attributes: tuple[tuple[Any, str, Any], ...] = ()  # object, name, value
    inside: tuple[tuple[Any, Any, Any], ...] = ()  # dict or list, key, value
    sizes: tuple[tuple[Any, int], ...] = ()  # of the dicts and lists
    versions: tuple[tuple[torch.Tensor, int], ...] = ()
    reason: str | None = None  # why this is not the recognised state


class Look:
    """The values that one patched module may read.

    Attributes:
        found: the values by path. Numbers, strings, functions and classes stand for themselves, tensors as copies. Any
            other object stands as its class, with the attributes that the forward's code names.
        ways: by path, the steps from the module to the value, if they are only attributes and items.
    """

    def __init__(self, module: nn.Module):
        self.found: dict[str, Any] = {}
        self.ways: dict[str, Way] = {"": ()}
        self.own: list[tuple[str, Any]] = []
        self.attributes: list[tuple[Any, str, Any]] = []
        self.inside: list[tuple[Any, Any, Any]] = []
        self.sizes: list[tuple[Any, int]] = []
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.seen: set[int] = set()
        self.state = module.__dict__
        self.seen.add(id(module))
        self.live = frozenset(type(module)._liger_kernels_recipe.live)  # type: ignore[attr-defined]
        self._module(module, "")

    def known(self, reason: str | None) -> Known:
        """This state, with the reason why it is not the recognised one."""
        return Known(
            size=len(self.state),
            own=tuple(self.own),
            containers=tuple((kind, self.state[kind], len(self.state[kind])) for kind in _KINDS),
            attributes=tuple(self.attributes),
            inside=tuple(self.inside),
            sizes=tuple(self.sizes),
            versions=tuple(self.versions),
            reason=reason,
        )

    def _module(self, module: nn.Module, path: str) -> None:
        cls: Any = type(module)
        cls = getattr(cls, "_liger_kernels_base", cls)  # the recognised class of a patched module
        state = module.__dict__
        live = self.live if state is self.state else frozenset()
        reads = reads_of([cls.forward], cls)
        names = reads.names | {"forward"}
        self._globals(reads, path)
        parameters, buffers, modules = (state[kind] for kind in _KINDS)
        if state is not self.state:
            for kind in _KINDS:
                self._compare(state, kind, state[kind])
            self.sizes += [(container, len(container)) for container in (state, parameters, buffers, modules)]
        for name in live:  # The recipe's forward checks these. FSDP1 removes them between two forwards.
            is_none = any(name in holder and holder.get(name) is None for holder in (state, parameters, modules))
            self.found[path + name] = None if is_none else _THERE
        public = (name for name in state if reads.all and not name.startswith("_"))
        for name in sorted(names.union(public) - live - _OF_EVERY_MODULE):
            at = path + name
            if name in state and is_kept(state[name], module):
                self._compare(state, name, state[name])
                self._of_class(cls, name, at)
            elif name in state and (name != "forward" or state is not self.state):
                self._value(at, state[name], names, state, name)
            elif name in parameters:
                parameter = parameters.get(name)  # ZeRO's look-up would gather the parameter
                self.found[at] = None if parameter is None else _THERE
                if parameter is None:
                    self._compare(parameters, name, None)
            elif name in buffers:
                self._value(at, buffers[name], names, buffers, name)
            elif name not in modules and cls is not nn.Module:
                self._of_class(cls, name, at)
        everything = reads.all or not names.isdisjoint(ALL_CHILDREN) or hasattr(cls, "__iter__")
        for name, child in modules.items():
            if name not in live and (everything or name in names):
                self._value(path + name, child, names, modules, name)

    def _of_class(self, cls: Any, name: str, at: str) -> None:
        """Note a method or a setting of the class, unless nn.Module defines it."""
        owner = next((c for c in cls.__mro__ if name in vars(c)), object)
        if owner in (nn.Module, object):
            return
        value = vars(owner)[name]
        self.found[at] = value
        read = getattr(cls, name, ABSENT)
        if read is value:
            self.attributes.append((cls, name, value))
            if isinstance(value, SCALARS):
                self._reached(at, name, False)
        else:  # a descriptor
            self._compare(vars(owner), name, value)

    def _globals(self, reads: Reads, path: str) -> None:
        for holder, name in reads.values:
            if isinstance(holder, types.CellType):
                value = holder.cell_contents
                self.attributes.append((holder, name, value))
                at = f"{path}{getattr(value, '__name__', type(value).__name__)}"
            else:
                value = holder[name]
                self._compare(holder, name, value)
                at = f"{holder.get('__name__')}.{name}"
            table = table_of(value)
            plain = isinstance(value, (*SCALARS, types.FunctionType, type))
            self.found[at] = value if plain else type(value)
            if table is not None:
                self.found.update({f"{at}[{key!r}]": item for key, item in table.items()})
                for held in _dicts_in(table):
                    self.sizes.append((held, len(held)))
                    self.inside += [(held, key, item) for key, item in held.items()]

    def _compare(self, mapping: Any, name: Any, value: Any) -> None:
        if mapping is self.state:
            self.own.append((name, value))
        else:
            self.inside.append((mapping, name, value))

    def _value(
        self, at: str, value: Any, names: set[str], mapping: Any = None, key: Any = None, depth: int = 0
    ) -> None:
        """Note ``value`` at the path ``at``, and everything inside it. ``mapping[key]`` is ``value`` if there is a
        mapping."""
        if mapping is not None:
            self._compare(mapping, key, value)
            self._reached(at, key, type(mapping) is list or (type(mapping) is dict and at.endswith("]")))
        if isinstance(value, torch.Tensor):
            self.found[at] = value.detach().clone()
            if not value.is_inference():
                self.versions.append((value, value._version))
        elif isinstance(value, nn.Module):
            cls = type(value)
            self.found[at] = getattr(cls, "_liger_kernels_base", cls)
            if id(value) not in self.seen:
                self.seen.add(id(value))
                self._module(value, f"{at}.")
        elif type(value) in (tuple, list, dict):
            self.found[at] = type(value), len(value)
            if depth < _DEPTH:
                self._items(at, value, names, depth + 1)
        elif isinstance(value, types.FunctionType):
            self.found[at] = value
            self._globals(reads_of([value], object), f"{at} ")
        elif type(value) is functools.partial:
            self.found[at] = value
            for part in ("func", "args", "keywords"):
                self._value(f"{at}.{part}", getattr(value, part), names, depth=depth + 1)
        elif isinstance(value, types.MethodType):
            self.found[at] = value
            self._globals(reads_of([value], type(value.__self__)), f"{at} ")
            self._value(f"{at}.__self__", value.__self__, names, depth=depth + 1)
        elif isinstance(value, (*SCALARS, type, types.ModuleType)) or not hasattr(value, "__dict__"):
            self.found[at] = value
        else:
            self.found[at] = type(value)
            if depth < _DEPTH and id(value) not in self.seen:
                self.seen.add(id(value))
                self._object(f"{at}.", value, names, depth + 1)

    def _reached(self, at: str, key: Any, is_item: bool) -> None:
        parent = at.removesuffix(f"[{key!r}]") if is_item else at.rpartition(".")[0]
        if parent in self.ways:
            self.ways[at] = (*self.ways[parent], (is_item, key))

    def _items(self, at: str, value: Any, names: set[str], depth: int) -> None:
        if type(value) is not tuple:
            self.sizes.append((value, len(value)))
        for key, item in value.items() if type(value) is dict else enumerate(value):
            self._value(f"{at}[{key!r}]", item, names, None if type(value) is tuple else value, key, depth)

    def _object(self, path: str, value: Any, names: set[str], depth: int) -> None:
        """Note the attributes of an object, such as a configuration, that the code names."""
        state, cls = vars(value), type(value)
        if hasattr(cls, "__call__"):  # noqa: B004  (the class's, also if inherited)
            names = names | reads_of([cls.__call__], cls).names
        stored = getattr(cls, "attribute_map", {})  # transformers' table of aliases, whose look-up takes microseconds
        for name in sorted(names - self.live):
            if (key := stored.get(name, name)) in state:
                self._value(path + name, state[key], names, state, key, depth)
                continue
            if isinstance(getattr(cls, name, None), (types.FunctionType, classmethod, types.MethodType)):
                continue
            try:
                read = getattr(value, name, ABSENT)
            except Exception:  # a property raised, and would also raise in upstream's forward
                continue
            if read is not ABSENT:
                self.attributes.append((value, name, read))
                self._value(path + name, read, names, depth=depth)


def _dicts_in(table: Any) -> list[dict[Any, Any]]:
    """The dicts that hold a table's items: the table itself, or dicts of the object or of its class."""
    if type(table) is dict:
        return [table]
    spaces = (getattr(table, "__dict__", {}), *map(vars, type(table).__mro__))
    return [value for space in spaces for value in space.values() if type(value) is dict]
