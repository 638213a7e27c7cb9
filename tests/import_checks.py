"""What the files of the project import, read from their text."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("liger_kernels", "convergence", "matrix", "benchmarks", "tools")


def sources(tops: Iterable[str] = PRODUCT) -> dict[str, tuple[str, str]]:
    """By module, its package and its text."""
    found = {}
    for path in (path for top in tops for path in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        found[package if parts[-1] == "__init__" else ".".join(parts)] = package, path.read_text(encoding="utf-8")
    return found


def imports(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[str, str]]:
    """The imports among ``nodes`` of a module of ``package``: ("a", "b") for ``from a import b``, ("a", "") for
    ``import a``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((base, alias.name) for alias in node.names)


def imported_files(files: dict[str, tuple[str, str]]) -> dict[str, set[str]]:
    """Of each of ``files`` (as :func:`sources` has them), those that it imports by name.

    ``from a import b`` is ``a.b`` where that is a module; where ``a`` is a package that imports b, the module from
    which it does; and else ``a``. Of a package of which a file uses nothing but attributes, each counts as imported.
    """
    trees = {module: [*ast.walk(ast.parse(text))] for module, (_, text) in files.items()}
    found = {module: set(imports(trees[module], package)) for module, (package, _) in files.items()}
    given = {module: {name: base for base, name in pairs if name} for module, pairs in found.items()}
    packages = {package for package, _ in files.values()}

    def defined_in(base: str, name: str) -> str:
        if f"{base}.{name}" in files or not name:
            return f"{base}.{name}".rstrip(".")
        again = given.get(base, {}).get(name)
        return defined_in(again, name) if again and again != base else base

    edges = {}
    for module, pairs in found.items():
        edges[module] = {defined_in(base, name) for base, name in pairs} & files.keys() - {module}
        for base, name in pairs:
            if name and (package := f"{base}.{name}") in packages & edges[module]:
                of = [node for node in trees[module] if isinstance(node, ast.Attribute) and _is_name(node.value, name)]
                if len(of) == sum(_is_name(node, name) for node in trees[module]):
                    edges[module].remove(package)
                    edges[module] |= {defined_in(package, node.attr) for node in of} & files.keys()
    return edges


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def reaching(edges: dict[str, set[str]], changed: Iterable[str], within: int) -> set[str]:
    """Those that import one of ``changed`` by at most ``within`` steps, and ``changed``."""
    reached = set(changed) & edges.keys()
    for _ in range(within):
        more = {module for module, imported in edges.items() if imported & reached} - reached
        if not more:
            break
        reached |= more
    return reached
