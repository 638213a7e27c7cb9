"""What reads records, baselines, measured kernels and cells on files that may hold anything: an error that names the
file, and nothing of them does anything where it is shown."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from convergence.__main__ import main as convergence
from convergence.arms.quantities import Failure, Finding
from convergence.checked import checked
from convergence.files import Unusable, plain, read_json
from convergence.report import html, report
from convergence.report.records import Case, Outcome, Record, dumps, from_dict
from convergence.tables import literal, visible
from matrix import __main__ as matrix
from matrix import baseline, cells, census, new, records, runner
from matrix.cells import Cell
from matrix.records import CaseVerdict, CellRecord, StageResult
from tests import damaged
from tests.damaged import HOSTILE, RAW, controls, put

ROOT = Path(__file__).parent.parent
CELL = Cell("tf9.9-trl9.9", "for this test", {"transformers": "9.9.0"}, "versions", "0123")
KERNELS: dict[str, Any] = {
    "device": "GPU",
    "rows": [{"op": "rope", "shape": "4x8", "ours_ms": 1.0, "spread_ms": 0.01, "ours_mib": 100.0, "peers": {}}],
}


def cell_record(text: str = "some text") -> dict[str, Any]:
    """With something in every field, and ``text`` in every field that may hold any."""
    worst = {"gain": {"value": 1.2, "bound": 2.4, "quantity": text, "step": text}}
    finding = CaseVerdict("equal", text, worst, {text: 5}, {text: 9}, {text: 1}, {text: 0.5})
    stage = StageResult("models", [text], "failed", text, 1.0, 2.0, [text], {f"b{text}": text}, {f"c{text}": text})
    stage.findings = {"llama": finding}
    machine = {"cpus": "2", "gpu": "none", "platform": text, "python": "3.11"}
    at = "2026-11-21T00:00:00+00:00"
    record = CellRecord("tf9.9-trl9.9", "0123", "c0de", text, {"trl": text}, machine, at, [text], [stage], True)
    return dataclasses.asdict(record)


def accepted(text: str = "some text") -> dict[str, Any]:
    record = cell_record(text)
    record["stages"][0]["passed"].append(f"d{text}")
    return {"schema": 1, "history": [{"who": text}], "kernels": KERNELS, "cells": {"tf9.9-trl9.9": record}}


def proof_record(text: str = "some text", verdict: str = "different") -> dict[str, Any]:
    outcome = Outcome(
        verdict, text, [Failure(text, text, Finding.GAIN, text, text)], [text],
        blame=[{"kernel": text, "module": text, "pass": text, "step": text, "tensor": text, "note": text}],
        census={text: 1}, launches={text: 1}, fallbacks={text: 1},
        losses={"truth": {text: 1.5, "SGD: a": 1.25}, "candidate": {text: 1.5}},
        costs={"baseline": {"step, ms": 1.0}}, digests={"candidate": [{"steps": [], "quantities": {}}]},
    )  # fmt: skip
    record = Record.of(Case("llama-tied", "float32", "package.module:function"), outcome)
    found: dict[str, Any] = json.loads(dumps(dataclasses.replace(record, versions={"torch": text})))
    found["statistics"] = [{"quantity": text, "step": text, "statistic": "gain", "value": 1.0, "bound": 2.0}]
    return found


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good file for every reader of the matrix; its code and its cells are those of this test."""
    monkeypatch.setattr(runner, "code_digest", lambda: "c0de")
    monkeypatch.setattr(runner, "commit", lambda: "abc")
    monkeypatch.setattr(cells, "load_all", lambda: {CELL.name: CELL})
    monkeypatch.setattr(baseline.load, "__defaults__", (tmp_path / "baseline.json",))
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "records").mkdir()
    write_good(tmp_path)
    return tmp_path


def write_good(folder: Path, text: str = "some text") -> None:
    (folder / "records" / "tf9.9-trl9.9.json").write_text(json.dumps(cell_record(text)))
    (folder / "records" / "main.json").write_text(json.dumps({**cell_record(text), "cell": "main"}))
    (folder / "baseline.json").write_text(json.dumps(accepted(text)))
    (folder / "kernels.json").write_text(json.dumps(KERNELS))
    (folder / "proof.json").write_text(json.dumps(proof_record(text)))


def in_matrix(folder: Path, *arguments: str) -> int:
    return matrix.main(["--records", str(folder / "records"), *arguments])


