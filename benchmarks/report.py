"""The results as a table in Markdown and as JSON."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton

from benchmarks.case import BenchmarkCase
from benchmarks.timing import Measured
from convergence import files, tables


@dataclass(frozen=True)
class PeerResult:
    """What one arm of a peer reached; ``note`` says why there is no time."""

    measured: Measured | None = None
    error: float | None = None
    note: str = ""

    @property
    def ms(self) -> float | None:
        return self.measured.ms if self.measured else None


@dataclass(frozen=True)
class BenchmarkRow:
    """Ours at one shape, and every arm of its formula that was tried there.

    ``error`` is the norm of the difference from float64 over the truth's, the worst over outputs and gradients.
    ``of_copy`` and ``of_matmul`` are shares of what the ceilings allow, ``of_own_copy`` of a copy of the case's bytes.
    """

    case: BenchmarkCase
    ours: Measured
    error: float
    of_copy: float
    of_own_copy: float
    of_matmul: float
    peers: dict[str, PeerResult]

    @property
    def ceiling(self) -> str:
        """Its share of the nearer ceiling, and which that is."""
        if self.of_copy >= self.of_matmul:
            return f"{self.of_copy:.0%} of copy ({self.of_own_copy:.0%})"
        return f"{self.of_matmul:.0%} of matmul"


def where(device: str, packages: Iterable[str]) -> dict[str, Any]:
    """What a measurement depends on, in addition to its options: the kind of machine, versions, and the date."""
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "versions": files.versions(packages),
        "date": str(datetime.date.today()),
    }


def as_json(where: Mapping[str, Any], rows: Sequence[BenchmarkRow], skipped: Mapping[str, str]) -> dict[str, Any]:
    return {**where, "skipped": dict(skipped), "rows": [_flat(row) for row in rows]}


def _flat(row: BenchmarkRow) -> dict[str, Any]:
    peers = {}
    for arm, peer in row.peers.items():
        numbers = asdict(peer.measured) if peer.measured else {}
        finite = peer.error is not None and math.isfinite(peer.error)  # JSON has no NaN; the note has it
        peers[arm] = {**numbers, "error": peer.error if finite else None, "note": peer.note}
    case, ours = row.case, row.ours
    return {
        "op": case.op,
        "formula": case.formula,
        "shape": case.shape,
        "bytes": case.bytes,
        "flops": case.flops,
        "ours_ms": ours.ms,
        "spread_ms": ours.spread_ms,
        "ours_mib": ours.mib,
        "host_ms": ours.host_ms,
        "error": row.error,
        "of_copy": row.of_copy,
        "of_own_copy": row.of_own_copy,
        "of_matmul": row.of_matmul,
        "peers": peers,
    }


def table(where: Mapping[str, Any], rows: Sequence[BenchmarkRow], skipped: Mapping[str, str]) -> str:
    """One line for each case; a peer's cell is its ms (its time over ours), MiB and error."""
    seen = list(dict.fromkeys(arm for row in rows for arm in row.peers))
    peers = list(dict.fromkeys(arm.partition("-")[0] for arm in seen))
    arms = sorted(seen, key=lambda arm: peers.index(arm.partition("-")[0]))  # those of one peer side by side
    named = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    header = ["op", "shape", "ours, ms", "of the ceiling (of a copy of its size)", "host, ms", "MiB", "error"]
    copy, matmul = where["copy_gb_per_s"], where["matmul_tflop_per_s"]
    lines = [
        f"{where['device']}, {named}, {where['dtype']}, {where['date']}; device copy {copy:.0f} GB/s, "
        f"matmul {matmul:.0f} TFLOP/s. Peers: ms (over ours), MiB, error.",
        "",
    ]
    cells = []
    notes = [f"- {peer}: {why}" for peer, why in skipped.items()]
    for row in rows:
        case, ours = row.case, row.ours
        shown = [case.op, case.shape, f"{ours.ms:.3f} ± {ours.spread_ms:.3f}", row.ceiling, f"{ours.host_ms:.2f}"]
        shown += [f"{ours.mib:.0f}", f"{row.error:.1e}"]
        cells.append([*shown, *(_cell(row.peers.get(arm), ours.ms) for arm in arms)])
        notes += [f"- {case.formula} {case.shape}, {arm}: {peer.note}" for arm, peer in row.peers.items() if peer.note]
    lines += tables.markdown([*header, *arms], cells)
    return "\n".join([*lines, *([""] if notes else []), *dict.fromkeys(notes)])


def _cell(peer: PeerResult | None, ours_ms: float) -> str:
    if peer is None:
        return ""
    if peer.measured is None:
        return peer.note.partition(":")[0]
    found = peer.measured
    error = "" if peer.error is None else f", {peer.error:.1e}"
    return f"{found.ms:.3f} ({found.ms / ours_ms:.2f}), {found.mib:.0f}{error}"
