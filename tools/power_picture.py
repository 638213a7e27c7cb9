"""Writes power.md and power.svg in docs/evidence: how far honest runs and mutants are from the bounds, per statistic.

``python -m tools.power_picture HONEST.jsonl RECORDS`` (needs matplotlib). HONEST.jsonl is what ``pytest
tests/test_honest.py --honest-results`` wrote, RECORDS the folder that ``pytest tests/test_mutants.py --records`` named.
``--scale FILE`` takes what ``pytest tests/test_honest.py --profile scale --honest-results`` wrote, and writes the
section about real sizes; what is not given stays on the page as it is. Nothing is trained here: whatever the page says
was counted in these files.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convergence.arms.quantities import STATISTICS, share
from convergence.files import write
from convergence.judge import tolerance
from convergence.report.records import Record, load_folder
from convergence.tables import markdown
from tools import power_scale
from tools.power_runs import Simulation
from tools.power_scale import places

PAGES = Path(__file__).parent.parent / "docs" / "evidence"
DTYPES = ("float32", "tf32", "bfloat16")
TOGETHER = "all statistics together"
HONEST, MUTANT = "#0072b2", "#d55e00"  # blue and vermilion of Okabe and Ito: told apart by every kind of eye
PER_DECADE, DECADES = 10, (-1, 3)  # the bins of the picture; what lies outside counts in the first and the last


_PAGE = """\
# How far apart honest runs and mutants are

A proof is useful when every honest candidate passes and every fault fails. Both were measured; this
page counts them. Honest candidates (`tools/honest.py`) are models, patched or not, that differ in
seed, in the last bits of the weights, in the order of rows, in the attention implementation, or in
tiles and chunks. [Mutants](mutants.md) are faults. Each statistic of [the
proof](../explanation/how-the-proof-judges.md) is a value with a bound. The *share* is value /
bound; of each run, the largest share of any tensor and step counts.

![Histograms of the largest share of the bound, of honest candidates and of mutants](power.svg)

Blue, upwards: honest candidates. Orange, downwards: mutants. Counts are on a logarithmic scale. The
black line is the bound. A mutant fails when one statistic is beyond its bound. Mutants that raise
have no share and are not drawn.

## All statistics together

{by_dtype}

{alarms}

Mutants that [a check of their own](mutants.md) kills are not trained and not counted.

## Each statistic alone

{by_statistic}

"Beyond 1" counts the mutants that this statistic fails, "by nothing else" those that only this
statistic fails.

## Mutants that die otherwise

They raise, overwrite what the caller holds, or deliver nothing, or something of another dtype. No
share says how far such a mutant is from passing; no statistic is beyond its bound for it.

{otherwise}

## What was counted

{by_model}

{places}

```console
$ pytest tests/test_honest.py --honest-seeds {seeds} --models {models} --honest-results honest.jsonl
$ pytest tests/test_mutants.py --mutants all --records records/
$ python -m tools.power_picture honest.jsonl records/
```

`-n 15 --dist loadgroup` spreads the first two over the processor's cores; `-k` may leave some out,
and the table says what was run. A candidate that ran more than once counts once, as its worst run;
of a mutant, the newest record counts.

On an H200, 2026-11-28, `--honest-seeds 7,8 --models llama-tied,gemma3,qwen3` ended at a time limit
after 354 candidates. Two of them failed, in bfloat16 and from one replica's weights: the loss of an
evaluation was off by 0.00134, with a bound of 0.00133. Such a number is [judged once
more](../explanation/how-the-proof-judges.md#how-it-is-judged) since. The table is of before.

Not measured: models, dtypes and mutants that are not in the table, and other machines than those
named above.

## Where the bounds come from

`convergence/judge/tolerance.py` computes every bound from the unit roundoff of the dtype, a count, or
noise that was measured in the very case: {replicas} replicas of the unpatched baseline, each with a
truth of its own, whose weights were moved by one unit in the last place. Nothing there is told
which model or patch it bounds, so nothing is tuned per model.

- *Error ratio* and *largest error ratio*: {factor:g} times the worst ratio that a replica has when
  the others judge it, at least 1, over all tensors of the phase. A number alone (the loss, the
  gradient norm), and whatever the steps of an optimizer have led to, is one draw of the noise and
  may always be {sigmas:g} times it. An error below one unit of roundoff counts as one.
- *Row error ratio*: as that of one draw of the noise, over all rows of the phase.
- *Gain* and *gain against the others*: {sigmas:g} standard deviations of the replicas' gains (more
  where one, two or three steps measure them), and one unit of roundoff over the square root of the
  number of steps.