def judge(folder: Path, *options: str) -> int:
    return in_matrix(folder, "gate", "--no-run", "--cells", CELL.name, "--output", str(folder / "out"), *options)


def in_convergence(*arguments: str) -> int:
    try:
        return convergence(arguments)
    except SystemExit as error:
        return int(error.code or 0)


# By file: who reads it.
READERS: dict[str, list[Callable[[Path], int]]] = {
    "records/tf9.9-trl9.9.json": [
        lambda folder: in_matrix(folder, "report"),
        lambda folder: in_matrix(folder, "report", "--markdown"),
        judge,
    ],
    "records/main.json": [lambda folder: in_matrix(folder, "moved")],
    "baseline.json": [judge, lambda folder: in_matrix(folder, "moved")],
    "kernels.json": [lambda folder: judge(folder, "--kernels", str(folder / "kernels.json"))],
    "proof.json": [
        lambda folder: in_convergence("report", str(folder / "proof.json")),
        lambda folder: in_convergence("setups", str(folder / "proof.json")),
        lambda folder: in_convergence(
            *("report", "--trend", str(folder / "proof.json"), "--html", str(folder / "out" / "report.html")),
            *("--junit", str(folder / "out" / "junit.xml"), "--markdown", str(folder / "out" / "report.md")),
        ),
    ],
}


@pytest.fixture(autouse=True)
def newest_is_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new, "newest_cell", lambda known, kind: CELL)


@pytest.mark.parametrize("file", READERS)
def test_a_good_file_is_read(file: str, at_home: Path) -> None:
    for read in READERS[file]:
        assert read(at_home) in (0, 1)


@pytest.mark.parametrize("file", READERS)
def test_bytes_that_are_no_such_file_are_an_error_that_names_it(file: str, at_home: Path, capsys: Any) -> None:
    for name, content in RAW.items():
        put(at_home / file, content)
        for read in READERS[file]:
            if file == "baseline.json" and name in ("dangling", "loop"):
                continue  # there is none, as before the first release
            if file == "records/main.json" and name in ("dangling", "loop"):
                assert read(at_home) == 2
                continue
            assert read(at_home) == 2, name
            said = capsys.readouterr().err
            assert str(at_home / file) in said, name
            assert not controls(said), name


def wrong(file: str) -> Iterator[tuple[str, str]]:
    """JSON that is no such file, and the field that is wrong in it."""
    good: Any
    if file == "kernels.json":
        good = KERNELS
        without = {name: value for name, value in KERNELS["rows"][0].items() if name != "peers"}
        yield from damaged.missing({"device": "GPU", "rows": [without]}, "rows", 0)
    elif file == "proof.json":
        good = proof_record()
        yield from damaged.missing(good)
        yield from damaged.missing(good, "statistics", 0)
        yield from damaged.missing(good, "blame", 0)
    elif file == "baseline.json":
        good = {**accepted(), "history": [{}]}
        yield json.dumps({**good, "history": []}), "history"
        yield json.dumps({**good, "cells": {HOSTILE: cell_record()}}), "cells"
        yield from damaged.missing(good)
    else:
        good = cell_record()
        for name in ("../../elsewhere", "-e", "", "a b", HOSTILE):
            yield json.dumps({**good, "cell": name}), "cell"
        yield json.dumps({**good, "machine": {}}), "machine"
        yield json.dumps({**good, "stages": [{**good["stages"][0], "status": "fine"}]}), "status"
        yield from ((text, field) for text, field in damaged.missing(good) if field != "schema")
        yield from damaged.missing(good, "stages", 0, "findings", "llama", "statistics", "gain")
    if "schema" in good:
        yield from ((json.dumps({**good, "schema": schema}), "schema") for schema in (0, 99, True, "1", 1.0, None))
    for text, field in damaged.wrong_types(good):
        if field != "peers" and json.loads(text).get("kernels", True) is not None:  # which a baseline may lack
            yield text, field


@pytest.mark.parametrize("file", READERS)
def test_json_of_another_kind_is_an_error_that_names_file_and_field(file: str, at_home: Path, capsys: Any) -> None:
    read, every = READERS[file][0], list(wrong(file))
    assert len(every) > 40
    for text, field in every:
        (at_home / file).write_text(text)
        assert read(at_home) == 2, f"{field}: {text}"
        said = capsys.readouterr().err
        assert str(at_home / file) in said
        assert field in said, f"{field}: {said}"
        assert len(said.strip().splitlines()[-1]) < 1000, said
        assert not controls(said), said


