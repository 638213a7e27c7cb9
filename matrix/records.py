"""The record of a cell's run, as one JSON file: its environment, and per stage every case, verdict and census.

A record is written after each stage, whole or not at all, so a killed run keeps its finished stages. A record is
``complete`` once every stage has run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict
from xml.etree import ElementTree

from convergence.arms.quantities import Statistic
from convergence.arms.quantities import share as share_of_bound
from convergence.checked import checked, cut, shown
from convergence.files import Unusable, plain, read_json, reason, write_json
from matrix.cells import checked_name
from matrix.repository import config

# Raise this number with every change of a record's fields. A reader rejects unknown schemas.
SCHEMA = 2
# By earlier schema, the fields that a stage's result lacks. For such a stage, the code of the whole record counts.
_NOT_YET: dict[int, dict[str, Any]] = {1: {"code": ""}}
# The good verdicts of a case of the proof and a model class. "upstream leaks" is a fact about upstream.
GOOD = ("equal", "patched", "upstream leaks")
STATUSES = ("passed", "failed", "nothing ran")
NAMED_BY = (("name",), ("model", "dtype", "patch"))
GPU = config.GPU
NOT_THERE = "absent"  # the verdict on a model that this version of upstream does not have


class Worst(TypedDict):
    """A judged number, and its bound."""

    value: float
    bound: float
    quantity: str
    step: str


@dataclass
class CaseVerdict:
    """One record of a stage: the verdict on one convergence case, model class or trainer.

    Attributes:
        statistics: by kind, the judged number that is nearest to its bound.
        census: how many modules each kernel replaced.
        launches: how often each kernel was launched.
        fallbacks: how often real logits were computed, by reason.
        shares: by name, the part or the amount that runs on kernels. More is better.
    """

    verdict: str
    reason: str = ""
    statistics: dict[str, Worst] = field(default_factory=dict)
    census: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)


@dataclass
class StageResult:
    """One stage: a process, the cases that the process ran, and the records that it wrote.

    Attributes:
        status: "passed", "failed" or "nothing ran" (all cases were skipped).
        cpu_seconds: of all processes of the stage. It is more reliable than ``seconds`` on a shared machine.
        code: a digest of the source that the stage runs (``code.py``).
    """

    name: str
    command: list[str]
    status: str
    reason: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: dict[str, CaseVerdict] = field(default_factory=dict)
    code: str = ""


@dataclass
class CellRecord:
    """One cell's run.

    Attributes:
        digest: of the cell's file. This digest and the ``code`` of each stage decide whether a record is current.
        code: a digest of all source that any stage may run.
        environment: every installed distribution with its version.
        deviations: pins of the cell that the environment does not have. A machine with a GPU brings its own torch and
            Triton, so only transformers and trl count there.
        machine: "cpus", "gpu" (its name, or "none"), "platform", "python".
    """

    cell: str
    digest: str
    code: str
    commit: str
    environment: dict[str, str]
    machine: dict[str, str]
    at: str
    deviations: list[str] = field(default_factory=list)
    stages: list[StageResult] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def passed(self) -> bool:
        return self.complete and self.passed_so_far

    @property
    def passed_so_far(self) -> bool:
        """Whether every stage so far passed, in the environment that the cell pins."""
        return not self.deviations and all(stage.status == "passed" for stage in self.stages)

    @property
    def name(self) -> str:
        """The name of the record and of its file: the cell's name, with ``-gpu`` if the stages ran on a GPU."""
        return self.cell if self.machine["gpu"] == "none" else f"{self.cell}{GPU}"


def canonical(name: str) -> str:
    """The normalised name of a package, as the keys of ``environment`` have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write(record: CellRecord, folder: Path) -> Path:
    path = folder / f"{record.name}.json"
    write_json(dataclasses.asdict(record), path)
    return path


def load(path: Path) -> CellRecord:
    """The record in ``path``.

    Raises:
        Unusable: the file is no record of a known schema. The message names the file, the field, its value and the
            allowed values.
    """
    return from_dict(read_json(path), str(path))


def from_dict(data: Any, source: str) -> CellRecord:
    """A record from parsed JSON; ``source`` names the data in errors.

    Raises:
        Unusable: as in :func:`load`.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema not in (SCHEMA, *_NOT_YET):
        allowed = ", ".join(map(str, (*_NOT_YET, SCHEMA)))
        raise Unusable(f"{source}: schema {cut(repr(schema))}; allowed are {allowed}; run the cell again")
    record: CellRecord = checked(_of_today(data, schema), CellRecord, f"{source}: record")
    checked_name(record.cell, f"{source}: record['cell']")
    if "gpu" not in record.machine:
        raise Unusable(f"{source}: record['machine'] has no 'gpu'; allowed is its name, or 'none'")
    for i, stage in enumerate(record.stages):
        if stage.status not in STATUSES:
            where = f"{source}: record['stages'][{i}]['status']"
            raise Unusable(f"{where} is {shown(stage.status)}; allowed are {', '.join(STATUSES)}")
    return record


