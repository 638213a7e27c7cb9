"""Tables as lines of text. It imports the standard library only, so that every part of the project may use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under ``header``, for a terminal."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    body = (header, ["-" * width for width in widths], *rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body]


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [markdown_row(cells) for cells in (header, ["---"] * len(header), *rows)]


def markdown_row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