@pytest.mark.parametrize("file", READERS)
def test_values_that_make_no_sense_are_no_traceback(file: str, at_home: Path, capsys: Any) -> None:
    good = {"kernels.json": KERNELS, "proof.json": proof_record(), "baseline.json": accepted()}.get(file, cell_record())
    for text, what in damaged.other_values(good):
        (at_home / file).write_text(text)
        assert READERS[file][-1](at_home) in (0, 1, 2), what
        captured = capsys.readouterr()
        assert not controls(captured.out + captured.err), what


def outside_of_code(text: str) -> str:
    """Markdown without its blocks and spans of code."""
    text = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def test_what_a_record_says_does_nothing_where_it_is_shown(at_home: Path, capsys: Any, monkeypatch: Any) -> None:
    write_good(at_home, HOSTILE)
    for file, readers in READERS.items():
        for read in readers:
            assert read(at_home) in (0, 1), file
    said = capsys.readouterr()
    assert not controls(said.out + said.err)
    assert "[red]r[/red]" in said.out, "text, and no markup of rich's"
    for path in (at_home / "out" / "gate.md", at_home / "out" / "report.md"):
        text = path.read_text()
        assert not controls(text)
        rest = outside_of_code(text)
        for bad in ("<script", "<img", "](", "@somebody", "http", "#1"):
            assert bad in text
            assert bad not in rest, f"{path.name}: {bad}"
    page = (at_home / "out" / "report.html").read_text()
    assert not controls(page)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    # On a terminal, rich colours its own table, and nothing else does.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    in_matrix(at_home, "report")
    judge(at_home)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert not controls(re.sub("\x1b\\[[0-9;]*m", "", shown))
    assert "\x1b]" not in shown


@pytest.mark.parametrize("text", [HOSTILE, "a\nb", "", "plain text: 5 of 6 (x_y)", "`", "``a`", "www.evil.example"])
def test_text_on_a_line_of_markdown(text: str) -> None:
    line = literal(text)
    assert "\n" not in line
    assert not controls(line)
    if re.search(r"[<>\[\]@#`]|www", text):
        assert outside_of_code(line) == ""
    else:
        assert line == visible(text).replace("\n", " ")


def test_what_is_shown_of_a_run_is_escaped() -> None:
    record = from_dict(proof_record(HOSTILE))
    lines = [report.failure(record), report.progress(record.summary()), *report.summary_tables([record.summary()])]
    assert not controls("".join(lines))
    assert not controls(runner.describe(StageResult("a", [], "failed", HOSTILE)))
    assert not controls(html.page([record]))


# What a stage leaves.
@pytest.mark.parametrize("name", RAW)
def test_a_damaged_record_of_a_stage_is_named(name: str, tmp_path: Path) -> None:
    put(tmp_path / "a.json", RAW[name])
    with pytest.raises(Unusable, match=re.escape(str(tmp_path / "a.json"))):
        records.read_findings(tmp_path)


def test_a_record_of_a_stage_of_another_kind_is_named(tmp_path: Path) -> None:
    statistic = {"quantity": "loss", "step": "1", "statistic": "gain", "value": 1.0, "bound": 1.0}
    good = {"name": "a", "verdict": "equal", "reason": "", "statistics": [statistic], "census": {"x": 1}}
    for text, what in [*damaged.wrong_types(good), *damaged.missing(good, "statistics", 0)]:
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(Unusable, match=re.escape(str(tmp_path / "a.json"))):
            assert records.read_findings(tmp_path) == what, "it was read"


