"""How cells, records and the gate's decision read: tables for a terminal, Markdown, JSON for a CI."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from convergence.tables import literal, visible
from convergence.tables import markdown as markdown_table
from matrix import cells, records, runner
from matrix.baseline import Difference, failing
from matrix.cells import Cell
from matrix.code import Code
from matrix.records import CellRecord
from matrix.repository import config

_MOST_ROWS = 60


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console  # a cell's environment need not have it
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    Console(soft_wrap=False).print(table)


def list_cells() -> int:
    axes = config.here().axes
    rows = [(cell.name, *(cell.version(package) for package in axes), cell.why) for cell in cells.load_all().values()]
    _print("cells", ("cell", *axes, "why it exists"), rows)
    return 0


def print_jobs() -> int:
    """``{"include": [{"cell": name}, ...]}``: what ``strategy.matrix`` takes."""
    known = cells.load_all()
    cells.refuse_none(known.values())
    print(json.dumps({"include": [{"cell": name} for name in known]}))
    return 0


def show(folder: Path, known: Collection[Cell], markdown: bool = False) -> int:
    """Print what the records of these cells say; 1 unless every one is of this code and passed. A cell that ``run``
    does not run, because it needs GPUs or has no requirement file, may have none.

    Raises:
        ValueError: there is nothing to say anything of.
    """
    found = records.load_folder(folder)
    code, sources = runner.code_digest(), Code()
    on_gpu = {f"{cell.name}{records.GPU}": cell for cell in known}
    by_hand = {name for name in cells.in_place() if name not in found}
    wanted = {cell.name: cell for cell in known if not cell.gpus and cell.name not in by_hand}
    wanted |= {name: cell for name, cell in on_gpu.items() if name in found}
    cells.refuse_none(wanted.values())
    rows, good = [], True
    for name, cell in wanted.items():
        record = found.get(name)
        fresh = record is not None and record.digest == cell.digest and not sources.stale(record, cell.kind, code)
        good = good and fresh and record is not None and record.passed
        rows.append(_row(name, record, fresh))
    columns = ("cell", "result", "stages: passed/failed/skipped in seconds", "seconds", "CPU seconds", "why not")
    if markdown:
        print("\n".join(markdown_table(columns, [[literal(cell) for cell in row] for row in rows])))
    else:
        _print("records", columns, rows)
    return int(not good)


def _row(name: str, record: CellRecord | None, fresh: bool) -> tuple[str, ...]:
    if record is None:
        return name, "no record", "", "", "", "it has not run, or its environment could not be made"
    stages = [f"{s.name} {len(s.passed)}/{len(s.failed)}/{len(s.skipped)} in {s.seconds:.0f}" for s in record.stages]
    reasons = [f"{stage.name}: {stage.reason}" for stage in record.stages if stage.status != "passed"]
    result = "passed" if record.passed else "failed" if reasons else "partial"
    if not fresh:
        result += ", of other code"
    cpu = sum(stage.cpu_seconds for stage in record.stages)
    why = "; ".join([*record.deviations, *reasons])
    return name, result, "; ".join(stages), f"{record.seconds:.0f}", f"{cpu:.0f}", why


def differences(found: Sequence[Difference]) -> None:
    rows = [("note" if d.note else "FAILS", d.where, d.kind, d.name, d.detail[:300]) for d in found]
    if len(rows) > _MOST_ROWS:
        rows = [*rows[:_MOST_ROWS], ("", "", f"and {len(rows) - _MOST_ROWS} more", "gate.json has all of them", "")]
    _print("differences", ("", "where", "what", "name", "detail"), rows)


def totals(result: dict[str, Any], passed: str, failed: str) -> Iterator[tuple[str, ...]]:
    """A row a cell of the gate's ``result``: name, "passed" or "failed" in these words, cases by outcome, seconds."""
    for name, cell in result["cells"].items():
        stages = cell["stages"].values()
        counts = [str(sum(stage[key] for stage in stages)) for key in ("passed", "failed", "skipped")]
        seconds = sum(stage["seconds"] for stage in stages)
        yield name, passed if cell["passed"] else failed, *counts, f"{seconds:.0f}"


def gate(result: dict[str, Any], found: Sequence[Difference]) -> None:
    """The cells, what fails by name, and the decision."""
    columns = ("cell", "result", "passed", "failed", "skipped", "seconds")
    _print("gate", columns, list(totals(result, "passed", "FAILED")))
    if found:
        differences(sorted(found, key=lambda difference: difference.note))
    print(
        f"gate: {result['verdict']} ({len(failing(found))} differences fail, {len(found) - len(failing(found))} notes)"
    )
