"""``python -m tests.mutants RECORDS``: write docs/mutants.md from the records of ``pytest tests/test_mutants.py``."""

from __future__ import annotations

import argparse
from pathlib import Path

from convergence.observed import ADAMW, INITIAL, SGD, Moment
from convergence.records import Record, load_folder
from convergence.tables import markdown
from tests.mutants import ABSENT, MUTANTS
from tests.mutants.mutant import Mutant

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
DTYPES = ("float32", "bfloat16")
_INTRO = """\
# Mutants

A proof that passes is worth what it would have caught. Each fault below is injected into the candidate alone and must
make the proof fail, in every dtype in which it is a fault. The identifiers are rows of a list of faults that really
happened to kernel packages and trainers; a fault without one was thought up here.

- `pytest convergence --patch tests.mutants:NAME --models MODEL` runs one of them as any other patch is run.
- `pytest tests/test_mutants.py` runs a sample, `tox run -e mutants` all of them.
- `pytest tests/test_mutants.py --mutants all --records DIR`, then `python -m tests.mutants DIR`, writes this page.

A fault is a change of a few characters of source that must still be there: a mutant whose place is gone fails as stale.

## Killed by training
"""
_CELLS = """
A cell says what kills the mutant: the statistic farthest beyond its bound, with value / bound, where it is highest, and
the phase in which the first statistic leaves the noise; or the finding in words. "-" is a dtype in which it is no
fault, or in which it has a check of its own below; "?" was not measured.
"""


def where(mutant: Mutant) -> str:
    """The mini model, and the set-up where there is one."""
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


def page(records: list[Record]) -> str:
    found = {(record.patch.rpartition(":")[2], record.dtype): record for record in records}
    trained = [m for m in MUTANTS.values() if m.check is None]
    checked = [m for m in MUTANTS.values() if m.check is not None]
    environments = sorted(
        {
            f"{record.versions.get('device', record.device)}, torch {record.versions.get('torch')}, triton "
            f"{record.versions.get('triton')}, transformers {record.versions.get('transformers')}, {record.at[:10]}"
            for record in records
        }
    )
    rows = [
        (f"`{m.name}`", m.source or "", m.does, where(m), *(cell(m, dtype, found) for dtype in DTYPES)) for m in trained
    ]
    lines = [_INTRO, *markdown(("mutant", "row", "what it does", "model", *DTYPES), rows), _CELLS]
    lines += [f"Measured on: {environment}." for environment in environments]
    lines += ["", "## Killed by a check of their own", ""]
    lines += ["No training shows these. In a copy of the sources with the fault in it, the test named here fails.", ""]
    rows = [(f"`{m.name}`", m.source or "", m.does, f"`{m.check}`") for m in checked]
    lines += markdown(("mutant", "row", "what it does", "test"), rows)
    lines += ["", "## Not possible here", ""]
    rows = [(row, what, why) for why, group in ABSENT.items() for row, what in group.items()]
    lines += markdown(("row", "what", "why not"), sorted(rows))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("records", type=Path, help="the folder that --records named")
    PAGE.write_text(page(load_folder(parser.parse_args().records)), encoding="utf-8")


if __name__ == "__main__":
    main()
