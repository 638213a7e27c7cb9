"""Is what JSON gave of the types that a class declares? It imports the standard library only, so that every part of the
project may use it."""

from __future__ import annotations

import enum
import functools
import types
import typing
from typing import Any

from convergence.files import Unusable

# Beyond, a whole number is no size, count or seed, and arithmetic with it may overflow.
LARGEST = 2**63 - 1
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def checked(value: Any, kind: Any, where: str, more: bool = False) -> Any:
    """``value`` as ``kind``, with every item checked.

    Args:
        value: what JSON gave.
        kind: str, int, float (which "nan", "inf" and "-inf" are, too), bool, Any, an enum of texts, or a list, tuple,
            dict, union with None, dataclass or NamedTuple or TypedDict of these. An object has exactly their fields.
        where: what a message calls it: the file, and the field of it.
        more: whether objects may have other fields, too. A TypedDict keeps them unchecked, a dataclass does not.

    Raises:
        Unusable: the message names the field, what came and what is allowed.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        (of,) = (part for part in arguments if part is not type(None))
        return None if value is None else checked(value, of, where, more)
    if kind in _NAMES:
        return _single(value, kind, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        members = {member.value: member for member in kind}
        if type(value) is str and value in members:
            return members[value]
        raise Unusable(f"{where} is {shown(value)}; allowed are {', '.join(members)}")
    if origin in (list, tuple):
        if type(value) is not list:
            raise Unusable(f"{where} is {shown(value)}; allowed is a list")
        each = arguments * len(value) if origin is list else arguments
        if len(value) != len(each):
            raise Unusable(f"{where} is {shown(value)}; allowed are {len(each)} items")
        items = [checked(item, each[i], f"{where}[{i}]", more) for i, item in enumerate(value)]
        return items if origin is list else tuple(items)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple, which JSON has as a list
        fields = _types(kind)
        return kind(*checked(value, tuple[tuple(fields.values())], where, more))  # type: ignore[misc]
    if type(value) is not dict:
        raise Unusable(f"{where} is {shown(value)}; allowed is an object of named values")
    if origin is dict:
        return {key: checked(item, arguments[1], f"{where}[{cut(repr(key))}]", more) for key, item in value.items()}
    fields = _types(kind)
    if (missing := fields.keys() - value.keys()) or (value.keys() - fields.keys() and not more):
        has = ", ".join(map(repr, value)) or "nothing"
        lacks = f" and not {', '.join(sorted(missing))}" if missing else ""
        allowed = "at least" if more else "exactly"
        raise Unusable(f"{where} has {cut(has)}{lacks}; allowed are {allowed} {', '.join(fields)}")
    found = {name: checked(value[name], fields[name], f"{where}[{name!r}]", more) for name in fields}
    return {**value, **found} if typing.is_typeddict(kind) else kind(**found)


def _single(value: Any, kind: Any, where: str) -> Any:
    if type(value) is kind and (kind is not int or abs(value) <= LARGEST):
        return value
    if kind is float and (value in ("nan", "inf", "-inf") or (type(value) is int and abs(value) <= LARGEST)):
        return float(value)
    raise Unusable(f"{where} is {shown(value)}; allowed is {_NAMES[kind]}")


_types = functools.cache(typing.get_type_hints)


def shown(value: Any) -> str:
    """``value`` in a message: as Python writes it, cut, and its type."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number of thousands of digits"
    return f"{cut(text)} ({type(value).__name__})"


def cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
