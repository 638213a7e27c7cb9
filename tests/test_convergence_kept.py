"""Truth, baseline and replicas of an earlier run: found again by what decides them, and by nothing of a patch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from convergence import border, case, kept
from convergence.files import Unusable
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


@pytest.mark.slow
def test_a_second_run_trains_the_candidate_only(tmp_path: Path, trained: list[str]) -> None:
    options = (*CASE, "--references", str(tmp_path))
    assert suite(*options, "--patch", "tests.convergence_faults:honest") == 0
    first, trained[:] = [*trained], []
    assert len(first) == 2 * 6 + 1
    case.references.cache_clear()
    assert suite(*options, "--patch", "tests.convergence_faults:one_gradient_scaled") == 1
    assert trained == ["candidate"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "is damaged"), (b"no plain data", "is damaged"), (border.dumps({"no": "references"}), "holds a dict")],
)
def test_a_damaged_file_is_a_usage_error_that_names_it(
    content: bytes, problem: str, tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(kept, "_name", lambda key, decides: f"{'-'.join(key)}-damaged.safetensors")
    file = tmp_path / "llama-tied-float32-plain-cpu-0-damaged.safetensors"
    file.write_bytes(content)
    options = (*CASE, "--references", str(tmp_path), "--patch", "convergence.patches:fused_cross_entropy")
    assert suite(*options) == pytest.ExitCode.USAGE_ERROR
    said = "".join(capfd.readouterr())
    assert f"{file}: {problem}" in said
    assert "delete it, and it is made anew" in said
    assert "Traceback" not in said
    assert trained == []


def test_what_decides_a_bit_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(len(made))
        return made[-1:]

    def found(**decides: str) -> list[int]:
        return kept.kept(("llama", "float32"), decides, make)

    with keep_in(tmp_path, {}):
        assert [found(torch=of) for of in ("2.13", "2.13", "2.14", "2.13")] == [[0], [0], [1], [0]]
        monkeypatch.setattr(kept, "_sources", lambda: "another proof")
        assert found(torch="2.13") == [2]


def numbers() -> list[Any]:
    """What is kept, and thousands of it."""
    return [torch.arange(10_000)]


def test_to_another_process_goes_the_file_that_is_kept(tmp_path: Path) -> None:
    with keep_in(tmp_path, {}):
        made, found = (kept.kept(("numbers",), {}, numbers) for _ in range(2))
    sent = pickle.dumps(found)
    assert len(sent) < 1000 < len(pickle.dumps(numbers()))
    for one in (made, found, pickle.loads(sent), pickle.loads(pickle.dumps(made))):
        assert torch.equal(one[0], torch.arange(10_000))


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    with keep_in(tmp_path, {}):
        found = kept.kept(("numbers",), {}, numbers)
        (file,) = tmp_path.glob("*.safetensors")
        content = border.dumps([torch.zeros(10_000)])
        with file.open("r+b") as opened:
            opened.write(content)
        assert torch.equal(found[0], torch.arange(10_000))
        with pytest.raises(Unusable, match="has changed since this run began; delete it"):
            kept.kept(("numbers",), {}, numbers)


def test_what_another_process_made_since_the_run_began_is_not_read(tmp_path: Path) -> None:
    with keep_in(tmp_path, {}):
        kept.kept(("numbers",), {}, numbers)
    before = kept.digests(tmp_path, [("numbers",)])
    made: list[Any] = []
    for known, again in (({}, 1), (before, 1)):
        with keep_in(tmp_path, known):
            kept.kept(("numbers",), {}, lambda: made.append(1) or made)
        assert len(made) == again
    assert kept.digests(tmp_path, [("other",)]) == {}


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert suite(*CASE, "--references", str(tmp_path / "file")) == 4
