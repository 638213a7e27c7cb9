"""Cells as tasks of Ray: a cluster of two nodes on this machine, one of which dies."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from matrix import __main__ as command
from matrix import cluster, records, runner
from matrix.cells import Cell
from matrix.records import CellRecord, StageResult
from matrix.repository import config

ray = pytest.importorskip("ray", reason="Ray is an optional extra")
pytest.importorskip("ray.cluster_utils", reason="this Ray is installed without its test cluster")
STAGES = [stage.name for stage in config.here().stages["versions"]]


def a_cell(notes: Path, name: str = "tf1.0-trl1.0", deaths: int = 0) -> Cell:
    """What its stand-in notes goes to ``notes``; in its first ``deaths`` runs it waits for its end."""
    return Cell(name, str(notes), {"deaths": str(deaths)}, "versions", "digest")


def in_steps(cell: Cell, options: list[str], folder: Path) -> None:
    """Stands in for tox: a record that grows stage by stage, and after the first of them a note of the node."""
    import ray

    record = CellRecord(cell.name, cell.digest, runner.code_digest(), "", {}, {"gpu": "none"}, "today")
    for stage in STAGES:
        record.stages.append(StageResult(stage, [], "passed", passed=["a"]))
        record.complete = stage == STAGES[-1]
        records.write(record, folder)
        if stage == STAGES[0]:
            with open(cell.why, "a+") as notes:
                notes.write(f"{ray.get_runtime_context().get_node_id()}\n")
                notes.seek(0)
                starts = len(notes.readlines())
            if starts <= int(cell.pins["deaths"]):
                time.sleep(600)


def of_other_code(cell: Cell, options: list[str], folder: Path) -> None:
    records.write(CellRecord(cell.name, cell.digest, "other", "", {}, {"gpu": "none"}, "today", complete=True), folder)


def half(cell: Cell, options: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{cell.name}.json").write_text('{"schema": 1, "cell":')


def nothing(cell: Cell, options: list[str], folder: Path) -> None:
    """An environment that could not be made."""


NO_WHOLE_RECORD = (of_other_code, half, nothing)


def not_whole(cell: Cell, options: list[str], folder: Path) -> None:
    """The one of :data:`NO_WHOLE_RECORD` that the notes of ``cell`` are named after."""
    (how,) = (how for how in NO_WHOLE_RECORD if how.__name__ == Path(cell.why).name)
    how(cell, options, folder)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without CPUs, which soon notices that a node is dead: a dead one refuses at once, a slow one has time."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    checks = {"initial_delay_ms": 0, "period_ms": 300, "timeout_ms": 20_000, "failure_threshold": 3}
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "_system_config": {f"health_check_{name}": value for name, value in checks.items()},
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


@pytest.fixture
def two(nodes: Any) -> list[Any]:
    """Two nodes of one CPU each: those of the test before, as far as they live."""
    while len(nodes.worker_nodes) < 2:
        nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    return [*nodes.worker_nodes]


def run(nodes: Any, cells: list[Cell], folder: Path, **options: Any) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    failures = cluster.run(cells, nodes.address, folder, **{"how": in_steps, "say": said.append, **options})
    return failures, said


@contextlib.contextmanager
def killed(nodes: Any, alive: list[Any], cell: Cell) -> Iterator[None]:
    """Inside, each node on which ``cell`` waits for its end is killed, in the middle of it."""
    over = threading.Event()

    def work() -> None:
        for death in range(int(cell.pins["deaths"])):
            while len(lines := Path(cell.why).read_text().split() if Path(cell.why).exists() else []) <= death:
                if over.wait(0.05):  # the cell never came that far
                    return
            (node,) = [node for node in alive if node.node_id == lines[death]]
            nodes.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_what_is_no_whole_record_does_not_count(nodes: Any, two: list[Any], tmp_path: Path) -> None:
    names = {how.__name__: f"tf{i}.0-trl1.0" for i, how in enumerate(NO_WHOLE_RECORD)}
    cells = [a_cell(tmp_path / how, name) for how, name in names.items()]
    failures, _ = run(nodes, cells, tmp_path / "records", how=not_whole)
    assert "its record is of other code or of another cell file" in failures[names["of_other_code"]]
    assert "cannot be read as JSON" in failures[names["half"]]
    assert "its environment could not be made, or nothing ran in it" in failures[names["nothing"]]
    assert list((tmp_path / "records").glob("*.json")) == []


def test_a_node_of_other_code_is_refused(nodes: Any, two: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(runner, "code_digest", lambda *_: "of the driver")
    failures, _ = run(nodes, [a_cell(tmp_path / "notes")], tmp_path / "records")
    assert "than the driver (of the driver)" in failures["tf1.0-trl1.0"]
    assert not (tmp_path / "notes").exists()


def test_a_cell_whose_node_dies_runs_again_on_another(nodes: Any, two: list[Any], tmp_path: Path) -> None:
    first, second = a_cell(tmp_path / "first", deaths=1), a_cell(tmp_path / "second", "tf2.0-trl2.0")
    with killed(nodes, two, first):
        failures, said = run(nodes, [first, second], tmp_path / "records")
    assert failures == {}
    assert f"{first.name}: its node died; it runs again" in said
    starts = (tmp_path / "first").read_text().split()
    assert len(starts) == 2
    assert starts[0] != starts[1]
    for cell in (first, second):
        record = records.load(tmp_path / "records" / f"{cell.name}.json")
        assert (record.complete, [stage.name for stage in record.stages]) == (True, [*STAGES])
    again, said = run(nodes, [first, second], tmp_path / "records")  # it resumes
    assert again == {}
    assert said == [f"{cell.name}: kept, it passed with this code" for cell in (first, second)]


def test_a_cell_without_a_node_left_has_no_record(
    nodes: Any, two: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PATIENCE", 2.0)
    cell = a_cell(tmp_path / "notes", deaths=2)
    record = CellRecord(cell.name, cell.digest, "earlier", "", {}, {"gpu": "none"}, "today", complete=True)
    records.write(record, tmp_path / "records")
    with killed(nodes, two, cell):
        failures, _ = run(nodes, [cell], tmp_path / "records")
    assert failures == {cell.name: "no node has 1 CPUs and 0 GPUs"}
    assert list((tmp_path / "records").iterdir()) == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://127.0.0.1:1"])
def test_a_wrong_address_is_refused(address: str, tmp_path: Path, capsys: Any) -> None:
    assert command.main(["--records", str(tmp_path), "run", "latest", "--ray", address]) == 2
    assert f"--ray {address}: no cluster answers there" in capsys.readouterr().err


def test_a_node_without_tox_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="has no tox and no tox_uv: pip install tox tox-uv there"):
        cluster.with_tox(a_cell(tmp_path), [], tmp_path)
