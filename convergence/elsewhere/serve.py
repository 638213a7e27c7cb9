"""Another Python runs this file as a script to answer calls. It imports the proof of the process that calls it.

The proof is always the caller's: truth, baseline and candidate must be trained by the same steps, and be observed by
the same hooks. What the proof judges comes from the paths of the other side.

The script imports everything, runs nothing, and forks for each call. If an import has started the GPU's driver, which
does not survive a fork, each call gets an interpreter of its own. Nothing that a call can write is read for another:
the judge is read once, or comes with each call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
from multiprocessing.connection import wait
from typing import Any


def listen(file: str) -> None:
    """Import everything, and answer calls. ``file`` is a pickle of the judge, as :func:`_import` takes it, and of the
    number of the socket over which calls are asked for."""
    with open(file, "rb") as opened:
        judge, number = pickle.load(opened)
    os.unlink(file)
    isolate = _import(judge)
    if not isolate.survives_a_fork(_ends_well):
        _become("alone", str(number), keeps=number)
    _answer_all(socket.socket(fileno=number), forks=True)


def alone(number: str) -> None:
    """As :func:`listen`, with an interpreter for each call, and without an import here."""
    _answer_all(socket.socket(fileno=int(number)), forks=False)


def answer(file: str, channel: str) -> None:
    """Answer one call, in an interpreter of its own."""
    with open(file, "rb") as opened:
        judge, _ = pickle.load(opened)
    _import(judge)
    _answer(file, int(channel))


def _import(judge: tuple[str, list[str], bool]) -> Any:
    """Import what every call needs.

    Args:
        judge: the proof's folder, the paths to import from, and whether they come after this Python's own.

    Returns:
        The module ``convergence.arms.isolate``.
    """
    proof, paths, behind = judge
    own = sys.path[1:] if behind else []  # the first entry is this script's folder
    sys.path[:] = [*own, *(path for path in paths if path not in own)]
    _load_proof(proof)
    isolate: Any = importlib.import_module("convergence.arms.isolate")
    for name in isolate.preloaded():
        importlib.import_module(name)
    return isolate


def _load_proof(folder: str) -> None:
    """Let ``convergence`` be the package in ``folder``, whatever lies on the path."""
    name = "convergence"
    spec: Any = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _ends_well(function: Any) -> bool:
    """Whether a forked process can run ``function``."""
    pid = os.fork()
    if not pid:
        try:
            function()
        finally:
            os._exit(int(sys.exc_info()[0] is not None))
    return os.waitpid(pid, 0)[1] == 0


def _become(*arguments: str, keeps: int) -> None:
    """Run this script anew in this process, with ``arguments`` and the file of that number."""
    os.set_inheritable(keeps, True)
    os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), *arguments])


def _answer_all(requests: socket.socket, forks: bool) -> None:
    """Start a process for each call. Say its number when it has started, and its exit code when it has ended."""
    ended, wakes = socket.socketpair()
    for end in (ended, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends it
    signal.set_wakeup_fd(wakes.fileno())
    running: dict[int, int] = {}  # what hears of each process
    while True:
        ready = wait([requests, ended])
        if ended in ready:
            ended.recv(4096)
            for pid, hears in [*running.items()]:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    _tell(hears, os.waitstatus_to_exitcode(status))
                    os.close(running.pop(pid))
        if requests in ready:
            name, files, _, _ = socket.recv_fds(requests, 4096, 2)
            if not name:  # the caller has ended
                return
            channel, hears = files
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for end in (requests, ended, wakes):
                    end.close()
                for one in (hears, *running.values()):
                    os.close(one)
                if not forks:
                    _become("answer", name.decode(), str(channel), keeps=channel)
                _answer(name.decode(), channel)
            running[pid] = hears
            _tell(hears, pid)
            os.close(channel)


def _tell(hears: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller waits no more
        os.write(hears, f"{number}\n".encode())


def _answer(file: str, channel: int) -> None:
    """Answer the call in ``file``, and end this process."""
    with open(file, "rb") as opened:
        _, (call, *rest) = pickle.load(opened)
    sys.modules["convergence.arms.isolate"].serve(call, socket.socket(fileno=channel), *rest)


if __name__ == "__main__":
    modes: dict[str, Any] = {"listen": listen, "alone": alone, "answer": answer}
    modes[sys.argv[1]](*sys.argv[2:])
