"""One case's outcome as one JSON file: everything that was judged, and in which environment.

A folder of records only grows: every run writes new files, and :func:`load_folder` finds the newest of each case. The
module imports nothing but the standard library, so that records of any machine can be read on any other.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import platform
import re
import typing
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from convergence import files
from convergence.arms.quantities import CONSISTENCY, DIFFERENCES, STATISTICS, Failure, Finding, Statistic, worst
from convergence.checked import checked, cut, shown
from convergence.files import Unusable
from convergence.judge.verdict import Verdict
from convergence.peers import PEERS

# Raise it with every change of what a record holds, and with a new finding. A reader refuses what it was not written
# for.
SCHEMA = 6
# What a record of an earlier schema did not hold yet: it was always the same, or not measured.
_ALWAYS: dict[int, dict[str, Any]] = {
    3: {"truth": "float64", "costs": {}, "differences": {}},
    4: {"costs": {}, "differences": {}},
    5: {"differences": {}},
}
CANNOT_RUN = Finding.CANNOT_RUN.value  # also the verdict on a patch that itself raised
VERDICTS = ("equal", "different", CANNOT_RUN, "absent")
TRAINER = "trainer"  # the profile of a case whose set-up is a trainer
# What does not decide a single bit of a result; everything else in ``versions`` does.
_DECIDES_NO_BIT = ("platform", "liger-kernels")


# A keyword among the names needs this form.
Blame = TypedDict("Blame", {"kernel": str, "module": str, "pass": str, "step": str, "tensor": str, "note": str})


class Digests(TypedDict):
    """Digests of quantities that were observed at the same steps: per quantity one string, a word per step."""

    steps: list[str]
    quantities: dict[str, str]


@dataclass(frozen=True)
class Case:
    """One row of the proof: a model, a dtype, a patch (``module:function``), on inputs and a device.

    ``model`` is a row's name (:func:`convergence.models.rows.find`); a checkpoint's says all that it was made with.
    ``scope`` is what the patch may change: the "instance" it is called with, or any "class", before the candidate is.
    ``setup`` is what baseline and candidate train in, ``order`` whether the patch comes "before" the model is wrapped.
    """

    model: str
    dtype: str
    patch: str
    profile: str = "hard"
    device: str = "cpu"
    seed: int = 0
    scope: str = "instance"
    setup: str = "plain"
    order: str = "before"

    def __str__(self) -> str:
        """Its set-up is named where there is one, and the order where the patch came after it. So is what is judged, if
        that is no training."""
        setup = self.setup if self.order == "before" else f"{self.setup}-{self.order}"
        around = [] if self.setup == "plain" else [setup]
        around += [CONSISTENCY] if self.profile == CONSISTENCY else []
        return "/".join((self.model.rpartition("/")[2], *around, self.dtype, self.patch.rpartition(":")[2]))


@dataclass(frozen=True)
class Outcome:
    """What came of one :class:`Case`.

    Attributes:
        verdict: "equal", "different", "cannot run" (the patch itself raised: it is not for this device or version), or
            "absent" (this transformers has no such model).
        reason: the first failure in words; empty when equal.
        failures: rows of quantity, step, finding, value, bound.
        statistics: every judged number with its quantity, step, statistic, value, bound.
        blame: who did it: kernel, module path, pass (forward or backward), first step and tensor that differ, a note.
        census: how many modules each of our kernels replaced; for a foreign patch, which modules changed.
        launches: how often each of our kernels was launched by the candidate.
        fallbacks: how often our fused head had to compute real logits, by reason.
        fused: whether our loss was computed from hidden states, and no logits but those that were read: "yes" or "no".
        truth: the arithmetic of the truth: float64, or float32 with TF32 off where that does not fit.
        losses: of every arm (truth, baseline, candidate), the loss of every step.
        differences: of log-probabilities, by what was compared and the arm (unpatched, patched), the figures that are
            judged (:data:`DIFFERENCES`).
        costs: of every arm, the milliseconds of a step and on a GPU the peak of its memory; nothing is judged by them.
        digests: of baseline and candidate, what every observed tensor was, bit for bit.
    """

    verdict: str = "equal"
    reason: str = ""
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    statistics: list[Statistic] = field(default_factory=list)
    blame: list[Blame] = field(default_factory=list)
    census: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    truth: str = "float64"
    losses: dict[str, dict[str, float]] = field(default_factory=dict)
    differences: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    digests: dict[str, list[Digests]] = field(default_factory=dict)
    replicas: int = 0
    symbols: int = 0
    seconds: float = 0.0
    fused: str = ""

    def worst(self, statistic: str) -> Statistic | None:
        """The judged number of this kind that is nearest to its bound; one that is not a number is beyond."""
        return worst(self.statistics, statistic)


def outcome(found: Verdict, **shown: Any) -> Outcome:
    """The outcome where ``found`` was judged, with what else is ``shown`` of the arms."""
    verdict, reason = "equal", ""
    if found.failures:
        first = found.failures[0]
        verdict, reason = CANNOT_RUN if first.finding is Finding.CANNOT_RUN else "different", str(first)
    return Outcome(verdict, reason, found.failures, found.notes, found.statistics, **shown)


@dataclass(frozen=True)
class Record(Outcome, Case):
    """A :class:`Case`, its :class:`Outcome`, and where and when that came of it.

    Attributes:
        versions: the environment: packages, processor, threads.
        at: when the record was made, UTC.
        run: what all records of one run share.
    """

    versions: dict[str, str] = field(default_factory=dict)
    at: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat())
    run: str = ""
    schema: int = SCHEMA

    @classmethod
    def of(cls, case: Case, outcome: Outcome, run: str = "", origin: dict[str, str] | None = None) -> Record:
        """What came of ``case`` in this process, whose environment it holds, and in this ``run``.

        Args:
            origin: what the environment also holds where the candidate is from other code or versions.
        """
        known = versions(case.device, case.patch) | (origin or {})
        if case.profile == TRAINER:
            known |= files.versions(("trl", "accelerate", "datasets"), missing="not installed")
        return cls(**vars(case), **vars(outcome), versions=known, run=run)

    @property
    def case(self) -> Case:
        """What was asked: two records of the same case differ in when and where it ran."""
        return Case(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Case)})

    @property
    def name(self) -> str:
        return str(self.case)

    @property
    def environment(self) -> dict[str, str]:
        """What decides, besides the case and our own code, every bit of the result."""
        return _deciding(self.versions)

    def summary(self) -> dict[str, Any]:
        """What the table at the end needs; travels from an xdist worker to the controller."""
        return {
            "case": self.name,
            "verdict": self.verdict,
            "reason": self.reason,
            **{name: str(self.worst(name) or "-") for name in (*STATISTICS, *DIFFERENCES)},
            "differences": self.differences,
            "kernels": len(self.launches),
            "launches": sum(self.launches.values()),
            "seconds": self.seconds,
        }


def _deciding(versions: dict[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name not in _DECIDES_NO_BIT}


def environment(device: str, patch: str = "") -> dict[str, str]:
    """What decides every bit of a result on ``device`` in this process, besides the case and our own code."""
    return _deciding(versions(device, patch))


def versions(device: str = "cpu", patch: str = "") -> dict[str, str]:
    """The environment that a result on ``device`` depends on, of this process; with a peer's ``patch``, its version."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    found |= files.versions(("torch", "triton", "transformers", "liger-kernels"), missing="not installed")
    import torch  # not at the top: a report is made where no torch is

    # Both decide in which order a CPU sums.
    found["cpu"] = torch.backends.cpu.get_cpu_capability()
    found["threads"] = str(torch.get_num_threads())
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    if patch in PEERS:
        found |= files.versions([PEERS[patch].distribution], missing="not installed")
    return found


