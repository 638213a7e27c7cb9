"""A module of the project in a process of its own: what one arm patches, imports or leaves behind reaches no other."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Finished:
    """How a process ended.

    Attributes:
        started: seconds since the epoch, as ``time.time`` counts them.
        output: what it wrote to stdout.
        problem: why it did not end well, with the end of what it wrote to stderr; empty where it did.
    """

    started: float
    output: str
    problem: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """--path and --json, of a benchmark whose arms are processes; :func:`check_options` looks at them."""
    parser.add_argument(
        "--path", action="append", default=[], metavar="ARM=DIR", help="a folder that hides what is installed from ARM"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured to FILE, too")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, arms: Iterable[str]) -> None:
    """``options.path`` becomes the folders of each of ``arms``. What is not there ends the program."""
    pairs, arms = [path.partition("=") for path in options.path], [*arms]
    if wrong := [arm for arm, _, folder in pairs if arm not in arms or not Path(folder).is_dir()]:
        parser.error(f"--path: {wrong} must be ARM=DIR, of an arm and a folder that is there")
    options.path = {name: [folder for arm, _, folder in pairs if arm == name] for name in arms}
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")


def run_module(
    module: str,
    arguments: Sequence[str] = (),
    *,
    paths: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    shows: bool = False,
) -> Finished:
    """``python -m module arguments`` in an empty folder, where some packages write files.

    Args:
        module: of the project, or of ``paths``.
        arguments: its command line.
        paths: folders that come first on its path, so that packages in them hide those that are installed.
        environment: variables in addition to this process's.
        timeout: seconds after which it is killed. What it started ends with it, always.
        shows: whether each line that it writes to stderr is written to this process's, too, when it comes.
    """
    path = [*map(os.path.abspath, paths), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", module, *arguments]
    over = ""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(2) as pool,  # a process whose pipes nobody reads stands still
    ):
        started = time.time()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that its workers can be killed with it
        )
        try:
            reading = pool.submit(_read, process.stdout), pool.submit(_read, process.stderr, shows)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            over = f"timed out after {timeout:g} s"
        finally:  # also what it started and left, which may hold its pipes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output, said = (text.result() for text in reading)
    how = over or (f"exit code {process.returncode}" if process.returncode else "")
    return Finished(started, output, f"{how}\n{said[-2000:]}" if how else "")


def _read(pipe: IO[str] | None, shows: bool = False) -> str:
    assert pipe is not None
    read = []
    with pipe:
        for line in pipe:
            read.append(line)
            if shows:
                with contextlib.suppress(OSError, ValueError):  # whoever looked may have gone
                    sys.stderr.write(line)
    return "".join(read)
