"""How a verdict reads: a line per case, a table of failures, a table of all cases; as Markdown and as JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree

from convergence import tables
from convergence.arms.quantities import CONSISTENCY, DIFFERENCES, Failure, Finding
from convergence.report.records import CANNOT_RUN, STATISTICS, Record

# The heads of a table of figures, and of the statistics in a table of cases.
FIGURES = ("compared", "arm", *DIFFERENCES)
_SHORT = ("error ratio", "largest", "row", "gain", "gain against others")
ARMS = ("truth", "baseline", "candidate")
_MOST_ROWS = 20
# Control characters that XML 1.0 cannot hold at all, not even escaped.
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def passed(record: Record) -> bool | None:
    """Whether the case passed; None where there is no such model to train."""
    return None if record.verdict == "absent" else record.verdict == "equal"


def failures_by_tensor(record: Record) -> list[Failure]:
    """The failures, with all steps of one tensor and finding in one row: the first, and how many more there are."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failed in record.failures:
        groups.setdefault(failed.key, []).append(failed)
    return [
        first._replace(step=first.step + (f" and {len(more)} more" if more else "")) for first, *more in groups.values()
    ]


def failure(record: Record) -> str:
    """What failed in one case: tensor, step, statistic, value and bound."""
    what = "the candidate is not the baseline's mathematics"
    if all(failed.finding is Finding.BIT_FOR_BIT for failed in record.failures):
        what = "not bit for bit what the earlier run observed"
    if record.verdict == CANNOT_RUN:
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
    if record.differences:
        lines += ["", *tables.aligned(FIGURES, figures(record.differences))]
    if record.census:
        lines += ["", "patched: " + ", ".join(f"{count} x {name}" for name, count in record.census.items())]
    return tables.visible("\n".join([*lines, *record.notes]))


def progress(summary: dict[str, Any]) -> str:
    """One case in one line."""
    line = f"{summary['case']}: {summary['verdict']}"
    if summary["verdict"] != "equal":
        return tables.visible(f"{line}: {summary['reason']}")
    shown = ("mean difference", "KL per token") if summary["differences"] else ("error ratio", "gain")
    judged = ", ".join(f"{summary[name]} {name}" for name in shown)
    return tables.visible(f"{line} ({judged}, {summary['seconds']} s)")


def summary_tables(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """All cases; every statistic as its worst value over its bound. Of cases that compare log-probabilities, their
    figures follow."""
    compared = [s for s in summaries if s["differences"]]
    trained = [s for s in summaries if not s["differences"]]
    blocks = [_summary_table(trained, STATISTICS, _SHORT)] if trained else []
    blocks += [_summary_table(compared, DIFFERENCES, DIFFERENCES)] if compared else []
    blocks += [[s["case"], *tables.aligned(FIGURES, figures(s["differences"]))] for s in compared]
    return "\n\n".join("\n".join(block) for block in blocks).splitlines()


def _summary_table(summaries: Sequence[dict[str, Any]], statistics: Sequence[str], heads: Sequence[str]) -> list[str]:
    keys = ("case", "verdict", *statistics, "kernels", "launches")
    rows = [(*(str(s[key]) for key in keys), f"{s['seconds']:.1f}") for s in summaries]
    return tables.aligned(("case", "verdict", *heads, "kernels", "launches", "seconds"), rows)


def figures(differences: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    """A row for every comparison of log-probabilities and every arm: its figures."""
    return [
        [compared, arm, *(f"{found[name]:.2g}" for name in DIFFERENCES)]
        for compared, arms in differences.items()
        for arm, found in arms.items()
    ]


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
    ordered = sorted(records, key=lambda record: passed(record) is not False)
    compared = [record for record in ordered if record.profile == CONSISTENCY]
    trained = [record for record in ordered if record.profile != CONSISTENCY]
    for chosen, statistics in ((trained, STATISTICS), (compared, DIFFERENCES)):
        if chosen:
            lines += [*_cases(chosen, statistics), ""]
    lines.pop()
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


def _cases(records: Sequence[Record], statistics: Sequence[str]) -> list[str]:
    """A Markdown table of ``records``."""
    header = ("case", "device", "transformers", "verdict", *statistics, "launches", "seconds")
    rows = [
        (
            tables.literal(record.name),
            tables.literal(record.versions.get("device", record.device)),
            tables.literal(record.versions.get("transformers", "-")),
            record.verdict if passed(record) is not False else f"**{record.verdict}**",
            *(record.worst(name) or "-" for name in statistics),
            sum(record.launches.values()),
            f"{record.seconds:.1f}",
        )
        for record in records
    ]
    return tables.markdown(header, rows)


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
