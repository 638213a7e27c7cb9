"""How a verdict reads: a line per case, a table of failures, a table of all cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convergence.records import Record

_MOST_ROWS = 20


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns under ``header``."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    body = (header, ["-" * width for width in widths], *rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body]


def failure(record: Record) -> str:
    """What failed in one case: tensor, step, statistic, value and bound."""
    lines = [
        f"{record.name} on {record.device} ({record.profile} inputs): the candidate is not the baseline's mathematics"
    ]
    groups: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for row in record.failures:
        groups.setdefault((row[0], row[2]), []).append(row)
    rows = []
    for first, *more in groups.values():
        rows.append((first[0], first[1] + (f" and {len(more)} more" if more else ""), *first[2:]))
    lines += ["", *table(("tensor", "step", "statistic", "value", "bound"), rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        lines.append(f"... and {len(rows) - _MOST_ROWS} more tensors; the record has all of them")
    if record.census:
        lines += ["", "patched: " + ", ".join(f"{count} x {name}" for name, count in record.census.items())]
    return "\n".join([*lines, *record.notes])


def progress(summary: dict[str, Any]) -> str:
    """One case in one line."""
    line = f"{summary['case']}: {summary['verdict']}"
    if summary["verdict"] != "equal":
        return f"{line}: {summary['reason']}"
    return (
        f"{line} ({_shown(summary['error ratio'])} error ratio, {_shown(summary['gain'])} gain, {summary['seconds']} s)"
    )


def summary_table(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """All cases; every statistic as its worst value over its bound."""
    header = ("case", "verdict", "error ratio", "gain", "gain against others", "kernels", "launches", "seconds")
    rows = [
        (
            s["case"],
            s["verdict"],
            _shown(s["error ratio"]),
            _shown(s["gain"]),
            _shown(s["gain against the others"]),
            str(s["kernels"]),
            str(s["launches"]),
            f"{s['seconds']:.1f}",
        )
        for s in summaries
    ]
    return table(header, rows)


def _shown(statistic: dict[str, Any] | None) -> str:
    return "-" if statistic is None else f"{statistic['value']:.2g} / {statistic['bound']:.2g}"
