"""Starts another Python, which answers one call of :func:`convergence.arms.isolate.call`."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from convergence.arms.isolate import Given

_PROOF = Path(__file__).parents[1]
_SERVE = Path(__file__).with_name("serve.py")


class Program:
    """A running program, with the attributes of ``multiprocessing.Process`` that ``isolate`` uses."""

    def __init__(self, command: Sequence[str], output: str, environment: dict[str, str], keeps: int) -> None:
        with open(output, "ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, pass_fds=[keeps]
            )
        self.pid = self._process.pid
        self.sentinel, self._ended = os.pipe()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Make the sentinel readable when the program ends: its own processes may hold every other file."""
        self._process.wait()
        os.close(self._ended)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def close(self) -> None:
        os.close(self.sentinel)


def start(python: str, paths: Sequence[str], behind: bool, given: Given) -> Program:
    """Let ``python`` answer a call.

    Args:
        paths: what it imports from, in addition to its standard library.
        behind: whether these paths come after its own. Otherwise they are all that it has.
        given: the arguments of ``isolate.serve``.

    Raises:
        OSError: ``python`` cannot be started.
    """
    call, channel, call_id, output, timeout, listens = given
    file = Path(output).with_name("given")
    rest = call_id, output, timeout, listens
    file.write_bytes(pickle.dumps((str(_PROOF), [*paths], behind, channel.fileno(), call, rest), protocol=4))
    hidden = ("PYTHONPATH", "PYTHONHOME") if behind else ()  # they would come before what it has installed
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return Program([python, str(_SERVE), str(file)], output, environment, channel.fileno())


def own_paths() -> list[str]:
    """The absolute paths that this process imports from and that do not belong to its Python's installation."""
    installed = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return [path for path in all_paths() if not any(Path(path).is_relative_to(folder) for folder in installed)]


def all_paths() -> list[str]:
    """The absolute paths that this process imports from."""
    return list(dict.fromkeys(os.path.abspath(path) for path in sys.path))
