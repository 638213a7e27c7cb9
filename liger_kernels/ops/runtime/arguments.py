"""What every public function asks of its arguments before it begins: what its annotations say.

``@checked`` reads the annotations once and writes a function of the same signature that checks and then calls, as
``dataclasses`` writes an ``__init__``: one comparison of types an argument, which costs the host less than any loop. An
annotation may carry a :class:`Limit`, which is one of the value: ``eps: Annotated[float, NOT_NEGATIVE]``.

``@checked_op`` is for an op with kernels: they get tensors whose memory holds their values (:func:`as_values`), too.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from liger_kernels.ops.runtime.dispatch import INTERPRET, as_values

_Checked = TypeVar("_Checked", bound=Callable[..., Any])
_Class = TypeVar("_Class")


class Limit(NamedTuple):
    """Which values of a type are allowed.

    Attributes:
        test: an expression of ``{x}``.
        words: "{name} is {value}; it must be " and this.
    """

    test: str
    words: str


# In comparisons that a symbol of torch.compile's knows, unlike math.isfinite.
FINITE = Limit("-inf < {x} < inf", "finite")
NOT_NEGATIVE = Limit("0 <= {x} < inf", "0 or positive, and finite")
POSITIVE = Limit("0 < {x} < inf", "positive and finite")
AT_LEAST_1 = Limit("{x} >= 1", "at least 1")
SHARE = Limit("0 <= {x} <= 1", "between 0 and 1")


def one_of(names: collections.abc.Iterable[str]) -> Limit:
    """One of these ``names``."""
    return Limit(f"{{x}} in {tuple(names)!r}", f"one of {', '.join(map(repr, names))}")


class _Kind(NamedTuple):
    """Which types an annotation allows: an expression of ``{x}``, and in words."""

    test: str
    words: str
    limit: Limit | None = None


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _are_names(x: Any) -> bool:
    return isinstance(x, (tuple, list, set, frozenset)) and all(isinstance(name, str) for name in x)


def _is_series(x: Any) -> bool:
    return isinstance(x, collections.abc.Iterable) and not isinstance(x, (str, bytes, Tensor, collections.abc.Mapping))


_KINDS: dict[Any, _Kind] = {
    Tensor: _Kind("(type({x}) is _Tensor or isinstance({x}, _Tensor))", "a tensor"),
    float: _Kind("(type({x}) is float or _is_number({x}))", "a Python number"),
    int: _Kind("(type({x}) is int or _is_int({x}))", "an int"),
    bool: _Kind("type({x}) is bool", "True or False"),
    str: _Kind("isinstance({x}, str)", "a string"),
    tuple[str, ...]: _Kind("_are_names({x})", "a tuple of names"),
    type(None): _Kind("{x} is None", "None"),
    nn.Module: _Kind("isinstance({x}, _Module)", "a torch.nn.Module"),
    torch.dtype: _Kind("isinstance({x}, _dtype)", "a torch.dtype"),
}
# What the functions that are written here call.
_scope: dict[str, Any] = {
    "_Tensor": Tensor,
    "_Module": nn.Module,
    "_dtype": torch.dtype,
    "_Mapping": collections.abc.Mapping,
    "_is_number": _is_number,
    "_is_int": _is_int,
    "_are_names": _are_names,
    "_is_series": _is_series,
    "_is_traced": is_dynamo_compiling,
    "_as_values": as_values,
    "inf": math.inf,
}


def _kind(annotation: Any) -> _Kind | None:
    """What an annotation allows; None where that is anything."""
    if annotation in (Any, inspect.Parameter.empty):
        return None
    if annotation in _KINDS:
        return _KINDS[annotation]
    origin, within = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        kind = _kind(within[0])
        limit = annotation.__metadata__[0]
        assert kind is not None
        return _Kind(kind.test, limit.words if within[0] is str else f"{kind.words}, {limit.words}", limit)
    if origin in (typing.Union, types.UnionType):
        return _any_of([_kind(part) for part in within])
    if origin is collections.abc.Callable:
        return _Kind("callable({x})", "a function")
    if origin is collections.abc.Iterable:
        return _Kind("_is_series({x})", f"a list of {'names' if within == (str,) else 'dicts'}")
    if origin is collections.abc.Mapping:
        return _Kind("isinstance({x}, _Mapping)", "a dict")
    cls = origin or annotation
    _scope[f"_{cls.__name__}"] = cls
    return _Kind(f"isinstance({{x}}, _{cls.__name__})", f"a {cls.__name__}")


def _any_of(kinds: list[_Kind | None]) -> _Kind | None:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    tests = sorted([kind.test for kind in known], key=lambda test: test != "{x} is None")  # the cheapest is asked first
    limits = [kind.limit for kind in known if kind.limit is not None]  # at most one, beside None
    limit = Limit(f"({{x}} is None or {limits[0].test})", f"{limits[0].words}, or None") if limits else None
    return _Kind(f"({' or '.join(tests)})", (", or " if limits else " or ").join(kind.words for kind in known), limit)


def describe(value: Any) -> str:
    """What came, in few words and without an address."""
    if value is None:
        return "None"
    name = type(value).__name__
    what = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(value, (bool, int, float, str)):
        shown = repr(value)
        return f"{what} ({shown if len(shown) <= 60 else f'{shown[:60]}...'})"
    if isinstance(value, Tensor):
        return f"{what} ({value.dtype}, shape {list(value.shape)})"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return what


def refuse_type(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the TypeError for an argument: its ``name``, what came, what is allowed."""
    raise TypeError(f"{name} is {describe(value)}; it must be {allowed}")


