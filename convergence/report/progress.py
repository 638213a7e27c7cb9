"""A bar that says which arm of a long case trains and what it is at, and how long the rest will take: from the first
step of the first arm on. Short cases have none. Where the output is no terminal, an arm that begins gets a line
instead. A candidate that trains in a process of its own is one tick."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

ONE_DAY = 24 * 3600.0


class _Shown(NamedTuple):
    begin: Callable[[str], None]
    reach: Callable[[str, int, int], None]


_shown: ContextVar[_Shown | None] = ContextVar("_shown", default=None)


def begin(arm: str) -> None:
    """Say that ``arm`` begins to train, and so that the one before it is done."""
    if (shown := _shown.get()) is not None:
        shown.begin(arm)


def reach(what: str, done: int, of: int) -> None:
    """Say that the arm that trains has ended ``done`` of ``of`` parts, the last of which was ``what``."""
    if (shown := _shown.get()) is not None:
        shown.reach(what, done, of)


@contextlib.contextmanager
def bar(arms: int) -> Iterator[None]:
    """Inside, a bar on the terminal, or lines; without rich, nothing. One tick is one arm of ``arms``."""
    if importlib.util.find_spec("rich") is None:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # A step may take minutes, and rich forgets what is older than this.
    with Progress(*columns, transient=True, speed_estimate_period=ONE_DAY) as progress:
        task = progress.add_task("loading", total=arms)
        begun, training = 0, ""

        def show(arm: str) -> None:
            nonlocal begun, training
            training = arm
            progress.update(task, description=arm, completed=begun)
            begun += 1
            if not progress.console.is_terminal:
                progress.console.print(f"{progress.tasks[task].elapsed:.0f} s: {arm}, {begun} of {arms}")

        def move(what: str, done: int, of: int) -> None:
            progress.update(task, description=f"{training}: {what}", completed=begun - 1 + done / of)

        token = _shown.set(_Shown(show, move))
        try:
            yield
        finally:
            _shown.reset(token)