def _of_today(data: dict[str, Any], schema: int) -> dict[str, Any]:
    """Upgrade a record of an earlier ``schema`` to today's. Malformed stages stay as they are."""
    stages = data.get("stages")
    if schema == SCHEMA or type(stages) is not list:
        return data
    made = [{**_NOT_YET[schema], **stage} if type(stage) is dict else stage for stage in stages]
    return {**data, "schema": SCHEMA, "stages": made}


def earlier(folder: Path, name: str) -> CellRecord | None:
    """The record of that name in ``folder``. The result is None if there is no record, or only an unreadable one: half
    written, or of an unknown schema."""
    try:
        return load(folder / f"{name}.json") if (folder / f"{name}.json").exists() else None
    except Unusable:
        return None


def load_folder(folder: Path) -> dict[str, CellRecord]:
    """Every record directly in ``folder``, by name.

    Raises:
        Unusable: as in :func:`load`, or a file has the name of another record.
    """
    found = {path.stem: load(path) for path in sorted(folder.glob("*.json"))}
    for name, record in found.items():
        if name != record.name:
            raise Unusable(
                f"{folder / name}.json: is the record {shown(record.name)}; allowed is the file of that name"
            )
    return found


def read_cases(junit: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """The cases of a JUnit XML file: passed, failed with messages, skipped with reasons.

    Raises:
        Unusable: the file is missing or cut off, because the process died before it had run everything.
    """
    try:
        root = ElementTree.parse(junit).getroot()
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:  # LookupError: an unknown encoding
        raise Unusable(f"no results: the process ended before it wrote them ({reason(error)})") from error
    passed: list[str] = []
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for case in root.iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        name = re.sub(r"(?<=\])@[^\]]*$", "", name)  # the case's group, which pytest-xdist appends if it has workers
        bad = [child for child in case if child.tag in ("failure", "error")]
        skip = case.find("skipped")
        if bad:
            failed[name] = _first_lines(bad[0].get("message") or bad[0].text or "")
        elif skip is not None:
            skipped[name] = _first_lines(skip.get("message") or "")
        elif name not in failed:  # an error in a case's teardown is a second entry
            passed.append(name)
    return sorted(set(passed) - failed.keys()), failed, skipped


def _first_lines(message: str, length: int = 600) -> str:
    return message if len(message) <= length else message[: length - 3] + "..."


class LeftModule(TypedDict):
    """The fields that a stage's record may have besides its verdict and name."""

    setup: str
    order: str
    reason: str
    statistics: list[Statistic]
    census: dict[str, int]
    launches: dict[str, int]
    fallbacks: dict[str, int]
    shares: dict[str, float]


_NOTHING = LeftModule(
    setup="plain", order="before", reason="", statistics=[], census={}, launches={}, fallbacks={}, shares={}
)


def read_findings(folder: Path) -> dict[str, CaseVerdict]:
    """The findings in the JSON records below ``folder``, by name.

    A record is an object with a ``verdict`` and one set of the naming keys in :data:`NAMED_BY`. It may have ``reason``,
    ``census``, ``launches``, ``fallbacks``, ``shares`` and ``statistics`` (a list of objects with ``statistic``,
    ``value``, ``bound``, ``quantity``, ``step``).

    Raises:
        Unusable: a file is no such record, or two records have the same name.
    """
    found: dict[str, CaseVerdict] = {}
    for path in sorted(folder.rglob("*.json")):
        data = read_json(path)
        if not isinstance(data, dict) or not isinstance(data.get("verdict"), str):
            raise Unusable(f"{path}: is no record: it has no verdict")
        keys = next((keys for keys in NAMED_BY if all(isinstance(data.get(key), str) for key in keys)), None)
        if keys is None:
            raise Unusable(f"{path}: is no record: it has no name; allowed are {NAMED_BY}")
        left: LeftModule = checked({**_NOTHING, **data}, LeftModule, f"{path}: record", more=True)
        if left["setup"] != "plain":
            keys = ("model", "setup", "order", *keys[1:])
        name = "/".join(data[key].rpartition(":")[2] for key in keys)
        if name in found:
            raise Unusable(f"{path}: a second record of {name}")
        worst: dict[str, Worst] = {}
        for statistic in left["statistics"]:
            kind = statistic.statistic
            if kind not in worst or statistic.share > share(worst[kind]):
                worst[kind] = plain({key: getattr(statistic, key) for key in Worst.__annotations__})
        counted = (left["census"], left["launches"], left["fallbacks"])
        found[name] = CaseVerdict(data["verdict"], left["reason"], worst, *counted, left["shares"])
    return found


def share(statistic: Mapping[str, Any]) -> float:
    """Value divided by bound. A value that is not a number counts as infinite. (Infinities are text in JSON.)"""
    return share_of_bound(float(statistic["value"]), float(statistic["bound"]))
