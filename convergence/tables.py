"""Tables as lines of text, and text that comes from elsewhere in them: no character of it does anything on a terminal,
in Markdown or in a shell. It imports the standard library only, so that every part of the project may use it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# None of these characters means anything in the middle of a line of Markdown.
_PLAIN = re.compile(r"[\w .,:;/+=()%'\"?-]*")
_ADDRESS = re.compile(r"://|www\.", re.IGNORECASE)


def visible(text: str) -> str:
    """``text`` without a character that moves a terminal's cursor, colours what follows, or turns its direction: each
    is written as Python writes it, ``\\x1b``. Line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def first_line(text: str) -> str:
    """The first line of ``text`` that is not empty; empty where there is none."""
    return next(iter(text.strip().splitlines()), "")


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under ``header``, for a terminal."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    body = (header, ["-" * width for width in widths], *rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body]


def literal(text: object) -> str:
    """``text`` on one line of Markdown: as it is where no character of it means anything there, else as code, in which
    there is no markup, no link and nobody is mentioned."""
    line = " ".join(visible(str(text)).split())
    if _PLAIN.fullmatch(line) and not _ADDRESS.search(line):
        return line
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [markdown_row(cells) for cells in (header, ["---"] * len(header), *rows)]


def markdown_row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(visible(str(cell)).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
