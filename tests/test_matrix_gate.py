"""The gate on synthetic records: each thing that must fail it does so by name, and noise does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from matrix import __main__ as command
from matrix import baseline, cells, gate, records, runner
from matrix.baseline import Baseline
from matrix.cells import Cell
from matrix.code import Code
from matrix.records import CaseVerdict, CellRecord, StageResult
from matrix.repository import config

CELL = Cell("tf9.9-trl9.9", "for this test", {}, "versions", "0123")
CODE = "c0de"
WORST = {"error ratio": {"value": 1.2, "bound": 2.4, "quantity": "loss", "step": "1"}}
KERNELS = {
    "device": "GPU",
    "rows": [{"op": "rope", "shape": "4x8", "ours_ms": 1.0, "spread_ms": 0.01, "ours_mib": 100.0}],
}


def stage(name: str) -> StageResult:
    finding = CaseVerdict("equal", "", copy.deepcopy(WORST), {"rms_norm": 5}, {"_rms_norm_fwd_kernel": 9})
    finding.shares = {"norms": 0.9}
    return StageResult(name, ["python"], "passed", passed=[f"{name}::a", f"{name}::b"], findings={"llama": finding})


def record(cell: Cell) -> CellRecord:
    """A whole record: every stage that the configuration gives the cell has run."""
    machine = {"cpus": "2", "gpu": "none", "platform": "Linux", "python": "3.11"}
    environment = {"transformers": "9.9.0", "trl": "9.9.9"}
    stages = [stage(one.name) for one in config.here().stages[cell.kind]]
    at = "2026-11-21T00:00:00+00:00"
    return CellRecord(cell.name, cell.digest, CODE, "abc", environment, machine, at, [], stages, True)


Gate = Callable[..., dict[str, Any]]


def run(folder: Path, *options: str) -> int:
    return command.main(["--records", str(folder / "records"), "gate", "--no-run", "--output", str(folder), *options])


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gate.json").read_text())
    return found


def failures(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["kind"], row["name"]) for row in found["differences"] if not row["note"]]


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """``decide(break)``: the gate's result for records that were accepted and then changed by ``break(records)``."""
    monkeypatch.setattr(runner, "code_digest", lambda: CODE)
    monkeypatch.setattr(cells, "load_all", lambda: {CELL.name: CELL})
    monkeypatch.setattr(gate, "git_user", lambda: "Somebody <some@body>")
    monkeypatch.setattr(baseline.load, "__defaults__", (tmp_path / "baseline.json",))
    monkeypatch.setattr(baseline.save, "__defaults__", (tmp_path / "baseline.json",))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "records"

    def decide(
        change: Callable[[CellRecord], None] = lambda record: None,
        kernels: dict[str, Any] | None = None,
        then: dict[str, Any] | None = None,
        options: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        both = [record(cells.in_place()["project"]), record(CELL)]
        for one in both:
            records.write(one, folder)
        before, after = tmp_path / "before.json", tmp_path / "after.json"
        before.write_text(json.dumps(kernels))
        after.write_text(json.dumps(then))
        assert run(tmp_path, "--accept", "the first", *(("--kernels", str(before)) if kernels else ())) == 0
        change(both[1])
        records.write(both[1], folder)
        code = run(tmp_path, *(("--kernels", str(after)) if then else ()), *options)
        found = result(tmp_path)
        assert code == (0 if found["verdict"] == "pass" else 1)
        return found

    return decide


def test_the_same_records_pass(decide: Gate, tmp_path: Path) -> None:
    found = decide()
    assert (found["verdict"], found["differences"]) == ("pass", [])
    assert "## Release gate: pass" in (tmp_path / "gate.md").read_text()


def test_a_record_under_the_name_of_another_cell_is_named(
    decide: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells without a requirement file have no digest that would tell."""
    decide()
    folder = tmp_path / "records"
    (folder / "two-gpus-gpu.json").write_text((folder / "project.json").read_text())
    assert run(tmp_path) == 2
    assert "two-gpus-gpu.json: is the record 'project' (str)" in capsys.readouterr().err


def fail_case(record: CellRecord) -> None:
    last = record.stages[1]
    last.status, last.passed, last.failed = "failed", ["convergence::a"], {"convergence::b": "the reason"}


def lose_case(record: CellRecord) -> None:
    record.stages[1].passed.remove("convergence::b")


def shrink_census(record: CellRecord) -> None:
    record.stages[0].findings["llama"].census["rms_norm"] = 4


def grow_error(record: CellRecord) -> None:
    record.stages[1].findings["llama"].statistics["error ratio"]["value"] = 1.8


def run_nothing(record: CellRecord) -> None:
    last = record.stages[1]
    last.status, last.passed, last.findings = "nothing ran", [], {}


def stop_early(record: CellRecord) -> None:
    record.complete = False
    record.stages.pop()


def lose_stage(record: CellRecord) -> None:
    """And still say that the record is complete, and of this code."""
    record.stages.pop()


def put(*path: Any, **values: Any) -> Callable[[CellRecord], None]:
    """Set attributes of what lies at ``path`` in a record."""

    def change(record: CellRecord) -> None:
        at: Any = record
        for part in path:
            at = at[part] if isinstance(at, (list, dict)) else getattr(at, part)
        vars(at).update(values)

    return change


FOUND = "findings", "llama"
change_code = put(code="other")


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (fail_case, "failed case", "convergence::b"),
        (
            put("stages", 1, passed=["convergence::a"], skipped={"convergence::b": "x"}),
            "skipped case",
            "convergence::b",
        ),
        (lose_case, "missing case", "convergence::b"),
        (put("stages", 1, *FOUND, verdict="different"), "failed verdict", "llama"),
        (put("stages", 1, findings={}), "missing verdict", "llama"),
        (put("stages", 1, *FOUND, verdict="absent"), "absent verdict", "llama"),
        (put("stages", 1, *FOUND, verdict="upstream leaks"), "changed verdict", "llama"),
        # A flag that is refused as it should be is no failure, but a change where it was not refused before.
        (put("stages", 1, *FOUND, verdict="not provided"), "changed verdict", "llama"),
        (shrink_census, "smaller census", "llama"),
        (put("stages", 0, *FOUND, shares={"norms": 0.8999}), "smaller share", "llama"),
        (put("stages", 0, *FOUND, shares={}), "smaller share", "llama"),
        (put("stages", 0, *FOUND, launches={}), "kernel not launched", "llama"),
        (put("stages", 0, *FOUND, fallbacks={"somebody reads the logits": 1}), "new fallback", "llama"),
        (grow_error, "grown error", "llama"),
        (put("stages", 1, *FOUND, statistics={}), "missing statistic", "llama"),
        (run_nothing, "nothing ran", "convergence"),
        (stop_early, "partial record", CELL.name),
        (lose_stage, "stale record", CELL.name),
        (change_code, "stale record", CELL.name),
        (put(digest="other"), "stale record", CELL.name),
        (put(deviations=["torch is 2.12.0 instead of 2.13.0"]), "not the cell's environment", "torch"),
        (put("stages", 1, status="failed", reason="killed after 3600 s"), "failed stage", "convergence"),
    ],
)
def test_what_is_worse_fails_by_name(
    change: Callable[[CellRecord], None], kind: str, name: str, decide: Gate, tmp_path: Path
) -> None:
    found = decide(change)
    assert found["verdict"] == "fail"
    assert (kind, name) in failures(found)
    assert f"{kind}: {name}" in (tmp_path / "gate.md").read_text()


@pytest.mark.parametrize("change", ["nothing", "code of a stage", "a stage is new", "only a stage is new"])
def test_a_record_is_of_today_where_each_stage_runs_what_it_ran(
    change: str, decide: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else changed: the digest of all source is another one, or, with "only", the same."""
    sources, kinds = Code(), config.here().stages
    every = kinds["versions"]

    def allow(*names: str) -> None:
        monkeypatch.setitem(kinds, "versions", tuple(stage for stage in every if stage.name in names))

    def of_other_source(record: CellRecord) -> None:
        record.code = CODE if change.startswith("only") else "other"
        for result in record.stages:
            result.code = next(sources.digest(s, on_gpu=False) for s in kinds["versions"] if s.name == result.name)
        if change == "code of a stage":
            record.stages[1].code = "other"
        if change.endswith("a stage is new"):
            allow("models", "convergence", "packing")

    allow("models", "convergence")
    found = decide(of_other_source)
    assert failures(found) == ([] if change == "nothing" else [("stale record", CELL.name)])
    which = {"nothing": [], "code of a stage": ["convergence"]}.get(change, ["packing"])
    details = [f"it is of other code in {name}; run the cell again" for name in which]
    assert [row["detail"] for row in found["differences"] if row["kind"] == "stale record"] == details


@pytest.mark.parametrize(
    ("lose", "failure"),
    [
        (lambda folder, patch: (folder / "records" / f"{CELL.name}.json").unlink(), ("missing record", CELL.name)),
        (lambda folder, patch: patch.setattr(cells, "load_all", dict), ("missing cell", CELL.name)),
        (lambda folder, patch: (folder / "baseline.json").unlink(), ("no baseline", "baseline.json")),
    ],
    ids=["record", "cell", "baseline"],
)
def test_what_is_not_there_fails(
    lose: Callable[..., None],
    failure: tuple[str, str],
    decide: Gate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide()
    lose(tmp_path, monkeypatch)
    assert run(tmp_path) == 1
    assert failures(result(tmp_path)) == [failure]


def test_a_cell_that_is_new_is_said(decide: Gate, tmp_path: Path) -> None:
    decide()
    accepted = json.loads((tmp_path / "baseline.json").read_text())
    del accepted["cells"][CELL.name]
    (tmp_path / "baseline.json").write_text(json.dumps(accepted))
    assert run(tmp_path) == 0
    (difference,) = result(tmp_path)["differences"]
    assert (difference["kind"], difference["name"], difference["note"]) == ("new cell", CELL.name, True)


@pytest.mark.parametrize(("value", "fails"), [(1.2, False), (1.6, False), (1.7, True), ("nan", True), ("inf", True)])
def test_an_error_grows_beyond_noise(value: float | str, fails: bool) -> None:
    assert baseline.grown(WORST["error ratio"], {**WORST["error ratio"], "value": value}) is fails


def test_an_error_below_what_replicas_have_is_noise() -> None:
    small = {"value": 0.0, "bound": 1.0, "quantity": "loss", "step": "1"}
    assert not baseline.grown(small, {**small, "value": 0.5})
    assert baseline.grown(small, {**small, "value": 0.51})


def moved(**changes: Any) -> dict[str, Any]:
    return {**KERNELS, "rows": [{**KERNELS["rows"][0], **changes}]}


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        (moved(), None),
        (moved(ours_ms=1.06), None),
        (moved(ours_ms=1.08), "slower kernel"),
        (moved(ours_ms=0.5), None),
        (moved(ours_ms=float("nan")), "slower kernel"),
        (moved(ours_mib=101.0), None),
        (moved(ours_mib=103.0), "bigger kernel"),
        ({**KERNELS, "rows": [{**KERNELS["rows"][0], "op": "other"}]}, "missing kernel"),
        ({**KERNELS, "device": "another GPU"}, "other machine"),
    ],
)
def test_kernels(then: dict[str, Any], kind: str | None, decide: Gate) -> None:
    assert [found for found, _ in failures(decide(kernels=KERNELS, then=then))] == ([kind] if kind else [])


def test_kernels_that_were_not_measured_fail_unless_that_is_said(decide: Gate) -> None:
    assert failures(decide(kernels=KERNELS)) == [("not measured", "every kernel")]
    found = decide(kernels=KERNELS, options=("--without-gpu",))
    assert (found["verdict"], [row["kind"] for row in found["differences"]]) == ("pass", ["not measured"])


def on_gpu(name: str, cell: Cell = CELL) -> CellRecord:
    one = record(cell)
    one.machine["gpu"] = name
    return one


def test_a_record_of_a_gpu_is_judged_like_any_other(decide: Gate, tmp_path: Path) -> None:
    def change(one: CellRecord) -> None:
        records.write(broken, tmp_path / "records")

    broken = on_gpu("GPU")
    records.write(broken, tmp_path / "records")
    fail_case(broken)
    assert {kind for kind, _ in failures(decide(change))} == {"failed case"}


@pytest.mark.parametrize("name", [None, "another GPU"])
def test_a_gpu_of_the_baseline_must_be_there(name: str | None, decide: Gate, tmp_path: Path) -> None:
    def change(one: CellRecord) -> None:
        (tmp_path / "records" / f"{CELL.name}-gpu.json").unlink()
        if name:
            records.write(on_gpu(name), tmp_path / "records")

    records.write(on_gpu("GPU"), tmp_path / "records")
    expected = "other machine" if name else "not measured"
    assert failures(decide(change)) == [(expected, f"{CELL.name}-gpu")]
    if not name:
        assert run(tmp_path, "--without-gpu") == 0


@pytest.mark.parametrize(
    ("changes", "notes", "expected"),
    [
        ((lose_case, shrink_census), {"upstream moved", "missing case", "smaller census"}, set()),
        ((fail_case, grow_error), {"upstream moved"}, {"failed case", "grown error"}),
    ],
    ids=["missing", "worse"],
)
def test_where_upstream_moved_what_is_missing_is_a_note(
    changes: tuple[Callable[[CellRecord], None], ...], notes: set[str], expected: set[str], decide: Gate
) -> None:
    def change(record: CellRecord) -> None:
        record.environment["transformers"] = "9.10.0"
        for worsen in changes:
            worsen(record)

    found = decide(change)
    assert {row["kind"] for row in found["differences"] if row["note"]} == notes
    assert {kind for kind, _ in failures(found)} == expected


def test_accepting_notes_who_what_why_when(decide: Gate, tmp_path: Path) -> None:
    decide(shrink_census)
    assert run(tmp_path, "--accept", "one norm less is right") == 0
    first, second = json.loads((tmp_path / "baseline.json").read_text())["history"]
    assert (first["why"], second["why"]) == ("the first", "one norm less is right")
    assert second["who"] == "Somebody <some@body>"
    assert second["when"].startswith("20")
    assert second["what"] == [f"{CELL.name} models: smaller census: llama: rms_norm: 4 instead of 5"]
    assert run(tmp_path) == 0


@pytest.mark.parametrize("change", [fail_case, stop_early, lose_stage, run_nothing, change_code])
def test_broken_records_cannot_be_accepted(
    change: Callable[[CellRecord], None], decide: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(change)
    before = (tmp_path / "baseline.json").read_text()
    assert run(tmp_path, "--accept", "anyway") == 2
    assert "wrong with the records themselves" in capsys.readouterr().err
    assert (tmp_path / "baseline.json").read_text() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--accept", " "), "--accept takes the reason"),
        (("--kernels", "x.json", "--without-gpu"), "exclude each other"),
        (("--kernels", "nowhere.json"), "cannot be read"),
        (("--cells", "tf9"), "unknown cell tf9; allowed are tf9.9-trl9.9, project, two-gpus"),
    ],
)
def test_bad_options(options: tuple[str, ...], message: str, decide: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["gate", "--no-run", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_cell_that_needs_gpus_is_judged_and_accepted_by_itself(decide: Gate, tmp_path: Path) -> None:
    decide()
    alone = ("--cells", "two-gpus")
    assert run(tmp_path, *alone) == 1  # it has not run
    assert failures(result(tmp_path)) == [("missing record", "two-gpus-gpu")]
    two = on_gpu("NVIDIA H100", cells.in_place()["two-gpus"])
    records.write(two, tmp_path / "records")
    assert run(tmp_path, *alone, "--accept", "two GPUs are there now") == 0
    assert set(json.loads((tmp_path / "baseline.json").read_text())["cells"]) == {"project", CELL.name, "two-gpus-gpu"}
    assert run(tmp_path) == 0  # with all others
    two.stages[0].passed.remove("setups::b")
    records.write(two, tmp_path / "records")
    assert run(tmp_path, *alone) == 1
    (tmp_path / "records" / "two-gpus-gpu.json").unlink()
    assert run(tmp_path) == 1
    assert failures(result(tmp_path)) == [("not measured", "two-gpus-gpu")]
    assert run(tmp_path, "--without-gpu") == 0


def test_a_baseline_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baseline.save(Baseline({CELL.name: record(CELL)}, KERNELS, [{"why": "so"}]), path)
    loaded = baseline.load(path)
    assert loaded == Baseline({CELL.name: record(CELL)}, KERNELS, [{"why": "so"}])
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="is no baseline of schema 1"):
        baseline.load(path)


def test_the_accepted_baseline_was_all_right() -> None:
    """Whether it has every cell of today, the gate says: these tests are among what it runs before it can accept."""
    accepted = baseline.load()
    assert accepted is not None
    assert "project" in accepted.cells
    assert all(record.passed for record in accepted.cells.values())
    assert all(accepted.history[-1][key] for key in ("who", "when", "why", "commit"))


def test_the_gate_runs_everything_first(decide: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide()
    ran: list[str] = []
    monkeypatch.setattr(runner, "run_stages", lambda cell, *_: ran.append(cell.name))
    monkeypatch.setattr(runner, "tox", lambda chosen, *_: ran.extend(cell.name for cell in chosen))
    assert command.main(["--records", str(tmp_path / "records"), "gate", "--output", str(tmp_path)]) == 0
    assert ran == ["project", CELL.name]
