"""The Python code of the pages of documentation, as a reader meets it.

A block whose first line is ``# name.py`` is a module of that name. Every other block runs after those above it. A block
under ``<!-- needs PACKAGE: reason -->`` runs only where that package is installed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
)
_BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n)?^```python\n(?:# (\w+)\.py\n)?(.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"needs (\w+): .+")


@dataclass(frozen=True)
class Block:
    """One block: the module that it is, or "", its code, its first line on the page, and what it needs, or ""."""

    module: str
    code: str
    line: int
    needs: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        mark, module, code = match.groups()
        needs = _NEEDS.fullmatch(mark) if mark else None
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(module or "", code, line, needs[1] if needs else ""))
    assert len(found) == text.count("```python"), f"{page}: a block that is no block"
    return found


def write_modules(folder: Path) -> list[str]:
    """Write the modules of all pages into ``folder``; returns their names."""
    modules = [block for page in PAGES for block in blocks(page) if block.module]
    for block in modules:
        (folder / f"{block.module}.py").write_text(block.code, encoding="utf-8")
    names = [block.module for block in modules]
    assert len(names) == len(set(names)), f"two blocks are one module: {names}"
    return names
