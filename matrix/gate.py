"""The gate before a release: run everything, judge the records, compare with the baseline; yes or no."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from convergence.checked import checked
from convergence.files import Unusable, read_json, write, write_json
from convergence.tables import literal
from convergence.tables import markdown as markdown_table
from matrix import baseline, cells, records, report, runner
from matrix.baseline import Baseline, Difference, Kernels
from matrix.cells import Cell
from matrix.code import Code
from matrix.records import GPU, CellRecord
from matrix.repository import config

SCHEMA = 1


def main(arguments: argparse.Namespace) -> int:
    """``python -m matrix gate``: 0 when a release may go out, 1 when not.

    Raises:
        ValueError: an option makes no sense, or a file cannot be read.
    """
    if arguments.accept is not None and not arguments.accept.strip():
        raise ValueError("--accept takes the reason why these records are the new baseline")
    if arguments.kernels and arguments.without_gpu:
        raise ValueError("--kernels and --without-gpu exclude each other")
    in_place = cells.in_place().values()
    without_gpu = [cell for cell in in_place if not cell.gpus]
    chosen = cells.select(arguments.cells, here=True) if arguments.cells else [*without_gpu, *cells.select([])]
    cells.refuse_none(chosen)
    if not arguments.no_run:
        run(chosen, arguments.jobs, arguments.records)
    found = records.load_folder(arguments.records)
    kernels = read_kernels(arguments.kernels) if arguments.kernels else None
    before = baseline.load()
    asked = before
    if arguments.cells and before is not None:  # the rest of the baseline stays as it is
        of_them = {name: record for name, record in before.cells.items() if record.cell in arguments.cells}
        asked = dataclasses.replace(before, cells=of_them, kernels=before.kernels if kernels else None)
    required = required_records(chosen, found, everything=not arguments.cells)
    code, sources = runner.code_digest(), Code()
    there = {name: found[name] for name in required if name in found}
    kinds = {cell.name: cell.kind for cell in (*chosen, *in_place)}
    stale = {name: sources.stale(record, kinds[name.removesuffix(GPU)], code) for name, record in there.items()}
    alone = list(baseline.broken(required, found, stale))
    compared = compare(asked, there, kernels, arguments.without_gpu)
    differences = [*alone, *compared]
    if arguments.accept is not None:
        if alone:
            report.differences(alone)
            raise ValueError(f"--accept: {len(alone)} things are wrong with the records themselves; see above")
        kept = before.cells if before and arguments.cells else {}
        accept(before, kept | {name: found[name] for name in required}, kernels, arguments.accept, compared)
        differences = [dataclasses.replace(difference, note=True) for difference in differences]
    verdict = "pass" if not baseline.failing(differences) else "fail"
    result = {
        "schema": SCHEMA,
        "verdict": verdict,
        "at": runner.now(),
        "commit": runner.commit(),
        "code": code,
        "baseline": before.history[-1] if before else None,
        "differences": [dataclasses.asdict(difference) for difference in differences],
        "cells": {name: summary(found.get(name)) for name in required},
        "kernels": "measured" if kernels else "not measured",
    }
    output = arguments.output or config.here().records.parent
    write_json(result, output / "gate.json")
    write(markdown(result), output / "gate.md")
    report.gate(result, differences)
    return int(verdict != "pass")


def run(chosen: Sequence[Cell], jobs: int, folder: Path) -> None:
    """Run what is of this environment here, and the others in those that tox makes."""
    workers, in_place = runner.cpus(), cells.in_place()
    for cell in chosen:
        if cell.name in in_place:
            runner.run_stages(cell, config.here().stages[cell.kind], folder, workers)
    if in_tox := [cell for cell in chosen if cell.name not in in_place]:
        runner.tox(in_tox, jobs, ["--workers", str(max(1, workers // jobs))], folder)


def required_records(chosen: Sequence[Cell], found: Collection[str], everything: bool) -> dict[str, str]:
    """The digest of each record that there must be, by the record's name: a cell's, and what it left on a GPU where it
    ran on one. What needs GPUs left no other. Where ``everything`` is judged, it may be missing: the comparison
    with the baseline says so."""
    need_gpus = [cell for cell in cells.in_place().values() if cell.gpus]
    required = {cell.name: cell.digest for cell in chosen if not cell.gpus}
    on_gpu = {f"{cell.name}{GPU}": cell.digest for cell in (*chosen, *(need_gpus if everything else []))}
    must = [f"{cell.name}{GPU}" for cell in chosen if cell.gpus]
    return required | {name: digest for name, digest in on_gpu.items() if name in found or name in must}


def compare(
    before: Baseline | None,
    found: dict[str, CellRecord],
    kernels: Kernels | None,
    without_gpu: bool,
) -> list[Difference]:
    """In what ``found`` and ``kernels`` fall short of the baseline; there must be one."""
    if before is None:
        detail = "nothing was ever accepted; look at the records, then gate --accept REASON"
        return [Difference("baseline", "no baseline", config.here().baseline.name, detail)]
    differences = []
    for name, old in before.cells.items():
        if name.endswith(GPU) and name not in found:
            detail = "run it on a GPU, or say --without-gpu"
            differences.append(Difference(name, "not measured", name, detail, note=without_gpu))
        elif name not in (*cells.in_place(), *cells.load_all()) and not name.endswith(GPU):
            differences.append(Difference(name, "missing cell", name, "the baseline has it"))
        elif name not in found:
            continue  # broken by itself
        elif old.machine["gpu"] != found[name].machine["gpu"]:
            detail = f"run on {found[name].machine['gpu']}, the baseline on {old.machine['gpu']}"
            differences.append(Difference(name, "other machine", name, detail))
        else:
            differences += baseline.worse(old, found[name])
    for name in found.keys() - before.cells.keys():
        differences.append(Difference(name, "new cell", name, "the baseline has nothing to compare it with", note=True))
    if before.kernels is not None and kernels is not None:
        differences += baseline.worse_kernels(before.kernels, kernels)
    elif before.kernels is not None:
        detail = "pass --kernels FILE, or say --without-gpu"
        differences.append(Difference("kernels", "not measured", "every kernel", detail, note=without_gpu))
    return differences


def read_kernels(path: Path) -> Kernels:
    """What ``python -m benchmarks --json`` wrote.

    Raises:
        Unusable: it is no such file, or has no row.
    """
    kernels: Kernels = checked(read_json(path), Kernels, f"{path}: kernels", more=True)
    if not kernels["rows"]:
        raise Unusable(f"{path}: has no measured kernels, rows is empty; python -m benchmarks --json FILE writes them")
    return kernels


def accept(
    before: Baseline | None,
    found: dict[str, CellRecord],
    kernels: Kernels | None,
    why: str,
    differences: Sequence[Difference],
) -> None:
    """Make ``found`` the baseline, and note who did it, when, why, and what it accepts."""
    entry = {
        "who": git_user(),
        "when": runner.now(),
        "why": why,
        "commit": runner.commit(),
        "what": [str(difference) for difference in differences],
    }
    history = [*(before.history if before else []), entry]
    kept = kernels if kernels is not None else (before.kernels if before else None)
    baseline.save(Baseline(found, kept, history))


def git_user() -> str:
    """The git user.

    Raises:
        ValueError: git knows none, so nobody could be named.
    """
    found = []
    for key in ("user.name", "user.email"):
        done = subprocess.run(["git", "config", key], cwd=config.here().root, capture_output=True, text=True)
        found.append(done.stdout.strip())
    if not found[0]:
        raise ValueError("--accept notes who accepts, and git knows no user; set git config user.name")
    return f"{found[0]} <{found[1]}>" if found[1] else found[0]


def summary(record: CellRecord | None) -> dict[str, Any]:
    if record is None:
        return {"passed": False, "stages": {}}
    stages = {
        stage.name: {
            "status": stage.status,
            "passed": len(stage.passed),
            "failed": len(stage.failed),
            "skipped": len(stage.skipped),
            "seconds": stage.seconds,
        }
        for stage in record.stages
    }
    return {"passed": record.passed, "at": record.at, "machine": record.machine, "stages": stages}


def markdown(result: dict[str, Any]) -> str:
    """For a release note."""
    lines = [
        f"## Release gate: {result['verdict']}",
        "",
        f"Commit {literal(result['commit'] or 'unknown')}, {result['at']}.",
        "",
        *markdown_table(("cell", "result", "passed", "failed", "skipped", "s"), report.totals(result, "pass", "fail")),
    ]
    lines += ["", f"Kernel speed and memory: {result['kernels']}."]
    for title, note in (("Fails", False), ("Notes", True)):
        rows = [row for row in result["differences"] if row["note"] is note]
        if rows:
            lines += ["", f"### {title}", "", *(f"- {literal(Difference(**row))}" for row in rows)]
    return "\n".join(lines) + "\n"
