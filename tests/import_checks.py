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
