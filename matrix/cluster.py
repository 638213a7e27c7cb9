"""Cells on several machines: each is a task of Ray, which makes the cell's environment on some node and runs it there.

The driver is the only one that writes records, and only whole ones: those whose code and cell file are its own. A cell
whose node dies is run again on another; what the dead node had done of it does not count.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence.files import Unusable, read_json
from convergence.tables import first_line, visible
from matrix import baseline, records, runner
from matrix.cells import Cell
from matrix.code import Code
from matrix.records import GPU, CellRecord
from matrix.repository import config

TRIES = 3  # of a cell whose node dies
PATIENCE = 30.0  # seconds without any node that a waiting cell fits on
_LOOKS = 0.5  # seconds between two looks at what a node has recorded
_NOT_SENT = ("/.git/", "/.tox/", "/.ci/venv/", "/records/", "**/__pycache__/", "*.egg-info")
Runner = Callable[[Cell, list[str], Path], None]


def with_tox(cell: Cell, options: list[str], folder: Path) -> None:
    """What a node does with a cell.

    Raises:
        ValueError: the node's Python lacks what makes environments.
    """
    missing = [name for name in ("tox", "tox_uv") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{socket.gethostname()} has no {' and no '.join(missing)}: pip install tox tox-uv there")
    runner.tox([cell], 1, options, folder)


@dataclass
class _State:
    """Of one cell: what the driver knows.

    Attributes:
        tries: how often it was started.
        began: of the last try, by ``time.monotonic``.
        record: as far as the node has told; ``done``: whether it is final.
        failure: why there is no record.
    """

    cell: Cell
    tries: int = 0
    began: float = 0.0
    record: CellRecord | None = None
    done: bool = False
    failure: str = ""


def run(
    chosen: Sequence[Cell],
    address: str,
    folder: Path,
    *,
    jobs: int | None = None,
    workers: int = 1,
    gpus: float = 0,
    fresh: bool = False,
    how: Runner = with_tox,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Run cells on the cluster at ``address``; their records are in ``folder`` afterwards.

    Args:
        jobs: cells at a time; None: as many as fit.
        workers: of pytest, and CPUs, per cell.
        gpus: per cell.
        fresh: run cells, too, that passed with this code.

    Returns:
        Why a cell has no record, by name.

    Raises:
        ValueError: Ray is not installed, the cluster cannot be reached, or is of another Python or Ray.
    """
    code, states = runner.code_digest(), [_State(cell) for cell in chosen]
    waiting = _to_run(states, folder, code, GPU if gpus else "", fresh, say)
    if not waiting:
        return {}
    options = ["--workers", str(workers), *(["--fresh"] if fresh else [])]
    running: dict[Any, _State] = {}
    homeless = time.monotonic()
    with _connected(address) as ray, _Table(states, say) as table:
        task = ray.remote(num_cpus=workers, num_gpus=gpus, max_retries=0)(on_node)
        while waiting or running:
            while waiting and len(running) < (jobs or len(states)):
                state = waiting.popleft()
                state.tries, state.began, state.record = state.tries + 1, time.monotonic(), None
                running[task.options(num_returns="streaming").remote(state.cell, options, code, how)] = state
            if _somewhere(ray, workers, gpus):
                homeless = time.monotonic()
            elif time.monotonic() - homeless > PATIENCE:
                for state in (*running.values(), *waiting):
                    state.failure = state.failure or f"no node has {workers} CPUs and {gpus:g} GPUs"
                break
            ready, _ = ray.wait([*running], num_returns=1, timeout=1.0, fetch_local=False)
            for stream in ready:
                state = running.pop(stream)
                try:
                    state.record = records.from_dict(ray.get(next(stream)), state.cell.name)
                    running[stream] = state
                except StopIteration:
                    _finish(state, folder, code)
                except ray.exceptions.RayTaskError as error:
                    state.record, state.failure = None, str(error.cause).strip()
                except Unusable as error:
                    state.record, state.failure = None, f"its node sent no record: {error}"
                except ray.exceptions.RayError as error:  # the node, or the worker process on it, died
                    state.record = None
                    if state.tries < TRIES:
                        table.say(f"{state.cell.name}: its node died; it runs again")
                        waiting.append(state)
                    else:
                        state.failure = f"its node died {TRIES} times: {first_line(str(error))}"
            table.show()
    return {state.cell.name: state.failure for state in states if state.failure}


