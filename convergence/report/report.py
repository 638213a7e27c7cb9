"""How a verdict reads: a line per case, a table of failures, a table of all cases; as Markdown and as JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree

from convergence import tables
from convergence.arms.quantities import Failure
from convergence.report.records import BIT_FOR_BIT, STATISTICS, Record

ARMS = ("truth", "baseline", "candidate")
_MOST_ROWS = 20
# Control characters that XML 1.0 cannot hold at all, not even escaped.
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def passed(record: Record) -> bool | None:
    """Whether the case passed; None where there is no such model to train."""
    return None if record.verdict == "absent" else record.verdict == "equal"


def failures_by_tensor(record: Record) -> list[Failure]:
    """The failures, with all steps of one tensor and statistic in one row: the first, and how many more there are."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failed in record.failures:
        groups.setdefault(failed.key, []).append(failed)
    return [
        first._replace(step=first.step + (f" and {len(more)} more" if more else "")) for first, *more in groups.values()
    ]


def failure(record: Record) -> str:
    """What failed in one case: tensor, step, statistic, value and bound."""
    what = "the candidate is not the baseline's mathematics"
    if all(failed.statistic == BIT_FOR_BIT for failed in record.failures):
        what = "not bit for bit what the earlier run observed"
    if record.verdict == "cannot run":
        what = "the patch cannot run here"
    lines = [f"{record.name} on {record.device} ({record.profile} inputs): {what}"]
    rows = failures_by_tensor(record)
    if record.blame:
        columns = ("kernel", "module", "pass", "step", "tensor")
        blame: list[dict[str, str]] = [dict(row) for row in record.blame]  # type: ignore[arg-type]
        lines += [
            "",
            "who did it:",
            *tables.aligned(columns, [[row[name] or "-" for name in columns] for row in blame]),
        ]
        lines += dict.fromkeys(row["note"] for row in blame)
    lines += ["", *tables.aligned(("tensor", "step", "statistic", "value", "bound"), rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        lines.append(f"... and {len(rows) - _MOST_ROWS} more tensors; the record has all of them")
    if record.census:
        lines += ["", "patched: " + ", ".join(f"{count} x {name}" for name, count in record.census.items())]
    return tables.visible("\n".join([*lines, *record.notes]))


def progress(summary: dict[str, Any]) -> str:
    """One case in one line."""
    line = f"{summary['case']}: {summary['verdict']}"
    if summary["verdict"] != "equal":
        return tables.visible(f"{line}: {summary['reason']}")
    judged = f"({summary['error ratio']} error ratio, {summary['gain']} gain, {summary['seconds']} s)"
    return tables.visible(f"{line} {judged}")


def summary_table(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """All cases; every statistic as its worst value over its bound."""
    short = ("error ratio", "largest", "row", "gain", "gain against others")
    keys = ("case", "verdict", *STATISTICS, "kernels", "launches")
    rows = [(*(str(s[key]) for key in keys), f"{s['seconds']:.1f}") for s in summaries]
    return tables.aligned(("case", "verdict", *short, "kernels", "launches", "seconds"), rows)


def setups(records: Sequence[Record]) -> list[str]:
    """Lines of a Markdown table: every set-up with the order of patch and wrapping, whether the loss ran fused there,
    and the verdict; with what it was run on."""
    header = ("set-up", "patch", "model", "dtype", "fused", "verdict", "error ratio", "gain")
    rows = []
    for r in records:
        order = f"{r.order} wrapping" if r.setup != "plain" else "-"
        verdict = r.verdict if r.verdict in ("equal", "absent") else f"{r.verdict}: {r.reason}"
        statistics = [r.worst(name) or "-" for name in ("error ratio", "gain")]
        row = (r.setup, order, r.model, r.dtype, r.fused or "-", verdict, *statistics)
        rows.append([tables.literal(cell) for cell in row])
    return tables.markdown(header, rows)


def markdown(records: Sequence[Record]) -> str:
    """A summary for a CI's page: a table of all cases, and the failure table of each that failed."""
    failed = [record for record in records if passed(record) is False]
    title = f"{len(failed)} of {len(records)} cases failed" if failed else f"{len(records)} cases, none failed"
    lines = [f"## Convergence: {title}", ""]
    header = ("case", "device", "transformers", "verdict", *STATISTICS, "launches", "seconds")
    rows = [
        (
            tables.literal(record.name),
            tables.literal(record.versions.get("device", record.device)),
            tables.literal(record.versions.get("transformers", "-")),
            record.verdict if passed(record) is not False else f"**{record.verdict}**",
            *(record.worst(name) or "-" for name in STATISTICS),
            sum(record.launches.values()),
            f"{record.seconds:.1f}",
        )
        for record in sorted(records, key=lambda record: passed(record) is not False)
    ]
    lines += tables.markdown(header, rows)
    for record in failed:
        text = failure(record)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        lines += [
            "",
            f"<details><summary>{escape(tables.visible(record.name), quote=False)}</summary>",
            "",
            fence,
            text,
            fence,
            "",
            "</details>",
        ]
    return "\n".join(lines) + "\n"


def junit(records: Sequence[Record]) -> str:
    """JUnit XML: a test case per record; the text of a failure is its failure table."""
    outcomes = [passed(record) for record in records]
    totals = {
        "tests": str(len(records)),
        "failures": str(outcomes.count(False)),
        "skipped": str(outcomes.count(None)),
        "errors": "0",
        "time": f"{sum(record.seconds for record in records):.2f}",
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "convergence", **totals})
    for record, outcome in zip(records, outcomes, strict=True):
        environment = f"{record.device}.transformers-{record.versions.get('transformers', 'unknown')}"
        case = ElementTree.SubElement(
            suite,
            "testcase",
            {
                "classname": _xml(f"convergence.{environment}"),
                "name": _xml(record.name),
                "time": f"{record.seconds:.2f}",
            },
        )
        if outcome is None:
            ElementTree.SubElement(case, "skipped", {"message": _xml(record.reason)})
        elif not outcome:
            ElementTree.SubElement(case, "failure", {"message": _xml(record.reason)}).text = _xml(failure(record))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
