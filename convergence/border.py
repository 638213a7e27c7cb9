"""Encodes the data that a process with a patch sends to the judge: tensors (safetensors) and JSON.

A pickle runs code that its writer chose, so the judge reads no pickle from a patch's process. Here the reader decides.
It makes only plain values, and objects of the few classes in :func:`_classes`. The fields of such objects must have the
declared types.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import functools
import json
import math
import mmap
import types
import typing
from typing import Any

import torch

_TREE = "tree"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_MANY = {kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)}
_MAPPINGS = {kind.__name__: kind for kind in (dict, collections.Counter)}


class NotPlain(ValueError):
    """A value that cannot be sent, or bytes that :func:`dumps` did not make."""


def dumps(value: Any) -> bytes:
    """``value`` as the bytes of a safetensors file. The file's metadata hold the structure and all other values.
    Tensors may be on any device and lose their graph.

    Raises:
        NotPlain: ``value`` holds an object of a class that may not be sent.
    """
    import safetensors.torch

    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_encoded(value, tensors), separators=(",", ":"))
    return safetensors.torch.save(tensors, {_TREE: tree})


def loads(data: bytearray | mmap.mmap) -> Any:
    """The value of which :func:`dumps` made ``data``. Its tensors are on the CPU and share the memory of ``data``.

    Raises:
        NotPlain: :func:`dumps` did not make ``data``.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        tree = json.loads(header.pop("__metadata__")[_TREE])
        return _decoded(tree, {name: _tensor(data, start, **entry) for name, entry in header.items()})
    except NotPlain:
        raise
    except Exception as error:  # the bytes may be anything
        raise NotPlain(f"it is no plain data ({type(error).__name__}: {error})") from error


def _tensor(
    data: bytearray | mmap.mmap, start: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> torch.Tensor:
    """A view of the bytes. The library would copy each tensor twice, and a run sends hundreds of megabytes."""
    kind, (first, end) = _DTYPES[dtype], data_offsets
    if not (0 <= first <= end <= len(data) - start and math.prod(shape) * kind.itemsize == end - first):
        raise NotPlain("it has a tensor that its bytes do not fit")
    if first == end:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind, count=math.prod(shape), offset=start + first).view(shape)


@functools.cache
def _classes() -> dict[str, type]:
    """The classes whose objects may be sent: our data classes, which run no code of the writer."""
    from convergence import ours
    from convergence.arms.candidate import Candidate, PatchError
    from convergence.arms.quantities import Finding, Moment, Quantity, Remark
    from convergence.arms.trajectory import CannotApply, Trajectory
    from convergence.files import Unusable

    errors = (PatchError, CannotApply, Unusable)
    return {
        cls.__name__: cls
        for cls in (Finding, Moment, Quantity, Remark, Trajectory, Candidate, *errors, *ours.reports())
    }


def _encoded(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` for JSON. Everything but numbers, text and None becomes a list that begins with the type's name."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    name = kind.__name__
    if _MANY.get(name) is kind:
        return [name, *(_encoded(item, tensors) for item in value)]
    if _MAPPINGS.get(name) is kind:
        return [name, *([_encoded(key, tensors), _encoded(item, tensors)] for key, item in value.items())]
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES.values():
            raise NotPlain(f"a tensor of {value.dtype} cannot leave its process")
        tensors[place := str(len(tensors))] = value.detach().cpu().contiguous().clone().as_subclass(torch.Tensor)
        return ["tensor", place]
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, Exception):
        return _encoded_error(value, tensors)
    if _classes().get(name) is not kind:
        raise NotPlain(f"a {kind.__module__}.{kind.__qualname__} cannot leave its process; plain data can")
    if isinstance(value, enum.Enum):
        return [name, value.value]
    if isinstance(value, tuple):
        return [name, *(_encoded(item, tensors) for item in value)]
    return [name, [[key, _encoded(item, tensors)] for key, item in _state(value).items()]]


def _encoded_error(error: Exception, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """The error itself, if its type may be sent and its arguments are plain; else a RuntimeError that names the
    type."""
    name = type(error).__name__
    try:
        arguments = [_encoded(argument, tensors) for argument in error.args]
        if _error_class(name) is type(error) and type(error)(*error.args).args == error.args:
            return ["error", name, *arguments]
    except Exception:  # an argument is not plain, or the type changes its arguments
        pass
    return ["error", "RuntimeError", f"{name}: {error}"]


def _error_class(name: str) -> type[Exception]:
    found = getattr(builtins, name, None) or _classes().get(name)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise NotPlain(f"{name} is no exception that may cross")
    return found


def _state(value: Any) -> dict[str, Any]:
    if "__getstate__" in vars(type(value)):
        return dict(value.__getstate__())
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _decoded(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise NotPlain("it has an object where a value is expected")
        return tree
    name, *items = tree
    if name in _MANY:
        many = [_decoded(item, tensors) for item in items]
        return many if name == "list" else _MANY[name](many)
    if name in _MAPPINGS:
        return _MAPPINGS[name]({_decoded(key, tensors): _decoded(item, tensors) for key, item in items})
    if name == "tensor":
        return tensors[items[0]]
    if name == "dtype":
        found = getattr(torch, items[0])
        if not isinstance(found, torch.dtype):
            raise NotPlain(f"{items[0]!r} is no dtype")
        return found
    if name == "error":
        return _error_class(items[0])(*(_decoded(item, tensors) for item in items[1:]))
    if (cls := _classes().get(name)) is None or issubclass(cls, Exception):
        raise NotPlain(f"{name!r} is no type that may cross")
    return _made(cls, items, tensors)


def _made(cls: Any, items: list[Any], tensors: dict[str, torch.Tensor]) -> Any:
    """An object of ``cls``. It must have exactly the declared fields, each of the declared type."""
    if issubclass(cls, (tuple, enum.Enum)):
        made = cls(*(_decoded(item, tensors) for item in items))
    else:
        state = {str(key): _decoded(item, tensors) for key, item in items[0]}
        if cls in _reports():  # another commit's may have other fields
            state = _defaults(cls) | {name: value for name, value in state.items() if name in _hints(cls)}
        if state.keys() != {field.name for field in dataclasses.fields(cls)}:
            raise NotPlain(f"a {cls.__name__} with the fields {', '.join(state)}")
        if "__setstate__" in vars(cls):
            made = cls.__new__(cls)
            made.__setstate__(state)
        else:
            made = cls(**state)
    for field, kind in _hints(cls).items():
        if not _fits(getattr(made, field), kind):
            raise NotPlain(f"the field {field!r} of a {cls.__name__} has another type")
    return made


_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _reports() -> tuple[type, ...]:
    from convergence import ours

    return ours.reports()


def _defaults(cls: Any) -> dict[str, Any]:
    """New defaults of the fields of ``cls`` that have one."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def _fits(value: Any, kind: Any) -> bool:
    """Whether ``value``, with all its items, has the declared type ``kind``."""
    if kind is Any:
        return True
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in arguments)
    if origin is None:
        return isinstance(value, (int, float) if kind is float else kind)
    if not isinstance(value, origin):
        return False
    if isinstance(value, dict):
        key, item = arguments if len(arguments) == 2 else (arguments[0], int)  # of a Counter
        return all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if origin is tuple and arguments[-1] is not Ellipsis:
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    return all(_fits(item, arguments[0]) for item in value)
