"""Runs cells. tox makes each environment, and there :func:`run_stages` starts one process per stage."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from convergence.files import Unusable
from convergence.tables import visible
from matrix import records
from matrix.cells import Cell
from matrix.code import SUFFIXES, Code
from matrix.records import CellRecord, StageResult
from matrix.repository import config, environments
from matrix.repository.config import PYTEST, Stage

TIMEOUT = 3600.0
REQUIREMENTS = "MATRIX_REQUIREMENTS"  # the requirements of the cell of upstream's branches
_DISTRIBUTIONS = (
    "import importlib.metadata as m, json, platform as p; "
    "print(json.dumps([p.python_version(), [(d.metadata['Name'], d.version) for d in m.distributions()]]))"
)


def records_folder() -> Path:
    """The default folder of records: ``MATRIX_RECORDS``, or else the configuration's folder."""
    return Path(os.environ.get("MATRIX_RECORDS") or config.here().records)


def code_digest(root: Path | None = None) -> str:
    """A digest of every source file on the disk that any stage's result depends on."""
    here = config.here()
    root = root or here.root
    tops = [root / name for name in dict.fromkeys((*here.product, *here.tests, config.FILE))]
    files = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
    digest = hashlib.sha256()
    for path in sorted(file for file in files if file.suffix in SUFFIXES and file.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit() -> str:
    """The current commit, with ``+`` if files differ from it; empty outside of git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=config.here().root,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def environment() -> dict[str, str]:
    """The version of every distribution that this process can import, without local labels (``+cpu``)."""
    return _by_name([(one.metadata["Name"], one.version) for one in importlib.metadata.distributions()])


def _by_name(distributions: Sequence[tuple[str | None, str | None]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, version in distributions:  # in the order of sys.path; the first one is imported
        if name and version:  # an installation that was broken off has neither
            found.setdefault(records.canonical(name), version.partition("+")[0])
    return dict(sorted(found.items()))


def environment_of(python: str) -> tuple[dict[str, str], str]:
    """:func:`environment` of another Python, and the version of that Python. It need not have this package.

    Raises:
        ValueError: there is no such Python.
    """
    try:
        done = subprocess.run([python, "-c", _DISTRIBUTIONS], capture_output=True, text=True, cwd=config.here().root)
    except OSError as error:
        raise ValueError(f"--python {python}: cannot be started: {error.strerror}") from None
    if done.returncode:
        raise ValueError(f"--python {python}: {done.stderr.strip().splitlines()[-1:] or 'no Python'}")
    version, found = json.loads(done.stdout)
    return _by_name(found), version


def gpu() -> str:
    """The name of the first GPU, or "none" if there is none or the environment hides it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return "none"
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    first = done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
    return first or "none"


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_count(text: str) -> bool:
    """Whether it is a number, 1 or more."""
    return text.isascii() and text.isdecimal() and int(text) > 0


def workers() -> int:
    """The pytest workers of a cell: ``MATRIX_WORKERS``, or else as many as there are CPUs.

    Raises:
        ValueError: ``MATRIX_WORKERS`` is no number of workers.
    """
    text = os.environ.get("MATRIX_WORKERS", "")
    if text and not is_count(text):
        raise ValueError(f"MATRIX_WORKERS is {text!r}; it must be a number of pytest workers, 1 or more")
    return int(text or cpus())


def machine() -> dict[str, str]:
    python = platform.python_version()
    return {"cpus": str(cpus()), "gpu": gpu(), "platform": platform.platform(), "python": python}


def run_stages(
    cell: Cell,
    stages: Sequence[Stage],
    folder: Path,
    workers: int = 1,
    fresh: bool = False,
    say: Callable[[str], None] = print,
    python: str = sys.executable,
) -> CellRecord:
    """Run ``stages`` in the environment of ``python``. Returns the record, which is also written to ``folder``.

    A stage is kept if it passed in an earlier run, even a killed one, with the same cell file, environment and code of
    the stage (:class:`Code`). ``fresh`` keeps none. A stage fails if its code changes while it runs, because nobody
    knows which one ran.
    """
    here, version = (environment(), platform.python_version()) if python == sys.executable else environment_of(python)
    this = {**machine(), "python": version}
    counts = config.here().upstream
    deviations = [
        f"{package} is {here.get(records.canonical(package), 'not installed')} instead of {version}"
        for package, version in cell.pins.items()
        if here.get(records.canonical(package)) != version and (this["gpu"] == "none" or package in counts)
    ]
    record = CellRecord(cell.name, cell.digest, code_digest(), commit(), here, this, now(), deviations)
    sources, on_gpu = Code(), this["gpu"] != "none"
    codes = {stage.name: sources.digest(stage, on_gpu) for stage in stages}
    kept = {} if fresh else _kept(record, codes, folder)
    workers = workers if "pytest-xdist" in here else 1
    for stage in stages:
        result = kept.get(stage.name)
        if result is None:
            say(f"{cell.name}: {stage.name} ...")
            result = run_stage(stage, folder / record.name / stage.name, workers, this["gpu"], python=python)
            result.code = codes[stage.name]
            if changed := _changed(sources.digests(stage, on_gpu), Code().digests(stage, on_gpu)):
                result.status = "failed"
                result.reason = "; ".join(filter(None, (result.reason, f"{changed} changed while it ran")))
        again = " (kept from an earlier run)" if stage.name in kept else ""
        say(f"{cell.name}: {describe(result)}{again}")
        record.stages.append(result)
        record.complete = {stage.name for stage in record.stages} >= {
            stage.name for stage in config.here().stages[cell.kind]
        }
        records.write(record, folder)
    return record


def describe(result: StageResult) -> str:
    counts = f"{len(result.passed)} passed, {len(result.failed)} failed, {len(result.skipped)} skipped"
    reason = f": {visible(result.reason)}" if result.reason else ""
    return f"{result.name} {result.status}, {counts}, {result.seconds:.0f} s{reason}"


def _kept(record: CellRecord, codes: dict[str, str], folder: Path) -> dict[str, StageResult]:
    """The stages that passed earlier with the cell file, environment and machine of ``record``. ``codes`` are the
    digests of the stages' code."""
    earlier = records.earlier(folder, record.name)
    same = ("digest", "environment", "machine")
    if earlier is None or any(getattr(earlier, name) != getattr(record, name) for name in same):
        return {}
    return {
        stage.name: stage
        for stage in earlier.stages
        if stage.status == "passed" and stage.code == codes.get(stage.name)
    }


def run_stage(
    stage: Stage,
    folder: Path,
    workers: int,
    gpu: str = "none",
    timeout: float = TIMEOUT,
    python: str = sys.executable,
) -> StageResult:
    """Run one stage as a separate process. ``folder`` gets its log, its JUnit XML and its records."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = stage.given(gpu != "none")
    if stage.program == PYTEST:
        command = ["python", *_pytest(stage, arguments, folder, 1 if stage.alone and gpu != "none" else workers)]
    else:
        command = [stage.program, *(argument.replace("{records}", str(folder / "records")) for argument in arguments)]
    began, cpu_began = time.monotonic(), _children_seconds()
    reason = _call(command, folder / "log.txt", timeout, python)
    seconds, cpu_seconds = (round(s, 1) for s in (time.monotonic() - began, _children_seconds() - cpu_began))
    shown = [argument.replace(f"{config.here().root}/", "") for argument in command]
    result = StageResult(stage.name, shown, "failed", reason, seconds, cpu_seconds)
    _collect(stage, folder, result)
    return result


def _pytest(stage: Stage, arguments: Sequence[str], folder: Path, workers: int) -> list[str]:
    command = ["-m", "pytest", *arguments]
    if workers > 1:
        command += ["-n", str(workers)]
    elif "--dist" in command:
        at = command.index("--dist")
        command = command[:at] + command[at + 2 :]
    if stage.leaves_records:
        command += ["--records", str(folder / "records")]
    return [*command, "-p", "no:cacheprovider", "--junitxml", str(folder / "junit.xml")]


def _changed(before: dict[str, str], after: dict[str, str]) -> str:
    """Which files differ: the first, and how many others."""
    first, *others = sorted({name for name, _ in before.items() ^ after.items()}) or [""]
    return f"{first} and {len(others)} more" if others else first


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _call(command: list[str], log: Path, timeout: float, python: str) -> str:
    """Run a process and return why it failed; empty if its exit code is 0. What it started dies with it, also where it
    ends by itself. Programs in the environment of ``python`` come first."""
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    found = python if command[0] == "python" else shutil.which(command[0], path=path)
    if found is None:
        return f"there is no program {command[0]}"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [found, *command[1:]],
            env={**os.environ, "PATH": path},
            cwd=config.here().root,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"killed after {timeout:.0f} s"
        finally:
            # It has left nothing; macOS says PermissionError of a process that nobody has waited for.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "" if code == 0 else f"exit code {code}: {_last_words(log.read_text(encoding='utf-8', errors='replace'))}"


def _last_words(output: str) -> str:
    """The last line of a program's output that is not indented: an indented one adds to a line above it. pytest adds
    its rootdir to a usage error like that."""
    lines = [line for line in output.splitlines() if line.strip()]
    whole = [line for line in lines if not line[0].isspace()] or lines
    return whole[-1].strip("= ") if whole else "no output"


def _collect(stage: Stage, folder: Path, result: StageResult) -> None:
    """Fill ``result`` from the files that the process left. The stage passed only if the process succeeded and ran
    something."""
    reason = result.reason
    try:
        if stage.program == PYTEST:
            result.passed, result.failed, result.skipped = records.read_cases(folder / "junit.xml")
        elif reason:
            result.failed = {stage.name: reason}
        else:
            result.passed = [stage.name]
        if stage.leaves_records:
            result.findings = records.read_findings(folder / "records")
    except Unusable as error:
        result.reason = "; ".join(filter(None, (reason, str(error))))
        return
    if result.failed:
        result.reason = reason or f"{len(result.failed)} cases failed"
    elif not result.passed:
        result.status = "nothing ran"
        result.reason = reason or f"{len(result.skipped)} cases, and every one was skipped"
    elif stage.leaves_records and not result.findings:
        result.status, result.reason = "nothing ran", reason or "it left no record"
    elif not reason:
        result.status = "passed"


def _made_anew(cells: Sequence[Cell], variables: dict[str, str]) -> dict[str, Path]:
    """By cell, the requirement files of environments that are never kept."""
    asked = variables.get(REQUIREMENTS)
    folder = config.here().cells
    return {cell.name: Path(asked) if asked else folder / f"{cell.name}.txt" for cell in cells if cell.open or asked}


def tox(cells: Sequence[Cell], jobs: int, options: Sequence[str], folder: Path, **variables: str) -> int:
    """Make each cell's environment and run the cell there, ``jobs`` cells at a time. The records in ``folder`` have the
    results. ``variables`` are environment variables. Returns tox's exit code."""
    outer = {name: value for name, value in os.environ.items() if not name.lstrip("_").startswith("TOX")}
    outer.pop("VIRTUAL_ENV", None)
    outer |= {"MATRIX_RECORDS": str(folder.absolute()), **variables}
    command = [sys.executable, "-m", "tox", "run-parallel" if jobs > 1 else "run"]
    if jobs > 1:
        command += ["--parallel", str(jobs), "--parallel-live"]
    given = environments.options([cell.name for cell in cells], folder, _made_anew(cells, variables))
    command += [*given, "-e", ",".join(cell.name for cell in cells), "--", *options]
    with subprocess.Popen(command, cwd=config.here().root, env=outer, start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)  # each cell ends its stage
            process.wait()  # and writes its record
            raise
