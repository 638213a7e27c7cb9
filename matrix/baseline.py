"""Stores the results of the last accepted release and finds what is worse in a new run. This file runs nothing.

Every difference is a :class:`Difference` with the name of the case. A change within honest noise is no difference;
:func:`grown`, :func:`slower` and :func:`bigger` define the noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from convergence.checked import checked
from convergence.files import Unusable, read_json, write_json
from convergence.tables import first_line
from matrix import records
from matrix.cells import checked_name, made_by
from matrix.records import NOT_THERE, CellRecord, StageResult, share
from matrix.repository import config

SCHEMA = 1
# "not provided": upstream's flag asked for a feature that this package lacks, and got an error that says so.
GOOD = (*records.GOOD, "not provided")

# The baseline's replicas reach half the bound, because an error ratio's bound is twice the worst replica's ratio. A
# bound is five standard deviations of the noise, so one standard deviation is a fifth.
REPLICAS_REACH = 1 / 2
NOISE = 1 / 5
# Medians of 20 calls differ by a few percent between two runs on one kind of GPU, because of clock and temperature.
DRIFT = 0.05
ALLOCATOR_MIB = 2.0  # the allocator rounds blocks up to multiples of this


class Kernel(TypedDict):
    """The compared fields of one row of ``python -m benchmarks --json``."""

    op: str
    shape: str
    ours_ms: float
    spread_ms: float
    ours_mib: float


class Kernels(TypedDict):
    """The compared fields of the file of ``python -m benchmarks --json``."""

    device: str
    rows: list[Kernel]


class _Saved(TypedDict):
    """The content of the baseline's file; ``cells`` are records."""

    schema: int
    history: list[dict[str, Any]]
    kernels: Kernels | None
    cells: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One result that is worse than in the baseline, or wrong on its own. A note does not fail the gate."""

    where: str
    kind: str
    name: str
    detail: str = ""
    note: bool = False

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.where}: {self.kind}: {self.name}{detail}"


def broken(
    required: Mapping[str, str], found: Mapping[str, CellRecord], stale: Mapping[str, Sequence[str]]
) -> Iterator[Difference]:
    """Differences that need no baseline: missing, stale, partial and failed records. ``required`` has the digest of
    each cell's file, by name. ``stale`` has the stages of each record that ran other code than today's."""
    for name, digest in required.items():
        record = found.get(name)
        if record is None:
            detail = f"it has not run; {made_by(name.removesuffix(records.GPU))} makes it"
            yield Difference(name, "missing record", name, detail)
            continue
        if stale[name] or record.digest != digest:
            what = f"of other code in {', '.join(stale[name])}" if stale[name] else "of another cell file"
            yield Difference(name, "stale record", name, f"it is {what}; run the cell again")
        if not record.complete:
            ran = ", ".join(stage.name for stage in record.stages) or "none"
            yield Difference(name, "partial record", name, f"not every stage has run, only {ran}")
        for deviation in record.deviations:
            yield Difference(name, "not the cell's environment", deviation.partition(" ")[0], deviation)
        for stage in record.stages:
            yield from failed(name, stage)


def failed(cell: str, stage: StageResult) -> Iterator[Difference]:
    """The failures of a stage."""
    where = f"{cell} {stage.name}"
    if stage.status == "nothing ran" or not (stage.passed or stage.failed):
        yield Difference(where, "nothing ran", stage.name, stage.reason)
    elif stage.status != "passed" and not stage.failed:
        yield Difference(where, "failed stage", stage.name, stage.reason)
    for case, message in stage.failed.items():
        yield Difference(where, "failed case", case, first_line(message))
    for name, finding in stage.findings.items():
        if finding.verdict not in (*GOOD, NOT_THERE):
            yield Difference(where, "failed verdict", name, f"{finding.verdict}: {finding.reason}")


def worse(before: CellRecord, after: CellRecord) -> Iterator[Difference]:
    """Results of a cell that are worse in ``after`` than in ``before``. If upstream's versions changed, missing results
    are notes."""
    moved = [
        f"{package} {before.environment.get(package)} is now {after.environment.get(package)}"
        for package in config.here().upstream
        if before.environment.get(package) != after.environment.get(package)
    ]
    if moved:
        yield Difference(after.cell, "upstream moved", after.cell, "; ".join(moved), note=True)
    stages = {stage.name: stage for stage in after.stages}
    for old in before.stages:
        new = stages.get(old.name)
        where = f"{after.cell} {old.name}"
        if new is None:
            yield Difference(where, "missing stage", old.name)
            continue
        for case in old.passed:
            if case in new.skipped:
                yield Difference(where, "skipped case", case, first_line(new.skipped[case]), note=bool(moved))
            elif case not in new.failed and case not in new.passed:
                yield Difference(where, "missing case", case, "it passed before", note=bool(moved))
        for name, finding in old.findings.items():
            if name not in new.findings:
                if finding.verdict in GOOD:
                    yield Difference(where, "missing verdict", name, note=bool(moved))
                continue
            for difference in _worse_finding(where, name, finding, new.findings[name]):
                yield dataclasses.replace(difference, note=bool(moved) and difference.kind != "grown error")


def _worse_finding(where: str, name: str, old: records.CaseVerdict, new: records.CaseVerdict) -> Iterator[Difference]:
    if old.verdict in GOOD and new.verdict == NOT_THERE:
        yield Difference(where, "absent verdict", name, new.reason)
        return
    if old.verdict in GOOD and new.verdict in GOOD and new.verdict != old.verdict:
        yield Difference(where, "changed verdict", name, f"{new.verdict} instead of {old.verdict}")
    for kernel, count in old.census.items():
        if new.census.get(kernel, 0) < count:
            yield Difference(where, "smaller census", name, f"{kernel}: {new.census.get(kernel, 0)} instead of {count}")
    for what, before in old.shares.items():
        if new.shares.get(what, 0.0) < before:
            yield Difference(
                where, "smaller share", name, f"{what}: {new.shares.get(what, 0.0):g} instead of {before:g}"
            )
    for kernel, count in old.launches.items():
        if count and not new.launches.get(kernel):
            yield Difference(where, "kernel not launched", name, kernel)
    for reason in new.fallbacks.keys() - old.fallbacks.keys():
        yield Difference(where, "new fallback", name, reason)
    for kind, statistic in old.statistics.items():
        if kind not in new.statistics:
            yield Difference(where, "missing statistic", name, kind)
        elif grown(statistic, new.statistics[kind]):
            value = new.statistics[kind]
            shown = f"{kind} of {value['quantity']}: {share(value):.2f} of its bound, {share(statistic):.2f} before"
            yield Difference(where, "grown error", name, shown)


def grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a statistic's share of its bound grew by more than noise. The share must exceed the replicas' share, and
    the old share by more than a standard deviation."""
    return share(after) > max(REPLICAS_REACH, share(before) + NOISE)


