"""The proof on a checkpoint of somebody's own, saved to disk here."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from convergence.__main__ import main
from convergence.arms.large import LARGE, is_large, nudged, project
from convergence.arms.quantities import ADAMW, INITIAL
from convergence.arms.train import train
from convergence.case import inputs
from convergence.models import memory
from convergence.models.checkpoint import Checkpoint
from convergence.models.rows import find
from convergence.report import progress
from convergence.report.records import Record, dumps, from_dict, load_folder
from convergence.trainers.material import save
from tests.mutants import restore
from tests.suite import assert_refused, suite

OURS = "convergence.patches:fused_linear"
SMALL = ("--device", "cpu", "--rows", "3", "--length", "24", "--steps", "3", "--layers", "1", "--no-blame")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama and a Gemma of two layers, with their tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in ("llama", "gemma"):
        save(family, folder / family)
    return folder


def prove(path: Path, records: Path, *options: str) -> tuple[int, Record]:
    code = suite("--checkpoint", str(path), "--records", str(records), *SMALL, *options)
    (record,) = load_folder(records)
    return code, record


def test_our_patch_is_equal_on_the_checkpoints_own_weights(folder: Path, tmp_path: Path) -> None:
    code, record = prove(folder / "llama", tmp_path, "--patch", OURS)
    assert code == 0, record.reason
    assert (record.dtype, record.profile, record.truth) == ("float32", "text", "float64")
    assert record.census["linear_cross_entropy"] == 1
    assert record.census["rms_norm"] == 3, "two in the one layer that is left, and the last"
    steps = set(record.losses["truth"])
    assert {"initial: text 0", "initial: packed 1", "initial: masked 2", "SGD: masked 2", "SGD: evaluation"} <= steps
    assert not any(step.startswith("AdamW") for step in steps)


@pytest.mark.slow
def test_a_fault_is_found_by_the_command(folder: Path, tmp_path: Path) -> None:
    patch = "tests.mutants:n1a_norm_without_offset"
    arguments = ("--patch", patch, "--records", str(tmp_path), "-q", "-p", "no:xdist", "-p", "no:faulthandler")
    try:
        assert main(["prove", str(folder / "gemma"), *arguments, *SMALL]) == 1
    finally:
        restore()
    (record,) = load_folder(tmp_path)
    assert record.verdict == "different"
    assert "logits" in record.reason or "loss" in record.reason


@pytest.mark.slow
def test_a_truth_in_float32_judges_bfloat16_and_the_record_says_so(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "truth", lambda self, dtype, device: torch.float32)
    code, record = prove(folder / "llama", tmp_path, "--patch", OURS, "--dtypes", "bfloat16")
    assert code == 0, record.reason
    assert record.truth == "float32 with TF32 off"


def test_a_record_of_the_schema_before_had_its_truth_in_float64():
    data = json.loads(dumps(Record("llama-tied", "float32", OURS, "hard", "cpu", 0, versions={})))
    del data["truth"]
    assert from_dict({**data, "schema": 3}).truth == "float64"
    with pytest.raises(ValueError, match="'truth' is missing"):
        from_dict(data)


def test_the_command_takes_only_its_own_options_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path), "--patch", OURS])


def test_its_weights_are_those_on_the_disk_cut_to_the_first_layers(folder: Path) -> None:
    whole, cut = Checkpoint(str(folder / "llama")), Checkpoint(str(folder / "llama"), layers=1)
    before, after = whole.build(0).state_dict(), cut.build(0).state_dict()
    assert {name for name in before if ".layers.1." in name} == before.keys() - after.keys()
    assert after
    for name, weight in after.items():
        assert torch.equal(weight, before[name])


def test_without_a_terminal_every_arm_that_begins_has_a_line(capsys):
    with progress.bar(2):
        progress.begin("truth")
        progress.begin("baseline")
    first, second, *_ = capsys.readouterr().out.split("\n")
    assert re.fullmatch(r"\d+ s: truth, 1 of 2", first)
    assert re.fullmatch(r"\d+ s: baseline, 2 of 2", second)


def test_time_left_is_known_from_the_second_step_of_the_first_arm_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a step takes: five minutes here, and ten arms of four steps."""
    import rich.progress

    made: list[Any] = []

    class Clocked(rich.progress.Progress):
        def __init__(self, *columns: Any, **options: Any) -> None:
            super().__init__(*columns, **options, get_time=lambda: clock[0], auto_refresh=False)
            made.append(self)

    clock = [0.0]
    monkeypatch.setattr(rich.progress, "Progress", Clocked)
    with progress.bar(10):
        progress.begin("truth")
        for step in (1, 2):
            clock[0] += 300
            progress.reach(f"initial, step {step}", step, 4)
        (task,) = made[0].tasks
        assert task.description == "truth: initial, step 2"
        assert task.completed == 0.5
        assert task.time_remaining == pytest.approx(9.5 * 4 * 300, rel=0.01)
    progress.reach("nobody looks", 1, 4)


def test_an_arm_says_what_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int, int]] = []
    monkeypatch.setattr(progress, "reach", lambda *what: said.append(what))
    given = inputs("llama-untied", "float32", "hard", 0)
    train(given.run(torch.float32, torch.device("cpu")))
    assert [done for _, done, _ in said] == list(range(1, len(said) + 1))
    assert {of for *_, of in said} == {len(said)}
    assert said[0][0].startswith(INITIAL)
    assert said[-1][0].startswith(ADAMW)