def _to_run(
    states: list[_State], folder: Path, code: str, suffix: str, fresh: bool, say: Callable[[str], None]
) -> collections.deque[_State]:
    """The cells that have to run. The others get their record of an earlier run."""
    waiting, sources = collections.deque[_State](), Code()
    for state in states:
        name = f"{state.cell.name}{suffix}"
        kept = None if fresh else records.earlier(folder, name)
        if kept is not None and kept.digest != state.cell.digest:
            kept = None
        if kept is not None and kept.passed and not sources.stale(kept, state.cell.kind, code):
            state.record, state.done = kept, True
            say(f"{state.cell.name}: kept, it passed with this code")
        else:  # what an earlier run left is not what this one did
            (folder / f"{name}.json").unlink(missing_ok=True)
            waiting.append(state)
    return waiting


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster."""
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray: pip install 'liger-kernels[ray]' here and on every node") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("auto", "local"):
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise ValueError(f"--ray {address}: no cluster answers there ({error}); it takes HOST:PORT") from None
    sent = {"working_dir": str(config.here().root), "excludes": list(_NOT_SENT)}
    try:
        try:
            ray.init(address=address, runtime_env=sent, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:  # among them another version of Ray or Python
            raise ValueError(f"--ray {address}: {first_line(str(error))}") from None
        yield ray
    finally:
        ray.shutdown()


def on_node(cell: Cell, options: list[str], code: str, how: Runner) -> Iterator[Any]:
    """The task: yields the cell's record, as a dictionary, whenever there is more of it.

    Raises:
        ValueError: the source tree that came is not the driver's, or ``how`` raised it.
    """
    here = runner.code_digest()
    if here != code:
        raise ValueError(f"{socket.gethostname()} has other code ({here}) than the driver ({code})")
    folder = runner.records_folder() / f"ray-{time.time_ns()}"
    failures: list[Exception] = []

    def work() -> None:
        try:
            how(cell, options, folder)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    seen = ""
    while True:
        ended = not thread.is_alive()
        for path in folder.glob("*.json"):  # written whole, after each stage
            if (text := path.read_text(encoding="utf-8")) != seen:
                seen = text
                yield read_json(path)
        if ended:
            break
        thread.join(_LOOKS)
    if failures:
        raise ValueError(str(failures[0]))


def _somewhere(ray: Any, workers: int, gpus: float) -> bool:
    """Whether a node is alive that has room for a cell when it is idle."""
    found = [node.get("Resources", {}) for node in ray.nodes() if node["Alive"]]
    return any(node.get("CPU", 0) >= workers and node.get("GPU", 0) >= gpus for node in found)


def _finish(state: _State, folder: Path, code: str) -> None:
    """Keep the record that came last, if it is one of this code and cell."""
    record = state.record
    if record is None:
        state.failure = "its environment could not be made, or nothing ran in it"
    elif (record.code, record.digest) != (code, state.cell.digest):
        state.failure, state.record = "its record is of other code or of another cell file", None
    else:
        state.done = True
        records.write(dataclasses.replace(record, commit=runner.commit()), folder)


class _Table:
    """Progress, on a terminal: a row a cell, with the time left by what the accepted record took; else a line where
    something happened."""

    def __init__(self, states: list[_State], say: Callable[[str], None]) -> None:
        from rich.console import Console
        from rich.live import Live

        self.states, self._say, self.said = states, say, dict.fromkeys((s.cell.name for s in states), 0)
        accepted = baseline.load()
        self.took = {name: cell.seconds for name, cell in accepted.cells.items()} if accepted else {}
        console = Console()
        self.live = Live(console=console, refresh_per_second=2) if console.is_terminal and say is print else None

    def __enter__(self) -> _Table:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.show()
        if self.live is not None:
            self.live.stop()

    def say(self, line: str) -> None:
        line = visible(line)
        self.live.console.print(line, markup=False) if self.live is not None else self._say(line)

    def show(self) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table("cell", "stage", "passed", "failed", "left")
        for state in self.states:
            stages = state.record.stages if state.record else []
            for stage in stages[self.said[state.cell.name] :] if self.live is None else []:
                self.say(f"{state.cell.name}: {runner.describe(stage)}")
            self.said[state.cell.name] = max(self.said[state.cell.name], len(stages)) if stages else 0
            if state.failure:
                where = f"FAILED: {state.failure}"
            elif state.done:
                where = "done"
            else:
                where = f"after {stages[-1].name}" if stages else "environment" if state.began else "waiting"
            took = self.took.get(state.cell.name, 0.0)
            runs = took and state.began and not state.done
            left = f"{max(0.0, took - (time.monotonic() - state.began)):.0f} s" if runs else ""
            counts = [str(sum(len(getattr(s, kind)) for s in stages)) for kind in ("passed", "failed")]
            table.add_row(*(Text(visible(cell)) for cell in (state.cell.name, where, *counts, left)))
        if self.live is not None:
            self.live.update(table)