Chosen, not derived, are the factor {factor:g} of the customary three-way comparison, the {sigmas:g}
standard deviations and the number of replicas: three constants for all models and dtypes. Without
the rule for a single draw, one honest run of 2,400 was beyond its bound, by a factor of 1.08.
"""


@dataclass
class Evidence:
    """What was measured, and what has no result: candidates by model, dtype and seed, mutants by dtype."""

    honest: list[Simulation]
    mutants: list[Simulation]
    no_line: dict[str, list[str]] = field(default_factory=dict)
    no_record: dict[str, list[str]] = field(default_factory=dict)

    @property
    def dtypes(self) -> list[str]:
        return _ordered({run.dtype for run in (*self.honest, *self.mutants)}, DTYPES)

    @property
    def statistics(self) -> list[str]:
        return _ordered({name for run in (*self.honest, *self.mutants) for name in run.shares}, STATISTICS)


def _ordered(found: Collection[str], known: Sequence[str]) -> list[str]:
    return [*(name for name in known if name in found), *sorted(set(found) - set(known))]


def read_honest(*paths: Path) -> list[Simulation]:
    """The honest candidates in all ``paths``, one JSON object a line. One that ran more than once counts once, as its
    worst.

    Raises:
        ValueError: a line is no result of an honest candidate, or a file has none.
    """
    runs: dict[tuple[str, str, int, str], Simulation] = {}
    for run in (run for path in paths for run in _lines(path)):
        key = run.model, run.dtype, run.seed, run.name
        runs[key] = max(runs.get(key, run), run, key=lambda run: (run.failed, run.largest))
    return list(runs.values())


def _lines(path: Path) -> list[Simulation]:
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            shares = {name: max(share(x, 1.0) for x in found) for name, found in row["shares of the bound"].items()}
            place = environment(row.get("versions", {}), row["device"], row.get("at", ""))
            run = Simulation(row["candidate"], row["model"], row["dtype"], shares, row["failures"], place, row["seed"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: {error!r}; allowed is what pytest tests/test_honest.py --honest-results wrote"
            ) from error
        runs.append(run)
    if not runs:
        raise ValueError(f"{path}: no line in there; pytest tests/test_honest.py --honest-results FILE writes them")
    return runs


def read_mutants(folder: Path) -> list[Simulation]:
    """The newest record of each mutant and dtype in ``folder``; records of other patches are left out.

    Raises:
        ValueError: as :func:`convergence.report.records.load_all`, or no record is of a mutant.
    """
    newest: dict[tuple[str, str], Record] = {}
    for record in sorted(load_folder(folder), key=lambda record: record.at):
        module, _, name = record.patch.rpartition(":")
        if module == "tests.mutants":
            newest[name, record.dtype] = record
    if not newest:
        raise ValueError(f"{folder}: no record of a mutant; pytest tests/test_mutants.py --records DIR writes them")
    runs = []
    for (name, dtype), record in newest.items():
        shares: dict[str, float] = {}
        for statistic in record.statistics:
            kind = statistic.statistic
            shares[kind] = max(shares.get(kind, 0.0), statistic.share)
        place = environment(record.versions, record.device, record.at)
        failures: list[Sequence[Any]] = list(record.failures)
        runs.append(Simulation(name, record.model, dtype, shares, failures, place, record.seed, record.verdict))
    return runs


def environment(versions: dict[str, str], device: str, at: str) -> str:
    names = [f"{package} {versions[package]}" for package in ("torch", "triton", "transformers") if package in versions]
    return ", ".join((versions.get("device", device), *(names or ["versions not written down"]), at[:10] or "undated"))


def trained_mutants(folder: Path = PAGES) -> list[tuple[str, str]]:
    """The name of every mutant that is trained, with each dtype in which it is a fault: what their pages list."""
    found = []
    for path in sorted(folder.glob("mutants-*.md")):
        for section in path.read_text(encoding="utf-8").split("\n## ")[1:]:
            rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
            if not rows or "model" not in rows[0]:  # those of checks have none
                continue
            header, _, *mutants = rows
            dtypes = header[header.index("model") + 1 :]
            for row in mutants:
                cells = zip(dtypes, row[-len(dtypes) :], strict=True)
                found += [(row[0].strip("`"), dtype) for dtype, cell in cells if cell.strip() != "-"]
    return found


def without_line(honest: Sequence[Simulation], candidates: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Which of the ``candidates`` of each model have no line with a dtype and seed that were run: they raised, or the
    run was stopped."""
    seen = {(run.model, run.dtype, run.seed, run.name) for run in honest}
    missing: dict[str, list[str]] = {}
    for dtype, seed in sorted({(run.dtype, run.seed) for run in honest}):
        for model, names in candidates.items():
            group = [name for name in names if (model, dtype, seed, name) not in seen]
            if group:
                missing[f"{model}/{dtype}/{seed}"] = group
    return missing


