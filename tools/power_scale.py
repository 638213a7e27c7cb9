"""The part of docs/evidence/power.md about honest candidates at real sizes; :mod:`tools.power_picture` writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from convergence.judge import tolerance
from convergence.tables import markdown
from tools.power_runs import Simulation

HEADING, NEXT = "## At real sizes\n", "## Where the bounds come from\n"
_SECTION = """\
{heading}
[`--profile scale`](../how-to/prove-a-checkpoint.md#without-a-checkpoint-real-widths) observes one
step of models of real widths.
Honest candidates there (`tools/honest.py`) differ in seed, in the last bits of the weights, in the
schedule of the fused head, in chunks, slabs and tiles, and in the order of rows. One step is all
there is, so gains and lone numbers are judged by {sigmas:g} standard deviations of the replicas.

{table}

{alarms}

{places}

```console
$ pytest tests/test_honest.py --profile scale --honest-seeds {seeds} --honest-results scale.jsonl \\
    --models {models}
$ python -m tools.power_picture --scale scale.jsonl
```

"""


def table(runs: Sequence[Simulation]) -> list[str]:
    """Of every shape and dtype: how many candidates ran, how many of them fail, and the nearest to a bound."""
    rows: list[tuple[object, ...]] = []
    for model, dtype in sorted({(run.model, run.dtype) for run in runs}):
        own = [run for run in runs if (run.model, run.dtype) == (model, dtype)]
        seeds = ", ".join(map(str, sorted({run.seed for run in own})))
        nearest = max(own, key=lambda run: run.largest)
        rows.append((model, dtype, seeds, len(own), sum(run.failed for run in own), *_nearest(nearest)))
    nearest = max(runs, key=lambda run: run.largest)
    rows.append(("all", "", "", len(runs), sum(run.failed for run in runs), *_nearest(nearest)))
    header = ("shape", "dtype", "seeds", "candidates", "alarms", "largest share of a bound", "of the statistic")
    return markdown(header, rows)


def _nearest(run: Simulation) -> tuple[str, str]:
    return f"{run.largest:.3g}", run.statistic or "-"


def alarms(what: str, runs: Sequence[Simulation]) -> list[str]:
    """Every false alarm in full."""
    failed = [run for run in runs if run.failed]
    lines = [f"- {what}: {len(failed)} of {len(runs)}."]
    for run in failed:
        what = "; ".join(" ".join(map(str, failure)) for failure in run.failures) or f"{run.statistic} beyond its bound"
        lines.append(f"  - `{run.model}/{run.dtype}/{run.seed}/{run.name}`: {what}")
    return lines


def places(what: str, runs: Sequence[Simulation]) -> list[str]:
    """How many runs were measured where."""
    counts = Counter(run.environment for run in runs)
    return [f"- {what}: {place} ({count})." for place, count in sorted(counts.items())]


def section(runs: Sequence[Simulation]) -> str:
    return _SECTION.format(
        heading=HEADING,
        sigmas=tolerance.SIGMAS_OF_ONE_STEP,
        table="\n".join(table(runs)),
        alarms="\n".join(alarms("Alarms", runs)),
        places="\n".join(places("Measured on", runs)),
        seeds=",".join(map(str, sorted({run.seed for run in runs}))),
        models=",".join(sorted({run.model for run in runs})),
    )


def section_of(page: str) -> str:
    """That of ``page``; empty where it has none."""
    start = page.find(HEADING)
    return "" if start < 0 else page[start : page.index(NEXT)]


def put(page: str, new: str) -> str:
    """``page`` with ``new`` as its section.

    Raises:
        ValueError: ``page`` has no place for it.
    """
    if NEXT not in page:
        raise ValueError(f"the page has no line {NEXT.strip()!r}, before which the section about real sizes goes")
    before, _, after = page.partition(section_of(page) + NEXT)
    return before + new + NEXT + after
