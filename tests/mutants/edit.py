"""A change of a module's syntax tree: what it matches does not depend on formatting, comments or quotes."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class StaleMutant(Exception):
    """The source no longer has the place that a mutant changes: write the mutant anew."""


@dataclass(frozen=True)
class Edit:
    """Exchange ``old`` by ``new`` in the syntax tree of ``module``.

    Both are Python source, and both the same of these: an expression, statements, or consecutive arguments of a call,
    positional (``"a, b"``) or by name (``"eps=eps"``).

    Attributes:
        module: the dotted name of the module.
        old: what must occur ``times`` times. If empty, ``new`` goes to the front of the function ``within``.
        new: what takes its place. If empty, the statements are removed.
        within: the function or class to look in, such as ``"Cache.get"``. If empty, the whole module.
        times: how often ``old`` occurs.
    """

    module: str
    old: str
    new: str
    within: str = ""
    times: int = 1

    def apply(self, text: str) -> str:
        """The changed source, without comments.

        Raises:
            StaleMutant: ``old`` does not occur as often as it should.
        """
        tree = ast.parse(text)
        scope = self._scope(tree)
        places, new = self._places(scope)
        if len(places) != self.times:
            where = f"{self.module} {self.within}".strip()
            raise StaleMutant(f"{where} has {self.old!r} {len(places)} times, not {self.times}: adapt the mutant")
        for place in reversed(places):
            place.put(new)
        return ast.unparse(tree)

    def _scope(self, tree: ast.Module) -> ast.AST:
        scope: ast.AST = tree
        for name in self.within.split(".") if self.within else ():
            found = [node for node in ast.walk(scope) if isinstance(node, _Definition) and node.name == name]
            if len(found) != 1:
                raise StaleMutant(f"{self.module} defines {name} {len(found)} times, not 1: adapt the mutant")
            scope = found[0]
        return scope

    def _places(self, scope: ast.AST) -> tuple[list[_Place], Sequence[ast.AST]]:
        """Where ``old`` is, and what goes there."""
        if not self.old:
            assert isinstance(scope, _Definition), f"say within which function {self.new!r} goes"
            return [_Place(scope, "body", int(ast.get_docstring(scope) is not None), 0)], _statements(self.new) or ()
        for parse in (_expression, _statements, _arguments):
            old, new = parse(self.old), parse(self.new)
            if old and new is not None and (places := list(_find(scope, old))):
                return places, new
        return [], ()


class _Place(NamedTuple):
    """``length`` nodes from ``start`` on in a field that is a list, or (``start`` is None) the field itself."""

    parent: ast.AST
    field: str
    start: int | None
    length: int

    def put(self, new: Sequence[ast.AST]) -> None:
        if self.start is None:
            (only,) = new
            setattr(self.parent, self.field, only)
            return
        siblings = getattr(self.parent, self.field)
        siblings[self.start : self.start + self.length] = new
        if not siblings and self.field == "body":
            siblings.append(ast.Pass())


def _find(scope: ast.AST, old: Sequence[ast.AST]) -> Iterator[_Place]:
    first = type(old[0])  # a module has 10,000 nodes, and few are of this type
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for start in range(len(value) - len(old) + 1):
                    if type(value[start]) is first and _same(value[start : start + len(old)], old):
                        yield _Place(parent, field, start, len(old))
            elif len(old) == 1 and _same(value, old[0]):
                yield _Place(parent, field, None, 1)


def _same(a: object, b: object) -> bool:
    """Whether two nodes are written the same, whether their value is read or assigned."""
    if type(a) is not type(b):
        return False
    if isinstance(a, ast.AST):
        return all(_same(getattr(a, name, None), getattr(b, name, None)) for name in a._fields if name != "ctx")
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def _expression(text: str) -> Sequence[ast.AST] | None:
    try:
        return [ast.parse(text.strip(), mode="eval").body]
    except SyntaxError:
        return None


def _statements(text: str) -> Sequence[ast.AST] | None:
    try:
        return ast.parse(textwrap.dedent(text)).body
    except SyntaxError:
        return None


def _arguments(text: str) -> Sequence[ast.AST] | None:
    """Of a call: positional, or by name."""
    call = (_expression(f"_({text})") or [None])[0]
    if not isinstance(call, ast.Call) or (call.args and call.keywords):
        return None
    return [*call.args, *call.keywords]
