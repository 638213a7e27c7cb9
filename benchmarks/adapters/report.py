"""What was measured as tables in Markdown. A result is a dictionary, as its JSON file has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.adapters.steps import StepRow
from benchmarks.sharded import differs
from convergence import tables

Result = Mapping[str, Any]
_CHECKPOINTS = {"none": "none", "hf": "on the GPU", "own": "its own, on the host"}
_PRECISION = {
    "trainer": "float32 adapters and a bfloat16 base under bfloat16 autocast",
    "bfloat16": "bfloat16 adapters and base without autocast",
    "float32": "float32 adapters and base",
}


def caption(found: Result, versions: Mapping[str, str] | None = None) -> str:
    """The command, and what else the figures depend on. On a page, whose reader has seen the :func:`defaults`,
    ``versions`` are those that it needs not repeat."""
    named = [
        f"{name} {version}" for name, version in found["versions"].items() if (versions or {}).get(name) != version
    ]
    how = [", ".join([found["device"], *named, found["date"]])]
    if found["trained"] == "full":
        how.append("every weight, in bfloat16")
    elif versions is None or found["precision"] != "trainer":
        how.append(_PRECISION[found["precision"]])
    layers = [f"{found['layers']} layers"] if found["layers"] else []
    return f"`{found['command']}`; {', '.join(['; '.join(how), *layers])}."


def defaults(versions: Mapping[str, str]) -> str:
    """What the captions of a page do not repeat."""
    named = [", ".join(map(" ".join, versions.items()))] if versions else []
    return f"Where a caption says nothing else: {'; '.join([_PRECISION['trainer'], *named])}."


def shared_versions(results: Sequence[Result]) -> dict[str, str]:
    """The versions of ``results`` on which all agree that name one."""
    found: dict[str, set[str]] = {}
    for result in results:
        for name, version in result["versions"].items():
            found.setdefault(name, set()).add(version)
    return {name: min(versions) for name, versions in found.items() if len(versions) == 1}


def table(found: Result) -> str:
    return "\n".join({"steps": step_lines, "check": check_lines, "start": start_lines}[found["kind"]](found))


def base(quantised: bool) -> str:
    return "NF4" if quantised else "dense"


def rows_of(found: Result) -> list[StepRow]:
    return [StepRow(**row) for row in found["rows"]]


def judged(rows: Sequence[StepRow]) -> list[StepRow]:
    """``rows``, with a note at those whose loss or gradient is not that of the first measured arm, which is eager's
    where there is one."""
    return [_judged(row, rows) for row in rows]


def _judged(row: StepRow, rows: Sequence[StepRow]) -> StepRow:
    alike = [r for r in rows if r.s and (r.quantised, r.tokens) == (row.quantised, row.tokens)]
    first = next((r for r in alike if r.arm == "eager"), alike[0] if alike else row)
    wrong = differs(row, first) if row.s else ""
    return replace(row, note=f"WRONG: {wrong}") if wrong else row


def ours_beside(row: StepRow, rows: Sequence[StepRow]) -> StepRow | None:
    """Ours with the same base, length and checkpointing, or with transformers' where ours has none of its own."""
    alike = [r for r in rows if r.arm == "ours" and r.s and (r.quantised, r.tokens) == (row.quantised, row.tokens)]
    by_checkpointing = {r.checkpointing: r for r in alike}
    return by_checkpointing.get(row.checkpointing) or by_checkpointing.get("hf")


def step_lines(found: Result) -> list[str]:
    """One line for each arm, base, checkpointing and length."""
    rows = rows_of(found)
    columns = ["arm", "base", "checkpoints", "tokens", "s", "best", "time / ours", "peak, GiB", "peak / ours"]
    columns += ["beyond the model, GiB", "first step, s", "loss", "note"]
    cells = []
    for row in rows:
        names = [row.arm, base(row.quantised), _CHECKPOINTS[row.checkpointing], str(row.tokens)]
        cells.append([*names, *_numbers(row, ours_beside(row, rows)), row.note])
    return tables.markdown(columns, cells)


def _numbers(row: StepRow, ours: StepRow | None) -> list[str]:
    if not (row.s and row.best_s and row.first_s) or row.gib is None or row.model_gib is None:
        return [""] * 8
    time = f"{row.s / ours.s:.2f}" if ours and ours.s else ""
    memory = f"{row.gib / ours.gib:.2f}" if ours and ours.gib else ""
    gib = [f"{row.gib:.1f}", memory, f"{row.gib - row.model_gib:.1f}"]
    return [f"{row.s:.3f}", f"{row.best_s:.3f}", time, *gib, f"{row.first_s:.1f}", f"{row.loss:.4f}"]


def matrix_lines(found: Result) -> list[str]:
    """One line for each arm and checkpointing; a cell is the median in seconds and the peak in GiB."""
    rows = rows_of(found)
    columns = list(dict.fromkeys((r.quantised, r.tokens) for r in rows))
    lines = list(dict.fromkeys((r.arm, r.checkpointing) for r in rows))
    cells = []
    for arm, checkpointing in lines:
        by_column = {(r.quantised, r.tokens): r for r in rows if (r.arm, r.checkpointing) == (arm, checkpointing)}
        cells.append([arm, _CHECKPOINTS[checkpointing], *(_cell(by_column.get(column)) for column in columns)])
    heads = [f"{'NF4, ' if quantised else ''}{tokens} tokens" for quantised, tokens in columns]
    notes = dict.fromkeys(f"- {r.arm}, {base(r.quantised)}, {r.tokens} tokens: {r.note}" for r in rows if _is_long(r))
    return [*tables.markdown(["arm", "checkpoints", *heads], cells), *([""] if notes else []), *notes]


def _is_long(row: StepRow) -> bool:
    """Whether a cell does not say all of its note."""
    return row.note.partition(":")[0] != row.note and not row.note.startswith("absent")


def _cell(row: StepRow | None) -> str:
    if row is None:
        return ""
    if row.s is None or row.note.startswith("WRONG"):
        return row.note.partition(":")[0]
    return f"{row.s:.3f} / {row.gib:.1f}"


def check_lines(found: Result) -> list[str]:
    """One line for each kind of gradient, one column for each arm."""
    rows = found["rows"]
    heads = [f"{row['arm']}{', NF4' * row['quantised']}" for row in rows]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["errors"]))
    cells = [
        [kind, *(f"{row['errors'][kind]:.1e}" if row["errors"] else row["note"] for row in rows)] for kind in kinds
    ]
    return tables.markdown(["relative error", *heads], cells or [["", *(row["note"] for row in rows)]])


def start_lines(found: Result) -> list[str]:
    """One line for each arm, base and state of the caches."""
    ours = {(r["quantised"], r["caches"]): r["third_s"] for r in found["rows"] if r["arm"] == "ours"}
    cells = []
    for r in found["rows"]:
        cell = [r["arm"], base(r["quantised"]), r["caches"]]
        if r["third_s"] is None:
            cells.append([*cell, "", "", "", r["note"]])
            continue
        more = ours.get((r["quantised"], r["caches"]))
        difference = f"{r['third_s'] - more:+.1f}" if more else ""
        cells.append([*cell, f"{r['first_s']:.1f}", f"{r['third_s']:.1f}", difference, r["note"]])
    columns = ("arm", "base", "caches", "end of the first step, s", "end of the third step, s", "after ours, s", "note")
    return tables.markdown(columns, cells)