@pytest.mark.parametrize(
    "content",
    [
        *(content for content in RAW.values() if isinstance(content, bytes)),
        b"<testsuites>",
        b'<?xml version="1.0" encoding="nonsense"?><a/>',
        b'<?xml version="1.0" encoding="utf-32"?><a/>',
        b'<!DOCTYPE a [<!ENTITY b "' + b"x" * 100_000 + b'"><!ENTITY c "' + b"&b;" * 10_000 + b'">]><a>&c;</a>',
    ],
)
def test_damaged_results_of_a_stage_are_no_results(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_bytes(content)
    with pytest.raises(Unusable, match="no results"):
        records.read_cases(tmp_path / "junit.xml")


GOOD_CELL = "# why\ntorch==2.13.0\ntransformers==5.1.0\ntrl==1.0.0\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (f"tf{name}", GOOD_CELL)
            for name in ("; rm -rf", " x", "$(x)", "\x1b[31m", "ä", "x" * 101, "'", "`x`", "&&")
        ),
        ("-e", GOOD_CELL),
        ("tf1.0-gpu", GOOD_CELL),
        *(("tf1.0-trl1.0", content) for name, content in RAW.items() if name not in ("100 GB",)),
        ("tf1.0-trl1.0", GOOD_CELL.replace("2.13.0", "")),
        ("tf1.0-trl1.0", GOOD_CELL.replace("2.13.0", "2.13.0==1")),
        ("tf1.0-trl1.0", GOOD_CELL.replace("2.13.0", "2.13.0; x")),
        ("tf1.0-trl1.0", GOOD_CELL.replace("torch==2.13.0", "")),
        ("tf1.0-trl1.0", GOOD_CELL.replace("5.1.0", "5.x")),
        ("torch1.0", GOOD_CELL.replace("2.13.0", "2.13.0rc1")),
    ],
)
def test_a_damaged_cell_is_named(name: str, content: Any, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.txt"
    put(path, content.encode() if isinstance(content, str) else content)
    with pytest.raises(Unusable) as raised:
        cells.load(path)
    assert str(path) in str(raised.value)


def test_a_good_cell_is_read_and_damaged_cells_are_an_error_of_the_command(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(cells.load_all, "__defaults__", (tmp_path,))
    (tmp_path / "tf5.1-trl1.0.txt").write_text(GOOD_CELL)
    assert list(cells.load_all()) == ["tf5.1-trl1.0"]
    (tmp_path / "tf\x1b[31m.txt").write_text(GOOD_CELL)
    for command in ("list", "ci", "run", "report", "new", "gate"):
        assert matrix.main([command]) == 2
        said = capsys.readouterr().err
        assert "names a cell" in said
        assert not controls(said)


def test_names_of_cells_on_the_command_line_and_of_proposals_are_checked(capsys: Any) -> None:
    for name in (HOSTILE, "../x", "-e", "a b", "", "1"):
        assert matrix.main(["run", "--", name]) == 2
        assert not controls(capsys.readouterr().err)
        with pytest.raises(Unusable, match="allowed is a release"):
            new.cell_name({"transformers": "5.1.0", "trl": name}, "versions")


def test_a_damaged_census_is_named(tmp_path: Path) -> None:
    path, good = tmp_path / "census.json", read_json(census.RECORD)
    (version,) = good
    classes = good[version]["classes"]
    good[version]["classes"] = {group: entries[:1] for group, entries in classes.items()}
    path.write_text(json.dumps(good))
    assert census.load(path) == good
    for text, what in damaged.wrong_types(good):
        path.write_text(text)
        with pytest.raises(Unusable, match=re.escape(str(path))):
            pytest.fail(what) if census.load(path) is None else None
    for name, content in RAW.items():
        if name not in ("object", "dangling", "loop"):
            put(path, content)
            with pytest.raises(Unusable, match=re.escape(str(path))):
                census.load(path)


def test_a_folder_that_cannot_be_written_is_an_error(at_home: Path, capsys: Any) -> None:
    (at_home / "out").write_text("a file")
    assert judge(at_home) == 2
    assert in_convergence("report", str(at_home / "proof.json"), "--junit", str(at_home / "out" / "x.xml")) == 2
    assert str(at_home / "out") in capsys.readouterr().err


def workflows() -> list[Path]:
    examples = [*(ROOT / "examples").glob("github/*.yml"), *(ROOT / "examples").glob("*/.github/workflows/*.yml")]
    return [*(ROOT / ".github" / "workflows").glob("*.yml"), *examples]


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_a_ci_puts_nothing_into_the_text_of_a_shell_command(path: Path) -> None:
    """What stands in ``${{ }}`` becomes part of the script. A variable of the environment does not."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job.get("steps", [])]
    for script in (step["run"] for step in steps if "run" in step):
        assert "${{" not in script
        unquoted = re.sub(r"\$\{\w+:\+[^}]*\}", "", script.replace(r"\"", ""))
        unquoted = re.sub(r'"[^"]*"|\'[^\']*\'', "", unquoted)
        assert not re.search(r"\$\w|\$\{", unquoted), f"a variable without quotes: {script}"


def test_a_number_that_json_does_not_have_is_kept() -> None:
    assert plain(checked("nan", float, "here")) == plain(float("nan"))
