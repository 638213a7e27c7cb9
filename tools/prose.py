"""Checks the prose of Markdown pages and docstrings: ``python -m tools.prose`` exits 1 with the places that are off.

The field has a word for most things; another one makes a reader stop. Lines of Markdown prose wrap at 100 characters.
Code and tables are not prose. Pages of evidence are mostly written by commands, which do not wrap.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100
# A pattern, and what to write instead.
WORDS = {
    r"\blet(?:s|ting)? go\b": "freed, or dropped",
    r"\bof so many\b": "that many",
    r"\bin ratio to\b": "relative to",
    r"\bby turns\b": "interleaved, or in turn",
    r"\bdoors?\b": "alias, or entry point",
    r"\b(?:first|second|both) looks?\b": "pass",
    r"\bsome \d[\d,.]*": "about, and the number",
    r"\b(?:and|:) not taken\b|\bnot taken:": "rejected",
    r"\bbeside\b": "next to, or in addition to",
    r"\bd (?:weight|hidden|logits|gate|up|bias|residual)\b": "grad_weight and the like",
}
_SKIPPED_FOLDERS = {"build", "records", "tests"}
_NOT_PROSE = re.compile(r"^\s*(?:\||#|<|!\[|:::|    )")


def markdown(text: str) -> Iterator[tuple[int, str]]:
    """The lines of prose by number, without what is in backquotes."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The lines of all docstrings by number."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                for offset, line in enumerate(str(first.value.value).splitlines()):
                    yield first.lineno + offset, line


def findings(path: Path) -> Iterator[str]:
    """What is off in a file, each with its line."""
    text = path.read_text(encoding="utf-8")
    for number, line in docstrings(text) if path.suffix == ".py" else markdown(text):
        words = re.sub(r"`[^`]*`", "", line)
        for pattern, instead in WORDS.items():
            if found := re.search(pattern, words, flags=re.IGNORECASE):
                yield f"{path}:{number}: {found[0]!r}: write {instead}"
        wraps = path.suffix == ".md" and "evidence" not in path.parts
        if wraps and len(line) > WIDTH and not _NOT_PROSE.match(line) and " " in line[:WIDTH].strip(" -*"):
            yield f"{path}:{number}: {len(line)} characters, at most {WIDTH}"


def files(root: Path) -> list[Path]:
    """Every page and module of the repository but for tests, hidden folders and what is built."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith((".md", ".py")) and not name.startswith(".")]
    return sorted(found)


def main() -> int:
    found = [finding for path in files(Path(".")) for finding in findings(path)]
    print("\n".join(found) or "prose: nothing found")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
