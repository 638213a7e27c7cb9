"""Kernels of other packages as patches: several in one run, their forward with a head, and the page of what they do."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from convergence import case, kept, peers
from convergence.__main__ import main
from convergence.arms.candidate import load_patch
from convergence.arms.quantities import Failure, Finding, Statistic
from convergence.models.models import MODELS
from convergence.report.records import Outcome, Record, load_folder
from tests.suite import suite
from tools.peers import page, reasons, verdict

RECORD = {"model": "llama-tied", "dtype": "float32", "profile": "hard", "device": "cpu", "seed": 0}


def plain_head(model):
    """What a package with a correct head does."""

    def loss(hidden, head, targets, reduction, softcap):
        logits = F.linear(hidden, head.weight, head.bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits.float(), targets, reduction=reduction)

    peers._with_head(model, loss)


def head_of_another_label(model):
    def loss(hidden, head, targets, reduction, softcap):
        return F.cross_entropy(F.linear(hidden, head.weight).float(), targets.roll(1), reduction=reduction)

    peers._with_head(model, loss)


@pytest.mark.slow
def test_patches_of_one_run_share_truth_and_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms: list[str] = []
    monkeypatch.setattr(case.progress, "begin", arms.append)
    monkeypatch.setattr(kept, "_folder", None)
    case.references.cache_clear()
    patches = "tests.test_peers:plain_head,tests.test_peers:head_of_another_label"
    options = ("--models", "gemma2", "--dtypes", "float32", "--profile", "plain", "--device", "cpu", "--no-blame")
    code = suite("--patch", patches, *options, "--records", str(tmp_path))
    found = {record.patch.rpartition(":")[2]: record.verdict for record in load_folder(tmp_path)}
    assert found == {"plain_head": "equal", "head_of_another_label": "different"}
    assert code == 1
    assert [arms.count(arm) for arm in ("truth", "baseline", "candidate")] == [1, 1, 2]


def test_every_peer_is_a_patch_that_refuses_or_patches() -> None:
    for name, peer in peers.PEERS.items():
        assert load_patch(name).__name__ == peer.patch
    model = MODELS["gemma2"].build(0)
    if hasattr(F, "linear_cross_entropy"):
        with pytest.raises(NotImplementedError, match="no softcap"):
            peers.torch_head(model)


def test_the_command_judges_all_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(pytest, "main", lambda options: asked.append(options) or 0)
    assert main(["peers", str(tmp_path), "--models", "llama"]) == 0
    (options,) = asked
    assert options[options.index("--patch") + 1].split(",") == [*peers.PEERS]
    assert f"--records={tmp_path}" in options
    assert options[-2:] == ["--models", "llama"]


FAILURES = {
    "numbers differ": [("loss", "initial: a", "gain", "0.1", "0.01"), ("x", "", "overwritten", "it", "")],
    "numbers right; missing, overwritten": [("x", "", "overwritten", "it", ""), ("y", "", "missing", "never", "")],
    "raises": [("candidate", "", "raised", "TypeError: | <b>", "")],
}


@pytest.mark.parametrize("said", FAILURES)
def test_the_page_says_whether_the_numbers_are_right(said: str) -> None:
    patch = "convergence.peers:trl"
    statistics = [Statistic("loss", "initial: a", "error ratio", 1.1, 2.0)]
    versions = {"trl": "1.16.0", "torch": "2"}
    record = Record(
        **RECORD,
        patch=patch,
        verdict="different",
        failures=[Failure(row[0], row[1], Finding(row[2]), *row[3:]) for row in FAILURES[said]],
        statistics=statistics,
        versions=versions,
    )
    assert verdict(record) == said
    text = page([record])
    assert f"| llama-tied | float32 | cpu | {said} | 1.1 / 2 | - |" in text
    assert "| trl's head | trl 1.16.0 | 0 |" in text
    assert "\n## unsloth" not in text
    assert "unsloth. Most kernels need a GPU." in text
    assert FAILURES[said][0][2] in reasons(record)


def test_a_page_says_what_every_peers_own_tests_accept_and_where_that_was_read() -> None:
    page_of_bounds = Path(__file__).parents[1] / "docs" / "evidence" / "peer-tolerances.md"
    text = page_of_bounds.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert {name for name, *_ in rows} == {peer.name for peer in peers.PEERS.values()}
    for _, _, accepts, source in rows:
        assert (accepts == "not found") == (source == "-")


def test_one_reason_for_all_models_is_one_row() -> None:
    failures = [Failure("candidate", "", Finding.CANNOT_RUN, "No module named 'unsloth'", "")]
    cannot = {**RECORD, "patch": "convergence.peers:unsloth", "verdict": "cannot run", "failures": failures}
    text = page([Record(**{**cannot, "model": model}) for model in ("llama-tied", "gemma")])
    said = "candidate cannot run No module named 'unsloth'"
    assert f"| llama-tied, gemma | float32 | cpu | cannot run | - | - | {said} |" in text


def test_the_version_of_a_peer_is_in_its_record() -> None:
    given = case.Case("llama-tied", "float32", "convergence.peers:torch_head")
    assert Record.of(given, Outcome()).versions["torch"] == importlib.metadata.version("torch")
    missing = Record.of(case.Case("llama-tied", "float32", "convergence.peers:unsloth"), Outcome())
    assert missing.versions["unsloth"] == "not installed"
