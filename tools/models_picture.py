"""Draws docs/evidence/whole-models.svg from the first table of whole-models.md: ``python -m tools.models_picture``.

Nothing is measured here.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path("docs/evidence/whole-models.md")
COLOURS = ("#999999", "#0072b2", "#56b4e9", "#d55e00")
LEFT, SCALE, BAR, GAP = 130, 300, 11, 14


def rows(text: str) -> tuple[list[str], list[tuple[str, list[tuple[float, float]]]]]:
    """The arms, and of each model and shape the milliseconds and GiB of each arm."""
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    start = next(i for i, cells in enumerate(table) if cells[:2] == ["model", "tokens"])
    found = []
    for model, tokens, *cells in table[start + 1 :]:
        if len(cells) != len(table[start]) - 2:
            break
        values = [re.sub(r"\*|\([^)]*\)", "", cell).split(",") for cell in cells]
        found.append((f"{model} {tokens}", [(float(ms), float(gib)) for ms, gib in values]))
    return [cell.replace("`", "").replace('"', "'") for cell in table[start][2:]], found


def svg(text: str) -> str:
    """Two columns of bars, relative to eager: time, and memory."""
    arms, found = rows(text)
    block = len(arms) * BAR + GAP
    height = 60 + len(found) * block
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + 2 * SCALE + 100} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, (arm, colour) in enumerate(zip(arms, COLOURS, strict=True)):
        x = LEFT + i * 150
        parts.append(
            f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="18">{arm}</text>'
        )
    for column, (title, unit) in enumerate((("time of a step", "ms"), ("memory of a step", "GiB"))):
        left = LEFT + column * (SCALE + 50)
        parts.append(f'<text x="{left}" y="44" font-weight="bold">{title}, {unit}</text>')
        for i, (label, values) in enumerate(found):
            top = 54 + i * block
            if column == 0:
                middle = top + len(arms) * BAR / 2 + 4
                parts.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{label}</text>')
            for j, (value, colour) in enumerate(zip(values, COLOURS, strict=True)):
                width = (SCALE - 40) * value[column] / max(v[column] for v in values)
                y = top + j * BAR
                parts.append(
                    f'<rect x="{left}" y="{y}" width="{width:.0f}" height="{BAR - 2}" fill="{colour}"/>'
                    f'<text x="{left + width + 4:.0f}" y="{y + 9}" font-size="10">{value[column]:g}</text>'
                )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".svg").write_text(svg(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
