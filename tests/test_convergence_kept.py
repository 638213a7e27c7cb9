"""Truth, baseline and replicas of an earlier run: found again by what decides them, and by nothing of a patch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from convergence import case, kept
from convergence.kept import keep_in
from tests.suite import suite

CASE = ("--models", "llama-tied", "--dtypes", "float32", "--profile", "plain", "--no-blame", "--device", "cpu")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arms that are trained."""
    arms: list[str] = []
    monkeypatch.setattr(case.progress, "begin", arms.append)
    case.references.cache_clear()
    return arms


def test_a_second_run_trains_the_candidate_only(tmp_path: Path, trained: list[str]) -> None:
    options = (*CASE, "--references", str(tmp_path))
    assert suite(*options, "--patch", "convergence.patches:fused_cross_entropy") == 0
    first, trained[:] = [*trained], []
    assert len(first) == 2 * 6 + 1
    case.references.cache_clear()
    assert suite(*options, "--patch", "tests.convergence_faults:one_gradient_scaled") == 1
    assert trained == ["candidate"]


@pytest.mark.parametrize("content", [b"", b"no pickle", {"no": "references"}])
def test_a_damaged_file_is_a_usage_error_that_names_it(
    content: Any, tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def make(file: Path, _: Any) -> None:
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)

    monkeypatch.setattr(kept.files, "make_once", make)
    options = (*CASE, "--references", str(tmp_path), "--patch", "convergence.patches:fused_cross_entropy")
    assert suite(*options) == pytest.ExitCode.USAGE_ERROR
    said = "".join(capfd.readouterr())
    assert f"{next(tmp_path.glob('*.pt'))}: " in said
    assert "delete it, and it is made anew" in said
    assert "Traceback" not in said
    assert trained == []


def test_what_decides_a_bit_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    def found(**decides: str) -> int:
        return kept.kept(("llama", "float32"), decides, make)

    with keep_in(tmp_path):
        assert [found(torch="2.13"), found(torch="2.13"), found(torch="2.14"), found(torch="2.13")] == [0, 0, 1, 0]
        monkeypatch.setattr(kept, "_sources", lambda: "another proof")
        assert found(torch="2.13") == 2


class Numbers(kept.Kept):
    """What is kept, and thousands of it."""

    def __init__(self) -> None:
        self.numbers = torch.arange(10_000)


def test_to_another_process_goes_the_file_that_is_kept(tmp_path: Path) -> None:
    with keep_in(tmp_path):
        found = kept.kept(("numbers",), {}, Numbers)
    sent = pickle.dumps(found)
    assert len(sent) < 1000 < len(pickle.dumps(Numbers()))
    for one in (found, pickle.loads(sent), pickle.loads(pickle.dumps(Numbers()))):
        assert torch.equal(one.numbers, torch.arange(10_000))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert suite(*CASE, "--references", str(tmp_path / "file")) == 4
