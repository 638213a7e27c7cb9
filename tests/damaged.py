"""Files that nobody should read, made from a good one: bytes that are no JSON, and JSON with one thing wrong."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What does something on a terminal, in HTML, in Markdown, in rich's markup or in a shell.
HOSTILE = (
    "\x1b[31m\x1b]8;;http://evil.example\x07link\x1b]0;title\x07\x9b2J\r\b\u202e[red]r[/red][link=http://evil.example]l[/link]"
    "<script>alert(1)</script><img src=x onerror=alert(1)> & ![x](http://evil.example) [y](http://evil.example) `tick` "
    "@somebody #1 $(touch pwned) | `"
)


def _directory(path: Path) -> None:
    path.mkdir()


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**11)


RAW: dict[str, bytes | Callable[[Path], None]] = {
    "empty": b"",
    "binary": bytes(range(256)) * 4,
    "no utf-8": b"\xff\xfe{}",
    "utf-16": '{"schema": 1}'.encode("utf-16"),
    "cut": b'{"schema": 1, "stages": [',
    "two": b"{}{}",
    "number": b"1",
    "text": b'"text"',
    "null": b"null",
    "true": b"true",
    "list": b"[]",
    "lists": b"[[[]]]",
    "no number": b"NaN",
    "object": b"{}",
    "deep list": b"[" * 200_000,
    "deep and whole": b"[" * 200_000 + b"]" * 200_000,
    "deep object": b'{"a":' * 200_000,
    "many digits": b'{"schema": ' + b"1" * 10_000 + b"}",
    "half a character": b'{"schema": "\\ud800"}',
    "escape": b'"\x1b[31m"',
    "directory": _directory,
    "pipe": os.mkfifo,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path),
    "100 GB": _sparse,
}


def put(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Make ``path`` what ``content`` says, whatever is there."""
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    content(path) if callable(content) else path.write_bytes(content)


def _places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of ``data`` lies."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from _places(value, (*at, key))


def _changed(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(data)
    holder = found
    for key in at[:-1]:
        holder = holder[key]
    if value is _changed:  # nobody's value: it is taken away
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    return found


def _kind(value: Any) -> str:
    """Numbers are one kind: a float may be written as a whole number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if number else "text" if isinstance(value, str) else type(value).__name__


def field(at: tuple[Any, ...]) -> str:
    """The name of the innermost field that ``at`` leads to."""
    return next((key for key in reversed(at) if isinstance(key, str)), "")


def wrong_types(data: Any) -> Iterator[tuple[str, str]]:
    """``data`` with one value of another type, as JSON, and the field in which it is."""
    for at in list(_places(data))[1:]:
        old = data
        for key in at:
            old = old[key]
        for new in (None, True, -1.5, 10**400, "text", [], [[]], {}, {"a": {"b": []}}):
            if _kind(new) != _kind(old) and not (isinstance(old, (list, dict)) and isinstance(new, type(old))):
                yield json.dumps(_changed(data, at, new)), field(at)


def missing(data: Any, *names: Any) -> Iterator[tuple[str, str]]:
    """``data`` without one of the fields of the object that ``names`` lead to, and that field."""
    holder = data
    for key in names:
        holder = holder[key]
    for name in holder:
        yield json.dumps(_changed(data, (*names, name), _changed)), name


def other_values(data: Any) -> Iterator[tuple[str, str]]:
    """``data`` with one value that its type allows, and that makes no sense, and the field in which it is."""
    values = {"number": (-1e308, 5e-324, float("nan"), 2**62), "text": ("\n", HOSTILE)}
    for at in list(_places(data))[1:]:
        old = data
        for key in at:
            old = old[key]
        for new in values.get(_kind(old), ()):
            yield json.dumps(_changed(data, at, new)), f"{field(at)} {new!r:.40}"


def controls(text: str) -> list[str]:
    """The characters of ``text`` that move, colour or turn something on a terminal."""
    return sorted({repr(c) for c in text if not (c.isprintable() or c in "\n\t")})
