"""Calls a function in a process of its own: whatever it changes there, or breaks, is gone with that process.

Every call forks a server that has imported everything and run nothing (the forkserver of multiprocessing). The process
is as clean as a new interpreter, for a few hundredths of a second instead of several seconds. It may use CUDA, because
the server does not. Call and result travel as files, so that a process may die at any moment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from convergence import ours

# A case of the largest mini model takes half a minute in the interpreter; a machine may be slow and shared.
TIMEOUT = 1800.0
_OURS = ("convergence.case", "convergence.arms.interpreter", *ours.MODULES)


class ProcessDied(RuntimeError):
    """The process ended without a result; ``output`` is the end of what it wrote."""

    def __init__(self, how: str, output: str = "") -> None:
        super().__init__(how)
        self.output = output


class RemoteTraceback(Exception):
    """The traceback in the other process, as the cause of an exception that came from there."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def call(function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> Any:
    """``function(*args)`` in a process of its own, with this process's device, threads and precision.

    Args:
        function: a function of a module, found by its name on the other side, where the module is imported anew.
        args: what it is called with; like the result, anything that can be pickled. Tensors are copied.
        timeout: seconds after which the process is killed.

    Raises:
        ProcessDied: it crashed, ended itself or took longer than ``timeout``.
        Exception: whatever ``function`` raised there, caused by a :class:`RemoteTraceback`.
    """
    with tempfile.TemporaryDirectory(prefix="convergence-") as name:
        folder = Path(name)
        torch.save((settings(), function, args), folder / "call")
        process = _context().Process(target=_serve, args=(name, timeout))  # type: ignore[attr-defined]
        with _no_main():
            process.start()
        try:
            process.join(timeout)
            how = f"it ran for more than {timeout:g} s" if process.exitcode is None else _how(process.exitcode)
        finally:
            process.kill()
            process.join()
        if not (folder / "result").exists():
            raise ProcessDied(f"the process of its own died: {how}", _tail(folder / "output"))
        error, trace, result = torch.load(folder / "result", map_location="cpu", weights_only=False)
    if trace:
        raise error from RemoteTraceback(trace)
    return result


@functools.cache
def _context() -> BaseContext:
    """How processes are started; the server's imports are chosen before the first one is."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from convergence.models.models import select

    context = multiprocessing.get_context("forkserver")
    # Modules of other models may import packages that wake the driver at once, as Qwen3-Next's does with fla.
    core = (model for model in select("core") if model.is_available())
    modeling = {model.model_class().__module__ for model in core}
    context.set_forkserver_preload([*_OURS, *sorted(modeling)])
    # Whoever asks at import whether there is a GPU must not wake the driver: it does not survive a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return context


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Inside, a new process does not run this one's main module again, as multiprocessing would for the sake of what is
    defined there: it is pytest, or a script that calls it."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


_starting = threading.Lock()  # ranks are started by a thread each


def settings() -> dict[str, Any]:
    """What decides bits besides the environment, in this process."""
    return {
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }


def _serve(name: str, timeout: float) -> None:
    """The other process: run the call in folder ``name``, leave its result there, and end without any ado."""
    folder = Path(name)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable(file=2)
    if hasattr(signal, "alarm"):  # should this process's parent be killed, nobody else would end it
        signal.alarm(int(timeout) + 60)
    answer: tuple[Exception | None, str, Any]
    try:
        answer = None, "", _run(folder)
    except Exception as error:
        answer = _picklable(error), traceback.format_exc(), None
    torch.save(answer, folder / "unfinished")
    os.replace(folder / "unfinished", folder / "result")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(folder: Path) -> Any:
    settings, function, args = torch.load(folder / "call", weights_only=False)
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.utils.deterministic.fill_uninitialized_memory = settings["fill"]  # type: ignore[attr-defined]
    if settings["device"] is not None:
        torch.cuda.set_device(settings["device"])
    # It imports Triton, which the process that starts this one may not need.
    from convergence.arms.interpreter import prepare

    prepare()
    return function(*args)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _tail(path: Path, characters: int = 4000) -> str:
    """The end of what a process said. Long lines are cut: faulthandler's last one names every extension."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(line[:300] for line in lines)[-characters:]
