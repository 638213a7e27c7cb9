"""Another Python imports once, and forks for each call: what a call does there stays with its process."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convergence.arms import isolate
from convergence.elsewhere import program
from tests.elsewhere_patches import copy_package, write_no_models


def here_and_parent() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def count_up() -> int:
    """How often this was called in this process: the first time in a process, 1."""
    count_up.calls = getattr(count_up, "calls", 0) + 1  # type: ignore[attr-defined]
    found: int = count_up.calls  # type: ignore[attr-defined]
    return found


def pipes_and_sockets() -> list[str]:
    """What this process could talk over."""
    names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    found = (os.readlink(name) for name in names if os.path.lexists(name))
    return sorted(name.partition(":")[0] for name in found if name.startswith(("pipe:", "socket:")))


def how_it_was_started() -> tuple[str, list[str]]:
    """The command of this process, and the files that its parent's command names."""
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    return sys.argv[1], [Path(name).name for name in parent[1:] if name and Path(name).exists()]


def signal_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def signal_its_server(number: int) -> None:
    os.kill(os.getppid(), number)
    time.sleep(60)


def wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.01)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a server imports from: no call here builds a model."""
    return [str(write_no_models(tmp_path_factory.mktemp("light"))), *program.all_paths()]


@pytest.fixture(scope="module")
def call(paths: list[str]) -> Iterator[Any]:
    start = functools.partial(program.start, sys.executable, paths, False)
    yield functools.partial(isolate.call, start=start, timeout=60)
    program.stop()


@pytest.mark.slow
def test_calls_share_what_is_imported_and_nothing_else(call: Any) -> None:
    (one, server), (two, again) = call(here_and_parent), call(here_and_parent)
    assert one != two
    assert server == again != os.getpid()
    assert [call(count_up), call(count_up)] == [1, 1]
    assert torch.equal(call(torch.square, torch.arange(3.0)), torch.tensor([0.0, 1.0, 4.0]))


def test_a_call_can_talk_to_its_caller_alone(call: Any, tmp_path: Path) -> None:
    """It has neither the socket by which calls are asked for, nor what hears of this process or of one that still
    runs; and no file is left that the server reads."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(call, wait_for, str(tmp_path / "go"))
        call(here_and_parent)
        assert not other.done()
        assert call(pipes_and_sockets) == ["socket"]
        (tmp_path / "go").touch()
    assert call(how_it_was_started) == ("listen", ["serve.py"])


def test_the_end_of_a_process_is_its_own(call: Any) -> None:
    _, server = call(here_and_parent)
    with pytest.raises(isolate.ProcessDied, match="signal SIGKILL"):
        call(signal_itself, signal.SIGKILL)
    with pytest.raises(isolate.ProcessDied, match="exit code 3"):
        call(os._exit, 3)
    with pytest.raises(isolate.ProcessDied, match="more than 1 s"):
        call(time.sleep, 60, timeout=1)
    with pytest.raises(ValueError, match="invalid literal"):
        call(int, "x")
    assert call(here_and_parent)[1] == server


@pytest.mark.slow
def test_a_server_that_stands_still_does_not_keep_its_caller(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, and another one takes its place."""
    _, server = call(here_and_parent)
    monkeypatch.setattr(program, "_PATIENCE", 0.5)
    with pytest.raises(isolate.ProcessDied, match="more than 1 s"):
        call(signal_its_server, signal.SIGSTOP, timeout=1)
    assert call(here_and_parent)[1] != server


def test_a_server_that_is_killed_ends_its_call(call: Any) -> None:
    with pytest.raises(isolate.ProcessDied, match="signal SIGKILL"):
        call(signal_its_server, signal.SIGKILL)


def test_a_program_that_never_answers_is_out_of_time(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    start = functools.partial(program.start, str(silent), [], False)
    with pytest.raises(isolate.ProcessDied, match="more than 1 s"):
        isolate.call(os.getpid, start=start, timeout=1)
    (server,) = (server for key, server in program._servers.items() if key[0] == str(silent))
    assert server.process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_where_a_fork_does_not_survive_each_call_has_its_own_interpreter(paths: list[str], tmp_path: Path) -> None:
    """An import there has started what a forked process cannot use."""
    there = copy_package(tmp_path)
    with open(there / "liger_kernels" / "__init__.py", "a", encoding="utf-8") as file:
        file.write("\n__import__('torch').cuda.is_available = lambda: True\n")
    start = functools.partial(program.start, sys.executable, [str(there), *paths], False)
    assert isolate.call(how_it_was_started, start=start) == ("answer", ["serve.py"])


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that were started, which start nothing; a call stays open until a test closes it."""
    made: list[Any] = []

    def server(python: str, judge: Any, output: str) -> Any:
        time.sleep(0.1)
        ended = SimpleNamespace(poll=lambda: None)
        made.append(SimpleNamespace(python=python, calls=0, closed=False, process=ended))
        made[-1].close = lambda one=made[-1]: setattr(one, "closed", True)
        return made[-1]

    def answering(server: Any, *rest: Any) -> Any:
        server.calls += 1
        return server

    monkeypatch.setattr(program, "Server", server)
    monkeypatch.setattr(program, "Answering", answering)
    monkeypatch.setattr(program, "_servers", {})
    return made


def ask(python: str) -> Any:
    return program.start(python, [], False, (b"", None, "", "", 1.0, False))


def test_two_servers_wait_and_one_that_answers_is_left_alone(servers: list[Any]) -> None:
    for python in ("a", "b", "a", "b"):
        ask(python).calls -= 1
    assert [one.python for one in servers] == ["a", "b"]
    ask("a")
    ask("c").calls -= 1
    assert [one.closed for one in servers] == [False, True, False], (
        "the one that waits longest, but not the one at work"
    )
    ask("d")
    assert [one.closed for one in servers] == [False, True, True, False]


def test_threads_share_a_server(servers: list[Any]) -> None:
    threads = [threading.Thread(target=ask, args=("a",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(servers) == 1
