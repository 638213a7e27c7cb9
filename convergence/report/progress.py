"""A bar that says which arm of a long case trains and what it is at, and how long the rest will take: from the first
step of the first arm on. Short cases have none. Where the output is no terminal, an arm that begins gets a line
instead. What trains in a process of its own says so here (``convergence.arms.isolate``)."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from convergence.tables import visible

ONE_DAY = 24 * 3600.0
LONGEST = 100  # characters of what is shown

# ("expect", arms), ("begin", arm), or ("reach", what, done, of)
Listener = Callable[[tuple[Any, ...]], None]
_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


def is_shown() -> bool:
    """Whether anybody looks."""
    return _listener.get() is not None


def expect(arms: int) -> None:
    """Say how many arms will train."""
    _say("expect", arms)


def begin(arm: str) -> None:
    """Say that ``arm`` begins to train, and so that the one before it is done."""
    _say("begin", arm)


def reach(what: str, done: int, of: int) -> None:
    """Say that the arm that trains has ended ``done`` of ``of`` parts, the last of which was ``what``."""
    _say("reach", what, done, of)


def _say(*message: Any) -> None:
    if (listener := _listener.get()) is not None:
        listener(message)


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Inside, ``listener`` gets what is said."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def pass_on(message: Any) -> bool:
    """Say here what was said in another process, which may be a stranger's; False where it is none of the messages."""
    match message:
        case ("expect", int(arms)) if arms > 0:
            expect(arms)
        case ("begin", str(arm)):
            begin(_line(arm))
        case ("reach", str(what), int(done), int(of)) if 0 <= done <= of != 0:
            reach(_line(what), done, of)
        case _:
            return False
    return True


def _line(text: str) -> str:
    return " ".join(visible(text).split())[:LONGEST]


@contextlib.contextmanager
def bar(arms: int) -> Iterator[None]:
    """Inside, a bar on the terminal, or lines; without rich, nothing. One tick is one arm of ``arms``."""
    if importlib.util.find_spec("rich") is None:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # A step may take minutes, and rich forgets what is older than this.
    with Progress(*columns, transient=True, speed_estimate_period=ONE_DAY) as progress:
        task = progress.add_task("loading", total=arms)
        begun, training = 0, ""

        def show(message: tuple[Any, ...]) -> None:
            nonlocal begun, training
            match message:
                case ("expect", total):
                    progress.update(task, total=total)
                case ("begin", arm):
                    training = arm
                    progress.update(task, description=arm, completed=begun)
                    begun += 1
                    if not progress.console.is_terminal:
                        seconds, total = progress.tasks[task].elapsed, progress.tasks[task].total
                        progress.console.print(f"{seconds:.0f} s: {arm}, {begun} of {total}", markup=False)
                case ("reach", what, done, of):
                    progress.update(task, description=f"{training}: {what}", completed=begun - 1 + done / of)

        with told_to(show):
            yield
