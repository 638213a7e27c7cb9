"""``python -m matrix incident``: what it installs, what it asks of both releases, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from matrix import __main__ as command
from matrix import cells, incidents, released, runner

FAULT = ["loss", "step 0", "raised", "TypeError: boom", ""]
OTHER = ["what the caller holds", "", "overwritten", "an output changed", ""]
INCIDENT = incidents.Incident(
    "It crashed.",
    "o/r#1",
    "tf4.49-trl0.15",
    "liger-kernel==0.1",
    "liger-kernel==0.2 trl==0.14.0",
    "convergence",
    "boom",
    "",
)


@pytest.fixture
def runs(monkeypatch: Any) -> list[Any]:
    """What each environment is made of; what runs in it leaves the record that a test puts into ``records``."""
    made: list[Any] = []

    def tox(chosen: Any, jobs: int, options: list[str], folder: Path, **variables: str) -> int:
        made.append((options[:-2], Path(variables["MATRIX_REQUIREMENTS"]).read_text().split()))
        if (failures := runs_of.pop(0)) is not None:
            place = Path(options[-1])
            place.mkdir(parents=True)
            data = {"verdict": "different" if failures else "equal", "failures": failures}
            (place / "case.json").write_text(json.dumps(data))
        return 0

    monkeypatch.setattr(runner, "tox", tox)
    monkeypatch.setattr(incidents, "INCIDENTS", {"crash": INCIDENT})
    return made


runs_of: list[Any] = []


def incident(tmp_path: Path, *failures: Any) -> int:
    runs_of[:] = failures
    return command.main(["--records", str(tmp_path), "incident", "crash"])


def test_both_releases_run_in_the_cell_of_that_day(tmp_path: Path, runs: list[Any]) -> None:
    assert incident(tmp_path, [FAULT], []) == 0
    (asked, faulty), (_, fixed) = runs
    assert asked == ["convergence"]
    pins = cells.load_all()["tf4.49-trl0.15"].pins
    assert {"liger-kernel==0.1", "trl==0.15.2"} <= {*faulty}
    assert {"liger-kernel==0.2", "trl==0.14.0"} <= {*fixed}
    assert len(faulty) == len(fixed) == len(pins) + 1


@pytest.mark.parametrize(
    ("faulty", "fixed"),
    [([], []), ([OTHER], []), ([FAULT], [FAULT]), ([FAULT], [OTHER])],
    ids=["no fault", "another fault", "not fixed", "fixed has another fault"],
)
def test_what_is_not_as_users_reported_fails(faulty: Any, fixed: Any, tmp_path: Path, runs: list[Any]) -> None:
    assert incident(tmp_path, faulty, fixed) == 1


def test_a_fault_that_remains_is_named(tmp_path: Path, runs: list[Any], monkeypatch: Any) -> None:
    row = incidents.Incident(**{**vars(INCIDENT), "remains": ("another", "overwritten")})
    monkeypatch.setattr(incidents, "INCIDENTS", {"crash": row})
    assert incident(tmp_path, [FAULT, OTHER], [OTHER]) == 0
    page = "\n".join(incidents.page(tmp_path))
    assert "TypeError: boom" in page
    assert "an output changed" in page


def test_no_record_is_an_error(tmp_path: Path, runs: list[Any], capsys: Any) -> None:
    assert incident(tmp_path, None) == 2
    assert "no record: the environment could not be made" in capsys.readouterr().err


def test_an_unknown_incident_is_refused(runs: list[Any], capsys: Any) -> None:
    assert command.main(["incident", "flood"]) == 2
    assert "unknown incident flood; allowed are crash" in capsys.readouterr().err
    assert command.main(["incident"]) == 0
    assert "It crashed." in capsys.readouterr().out


def test_a_release_counts_the_targets_of_packed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function alone is imported, and gets the lengths of a row's samples, which the model does not get."""
    folder = tmp_path / "unsloth_zoo"
    (folder / "temporary_patches").mkdir(parents=True)
    for init in (folder / "__init__.py", folder / "temporary_patches" / "__init__.py", folder / "device_type.py"):
        init.write_text("raise NotImplementedError('a GPU is needed')")
    (folder / "temporary_patches" / "common.py").write_text("from ..device_type import DEVICE_TYPE")
    (folder / "loss_utils.py").write_text(
        "from .temporary_patches.common import DEVICE_TYPE\n"
        "def _unsloth_get_batch_samples(trainer, batches, number, device=None):\n"
        "    found = [next(batches) for _ in range(number)]\n"
        "    return found, [batch['packed_seq_lengths'].tolist() for batch in found]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(transformers.Trainer, "get_batch_samples", None)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "unsloth_zoo"}
    try:
        released.count_of_packed_rows(None)
        batches = iter([{"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]])}] * 2)
        samples, counted = transformers.Trainer.get_batch_samples(None, batches, 2, None)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "unsloth_zoo"]:
            del sys.modules[name]
        sys.modules.update(before)
    assert counted == [[3, 1, 2]] * 2
    assert [list(sample) for sample in samples] == [["position_ids"]] * 2


def test_every_incident_has_a_cell_and_exact_releases() -> None:
    for name, row in incidents.INCIDENTS.items():
        for installed in (row.faulty, row.fixed):
            assert installed.startswith(("liger-kernel==", "unsloth_zoo==")), name
            assert incidents.requirements_of(row.cell, installed)
