"""``python -m tests.mutants RECORDS``: write docs/evidence/mutants*.md from the records of ``test_mutants.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from convergence.arms.quantities import ADAMW, INITIAL, SGD, Moment
from convergence.report.records import Record, load_folder
from convergence.tables import markdown
from tests.mutants import ABSENT, GROUPS, MUTANTS
from tests.mutants.mutant import Mutant

FOLDER = Path(__file__).parents[2] / "docs" / "evidence"
DTYPES = ("float32", "bfloat16")
# What kills a mutant. That a patch did nothing says nothing about the power of the numbers.
BY_NUMBERS, NOT_PATCHED, BY_ANOTHER = "Killed by numbers", "Killed as not patched", "Killed by another finding"
BY_CHECK = "Killed by a check of their own"
_INTRO = """\
# Mutants

A proof that passes is worth what it would have caught. Each fault is injected into the candidate
alone and must make the proof fail, in every dtype in which it is a fault. Identifiers such as N1
are rows of a list of faults that happened in kernel packages and trainers. A fault without one was
added here.

| command | what it does |
|---|---|
| `pytest convergence --patch tests.mutants:NAME --models MODEL` | runs one mutant as any other patch |
| `pytest tests/test_mutants.py` | runs a sample |
| `tox run -e mutants` | runs all of them |
| `pytest tests/test_mutants.py --mutants all --records DIR`, then `python -m tests.mutants DIR` | writes these pages |

A fault is a change of a few characters of source. A mutant whose place is gone fails as stale.

Not measured: a mutant in other models than the one in its row. [Power](power.md) has those that
were trained on a GPU.

"""
_TRAINED = """
A cell names the statistic farthest beyond its bound, with value / bound, tensor and step, then the
phase in which the first statistic leaves the noise; or the finding in words. "-": no fault in this
dtype. "?": not measured.
"""
_CHECKED = "No training shows these. In a copy of the sources that has the fault, the test named here fails."


def where(mutant: Mutant) -> str:
    """The mini model, and the set-up where there is one."""
    if mutant.profile == "scale":
        return f"{mutant.model}, at real size" + ("" if mutant.on_cpu is None else f" or {mutant.on_cpu}")
    return mutant.model if mutant.setup == "plain" else f"{mutant.model}, {mutant.setup}"


def cell(mutant: Mutant, dtype: str, records: dict[tuple[str, str], Record]) -> str:
    if dtype not in mutant.dtypes:
        return "-"
    record = records.get((mutant.name, dtype))
    if record is None:
        return "?"
    if record.verdict == "equal":
        return "**survives**"
    named = [failure for failure in record.failures if failure[2] == mutant.dies]
    beyond = [s for s in record.statistics if not s.passed]
    if named or not beyond:
        quantity, step, statistic, *_ = (named or record.failures)[0]
        return f"{statistic}: {quantity}" + (f", {step}" if step else "")
    worst = max(beyond, key=lambda s: s.share)
    first = min((Moment.parse(s.step).phase for s in beyond), key=(INITIAL, SGD, ADAMW).index)
    return f"{worst.statistic} {worst} ({worst.quantity}, {worst.step}); from {first}"


def environments(records: Sequence[Record]) -> list[str]:
    """What the records were measured on, a line each."""
    return sorted(
        {
            f"Measured on: {record.versions.get('device', record.device)}, torch {record.versions.get('torch')}, "
            f"triton {record.versions.get('triton')}, transformers {record.versions.get('transformers')}, "
            f"{record.at[:10]}."
            for record in records
        }
    )


def page(title: str, mutants: Sequence[Mutant], records: dict[tuple[str, str], Record], measured: list[str]) -> str:
    """The page of one group of mutants."""
    trained = [m for m in mutants if m.check is None]
    checked = [m for m in mutants if m.check is not None]
    lines = [f"# Mutants: {title}", "", "Written by a command; [the overview](mutants.md) says which."]
    for kind, killed in by_kind(trained).items():
        rows = [
            (f"`{m.name}`", m.source, m.does, where(m), *(cell(m, dtype, records) for dtype in DTYPES)) for m in killed
        ]
        lines += ["", f"## {kind}", "", *markdown(("mutant", "row", "what it does", "model", *DTYPES), rows)]
    if trained:
        lines += [_TRAINED, *measured]
    if checked:
        lines += ["", f"## {BY_CHECK}", "", _CHECKED, ""]
        rows = [(f"`{m.name}`", m.source, m.does, f"`{m.check}`") for m in checked]
        lines += markdown(("mutant", "row", "what it does", "test"), rows)
    return "\n".join(lines) + "\n"


def by_kind(trained: Sequence[Mutant]) -> dict[str, list[Mutant]]:
    """Mutants that training kills, by what does: a number, or another finding. Kinds without a mutant are left out."""
    kinds: dict[str, list[Mutant]] = {BY_NUMBERS: [], NOT_PATCHED: [], BY_ANOTHER: []}
    for mutant in trained:
        kind = (
            BY_NUMBERS if mutant.dies == "statistics" else NOT_PATCHED if mutant.dies == "not patched" else BY_ANOTHER
        )
        kinds[kind].append(mutant)
    return {kind: killed for kind, killed in kinds.items() if killed}


def overview() -> str:
    """The page that leads to the others: how many mutants of which kind, and what cannot be one."""
    rows: list[tuple[object, ...]] = []
    for name, (title, group) in {**GROUPS, "": ("all", tuple(MUTANTS.values()))}.items():
        trained = by_kind([m for m in group if m.check is None])
        counts = [len(trained.get(kind, ())) for kind in (BY_NUMBERS, NOT_PATCHED, BY_ANOTHER)]
        shown = f"[{title}](mutants-{name}.md)" if name else title
        rows.append((shown, *counts, len(group) - sum(counts)))
    absent = [(row, what, why) for why, group in ABSENT.items() for row, what in group.items()]
    kinds = (BY_NUMBERS, NOT_PATCHED, BY_ANOTHER, BY_CHECK)
    lines = markdown(("faults of", *(kind[0].lower() + kind[1:] for kind in kinds)), rows)
    lines += ["", "## Not possible here", "", *markdown(("row", "what", "why not"), sorted(absent))]
    return _INTRO + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("records", type=Path, help="the folder that --records named")
    records = load_folder(parser.parse_args().records)
    found = {(record.patch.rpartition(":")[2], record.dtype): record for record in records}
    pages = {f"mutants-{name}.md": page(*group, found, environments(records)) for name, group in GROUPS.items()}
    for name, text in {"mutants.md": overview(), **pages}.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
