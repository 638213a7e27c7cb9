"""Another Python imports once, and forks for each call: what a call does there stays with its process."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from convergence.arms import isolate
from convergence.elsewhere import program


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


def alone() -> tuple[int, list[str]]:
    assert "torch" in sys.modules
    return os.getppid(), pipes_and_sockets()


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_its_server() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def say_nothing() -> None:
    time.sleep(60)


@pytest.fixture(scope="module")
def call() -> Iterator[Any]:
    start = functools.partial(program.start, sys.executable, program.all_paths(), False)
    yield functools.partial(isolate.call, start=start, timeout=60)
    program.stop()


def test_calls_share_what_is_imported_and_nothing_else(call: Any) -> None:
    (one, server), (two, again) = call(here_and_parent), call(here_and_parent)
    assert one != two
    assert server == again != os.getpid()
    assert [call(count_up), call(count_up)] == [1, 1]
    assert torch.equal(call(torch.square, torch.arange(3.0)), torch.tensor([0.0, 1.0, 4.0]))


def test_a_call_can_talk_to_its_caller_alone(call: Any) -> None:
    """It has neither the socket by which calls are asked for, nor what hears of this or another process."""
    assert call(pipes_and_sockets) == ["socket"]


def test_the_end_of_a_process_is_its_own(call: Any) -> None:
    _, server = call(here_and_parent)
    with pytest.raises(isolate.ProcessDied, match="signal SIGKILL"):
        call(kill_itself)
    with pytest.raises(isolate.ProcessDied, match="exit code 3"):
        call(os._exit, 3)
    with pytest.raises(isolate.ProcessDied, match="more than 1 s"):
        call(say_nothing, timeout=1)
    with pytest.raises(ValueError, match="invalid literal"):
        call(int, "x")
    assert call(here_and_parent)[1] == server


def test_a_server_that_has_ended_is_started_anew(call: Any) -> None:
    _, server = call(here_and_parent)
    with pytest.raises(isolate.ProcessDied):
        call(kill_its_server)
    _, another = call(here_and_parent)
    assert another != server


def test_where_a_fork_does_not_survive_each_call_has_its_own_interpreter(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another Python, which takes the place of the one before."""
    _, server = call(here_and_parent)
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started([*command, "alone"], **options))
    start = functools.partial(program.start, sys.executable, [*program.all_paths(), "/nowhere"], False)
    parent, talks = isolate.call(alone, start=start)
    assert parent != server
    assert talks == ["socket"]
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
