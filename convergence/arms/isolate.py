"""Calls a function in a separate process. Whatever the function changes or breaks there ends with that process.

Every call forks a server that has imported everything and run nothing (the forkserver of multiprocessing). The new
process is as clean as a new interpreter, but it starts in hundredths of a second. The new process may use CUDA, because
the server does not use CUDA. If an import has started CUDA there, each call starts a new interpreter. A caller may
start another Python instead (``convergence.elsewhere``).

The function and its arguments travel through a pipe. Results come back as plain data (``convergence.border``) over a
socket that has no name and that no other process holds. Each message has a number that belongs to this call. A message
that was sent cannot be taken back or changed. So a patch that the process imports later cannot alter an earlier result.
The progress of an arm comes the same way; it is only shown.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from inspect import isgeneratorfunction
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from convergence import border, ours
from convergence.report import progress

# A case of the largest mini model takes half a minute in the interpreter; a machine may be slow and shared.
TIMEOUT = 1800.0
_LENGTH = 8  # bytes in front of a message
_RETURNED, _RAISED, _YIELDED, _SAID = "returned", "raised", "yielded", "said"
# A module that asks for a GPU at import must not start the driver, because the driver does not survive a fork.
DRIVER_LEFT_ALONE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
Given = tuple[bytes, socket.socket, str, str, float, bool]  # the arguments of serve()


class ProcessDied(RuntimeError):
    """The process ended without a result; ``output`` is the end of the text that it printed."""

    def __init__(self, how: str, output: str = "") -> None:
        super().__init__(how)
        self.output = output


class RemoteTraceback(Exception):
    """The traceback in the other process, as the cause of an exception that came from there."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def call(
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    start: Callable[[Given], Any] | None = None,
) -> Any:
    """Call ``function(*args)`` in a separate process, with this process's device, threads and precision.

    Args:
        function: a function of a module. The other process imports the module again and finds the function by name. For
            a generator function, the result is the list of its items. Each item arrives here before the generator goes
            on.
        args: the arguments of the function: anything that can be pickled. Tensors are copied.
        timeout: seconds after which the process is killed.
        start: starts a process that runs ``serve(*given)``, and returns it. By default it is forked from the server.

    Raises:
        ProcessDied: the process crashed, ended itself, took longer than ``timeout``, or sent no result of this call.
        Exception: the exception that ``function`` raised, caused by a :class:`RemoteTraceback`. An exception whose type
            is neither built-in nor ours becomes a RuntimeError that names that type.
    """
    buffer = io.BytesIO()
    torch.save((settings(), function, args), buffer)
    call_id, (here, there) = secrets.token_hex(16), socket.socketpair()
    with tempfile.TemporaryDirectory(prefix="convergence-") as name, here:
        output = Path(name) / "output"
        given = (buffer.getbuffer().tobytes(), there, call_id, str(output), timeout, progress.is_shown())
        deadline = time.monotonic() + timeout
        with there:
            process = (start or _forked)(given)
        del buffer, given
        found: list[Any] = []
        value: Any = None
        kind = trace = problem = ""
        try:
            while kind in ("", _YIELDED, _SAID):
                kind, value, trace = _message(here, process, call_id, len(found), deadline)
                found += [value] if kind == _YIELDED else []
                if kind == _SAID and not progress.pass_on(value):
                    raise border.NotPlain("it says what no arm says")
        except EOFError:
            process.join(max(0.0, deadline - time.monotonic()))
            over = process.exitcode is None or time.monotonic() >= deadline
            ended = f"it ran for more than {timeout:g} s" if over else how(process.exitcode)
            problem = f"the process of its own died: {ended}"
        except border.NotPlain as error:
            problem = f"what its own process sent is no result: {error}"
        finally:
            _end(process)
        if problem:
            raise ProcessDied(problem, _tail(output))
    if kind == _RAISED:
        raise value from RemoteTraceback(trace)
    return found if isgeneratorfunction(function) else value


def _message(channel: socket.socket, process: Any, call_id: str, number: int, deadline: float) -> tuple[str, Any, str]:
    """Receive one message: its kind, its value, and the traceback of an exception.

    Raises:
        EOFError: the process ended, or the time was over, before a whole message arrived.
        NotPlain: the message is no plain data, or it does not have this number of this call.
    """
    length = int.from_bytes(_received(channel, process, _LENGTH, deadline), "big")
    message = border.loads(_received(channel, process, length, deadline))
    match message:
        case (str(of), int(at), str(kind), value, str(trace)) if (of, at) == (call_id, number):
            if kind in (_RETURNED, _YIELDED, _SAID) or (kind == _RAISED and isinstance(value, Exception)):
                return kind, value, trace
    raise border.NotPlain("it belongs to no message that this call waits for")


