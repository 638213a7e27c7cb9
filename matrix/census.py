"""``python -m matrix census``: what of every model of transformers runs on kernels, as a record and a page.

:mod:`matrix.checks.count` counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from convergence.checked import checked
from convergence.files import Unusable, read_json, write
from convergence.tables import aligned, markdown
from matrix.checks.count import KINDS, built, measure, shares

RECORD = Path(__file__).parent / "census.json"
PAGE = Path(__file__).parent.parent / "docs" / "evidence" / "census.md"
LETTERS = ("a-l", "m-z")  # a page takes ten minutes to read at most


class _Entry(TypedDict):
    """A class of a model that was built; of each kind what is replaced, what is left, and what else there is."""

    name: str
    family: str
    full: bool
    found: dict[str, tuple[int, int, int]]
    kernels: dict[str, tuple[int, float, float]]
    reasons: dict[str, int]
    seconds: float


class _Absent(TypedDict):
    """A class of which no model is built."""

    name: str
    absent: str


class _Version(TypedDict):
    """What of one version of transformers runs on kernels; its classes only of the newest."""

    at: str
    torch: str
    transformers: str
    shares: dict[str, float]
    classes: dict[str, list[dict[str, Any]]]


def load(path: Path = RECORD) -> dict[str, Any]:
    """What was counted before, by version of transformers; nothing where there is no file.

    Raises:
        Unusable: it is no such record; the message names the file, and what of it is wrong.
    """
    if not path.exists():
        return {}
    record: dict[str, Any] = read_json(path)
    for version, taken in checked(record, dict[str, _Version], f"{path}: census").items():
        for group, entries in taken["classes"].items():
            for i, entry in enumerate(entries):
                where = f"{path}: census[{version!r}]['classes'][{group!r}][{i}]"
                checked(entry, _Absent if "absent" in entry else _Entry, where)
                if "absent" not in entry and (missing := [kind for kind in KINDS if kind not in entry["found"]]):
                    raise Unusable(f"{where}['found'] has no {', '.join(missing)}; allowed are {', '.join(KINDS)}")
        columns = ("classes", *KINDS.values(), "parameters", "FLOPs", "experts replaced", "classes with experts")
        if missing := [name for name in columns if name not in taken["shares"]]:
            raise Unusable(f"{path}: census[{version!r}]['shares'] has no {', '.join(missing)}")
    return record


def page(record: dict[str, Any]) -> str:
    """The text of docs/evidence/census.md: a row for each version, and the newest in detail."""
    newest = record[max(record, key=_version)]
    columns = ["classes", *KINDS.values(), "parameters", "FLOPs"]
    rows = [
        (version, *_row(taken["shares"], columns), taken["torch"], taken["at"])
        for version, taken in sorted(record.items(), key=lambda item: _version(item[0]), reverse=True)
    ]
    every = list(built(newest))
    by_kernel: dict[str, list[list[float]]] = defaultdict(list)
    reasons: dict[str, list[int]] = defaultdict(list)
    for entry in every:
        for kernel, share in entry["kernels"].items():
            by_kernel[kernel].append(share)
        for reason, times in entry["reasons"].items():
            reasons[re.sub(r"\b\d+", "N", reason)].append(times)
    kernels = [
        (f"`{kernel}`", len(found), sum(int(share[0]) for share in found), *(_mean(found, i) for i in (1, 2)))
        for kernel, found in sorted(by_kernel.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    left = [
        (*reason.split(": ", 1), sum(times), len(times))
        for reason, times in sorted(reasons.items(), key=lambda item: (-sum(item[1]), item[0]))
    ]
    absent = [(e["name"], e["absent"]) for entries in newest["classes"].values() for e in entries if "absent" in e]
    toys = [entry["name"] for entry in every if not entry["full"]]
    slowest = [f"{e['name']} {e['seconds']} s" for e in sorted(every, key=lambda entry: -entry["seconds"])[:3]]
    with_experts = newest["shares"]["classes with experts"]
    lines = [
        *_INTRO.splitlines(),
        "",
        *markdown(("transformers", *columns, "torch", "date"), rows),
        "",
        f"Experts are replaced in {newest['shares']['experts replaced']:.0f} of the {with_experts:.0f} classes of "
        f"transformers {newest['transformers']} that have packed ones.",
        *_section("By kernel", ("kernel", "classes", "modules", "parameters", "FLOPs"), kernels),
        "",
        "Shares are means over the classes in which the kernel runs.",
        *_section("What is left, and why", ("what", "reason, as the report gives it", "times", "classes"), left),
        "",
        f"Family by family: {', '.join(f'[{name}](census-{name}.md)' for name in LETTERS)}.",
        *_section("Not built", ("class", "why"), absent),
        "",
        f"Slowest to patch: {', '.join(slowest)}.",
        *_section("Built smaller, because the default configuration builds no model", ("class",), [(t,) for t in toys]),
    ]
    return "\n".join(lines) + "\n"


def families(record: dict[str, Any], letters: str) -> str:
    """The text of the page of the families of the newest version whose names begin with one of ``letters``."""
    version = max(record, key=_version)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in built(record[version]):
        if re.match(f"[{letters}]", entry["family"]):
            found[entry["family"]].append(entry)
    rows = [
        (
            family,
            len(entries),
            *(_fraction(entries, kind) for kind in KINDS),
            *(_on_kernels(entries, i) for i in (1, 2)),
        )
        for family, entries in sorted(found.items())
    ]
    header = ("family", "classes", *KINDS.values(), "parameters", "FLOPs")
    title = f"# Census: families {letters}"
    intro = f"Of transformers {version}. Written by a command; [the census](census.md) says which."
    return "\n".join([title, "", intro, "", *markdown(header, rows)]) + "\n"


def pages(record: dict[str, Any]) -> dict[Path, str]:
    """Every page, by its file."""
    of_families = {PAGE.with_name(f"census-{letters}.md"): families(record, letters) for letters in LETTERS}
    return {PAGE: page(record), **of_families}


_INTRO = """\
# Census