def test_a_text_of_ones_own_is_what_it_trains_on(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab " * 400)
    row = Checkpoint(str(folder / "llama"), text=str(tmp_path / "a.txt"))
    (batch,) = row.data("text", 0, torch.float32)[0][0].batches
    default = Checkpoint(str(folder / "llama")).data("text", 0, torch.float32)[0][0].batches[0]
    assert len(batch.input_ids.unique()) < 6 < len(default.input_ids.unique())


def test_a_name_says_all_that_it_was_made_with(tmp_path: Path) -> None:
    for row in (
        Checkpoint("/a folder/x?y=1"),
        Checkpoint("/x", layers=3, rows=1, length=99, steps=2, text="/a b/&text=?.txt"),
    ):
        assert find(row.name) == row


@pytest.mark.parametrize(
    ("changes", "options", "shown"),
    [
        ({"model_type": "nosuch"}, (), ("model_type is 'nosuch'", "does not know")),
        ({"model_type": "nosuch", "auto_map": {"AutoConfig": "a.B"}}, (), ("needs remote code",)),
        ({"architectures": ["LlamaForSequenceClassification"]}, (), ("has no causal language model",)),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, (), ("no causal language model",)),
        ({"quantization_config": {"quant_method": "fp8"}}, (), ("is quantized",)),
        ({"vocab_size": 100}, (), ("do not belong together",)),
        ({}, ("--layers", "3"), ("--layers 3", "1 to 2")),
        ({}, ("--rows", "0"), ("--rows 0", "from 1 on")),
        ({}, ("--length", "129"), ("--length 129", "16 to 128")),
        ({}, ("--text", "no/such/file"), ("there is no such file",)),
        ({}, ("--rows", "100000"), ("has", "tokens, and a batch takes more than 12800000", "longer text")),
        ({}, ("--setups", "compile"), ("no set-up",)),
        ("config.json", (), ("has no config.json",)),
        ("*.safetensors", (), ("has no *.safetensors",)),
        ("token*", (), ("has no tokenizer",)),
    ],
)
def test_what_cannot_be_proven_is_a_usage_error(folder, tmp_path, capfd, changes, options, shown):
    """With other values in its config.json, with options, or without files."""
    path = tmp_path / "copy"
    shutil.copytree(folder / "llama", path)
    if isinstance(changes, str):
        for file in path.glob(changes):
            file.unlink()
    else:
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))
    assert_refused(capfd, shown, "--device", "cpu", "--checkpoint", str(path), *options)


def test_a_gguf_file_needs_its_package(tmp_path, capfd, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    (tmp_path / "a.gguf").touch()
    assert_refused(capfd, ["pip install gguf"], "--device", "cpu", "--checkpoint", str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(("more", "shown"), [(0, "--layers 1 fits"), (-1, "One layer does not fit either")])
def test_one_that_does_not_fit_is_a_usage_error_that_says_what_would(folder, monkeypatch, capfd, more, shown):
    free = Checkpoint(str(folder / "llama"), layers=1, length=16).plan("float32", "cpu").host + more
    Checkpoint.plan.cache_clear()
    monkeypatch.setattr(memory, "available", lambda device: (0, free))
    monkeypatch.setattr(Checkpoint, "build", lambda *_: pytest.fail("it was loaded"))
    options = ("--checkpoint", str(folder / "llama"), "--device", "cpu", "--length", "16")
    assert_refused(capfd, ("does not fit", shown), *options)
    Checkpoint.plan.cache_clear()


def test_the_truth_is_in_float32_where_float64_does_not_fit(folder, monkeypatch):
    row = Checkpoint(str(folder / "llama"), length=16)
    needs = {dtype: memory.plan(row.empty(), 4, 16, torch.bfloat16, "cpu", torch.float32) for dtype in (1, 2)}
    monkeypatch.setattr(memory, "available", lambda device: (0, needs[1].host - 1))
    found = memory.plan(row.empty(), 4, 16, torch.bfloat16, "cpu", torch.float32)
    assert found.fits
    assert found.truth is torch.float32
    assert not memory.plan(row.empty(), 4, 16, torch.float32, "cpu", torch.float32).fits


def test_projections_of_a_large_tensor_keep_error_gain_and_every_wrong_row_and_column():
    truth = torch.randn(700, 900, dtype=torch.float64)
    noise = 1e-3 * torch.randn_like(truth)
    assert is_large(truth)
    assert truth.numel() > LARGE
    t, off = project(truth), project(truth + noise) - project(truth)
    assert t.shape == (700 + 900,)
    assert float(off.square().mean().sqrt()) == pytest.approx(1e-3, rel=0.1)
    torch.testing.assert_close(project(1.01 * truth), 1.01 * t)
    wrong = truth.clone()
    wrong[699] *= 1.5
    wrong[:, 450] = 0
    difference = (project(wrong) - t).abs()
    assert (int(difference[:700].argmax()), int(difference[700:].argmax())) == (699, 450)
    wrong[3, 4] = float("nan")
    assert not bool(project(wrong).isfinite().all())


def test_a_large_weight_is_moved_by_one_unit_everywhere_and_alike_in_every_arm():
    weight = torch.rand(700, 900) + 1
    moved = [nudged(weight, torch.bfloat16, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*moved)
    steps = (moved[0].double() / weight - 1).abs() / torch.finfo(torch.bfloat16).eps
    assert float(steps.min()) > 0.4
    assert float(steps.max()) < 1.6
    assert float((moved[0] > weight).double().mean()) == pytest.approx(0.5, abs=0.01)
