"""Patches that try to buy their verdict."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from convergence import border
from convergence.arms.trajectory import Run
from convergence.case import Case, train_case
from tests.convergence_faults import honest


class Code:
    """What it is unpickled to is up to its writer: here, code that runs in the reader."""

    def __reduce__(self) -> Any:
        return exec, ("import torch; torch.bought = True",)


def code() -> Any:
    return Code()


def _honest_result() -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return train_case(Case("llama-untied", "float32", "tests.convergence_faults:honest", "plain", device))


def _leave_as_file(result: Any) -> None:
    """Where this process's output goes is a folder that the judge reads."""
    torch.save((None, "", result), Path(os.readlink("/proc/self/fd/1")).parent / "result")
    os._exit(0)


def writes_code(model: Any) -> None:
    _leave_as_file(Code())


def writes_its_result(model: Any) -> None:
    _leave_as_file(_honest_result())


def sends_its_result(model: Any) -> None:
    """The message that the judge waits for, but for the number of its call, to whatever listens."""
    message = border.dumps(("0" * 32, 0, "returned", _honest_result(), ""))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as channel:
            channel.sendall(len(message).to_bytes(8, "big") + message)
    os._exit(0)


def replica(model: Any) -> None:
    """Trains nothing of its own, but an unpatched model that began one unit in the last place away."""
    frame: Any = sys._getframe()
    while not isinstance(frame.f_locals.get("run"), Run):
        frame = frame.f_back
    frame.f_locals["run"].nudge = 0


def writes_to_files(model: Any) -> None:
    """An honest patch that damages all files below the first folder of ``sys.path`` whose name begins so."""
    folder = next(path for path in sys.path if Path(path).name.startswith("written-by-a-patch"))
    for file in (file for file in Path(folder).iterdir() if file.stat().st_size):
        with file.open("r+b") as opened:
            opened.seek(-8, os.SEEK_END)
            opened.write(b" " * 8)
    honest(model)