Written by `python -m matrix census --write`, which runs in any environment and adds a row for its
transformers. [What is counted](../reference/matrix.md#census).

Not measured: speed, memory and numbers. The models are on the meta device, where no kernel runs."""


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return ["", f"## {title}", "", *markdown(header, rows)]


def _version(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:3]]


def _row(found: dict[str, float], columns: Sequence[str]) -> list[str]:
    return [f"{found[name]:.0f}" if name == "classes" else f"{found[name]:.1%}" for name in columns]


def _mean(found: list[list[float]], i: int) -> str:
    return f"{sum(share[i] for share in found) / len(found):.1%}"


def _fraction(entries: list[dict[str, Any]], kind: str) -> str:
    replaced, *rest = (sum(entry["found"][kind][i] for entry in entries) for i in range(3))
    return f"{replaced}/{replaced + sum(rest)}" if replaced + sum(rest) else "-"


def _on_kernels(entries: list[dict[str, Any]], i: int) -> str:
    return f"{sum(share[i] for entry in entries for share in entry['kernels'].values()) / len(entries):.0%}"


def add(census: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """``record`` with ``census``. Only the newest version keeps its classes."""
    taken = {**record, census["transformers"]: {**census, "shares": shares(census)}}
    newest = max(taken, key=_version)
    return {v: entry if v == newest else {**entry, "classes": {}} for v, entry in taken.items()}


def dump(record: dict[str, Any]) -> str:
    """JSON with one class a line."""
    text = json.dumps(record, indent=1, sort_keys=True)
    return re.sub(r"\n( {5,}| {4}(?=}))", " ", text) + "\n"


def main(arguments: argparse.Namespace) -> int:
    before = load() if arguments.write else {}  # what cannot be read is said before minutes of work
    census = measure()
    rows = [(group, *_row(shares(census, group), ["classes", *KINDS.values()])) for group in census["classes"]]
    print("\n".join(aligned(("classes", "built", *KINDS.values()), rows)))
    for what, share in shares(census).items():
        print(f"{what}: {share:.4g}")
    if arguments.write:
        record = add(census, before)
        write(dump(record), RECORD)
        for file, text in pages(record).items():
            write(text, file)
    return 0