def worse_kernels(before: Kernels, after: Kernels) -> Iterator[Difference]:
    """Kernels that got slower or bigger. Both arguments come from ``python -m benchmarks --json``."""
    if before["device"] != after["device"]:
        detail = f"measured on {after['device']}, the baseline on {before['device']}"
        yield Difference("kernels", "other machine", str(after["device"]), detail)
        return
    rows = {(row["op"], row["shape"]): row for row in after["rows"]}
    for old in before["rows"]:
        name = f"{old['op']} {old['shape']}"
        new = rows.get((old["op"], old["shape"]))
        if new is None:
            yield Difference("kernels", "missing kernel", name)
            continue
        if slower(old, new):
            yield Difference("kernels", "slower kernel", name, f"{new['ours_ms']:.3f} ms, {old['ours_ms']:.3f} before")
        if bigger(old, new):
            shown = f"{new['ours_mib']:.0f} MiB, {old['ours_mib']:.0f} before"
            yield Difference("kernels", "bigger kernel", name, shown)


def slower(before: Kernel, after: Kernel) -> bool:
    """Whether the median grew by more than the drift between two runs and the quartiles' spread in each."""
    allowed = before["ours_ms"] * (1 + DRIFT) + before["spread_ms"] + after["spread_ms"]
    return not after["ours_ms"] <= allowed


def bigger(before: Kernel, after: Kernel) -> bool:
    return not after["ours_mib"] <= before["ours_mib"] + ALLOCATOR_MIB


@dataclass
class Baseline:
    """The records of the last accepted release.

    Attributes:
        cells: the records by name, without fields that no comparison needs.
        kernels: the result of ``python -m benchmarks --json``, or None if there was no GPU.
        history: who accepted which run, when and why; the newest entry is last.
    """

    cells: dict[str, CellRecord]
    kernels: Kernels | None
    history: list[dict[str, Any]]


def load(path: Path | None = None) -> Baseline | None:
    """The baseline in ``path``, by default the repository's, or None if no baseline was accepted yet.

    Raises:
        Unusable: the file cannot be read, or has another schema. The message names the file and the error.
    """
    path = path or config.here().baseline
    if not path.exists():
        return None
    data = read_json(path)
    if not isinstance(data, dict) or type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        raise Unusable(f"{path}: is no baseline of schema {SCHEMA}; gate --accept REASON writes one")
    saved: _Saved = checked(data, _Saved, f"{path}: baseline", more=True)
    if not saved["history"]:
        raise Unusable(f"{path}: baseline['history'] is empty; allowed is who accepted what is in it")
    cells = {
        checked_name(name, f"{path}: baseline['cells']"): records.from_dict(record, f"{path}: {name}")
        for name, record in saved["cells"].items()
    }
    return Baseline(cells, saved["kernels"], saved["history"])


def save(baseline: Baseline, path: Path | None = None) -> None:
    here = config.here()
    cells = {name: dataclasses.asdict(record) for name, record in baseline.cells.items()}
    kept = {records.canonical(name) for name in (*here.axes, *here.free)}
    for record in cells.values():
        record["environment"] = {name: v for name, v in record["environment"].items() if name in kept}
    data = {"schema": SCHEMA, "history": baseline.history, "kernels": baseline.kernels, "cells": cells}
    write_json(data, path or here.baseline)


def failing(differences: Sequence[Difference]) -> list[Difference]:
    return [difference for difference in differences if not difference.note]