def without_record(mutants: Sequence[Simulation], expected: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Which of the ``expected`` (name, dtype) were not measured, by dtype."""
    seen = {(run.name, run.dtype) for run in mutants}
    missing: dict[str, list[str]] = {}
    for name, dtype in expected:
        if (name, dtype) not in seen:
            missing.setdefault(dtype, []).append(name)
    return missing


def by_dtype(evidence: Evidence) -> list[str]:
    """Of every dtype: how far all statistics together keep honest candidates and mutants apart."""
    rows = []
    for dtype in evidence.dtypes:
        honest = [run for run in evidence.honest if run.dtype == dtype]
        mutants = [run for run in evidence.mutants if run.dtype == dtype]
        counted = [run for run in mutants if run.dies == "by a number"]
        weakest = min(counted, key=lambda run: run.largest, default=None)
        rows.append(
            (
                dtype,
                len(honest),
                sum(run.failed for run in honest),
                _number_or_dash(max((run.largest for run in honest), default=None)),
                len(mutants),
                len(counted),
                f"{weakest.largest:.3g}, `{weakest.name}` ({weakest.statistic})" if weakest else "-",
                sum(run.dies == "otherwise" for run in mutants),
                sum(run.dies == "not" for run in mutants),
            )
        )
    header = ("dtype", "honest", "of them fail", "largest share", "mutants", "die by a number", "the weakest of those")
    return markdown((*header, "die otherwise", "do not die"), rows)


def by_statistic(evidence: Evidence) -> list[str]:
    """Of every statistic and dtype: what it says on its own."""
    rows = []
    for statistic in evidence.statistics:
        for dtype in evidence.dtypes:
            honest = [
                run.shares[statistic] for run in evidence.honest if run.dtype == dtype and statistic in run.shares
            ]
            mutants = [run for run in evidence.mutants if run.dtype == dtype and statistic in run.shares]
            beyond = [run.shares[statistic] for run in mutants if run.shares[statistic] > 1]
            largest = max(honest, default=None)
            rows.append(
                (
                    statistic,
                    dtype,
                    len(honest),
                    _number_or_dash(largest),
                    _number_or_dash(None if largest is None else 1 - largest),
                    len(mutants),
                    len(beyond),
                    sum(run.findings == {statistic} for run in mutants),
                    _number_or_dash(min(beyond, default=None)),
                )
            )
    header = ("statistic", "dtype", "honest", "largest share", "margin to 1", "mutants", "beyond 1", "by nothing else")
    return markdown((*header, "smallest beyond 1"), rows)


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def by_model(evidence: Evidence) -> list[str]:
    """How many honest candidates and mutants there are of each model and dtype."""
    counts = Counter((kind, run.model, run.dtype) for kind in ("honest", "mutants") for run in getattr(evidence, kind))
    columns = [(kind, dtype) for kind in ("honest", "mutants") for dtype in evidence.dtypes]
    models = sorted({model for _, model, _ in counts})
    rows = [(model, *(counts[kind, model, dtype] for kind, dtype in columns)) for model in models]
    rows.append(("all", *(sum(counts[kind, model, dtype] for model in models) for kind, dtype in columns)))
    return markdown(("model", *(f"{kind}, {dtype}" for kind, dtype in columns)), rows)


def otherwise(evidence: Evidence) -> list[str]:
    """The mutants that no statistic is beyond its bound for, by what they die of."""
    causes: dict[tuple[str, str], list[str]] = {}
    for run in evidence.mutants:
        if run.dies == "otherwise":
            causes.setdefault((", ".join(sorted(run.findings)), run.dtype), []).append(f"`{run.name}`")
    rows = [(cause, dtype, len(names), ", ".join(sorted(names))) for (cause, dtype), names in sorted(causes.items())]
    return markdown(("finding", "dtype", "mutants", "which"), rows) if rows else ["None."]


def alarms(evidence: Evidence) -> list[str]:
    """Every false alarm and every survivor in full, and what has no result."""
    lines = power_scale.alarms("Honest candidates that fail", evidence.honest)
    alive = [run for run in evidence.mutants if run.dies == "not"]
    lines.append(f"- Mutants that do not die: {len(alive)} of {len(evidence.mutants)}.")
    lines += [f"  - `{run.name}`, {run.dtype}: {run.verdict}, at most {run.largest:.3g} of a bound" for run in alive]
    for what, missing in (
        ("Honest candidates of these models, dtypes and seeds without a result", evidence.no_line),
        ("Mutants without a record", evidence.no_record),
    ):
        lines.append(f"- {what}: {sum(map(len, missing.values()))}.")
        for group, names in missing.items():
            lines.append(f"  - {group}: {', '.join(names) if len(names) <= 3 else f'{len(names)} of them'}")
    return lines


def page(evidence: Evidence) -> str:
    """The text of docs/evidence/power.md."""
    return _PAGE.format(
        by_dtype="\n".join(by_dtype(evidence)),
        alarms="\n".join(alarms(evidence)),
        by_statistic="\n".join(by_statistic(evidence)),
        otherwise="\n".join(otherwise(evidence)),
        by_model="\n".join(by_model(evidence)),
        places="\n".join([*places("Honest candidates", evidence.honest), *places("Mutants", evidence.mutants)]),
        seeds=",".join(map(str, sorted({run.seed for run in evidence.honest}))),
        models=",".join(sorted({run.model for run in evidence.honest})),
        factor=tolerance.THREE_WAY_FACTOR,
        sigmas=tolerance.SIGMAS,
        replicas=tolerance.REPLICAS,
    )


def draw(evidence: Evidence, path: Path) -> None:
    """The picture: per statistic and dtype a strip, honest candidates upwards and mutants downwards."""
    import matplotlib
    import matplotlib.pyplot as plt
    import numpy as np

    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "power", "font.family": "sans-serif", "font.size": 11}
    )
    edges = np.logspace(*DECADES, PER_DECADE * (DECADES[1] - DECADES[0]) + 1)
    inside = (edges[0] * 1.001, edges[-1] * 0.999)
    groups = [TOGETHER, *evidence.statistics]

    def counts(runs: Sequence[Simulation], statistic: str) -> tuple[Any, list[float]]:
        if statistic == TOGETHER:
            shares = [run.largest for run in runs if run.shares]
        else:
            shares = [run.shares[statistic] for run in runs if statistic in run.shares]
        return np.histogram(np.clip(np.nextafter(shares, 0), *inside), edges)[0], shares  # 1 itself passes

    chosen = {
        (statistic, dtype, kind): counts([run for run in runs if run.dtype == dtype], statistic)
        for statistic in groups
        for dtype in evidence.dtypes
        for kind, runs in (("honest", evidence.honest), ("mutants", evidence.mutants))
    }
    top, low = (
        np.log10(1 + max(found.max() for (*_, of), (found, _) in chosen.items() if of == kind))
        for kind in ("honest", "mutants")
    )
    figure = plt.figure(figsize=(5, len(groups) * (0.75 + 1.05 * len(evidence.dtypes))), layout="constrained")
    for part, statistic in zip(figure.subfigures(len(groups), 1, squeeze=False).flat, groups, strict=True):
        part.suptitle(statistic, fontsize=13, fontweight="bold")
        strips = part.subplots(len(evidence.dtypes), 1, sharex=True, squeeze=False)[:, 0]
        for strip, dtype in zip(strips, evidence.dtypes, strict=True):
            (honest, of_honest), (mutants, of_mutants) = (chosen[statistic, dtype, k] for k in ("honest", "mutants"))
            strip.stairs(np.log10(1 + honest), edges, fill=True, color=HONEST)
            strip.stairs(-np.log10(1 + mutants), edges, fill=True, color=MUTANT)
            strip.axhline(0, color="0.5", linewidth=0.8)
            strip.axvline(1, color="black", linewidth=1.5)
            notes = [(dtype, "black")]
            if of_honest:
                notes.append((f"{len(of_honest):,} honest, largest {max(of_honest):.3g}", HONEST))
            beyond = sum(share > 1 for share in of_mutants)
            notes.append((f"{len(of_mutants)} mutants, {beyond} beyond" if of_mutants else "no mutants", MUTANT))
            for line, (text, colour) in enumerate(notes):
                strip.annotate(
                    text,
                    (1.15, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, -3 - 12.5 * line),
                    textcoords="offset points",
                    color=colour,
                    va="top",
                    fontweight="bold" if not line else "normal",
                )
            strip.set_xscale("log")
            strip.set_xlim(edges[0], edges[-1])
            # The notes need the upper half, whatever is counted there.
            strip.set_ylim(-1.1 * max(low, 0.4), 1.1 * max(top, 1.6 * low))
            heights = [(sign * n) for n in (10, 100, 1000) for sign in (1, -1)]
            heights = [n for n in heights if np.log10(1 + abs(n)) <= (top if n > 0 else low)]
            strip.set_yticks([np.sign(n) * np.log10(1 + abs(n)) for n in heights], [str(abs(n)) for n in heights])
            strip.tick_params(axis="y", labelsize=9)
            strip.grid(axis="x", alpha=0.3)
            strip.spines[["top", "right"]].set_visible(False)
        strips[-1].set_xticks([0.1, 1, 10, 100, 1000], ["≤ 0.1", "1 = bound", "10", "100", "≥ 1000"])
        strips[-1].minorticks_off()
    figure.supxlabel("largest share of the bound")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.power_picture", description=__doc__)
    parser.add_argument("honest", type=Path, nargs="?", help="the file that --honest-results named")
    parser.add_argument("records", type=Path, nargs="?", help="the folder that --records named")
    parser.add_argument("--scale", type=Path, nargs="+", metavar="FILE", help="files of runs with --profile scale")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/evidence"), help="the folder to write to (docs/evidence)"
    )
    options = parser.parse_args(arguments)
    if options.honest and not options.records:
        parser.error("give the folder of records next to the file of honest candidates")
    if not (options.honest or options.scale):
        parser.error("nothing to count: give the file of honest candidates and the folder of records, or --scale FILE")
    target = options.out / "power.md"
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    try:
        text = _measured(options.honest, options.records, options.out) if options.honest else before
        at_scale = power_scale.section(read_honest(*options.scale)) if options.scale else power_scale.section_of(before)
        text = power_scale.put(text, at_scale)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    write(text, target)
    print(text)


def _measured(honest: Path, records: Path, out: Path) -> str:
    """The page without the section about real sizes; writes the picture."""
    from convergence.models.models import MODELS
    from tools.honest import candidates

    evidence = Evidence(read_honest(honest), read_mutants(records))
    expected = {model: [honest.name for honest in candidates(model)] for model in MODELS}
    evidence.no_line = without_line(evidence.honest, expected)
    evidence.no_record = without_record(evidence.mutants, trained_mutants())
    draw(evidence, out / "power.svg")
    return page(evidence)


if __name__ == "__main__":
    main()