def write(record: Record, folder: Path) -> Path:
    """Add ``record`` to ``folder``, as a whole or not at all, next to what is there; returns its file.

    The name holds the time and a random part, so no file is ever replaced.
    """
    parts = (record.model, record.setup, record.order, record.dtype, record.patch, record.profile, record.device)
    time = re.sub(r"[^0-9T]", "", record.at.partition("+")[0])
    case = re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(parts))[:150]
    path = folder / f"{case}-{time}-{uuid.uuid4().hex[:8]}.json"
    files.write(dumps(record), path)
    return path


def dumps(record: Record) -> str:
    """``record`` as JSON, a line per field; numbers that JSON does not have are strings ("nan", "inf", "-inf")."""
    plain = files.plain(dataclasses.asdict(record))
    fields = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in plain.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"


def digest(record: Record) -> str:
    """What tells the file of ``record`` from any other."""
    return hashlib.sha256(dumps(record).encode()).hexdigest()


def changed(file: str, digest: str) -> bool:
    """Whether ``file``, where a record with this digest was written, is no longer what it was. "" is no file."""
    if not file:
        return False
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() != digest
    except OSError:
        return True


def parsed(text: str) -> Record:
    """The record that :func:`dumps` made ``text`` of."""
    return from_dict(json.loads(text))


