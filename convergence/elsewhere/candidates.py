"""Candidates kept in a folder, and judged on another machine or by another commit.

A candidate is plain data (``convergence.border``). The JSON file next to it says what decides it: the proof's schema,
the case, the versions, and a digest of the inputs. It also has a digest of the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from convergence import border, files
from convergence.arms.candidate import Candidate
from convergence.checked import checked, shown
from convergence.elsewhere.origin import HERE, NotHere, Origin, Train, others
from convergence.elsewhere.portable import inputs_digest
from convergence.files import Unusable
from convergence.report.records import SCHEMA, Case

SUFFIX = ".candidate.json"
_AGAIN = "keep it again with --keep-candidates"


class Manifest(TypedDict):
    """What the JSON file of a candidate holds. ``file`` lies in the same folder, and has this SHA-256 ``digest``."""

    schema: int
    case: Case
    versions: dict[str, str]
    inputs: str
    file: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Keeping(Origin):
    """Another origin whose candidates are also written to ``folder``."""

    inner: Origin = HERE
    folder: str = ""

    def says(self, case: Case) -> dict[str, str]:
        return self.inner.says(case)

    def versions(self, case: Case) -> dict[str, str]:
        return self.inner.versions(case)

    def absent(self, case: Case) -> str:
        return self.inner.absent(case)

    def candidate(self, train: Train, case: Case, given: Any, timeout: float) -> Candidate:
        found = self.inner.candidate(train, case, given, timeout)
        _keep(Path(self.folder), case, inputs_digest(given), self.versions(case), found)
        return found

    def call(self, function: Callable[..., Any], case: Case, given: Any, *args: Any, timeout: float) -> Any:
        return self.inner.call(function, case, given, *args, timeout=timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        return self.inner.run(function, *args, timeout=timeout)


def _keep(folder: Path, case: Case, inputs: str, versions: dict[str, str], candidate: Candidate) -> None:
    """Write ``candidate`` in place of an earlier one of ``case``; the JSON file comes last."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(case))[:100]
    name += f"-{hashlib.sha256(repr(case).encode()).hexdigest()[:8]}"
    data = border.dumps(candidate)
    file = folder / f"{name}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(data)
    unfinished.replace(file)
    kept = {"schema": SCHEMA, "case": vars(case), "versions": versions, "inputs": inputs}
    files.write_json({**kept, "file": file.name, "digest": _digest(data)}, folder / f"{name}{SUFFIX}")


@dataclasses.dataclass(frozen=True)
class KeptCandidates(Origin):
    """The candidates of an earlier run; no patch is run here."""

    folder: str = ""
    kept: dict[Case, Manifest] = dataclasses.field(default_factory=dict)

    def says(self, case: Case) -> dict[str, str]:
        return {"candidate from": self.folder, **others(self.versions(case), case)}

    def versions(self, case: Case) -> dict[str, str]:
        return self.kept[case]["versions"]

    def candidate(self, train: Train, case: Case, given: Any, timeout: float) -> Candidate:
        kept = self.kept[case]
        file = Path(self.folder) / kept["file"]
        if (own := inputs_digest(given)) != kept["inputs"]:
            raise Unusable(
                f"{file}: was trained on other inputs (digest {kept['inputs'][:12]}, here {own[:12]}): initial weights "
                f"or batches differ; {_AGAIN}, with the torch and transformers of this environment"
            )
        try:
            data = bytearray(file.read_bytes())
        except OSError as error:
            raise Unusable(f"{file}: cannot be read ({files.reason(error)}); {_AGAIN}") from error
        if _digest(data) != kept["digest"]:
            raise Unusable(f"{file}: is not what was kept: its digest changed; {_AGAIN}")
        try:
            found = border.loads(data)
        except border.NotPlain as error:
            raise Unusable(f"{file}: was kept by another version of the proof ({error}); {_AGAIN}") from error
        if not isinstance(found, Candidate):
            raise Unusable(f"{file}: holds a {type(found).__name__}; allowed is a candidate; {_AGAIN}")
        return found

    def call(self, function: Callable[..., Any], case: Case, given: Any, *args: Any, timeout: float) -> Any:
        return self.run(function, case, given, *args, timeout=timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        raise NotHere(
            "the candidate was kept by another run, and its patch is not here; --candidate-from a checkout or an "
            "environment can search"
        )


def are_in(folder: Path) -> bool:
    """Whether candidates are kept in ``folder``."""
    return any(folder.glob(f"*{SUFFIX}"))


def kept_in(folder: Path, cases: Sequence[Case]) -> KeptCandidates:
    """The candidates of ``cases`` in ``folder``.

    Raises:
        Unusable: a file is damaged or of another schema, or a case has no candidate. The message names the nearest.
    """
    found = {kept["case"]: kept for kept in map(_read, sorted(folder.glob(f"*{SUFFIX}")))}
    for case in cases:
        if case not in found:
            near = min((_differences(vars(other), vars(case)) for other in found), key=len)
            raise Unusable(
                f"{folder}: no candidate of {case} is kept there; the nearest has {', '.join(near)}; ask for what is "
                f"kept, or {_AGAIN}"
            )
    return KeptCandidates(folder=str(folder), kept={case: found[case] for case in cases})


def _read(path: Path) -> Manifest:
    data = files.read_json(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise Unusable(f"{path}: field 'schema' is {shown(schema)}; allowed is {SCHEMA}, of this proof; {_AGAIN}")
    kept: Manifest = checked(data, Manifest, str(path))
    if Path(kept["file"]).name != kept["file"]:
        raise Unusable(f"{path}: field 'file' is {shown(kept['file'])}; allowed is a name in the same folder")
    return kept


def _differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    return [f"{name} {there[name]} (here {here[name]})" for name in here if there[name] != here[name]]


def _digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()
