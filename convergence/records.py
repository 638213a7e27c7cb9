"""One case's outcome as one JSON file: everything that was judged, and in which environment."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass
class Record:
    """The outcome of one case.

    Attributes:
        verdict: "equal", "different", or "absent" (this transformers has no such model).
        reason: the first failure in words; empty when equal.
        statistics: every judged number with its quantity, step, statistic, value, bound.
        failures: rows of quantity, step, statistic, value, bound.
        census: how many modules each of our kernels replaced; for a foreign patch, which modules changed.
        launches: how often each of our kernels was launched by the candidate.
        fallbacks: how often our fused head had to compute real logits, by reason.
    """

    model: str
    dtype: str
    patch: str
    profile: str
    device: str
    seed: int
    verdict: str = "equal"
    reason: str = ""
    failures: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    statistics: list[dict[str, Any]] = field(default_factory=list)
    census: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    losses: dict[str, dict[str, float]] = field(default_factory=dict)
    replicas: int = 0
    symbols: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        return f"{self.model}/{self.dtype}/{self.patch.rpartition(':')[2]}"

    def worst(self, statistic: str) -> dict[str, Any] | None:
        """The judged number of this kind that is nearest to its bound."""
        chosen = [s for s in self.statistics if s["statistic"] == statistic]
        return max(chosen, key=lambda s: s["value"] / s["bound"], default=None)

    def summary(self) -> dict[str, Any]:
        """What the table at the end needs; travels from an xdist worker to the controller."""
        return {
            "case": self.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "error ratio": self.worst("error ratio"),
            "gain": self.worst("gain"),
            "gain against the others": self.worst("gain against the others"),
            "kernels": len(self.launches),
            "launches": sum(self.launches.values()),
            "seconds": self.seconds,
        }


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "triton", "transformers", "liger-kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def write(record: Record, folder: Path) -> Path:
    """Write ``record`` into ``folder`` as a whole or not at all, so that a killed worker leaves no half a record."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join((record.model, record.dtype, record.patch, record.profile, record.device))
    path = folder / (re.sub(r"[^A-Za-z0-9_.-]+", "_", name) + ".json")
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8") as file:
        json.dump(dataclasses.asdict(record), file, indent=1)
    os.replace(file.name, path)
    return path