def load(path: Path) -> Record:
    """The record in ``path``.

    Raises:
        Unusable: it is no record of this schema; the message names file, field, what came and what is allowed.
    """
    return from_dict(files.read_json(path), str(path))


def from_dict(data: Any, source: str = "record") -> Record:
    """A record from what JSON gave; ``source`` names it in errors. Raises as :func:`load`."""
    if not isinstance(data, dict):
        raise Unusable(f"{source}: holds {shown(data)}; allowed is a record, an object of named fields")
    schema = data.get("schema")
    if type(schema) is not int:
        raise Unusable(f"{source}: field 'schema' is {shown(schema)}; allowed is {SCHEMA}, or it is no record")
    if schema in _ALWAYS:
        data = {**data, **_ALWAYS[schema], "schema": SCHEMA}
    elif schema != SCHEMA:
        release, advice = (
            ("a later", "read it with that release") if schema > SCHEMA else ("an earlier", "run the case again")
        )
        was = f"field 'schema' is {shown(schema)}, of {release} release"
        raise Unusable(f"{source}: {was}; allowed is {SCHEMA}; {advice}")
    types = typing.get_type_hints(Record)
    for name in data.keys() - types.keys():
        raise Unusable(f"{source}: field {name!r} is unknown; allowed are {', '.join(types)}")
    for name in types.keys() - data.keys():
        raise Unusable(f"{source}: field {name!r} is missing; every field of schema {SCHEMA} is written")
    record = Record(**{name: checked(data[name], kind, f"{source}: field {name!r}") for name, kind in types.items()})
    _check_sense(record, source)
    return record


def _check_sense(record: Record, source: str) -> None:
    """The verdict is a known one and agrees with the failures, the time is one, and no digest lacks its step."""
    if record.verdict not in VERDICTS:
        raise Unusable(f"{source}: field 'verdict' is {shown(record.verdict)}; allowed are {', '.join(VERDICTS)}")
    wrong = {"equal": bool(record.failures), "different": not record.failures, CANNOT_RUN: not record.failures}
    if wrong.get(record.verdict):
        raise Unusable(
            f"{source}: field 'verdict' is {record.verdict!r} with {len(record.failures)} failures; allowed is "
            "'equal' without any, 'different' and 'cannot run' with some"
        )
    try:
        aware = datetime.datetime.fromisoformat(record.at).utcoffset() is not None
    except (ValueError, OverflowError):
        aware = False
    if not aware:
        raise Unusable(f"{source}: field 'at' is {shown(record.at)}; allowed is an ISO 8601 time with its offset")
    for arm, groups in record.digests.items():
        for group in groups:
            for quantity, words in group["quantities"].items():
                if len(words.split()) != len(group["steps"]):
                    raise Unusable(
                        f"{source}: field 'digests'[{cut(repr(arm))}] has {len(words.split())} words for "
                        f"{cut(repr(quantity))}; allowed is one per step, {len(group['steps'])}"
                    )


def load_all(paths: Iterable[Path]) -> list[Record]:
    """Every record in ``paths`` (files, or folders with all below them), the oldest first.

    Raises:
        Unusable: as :func:`load`, or a path does not exist, or there is no record at all.
    """
    paths = list(paths)
    files: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise Unusable(f"{path}: does not exist; allowed are record files and folders of them")
        files.update(path.rglob("*.json") if path.is_dir() else [path])
    if not files:
        raise Unusable(f"{', '.join(map(str, paths))}: no record in there; --records DIR writes them")
    return sorted((load(file) for file in sorted(files)), key=lambda record: datetime.datetime.fromisoformat(record.at))


def newest(records: Sequence[Record]) -> list[Record]:
    """The newest record of each case in each environment, ordered by case; ``records`` come oldest first."""
    latest = {(record.case, tuple(sorted(record.environment.items()))): record for record in records}
    return [latest[key] for key in sorted(latest, key=str)]


def load_folder(folder: Path) -> list[Record]:
    """The newest record of each case, and environment, in ``folder`` and below; raises as :func:`load_all`."""
    return newest(load_all([folder]))
