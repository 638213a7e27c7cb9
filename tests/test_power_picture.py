"""tools/power_picture.py counts what was measured: nothing that fails, survives or is missing gets lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from convergence.report.records import Record, Statistic, write
from tests.mutants import MUTANTS
from tools import power_scale
from tools.power_picture import (
    Evidence,
    main,
    page,
    read_honest,
    read_mutants,
    trained_mutants,
    without_line,
    without_record,
)


def line(candidate: str = "replica 1", dtype: str = "float32", **fields: Any) -> str:
    shares = fields.pop("shares", {"error ratio": [0.2, 0.5], "gain": [0.1]})
    row = {"model": "llama-tied", "dtype": dtype, "seed": 5, "candidate": candidate, "device": "some GPU", "near": []}
    return json.dumps({**row, "failures": [], "shares of the bound": shares, **fields}) + "\n"


def mutant(folder: Path, name: str, values: dict[str, float], *findings: str, **fields: Any) -> None:
    statistics = [Statistic("loss", "SGD: text", statistic, value, 2.0) for statistic, value in values.items()]
    failures = [("loss", "SGD: text", finding, "x", "y") for finding in findings]
    case = {"model": "llama-untied", "dtype": "float32", "patch": f"tests.mutants:{name}", "seed": 0}
    case |= {"profile": "hard", "device": "cuda", "verdict": "different" if findings else "equal"}
    write(Record(**{**case, "failures": failures, "statistics": statistics, **fields}), folder)


def rows(text: str, heading: str) -> list[tuple[str, ...]]:
    """The rows of the table under ``heading``, without its header."""
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [tuple(row.strip("| ").split(" | ")) for row in part.splitlines() if row.startswith("|")][2:]


@pytest.fixture
def measured(tmp_path: Path) -> Evidence:
    """Three honest candidates, one of which fails; five mutants, one of which survives."""
    honest = tmp_path / "honest.jsonl"
    failure = ["loss", "SGD: text", "gain", "off by 3", "2"]
    again = line("replica 2", shares={"error ratio": [0.3], "gain": [1.5]}, failures=[failure])
    honest.write_text(line() + again + line("replica 2") + line(dtype="tf32"))
    mutant(tmp_path / "records", "strong", {"error ratio": 200.0, "gain": 5.0}, "error ratio", "gain")
    mutant(tmp_path / "records", "weak", {"error ratio": 3.0, "gain": 0.5}, "error ratio")
    mutant(tmp_path / "records", "not_a_number", {"error ratio": math.nan, "gain": 0.5}, "error ratio", "finite")
    mutant(tmp_path / "records", "crashes", {}, "raised")
    mutant(tmp_path / "records", "survivor", {"error ratio": 1.0, "gain": 0.5})
    mutant(tmp_path / "records", "honest", {"error ratio": 1.9}, patch="convergence.patches:fused_linear")
    return Evidence(read_honest(honest), read_mutants(tmp_path / "records"))


def test_all_statistics_together(measured):
    assert rows(page(measured), "All statistics together") == [
        ("float32", "2", "1", "1.5", "5", "3", "1.5, `weak` (error ratio)", "1", "1"),
        ("tf32", "1", "0", "0.5", "0", "0", "-", "0", "0"),
    ]


def test_each_statistic_alone(measured):
    assert rows(page(measured), "Each statistic alone") == [
        ("error ratio", "float32", "2", "0.5", "0.5", "4", "3", "1", "1.5"),
        ("error ratio", "tf32", "1", "0.5", "0.5", "0", "0", "0", "-"),
        ("gain", "float32", "2", "1.5", "-0.5", "4", "1", "0", "2.5"),
        ("gain", "tf32", "1", "0.1", "0.9", "0", "0", "0", "-"),
    ]


def test_what_fails_survives_or_dies_without_a_number_is_listed(measured):
    """A honest candidate that failed counts, too, though it passed when it ran again."""
    text = page(measured)
    assert "Honest candidates that fail: 1 of 3." in text
    assert "`llama-tied/float32/5/replica 2`: loss SGD: text gain off by 3 2" in text
    assert "Mutants that do not die: 1 of 5." in text
    assert "`survivor`, float32: equal, at most 0.5 of a bound" in text
    assert rows(text, "Mutants that die otherwise") == [("raised", "float32", "1", "`crashes`")]


def test_what_has_no_result_is_listed(measured):
    """A candidate that raises writes no line, so the file alone would not show it."""
    measured.no_line = without_line(measured.honest, {"llama-tied": ["replica 1", "replica 2"], "gemma": "ABCD"})
    measured.no_record = without_record(measured.mutants, [("weak", "float32"), ("weak", "bfloat16")])
    text = page(measured)
    assert f"without a result: {sum(map(len, measured.no_line.values()))}.\n" in text
    assert "\n  - llama-tied/tf32/5: replica 2\n" in text
    assert "\n  - gemma/tf32/5: 4 of them\n" in text
    assert "Mutants without a record: 1.\n  - bfloat16: weak\n" in text


def test_the_pages_of_mutants_name_those_that_are_trained():
    known = {(mutant.name, dtype) for mutant in MUTANTS.values() if not mutant.check for dtype in mutant.dtypes}
    assert sorted(trained_mutants()) == sorted(known)


def test_models_and_environments_are_counted(measured, tmp_path):
    (tmp_path / "more.jsonl").write_text(line(versions={"torch": "2.11.0", "device": "a GPU"}, at="2026-01-02T03:04"))
    measured.honest += read_honest(tmp_path / "more.jsonl")
    text = page(measured)
    assert rows(text, "What was counted") == [
        ("llama-tied", "3", "1", "0", "0"),
        ("llama-untied", "0", "0", "5", "0"),
        ("all", "3", "1", "5", "0"),
    ]
    assert "- Honest candidates: a GPU, torch 2.11.0, 2026-01-02 (1)." in text
    assert "- Honest candidates: some GPU, versions not written down, undated (3)." in text


def test_a_share_that_is_not_a_number_is_beyond_every_bound(tmp_path):
    (tmp_path / "honest.jsonl").write_text(line(shares={"gain": [0.5, math.nan, 0.7]}))
    (run,) = read_honest(tmp_path / "honest.jsonl")
    assert run.largest == math.inf
    assert run.failed


@pytest.mark.parametrize("text", ["", line() + line()[:50], '{"model": "llama-tied"}\n', "[]\n"])
def test_what_is_no_result_is_refused(text, tmp_path):
    (tmp_path / "honest.jsonl").write_text(text)
    with pytest.raises(ValueError, match="test_honest"):
        read_honest(tmp_path / "honest.jsonl")


def test_a_folder_without_a_mutant_is_refused(tmp_path):
    mutant(tmp_path, "honest", {}, patch="convergence.patches:fused_linear")
    with pytest.raises(ValueError, match="no record of a mutant"):
        read_mutants(tmp_path)


def test_the_section_about_real_sizes_comes_alone_and_from_several_files(measured, tmp_path, capsys):
    before = page(measured)
    (tmp_path / "power.md").write_text(before)
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    alarm = ["loss", "initial: scale", "gain", "off by 3", "2"]
    failed = line("replica 2", model="llama-long", shares={"gain": [1.5]}, failures=[alarm])
    files[0].write_text(line(model="gemma3-4b-odd") + failed)
    files[1].write_text(line(model="llama-long", seed=6) + line("replica 2", model="llama-long"))
    for _ in range(2):  # the second time it replaces the section
        main(["--scale", *map(str, files), "--out", str(tmp_path)])
        text = (tmp_path / "power.md").read_text()
        assert rows(text, "At real sizes") == [
            ("gemma3-4b-odd", "float32", "5", "1", "0", "0.5", "error ratio"),
            ("llama-long", "float32", "5, 6", "2", "1", "1.5", "gain"),
            ("all", "", "", "3", "1", "1.5", "gain"),
        ]
        assert "`llama-long/float32/5/replica 2`: loss initial: scale gain off by 3 2" in text
    assert power_scale.put(text, "") == before


def test_without_results_there_is_no_section_about_real_sizes(measured, tmp_path, capsys):
    assert "real sizes" not in page(measured)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "nothing to count" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--scale", str(tmp_path / "honest.jsonl"), "--out", str(tmp_path)])
    assert "before which the section about real sizes goes" in capsys.readouterr().err