def _received(channel: socket.socket, process: Any, count: int, deadline: float) -> bytearray:
    """The next ``count`` bytes. A process that has ended sends nothing more, although its child process may still hold
    the other end of the socket."""
    found = bytearray()
    while len(found) < count:
        ready = wait([channel, process.sentinel], max(0.0, deadline - time.monotonic()))
        part = channel.recv(min(count - len(found), 2**20)) if channel in ready else b""
        if not part:
            raise EOFError
        found += part
    return found


def _end(process: Any) -> None:
    """Kill the process and the processes that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


def preloaded() -> list[str]:
    """The modules that a process has imported before it imports a patch."""
    from convergence.models.models import MODELS

    # Modules of linear attention import fla where it is installed, which starts the GPU's driver at once.
    others = (model for model in MODELS.values() if "gated_rms_norm" not in model.kernels)
    modeling = {model.model_class().__module__ for model in others if model.is_available()}
    return ["convergence.case", "convergence.arms.interpreter", *ours.MODULES, *sorted(modeling)]


def _forked(given: Given) -> Any:
    process = _context().Process(target=serve, args=given)  # type: ignore[attr-defined]
    with _no_main():
        process.start()
    return process


@functools.cache
def _context() -> BaseContext:
    """The context that starts processes. The server's imports must be chosen before the first process starts."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    for name, value in DRIVER_LEFT_ALONE.items():
        os.environ.setdefault(name, value)

    def ends_well(function: Callable[[], None]) -> bool:
        process = context.Process(target=function)
        with _no_main():
            process.start()
        process.join(60)
        if process.exitcode is None:
            process.kill()
        return bool(process.exitcode == 0)

    return context if survives_a_fork(ends_well) else multiprocessing.get_context("spawn")


def survives_a_fork(ends_well: Callable[[Callable[[], None]], bool]) -> bool:
    """Whether a forked process can use a GPU, if there is one. Some packages, such as torchao 0.17, start the driver
    when they are imported.

    Args:
        ends_well: runs a function in a forked process, and returns whether that process ended with exit code 0.
    """
    return not torch.cuda.is_available() or ends_well(_start_the_driver)


def _start_the_driver() -> None:
    try:
        torch.cuda.init()
    except RuntimeError:
        sys.exit(1)


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Inside, a new process does not run this process's main module again. Multiprocessing would run it for its
    definitions, but it is pytest or a script that calls pytest."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


_starting = threading.Lock()  # a separate thread starts each rank


def settings() -> dict[str, Any]:
    """The settings of this process that affect the bits of results, apart from environment variables."""
    return {
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }


def serve(call: bytes, channel: socket.socket, call_id: str, output: str, timeout: float, listens: bool) -> None:
    """The other process: run the call, send the result, and exit at once."""
    if hasattr(os, "setsid"):  # the processes that it starts join its group and end with it
        os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable(file=2)
    if hasattr(signal, "alarm"):  # if the parent is killed, only this alarm ends the process
        signal.alarm(int(timeout) + 60)
    sent = 0

    def send(kind: str, value: Any, trace: str = "") -> None:
        nonlocal sent
        message = border.dumps((call_id, sent, kind, value, trace))
        channel.sendall(len(message).to_bytes(_LENGTH, "big"))
        channel.sendall(message)
        sent += kind != _SAID

    heard = progress.told_to(lambda message: send(_SAID, message)) if listens else contextlib.nullcontext()
    try:
        with heard:
            _run(call, send)
    except Exception as error:
        send(_RAISED, error, traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(call: bytes, send: Callable[[str, Any], None]) -> None:
    settings, function, args = torch.load(io.BytesIO(call), weights_only=False)
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.utils.deterministic.fill_uninitialized_memory = settings["fill"]  # type: ignore[attr-defined]
    if settings["device"] is not None:
        torch.cuda.set_device(settings["device"])
    # This module imports Triton, but the parent process may not need Triton.
    from convergence.arms.interpreter import prepare

    prepare()
    if isgeneratorfunction(function):
        for value in function(*args):
            send(_YIELDED, value)
        send(_RETURNED, None)
    else:
        send(_RETURNED, function(*args))


def how(code: int) -> str:
    """A process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _tail(path: Path, characters: int = 4000) -> str:
    """The end of a process's output. Long lines are cut, because faulthandler's last line names every extension."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(line[:300] for line in lines)[-characters:]
