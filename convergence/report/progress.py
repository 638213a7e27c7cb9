"""A bar that says which arm of a long case trains, and how long the rest will take. Short cases have none. Where the
output is no terminal, an arm that begins gets a line instead."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_begin: ContextVar[Callable[[str], None] | None] = ContextVar("_begin", default=None)


def begin(arm: str) -> None:
    """Say that ``arm`` begins to train, and so that the one before it is done."""
    if (shown := _begin.get()) is not None:
        shown(arm)


@contextlib.contextmanager
def bar(arms: int) -> Iterator[None]:
    """Inside, a bar on the terminal, or lines; without rich, nothing. One tick is one arm of ``arms``."""
    if importlib.util.find_spec("rich") is None:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("loading", total=arms)
        begun = 0

        def show(arm: str) -> None:
            nonlocal begun
            progress.update(task, description=arm, completed=begun)
            begun += 1
            if not progress.console.is_terminal:
                progress.console.print(f"{progress.tasks[task].elapsed:.0f} s: {arm}, {begun} of {arms}")

        token = _begin.set(show)
        try:
            yield
        finally:
            _begin.reset(token)
