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
_MOST = 2  # a comparison of two others goes from one to the other; an idle one holds all that it has imported
_PATIENCE = 10.0  # seconds for a killed process to end
_Judge = tuple[str, list[str], bool]  # the proof's folder, the paths to import from, whether they come last


class Server:
    """Another Python, which imports once and forks itself for each call."""

    def __init__(self, python: str, judge: _Judge, output: str) -> None:
        """
        Raises:
            OSError: it cannot be started.
        """
        hidden = ("PYTHONPATH", "PYTHONHOME") if judge[2] else ()  # they would come before what it has installed
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.calls = 0  # that are not closed
        self.requests, there = socket.socketpair()
        with tempfile.NamedTemporaryFile(prefix="convergence-", delete=False) as file:
            pickle.dump((judge, there.fileno()), file, protocol=4)
        self._file = Path(file.name)
        try:
            with there, open(output, "ab") as said:  # what keeps it from starting is said to the first call
                self.process = subprocess.Popen(
                    [python, str(_SERVE), "listen", file.name],  # it reads the file before anything, and removes it
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=DRIVER_LEFT_ALONE | environment,
                    pass_fds=[there.fileno()],
                )
        except BaseException:
            self.requests.close()
            self._file.unlink()
            raise

    def close(self) -> None:
        """It ends where nobody can ask it any more."""
        self.requests.close()
        self.process.kill()
        self.process.wait()
        self._file.unlink(missing_ok=True)


class Answering:
    """The process that answers one call, with the attributes of ``multiprocessing.Process`` that ``isolate`` uses.

    The server says the number of the process when it has started, and its exit code when it has ended.
    """

    def __init__(self, server: Server, judge: _Judge, given: Given) -> None:
        call, channel, call_id, output, timeout, listens = given
        file = Path(output).with_name("given")
        file.write_bytes(pickle.dumps((judge, (call, call_id, output, timeout, listens)), protocol=4))
        self._server = server
        self._code: int | None = None
        server.calls += 1
        self.sentinel, told = os.pipe()
        try:
            try:
                with contextlib.suppress(BrokenPipeError):  # it has ended: nobody will say anything
                    socket.send_fds(server.requests, [str(file).encode()], [channel.fileno(), told])
            finally:
                os.close(told)
            late = not wait([self.sentinel], timeout)
            if late:
                server.process.kill()
            said = self._line()
        except BaseException:
            server.process.kill()  # it may start what nobody waits for
            self.close()
            raise
        self.pid = int(said) if said else server.process.pid
        if not said:
            self._code = server.process.wait()
        elif late:
            self.kill()

    def _line(self) -> str:
        found = b""
        while not found.endswith(b"\n") and (byte := os.read(self.sentinel, 1)):
            found += byte
        return found.decode()

    @property
    def exitcode(self) -> int | None:
        """None while the process runs."""
        self.join(0.0)
        return self._code

    def join(self, timeout: float | None = None) -> None:
        if self._code is not None:
            return
        if not wait([self.sentinel], _PATIENCE if timeout is None else timeout):
            if timeout is not None:
                return
            self._server.process.kill()  # it was stopped: it tells of no end
        said = self._line()  # nothing, if the server has ended
        self._code = int(said) if said else self._server.process.wait()

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._server.calls -= 1
        os.close(self.sentinel)


_servers: dict[tuple[str, tuple[str, ...], bool, str], Server] = {}  # the one that was asked last is the last
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
    key, judge = (python, tuple(paths), behind, os.getcwd()), (str(_PROOF), [*paths], behind)
    with _one_at_a_time:
        server = _servers.pop(key, None)
        if server is not None and server.process.poll() is not None:
            server.close()
            server = None
        idle = [other for other, one in _servers.items() if not one.calls]
        for other in idle[: max(0, len(_servers) + 1 - _MOST)]:
            _servers.pop(other).close()
        _servers[key] = server = server or Server(python, judge, given[3])
        return Answering(server, judge, given)


@atexit.register
def stop() -> None:
    """End every Python that waits for calls."""
    while _servers:
        _servers.popitem()[1].close()


def own_paths() -> list[str]:
    """The absolute paths that this process imports from and that do not belong to its Python's installation."""
    installed = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return [path for path in all_paths() if not any(Path(path).is_relative_to(folder) for folder in installed)]


def all_paths() -> list[str]:
    """The absolute paths that this process imports from."""
    return list(dict.fromkeys(os.path.abspath(path) for path in sys.path))