def _refuse_value(name: str, value: Any, words: str) -> NoReturn:
    raise ValueError(f"{name} is {value!r}; it must be {words}")


_scope |= {"_refuse_type": refuse_type, "_refuse_value": _refuse_value}


def checked(function: _Checked, *, reads_memory: bool = False) -> _Checked:
    """``function``, which raises for an argument that its annotation does not allow.

    Args:
        reads_memory: whether kernels read the memory of the tensors.

    Raises:
        TypeError: of another type.
        ValueError: of that type, but beyond the :class:`Limit` of the annotation.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    scope = {**_scope, "_function": function}
    head, body, call, tensors = [], [], [], []
    for p in parameters:
        annotation = hints.get(p.name, p.annotation)
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            shown = f"*{p.name}" if p.kind is p.VAR_POSITIONAL else f"**{p.name}"
            head.append(shown)
            call.append(shown)
            continue
        if p.kind is p.KEYWORD_ONLY and not any(one.startswith("*") for one in head):
            head.append("*")
        scope[f"_default_{p.name}"] = p.default
        head.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
        call.append(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name)
        kind = _kind(annotation)
        if kind is None:
            continue
        scope |= _scope
        body.append(f"if not {kind.test.format(x=p.name)}: _refuse_type({p.name!r}, {p.name}, {kind.words!r})")
        if kind.limit is not None:
            test = kind.limit.test.format(x=p.name)
            body.append(f"if not {test}: _refuse_value({p.name!r}, {p.name}, {kind.limit.words!r})")
        if annotation in (Tensor, Tensor | None):
            tensors.append(p.name)
    if reads_memory:
        on_cpu = "" if INTERPRET else f" and not {tensors[0]}.is_cpu"  # where torch's operations read it
        negative = " or ".join(f"{name} is not None and {name}.is_neg()" for name in tensors)
        names = ", ".join(tensors)
        body.append(f"if not _is_traced(){on_cpu} and ({negative}): ({names},) = _as_values({names})")
    lines = [f"def checked({', '.join(head)}):", *body, f"return _function({', '.join(call)})"]
    # What it calls are cells of its closure, so that its globals are those of the function's module.
    made: dict[str, Any] = {}
    source = "\n        ".join([f"def make({', '.join(scope)}):\n    {lines[0]}", *lines[1:]])
    exec(f"{source}\n    return checked", getattr(function, "__globals__", {}), made)
    result: Any = functools.wraps(function)(made["make"](**scope))
    return result


checked_op = functools.partial(checked, reads_memory=True)


def checked_fields(cls: type[_Class]) -> type[_Class]:
    """The dataclass ``cls``, whose constructor raises as a :func:`checked` function does."""
    init: Any = cls.__init__
    init.__annotations__ = typing.get_type_hints(cls, include_extras=True)
    cls.__init__ = checked(init)  # type: ignore[method-assign]
    return cls
