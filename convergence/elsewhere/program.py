"""Starts another Python, which answers calls of :func:`convergence.arms.isolate.call`."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from convergence.arms.isolate import DRIVER_LEFT_ALONE, Given

_PROOF = Path(__file__).parents[1]
_SERVE = Path(__file__).with_name("serve.py")
_Key = tuple[str, tuple[str, ...], bool, str]


class Server:
    """Another Python, which imports once and forks itself for each call."""

    def __init__(self, key: _Key, output: str) -> None:
        """
        Raises:
            OSError: it cannot be started.
        """
        python, paths, behind, folder = key
        hidden = ("PYTHONPATH", "PYTHONHOME") if behind else ()  # they would come before what it has installed
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._folder = tempfile.TemporaryDirectory(prefix="convergence-")
        self.requests, there = socket.socketpair()
        file = Path(self._folder.name) / "server"
        file.write_bytes(pickle.dumps((str(_PROOF), [*paths], behind, there.fileno()), protocol=4))
        with there, open(output, "ab") as said:  # what keeps it from starting is said to the first call
            self.process = subprocess.Popen(
                [python, str(_SERVE), str(file)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=folder,
                env=DRIVER_LEFT_ALONE | environment,
                pass_fds=[there.fileno()],
            )

    def close(self) -> None:
        """It ends where nobody can ask it any more."""
        self.requests.close()
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()


class Answering:
    """The process that answers one call, with the attributes of ``multiprocessing.Process`` that ``isolate`` uses.

    The server says the number of the process when it has started, and its exit code when it has ended.
    """

    def __init__(self, server: Server, given: Given) -> None:
        call, channel, call_id, output, timeout, listens = given
        file = Path(output).with_name("given")
        file.write_bytes(pickle.dumps((call, call_id, output, timeout, listens), protocol=4))
        self._server = server
        self.sentinel, told = os.pipe()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: nobody will say anything
                socket.send_fds(server.requests, [str(file).encode()], [channel.fileno(), told])
        finally:
            os.close(told)
        if not wait([self.sentinel], timeout):
            server.process.kill()
        said = self._line()
        self.pid = int(said) if said else server.process.pid
        self._code: int | None = None if said else server.process.wait()

    def _line(self) -> str:
        found = b""
        while not found.endswith(b"\n") and (byte := os.read(self.sentinel, 1)):
            found += byte
        return found.decode()

    @property
    def exitcode(self) -> int | None:
        self.join(0.0)
        return self._code

    def join(self, timeout: float | None = None) -> None:
        if self._code is None and wait([self.sentinel], timeout):
            said = self._line()  # nothing, if the server has ended
            self._code = int(said) if said else self._server.process.wait()

    def kill(self) -> None:
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.sentinel)


_running: dict[_Key, Server] = {}  # one at most: an idle one holds everything that it has imported
_one_at_a_time = threading.Lock()


def start(python: str, paths: Sequence[str], behind: bool, given: Given) -> Answering:
    """Let ``python`` answer a call.

    Args:
        paths: what it imports from, in addition to its standard library.
        behind: whether these paths come after its own. Otherwise they are all that it has.
        given: the arguments of ``isolate.serve``.

    Raises:
        OSError: ``python`` cannot be started.
    """
    key = python, tuple(paths), behind, os.getcwd()
    with _one_at_a_time:
        if key not in _running or _running[key].process.poll() is not None:
            stop()
            _running[key] = Server(key, given[3])
        return Answering(_running[key], given)


@atexit.register
def stop() -> None:
    """End the Python that waits for calls, if there is one."""
    while _running:
        _running.popitem()[1].close()


def own_paths() -> list[str]:
    """The absolute paths that this process imports from and that do not belong to its Python's installation."""
    installed = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return [path for path in all_paths() if not any(Path(path).is_relative_to(folder) for folder in installed)]


def all_paths() -> list[str]:
    """The absolute paths that this process imports from."""
    return list(dict.fromkeys(os.path.abspath(path) for path in sys.path))
