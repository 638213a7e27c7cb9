"""Candidates that a run kept: judged again without their patch, and refused where they are not what is asked for."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from convergence import border
from convergence.arms.quantities import GRADIENT
from convergence.case import Case, inputs, prove, train_case
from convergence.elsewhere.candidates import SUFFIX
from convergence.elsewhere.options import origin_at
from convergence.files import Unusable
from convergence.op.memory import deterministic
from convergence.report.records import load_folder
from tests.elsewhere_patches import MODULE, PATCH, write_patch
from tests.suite import suite

CASE = Case("llama-tied", "float32", PATCH, "plain", "cpu")
OPTIONS = ("--models", "llama-tied", "--dtypes", "float32", "--profile", "plain", "--device", "cpu", "--patch", PATCH)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that kept its candidate, and its record."""
    folder = tmp_path_factory.mktemp("run")
    there = write_patch(folder / "there")
    options = ("--candidate-from", str(there), "--keep-candidates", str(folder / "kept"))
    with deterministic(True):  # as in every test, which shares truth and baseline with this run
        assert suite(*OPTIONS, *options, "--records", str(folder / "records")) == 0
    return folder


@pytest.fixture
def kept(run: Path, tmp_path: Path) -> Path:
    """A copy of what was kept."""
    return Path(shutil.copytree(run / "kept", tmp_path / "kept"))


def change(folder: Path, **fields: Any) -> None:
    (file,) = folder.glob(f"*{SUFFIX}")
    data = json.loads(file.read_text(encoding="utf-8"))
    case = {**data["case"], **fields.pop("case", {})}
    file.write_text(json.dumps({**data, **fields, "case": case}), encoding="utf-8")


def scale(folder: Path) -> None:
    """Make one gradient of the candidate 1.01 times as large, with the digest of that."""
    (file,) = folder.glob("*.safetensors")
    candidate = border.loads(bytearray(file.read_bytes()))
    quantity = next(quantity for quantity in candidate.trajectory.values if quantity.kind == GRADIENT)
    for value in candidate.trajectory.values[quantity].values():
        value *= 1.01
    data = border.dumps(candidate)
    file.write_bytes(data)
    change(folder, digest=hashlib.sha256(data).hexdigest())


@pytest.mark.slow
def test_a_kept_candidate_is_judged_without_its_patch(run: Path, tmp_path: Path) -> None:
    """The patch cannot be imported here. Bits, statistics and the record's versions are those of the first run."""
    assert suite(*OPTIONS, "--candidate-from", str(run / "kept"), "--records", str(tmp_path)) == 0
    (first,), (again,) = load_folder(run / "records"), load_folder(tmp_path)
    assert (first.statistics, first.digests, first.census) == (again.statistics, again.digests, again.census)
    assert again.versions["candidate from"] == str(run / "kept")
    (file,) = (run / "kept").glob(f"*{SUFFIX}")
    versions = json.loads(file.read_text(encoding="utf-8"))["versions"]
    assert versions["torch"] == first.versions["torch"]
    assert f"{MODULE}.py" not in str(versions)


def test_a_wrong_kept_candidate_is_different_and_not_blamed(kept: Path) -> None:
    scale(kept)
    outcome = prove(CASE, origin=origin_at(str(kept), [CASE]))
    assert (outcome.verdict, outcome.blame) == ("different", [])
    assert "gain" in {failure.finding for failure in outcome.failures}
    assert "who did it was not searched: the candidate was kept by another run" in outcome.notes[-1]


@pytest.mark.parametrize(
    ("change_of", "shown"),
    [
        ({"case": {"seed": 7}}, "no candidate of llama-tied/float32/patch is kept there; the nearest has seed 7"),
        ({"case": {"profile": "hard"}}, "the nearest has profile hard (here plain)"),
        ({"case": {"model": "gemma", "dtype": "bfloat16"}}, "model gemma (here llama-tied), dtype bfloat16"),
        ({"schema": 1}, "field 'schema' is 1 (int); allowed is"),
        ({"versions": []}, "versions"),
        ({"file": "../elsewhere.safetensors"}, "allowed is a name in the same folder"),
        ({"inputs": "0" * 64}, "was trained on other inputs (digest 000000000000, here"),
        ({"digest": "0" * 64}, "is not what was kept: its digest changed"),
        ({"file": "missing.safetensors"}, "cannot be read"),
    ],
)
def test_what_was_kept_for_something_else_is_refused(change_of: dict[str, Any], shown: str, kept: Path) -> None:
    change(kept, **change_of)
    with pytest.raises(Unusable) as caught:
        origin_at(str(kept), [CASE]).candidate(train_case, CASE, inputs("llama-tied", "float32", "plain", 0), 60)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"no plain data", "was kept by another version of the proof"),
        (border.dumps([1]), "holds a list; allowed is a candidate"),
    ],
)
def test_data_that_is_no_candidate_is_refused(data: bytes, shown: str, kept: Path) -> None:
    (file,) = kept.glob("*.safetensors")
    file.write_bytes(data)
    change(kept, digest=hashlib.sha256(data).hexdigest())
    with pytest.raises(Unusable, match=shown):
        origin_at(str(kept), [CASE]).candidate(train_case, CASE, inputs("llama-tied", "float32", "plain", 0), 60)


def test_a_changed_candidate_is_a_usage_error(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (file,) = kept.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert suite(*OPTIONS, "--candidate-from", str(kept)) == pytest.ExitCode.USAGE_ERROR
    said = "".join(capfd.readouterr())
    assert f"{file}: is not what was kept" in said
    assert "Traceback" not in said


def test_a_file_is_no_folder_to_keep_candidates_in(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert suite(*OPTIONS, "--keep-candidates", str(tmp_path / "file")) == pytest.ExitCode.USAGE_ERROR
