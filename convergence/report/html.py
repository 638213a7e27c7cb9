"""The report as one HTML page that needs nothing else: no script, no network, no font.

This module turns records into what ``report.html.jinja`` prints: numbers already in words, charts already in
coordinates. jinja2 is imported when a page is made, since the proof itself runs without it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence.arms.quantities import DIFFERENCES, Moment
from convergence.report.records import STATISTICS, Record, Statistic
from convergence.report.report import ARMS, FIGURES, failures_by_tensor, figures, passed
from convergence.tables import visible

TEMPLATE = "report.html.jinja"
# A chart's view box, which a phone shows about as wide as this many pixels, so that its text stays readable; and where
# in it the lines are drawn.
WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 332, 8, 168
# Where the bound lies in a bar; what is beyond fills the rest and is cut off there.
BOUND_AT = 70


@dataclass
class Chart:
    """One picture: ``lines`` are (arm, polyline points), ``levels`` (y, label), ``phases`` (x, label), ``steps``
    (x, width, what a pointer is shown)."""

    title: str
    about: str
    lines: list[tuple[str, str]]
    dots: list[tuple[float, float]]
    levels: list[tuple[float, str]]
    phases: list[tuple[float, str]]
    steps: list[tuple[float, float, str]]


def available() -> bool:
    """Whether a page can be made: jinja2 is installed."""
    return importlib.util.find_spec("jinja2") is not None


def page(records: Sequence[Record], history: Sequence[Record] = ()) -> str:
    """The HTML of ``records``, the failed ones first, each with how it came to that in ``history``.

    Raises:
        ValueError: jinja2 is not installed, or there is no record.
    """
    if not available():
        raise ValueError("an HTML report needs jinja2, which is not installed here: pip install jinja2")
    if not records:
        raise ValueError("there is no record to report; a case writes one when it has been judged")
    ordered = sorted(records, key=lambda record: (passed(record) is not False, passed(record) is None))
    environments = Counter((("runs on", record.device), *record.versions.items()) for record in records)
    return _template().render(
        cases=[
            _case(record, len(environments) > 1, [other for other in history if other.case == record.case])
            for record in ordered
        ],
        counts=Counter(record.verdict for record in ordered),
        failed=sum(passed(record) is False for record in records),
        environments=[(dict(environment), count) for environment, count in environments.items()],
        first=min(record.at for record in records)[:19],
        last=max(record.at for record in records)[:19],
        figures=FIGURES,
        bound_at=BOUND_AT,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        bottom=BOTTOM,
        top=TOP,
    )


@functools.cache
def _template() -> Any:
    import jinja2
    from markupsafe import Markup, escape

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    # Long names break between their parts.
    environment.filters["breakable"] = lambda text: Markup(
        re.sub(r"([._:/])", r"\1<wbr>", str(escape(visible(str(text)))))
    )
    environment.filters["zipped"] = lambda heads, cells: list(zip(heads, cells, strict=True))
    return environment.get_template(TEMPLATE)


def _case(record: Record, several: bool, history: Sequence[Record]) -> dict[str, Any]:
    return {
        "record": record,
        "state": {True: "pass", False: "fail", None: "none"}[passed(record)],
        "patch": record.patch.rpartition(":")[2],
        "where": f"transformers {record.versions.get('transformers', '?')}, {record.device}" if several else "",
        "worst": [(name, _bar(worst)) for name in (*STATISTICS[:3], *DIFFERENCES[:3]) if (worst := record.worst(name))],
        "differences": figures(record.differences),
        "failures": failures_by_tensor(record),
        "charts": _charts(record),
        "trends": _trends(history),
        "losses": [
            (step, [_short(record.losses.get(arm, {}).get(step)) for arm in ARMS])
            for step in dict.fromkeys(step for losses in record.losses.values() for step in losses)
        ],
        "statistics": [
            (name, [_bar(s) for s in sorted(chosen, key=lambda s: s.share, reverse=True)])
            for name in (*STATISTICS, *DIFFERENCES)
            if (chosen := [s for s in record.statistics if s.statistic == name])
        ],
        "observed": sum(len(group["quantities"]) for group in record.digests.get("candidate", [])),
    }


def _bar(statistic: Statistic) -> dict[str, Any]:
    return {
        "quantity": statistic.quantity,
        "step": statistic.step,
        "value": _short(statistic.value),
        "bound": _short(statistic.bound),
        "failed": not statistic.passed,
        "width": round(min(statistic.share * BOUND_AT, 100.0), 1),
    }


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _charts(record: Record) -> list[Chart]:
    """The losses of the arms, and how far from the truth's they are."""
    steps, long = list(record.losses.get("truth", {})), list(record.losses.get("lowest", {}))
    if not steps:
        return []

    def curves(arms: Iterable[str], steps: list[str]) -> dict[str, list[float]]:
        return {arm: [record.losses.get(arm, {}).get(step, math.nan) for step in steps] for arm in arms}

    losses = curves(ARMS, steps)
    distances = {
        arm: [abs(a - t) / abs(t) if t else math.nan for a, t in zip(losses[arm], losses["truth"], strict=True)]
        for arm in ARMS[1:]
    }
    about = "How far the losses of baseline and candidate are from the truth's, relative to it, on a logarithmic scale"
    charts = [
        _chart("Loss", "The loss of every step, of the three arms", losses, steps),
        _chart("Distance from the truth's loss", about, distances, steps, logarithmic=True),
    ]
    if long:
        about = "The mean loss of every block of a long run, with the lowest and the highest of all unpatched runs"
        charts.append(_chart("Long run", about, curves(("lowest", "highest", *ARMS[1:]), long), long))
    return charts


def _trends(history: Sequence[Record]) -> list[Chart]:
    """What one case came to in each of its records, grouped by version and in order of time within one."""
    if len(history) < 2:
        return []
    versions = [_versions(record, history) for record in history]
    pairs = sorted(zip(versions, history, strict=True), key=lambda pair: (versions.index(pair[0]), pair[1].at))
    labels = [f"{version}: {record.at[:16].replace('T', ' ')} {record.verdict}" for version, record in pairs]
    records, charts = [record for _, record in pairs], []
    for kind in ("error ratio", "gain"):
        worst = [record.worst(kind) for record in records]
        judged = {"bound": [s.bound if s else math.nan for s in worst]}
        judged["candidate"] = [s.value if s else math.nan for s in worst]
        charts.append(_chart(f"Worst {kind}", f"The {kind} nearest to its bound, of every record", judged, labels))
    for cost, about in (
        ("step, ms", "The milliseconds of a step on average"),
        ("peak, GiB", "The peak of the GPU's memory"),
    ):
        measured = {arm: [record.costs.get(arm, {}).get(cost, math.nan) for record in records] for arm in ARMS[1:]}
        if any(math.isfinite(value) for values in measured.values() for value in values):
            about += ", of baseline and candidate, of every record"
            charts.append(_chart(cost[0].upper() + cost[1:], about, measured, labels))
    return charts


def _versions(record: Record, history: Sequence[Record]) -> str:
    """The versions of ``record`` that are not the same in all of ``history``; else that of transformers."""
    packages = ("transformers", "torch", "triton", "liger-kernels")
    differ = [name for name in packages if len({other.versions.get(name) for other in history}) > 1]
    return ", ".join(f"{name} {record.versions.get(name, '?')}" for name in differ or packages[:1])


def _chart(
    title: str, about: str, series: dict[str, list[float]], steps: Sequence[str], logarithmic: bool = False
) -> Chart:
    series = {arm: [_drawable(value) for value in values] for arm, values in series.items()}
    finite = [value for values in series.values() for value in values if math.isfinite(value)]
    if logarithmic:
        positive = [value for value in finite if value > 0]
        # What is exactly equal has no place on this scale: it lies on the floor, a decade below the smallest distance.
        floor = math.floor(math.log10(min(positive, default=1e-8))) - 1
        ceiling = max(math.ceil(math.log10(max(positive, default=1e-7))), floor + 2)
        stride = math.ceil((ceiling - floor) / 5)
        levels = {float(level): f"1e{level}" for level in range(floor, ceiling + 1, stride)}
        levels[float(floor)] = "equal"
    else:
        levels = {level: f"{level:g}" for level in _levels(finite)}
    low, high = min(levels), max(*levels, ceiling if logarithmic else -math.inf)

    def x(i: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * (i + 0.5) / len(steps), 1)

    def y(value: float) -> float:
        if logarithmic:
            value = max(math.log10(value), low) if value > 0 else low
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    def level_at(level: float) -> float:
        return y(10**level if logarithmic and level > low else 0.0 if logarithmic else level)

    phases = [Moment.parse(step).phase for step in steps]
    lines = []
    for arm, values in series.items():  # a line ends with its phase, and where there is no number
        runs = itertools.groupby(enumerate(values), key=lambda point: (phases[point[0]], math.isfinite(point[1])))
        lines += [(arm, " ".join(f"{x(i)},{y(value)}" for i, value in run)) for (_, drawn), run in runs if drawn]
    width = (RIGHT - LEFT) / len(steps)
    told = [", ".join(f"{arm} {_short(values[i])}" for arm, values in series.items()) for i in range(len(steps))]
    return Chart(
        title,
        about,
        lines,
        dots=[(x(i), y(value)) for i, value in enumerate([*series.values()][-1]) if math.isfinite(value)],
        levels=[(level_at(level), label) for level, label in levels.items()],
        phases=[(round(LEFT + width * phases.index(phase), 1), phase) for phase in dict.fromkeys(phases)],
        steps=[(round(LEFT + width * i, 1), round(width, 1), f"{step}: {told[i]}") for i, step in enumerate(steps)],
    )


def _drawable(value: float) -> float:
    """``value`` where a scale can hold it: smaller ones are zero, larger ones no number."""
    return math.nan if not abs(value) <= 1e100 else value if abs(value) >= 1e-100 else 0.0


def _levels(values: Iterable[float]) -> list[float]:
    """Three to six round numbers that enclose ``values``."""
    values = list(values) or [0.0, 1.0]
    low, high = min(values), max(values)
    # Levels are far enough apart to be different numbers.
    span = max(high - low, 1e-9 * max(abs(low), abs(high))) if high > low else abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / 4))
    stride = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 4)
    first, last = math.floor(low / stride), math.ceil(high / stride)
    return [float(f"{i * stride:.12g}") for i in range(first, max(last, first + 1) + 1)]
