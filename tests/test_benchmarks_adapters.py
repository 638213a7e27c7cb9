"""``python -m benchmarks.adapters`` on a CPU, with a tiny model; a process of its own is this one, but in one test."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.adapters import __main__ as command
from benchmarks.adapters import arms, page, report, steps, worker
from benchmarks.adapters.arms import ARMS, AdapterArm
from benchmarks.adapters.job import AdapterJob
from benchmarks.process import Finished, run_module

Bench = Callable[..., dict[str, Any]]


def here(kind: str, job: AdapterJob, environment: Any) -> dict[str, Any]:
    """What a process of its own would find."""
    found: dict[str, Any] = {}
    started = time.time()
    worker.measure(kind, job, lambda more: found.update(json.loads(json.dumps(more))))
    return {**found, "started": started}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """``bench(options)``: what --json wrote in a run of a tiny model that ends with exit code ``code``."""
    monkeypatch.chdir(tmp_path)

    def go(options: str, code: int = 0) -> dict[str, Any]:
        always = "--tiny --quantised no --lengths 24 --repeats 1 --json result.json"
        assert command.main(f"{always} {options}".split(), here) == code
        found: dict[str, Any] = json.loads(Path("result.json").read_text())
        return found

    return go


def tables(shown: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("|")]


def test_ours_next_to_eager_and_what_is_not_installed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ARMS, "liger", dataclasses.replace(ARMS["liger"], needs=("no_such_package",)))
    found = bench("--arms eager,ours,liger --lengths 8,4")
    rows = found["rows"]
    expected = [(arm, tokens) for arm in ("eager", "ours", "liger") for tokens in (8, 4)]
    assert [(row["arm"], row["tokens"]) for row in rows] == expected
    eager, ours = rows[0], rows[2]
    assert ours["loss"] == pytest.approx(eager["loss"], rel=1e-3)
    assert ours["gradient_norm"] == pytest.approx(eager["gradient_norm"], rel=5e-3)
    assert 0 < eager["best_s"] <= eager["s"]
    assert {row["note"] for row in rows[:4]} == {""}
    assert {row["note"] for row in rows[4:]} == {"absent: no_such_package is not installed"}
    assert rows[4]["s"] is None
    header, _, *lines = tables(capsys.readouterr().out)
    ratio = header.index("time / ours")
    assert [line[ratio] for line in lines[:4]] == [f"{rows[i]['s'] / rows[2 + i % 2]['s']:.2f}" for i in range(4)]
    # what the figures depend on is with them
    assert found["command"].startswith("python -m benchmarks.adapters --tiny --quantised no")
    assert "result.json" not in found["command"]
    assert found["device"] == "CPU"
    assert found["versions"]["torch"] == torch.__version__
    assert found["date"]


def test_adapters_of_another_dtype_and_without_checkpoints(bench: Bench) -> None:
    found = bench("--arms ours,eager --lengths 8 --precision bfloat16 --checkpointing none,own")
    assert [(row["arm"], row["checkpointing"]) for row in found["rows"]] == [("ours", "none"), ("eager", "none")]
    assert not any(row["note"] for row in found["rows"])


@pytest.mark.parametrize("trained", ["dora", "experts", "full"])
def test_what_else_is_trained(trained: str, bench: Bench) -> None:
    found = bench(f"--trained {trained} --arms eager,ours,axolotl --lengths 8 --batch 2 --repeats 1")
    eager, ours, axolotl = found["rows"]
    assert axolotl["note"] == f"absent: it is not measured with {trained}"
    assert not eager["note"] + ours["note"]
    assert ours["loss"] == pytest.approx(eager["loss"], rel=1e-3)
    assert found["trained"] == trained


def test_the_trainers_precision_and_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {}
    for precision, checkpointing in (("trainer", "hf"), ("bfloat16", "none")):
        job = AdapterJob("eager", False, checkpointing, precision, [8], tiny=True)
        models[precision] = model = ARMS["eager"].build(job)
        worker.set_adapters(model, job)
        model.train()
        assert model.get_base_model().is_gradient_checkpointing == (checkpointing == "hf")
    of = {key: dict(model.named_parameters()) for key, model in models.items()}
    kinds = {key: {p.dtype for p in found.values() if p.requires_grad} for key, found in of.items()}
    assert kinds == {"trainer": {torch.float32}, "bfloat16": {torch.bfloat16}}
    assert of["trainer"].keys() == of["bfloat16"].keys()
    for name, p in of["trainer"].items():  # the same numbers
        assert torch.equal(p.float(), of["bfloat16"][name].float()), name
        assert p.requires_grad == ("lora_" in name)
        assert p.count_nonzero() > 0


def test_errors_of_gradients_next_to_float64(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench("--check --arms eager,ours")
    eager, ours = (row["errors"] for row in found["rows"])
    kinds = [f"{part}_proj d{matrix}" for part in ("q", "k", "v", "o", "gate", "up", "down") for matrix in "AB"]
    assert sorted(eager) == sorted(ours) == sorted(["model dA", "model dB", *kinds])
    for kind in kinds[:8]:  # which depend on the adapters alone: autocast rounds their weights
        assert ours[kind] < 1e-5 < 1e-3 < eager[kind] < 1e-2
    assert all(0 < errors[kind] < 2e-2 for errors in (eager, ours) for kind in errors)
    assert ["q_proj dA", f"{eager['q_proj dA']:.1e}", f"{ours['q_proj dA']:.1e}"] in tables(capsys.readouterr().out)


def test_seconds_from_the_start(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench("--from-start --arms ours --lengths 8")["rows"]
    assert [(row["arm"], row["caches"]) for row in rows] == [("ours", "empty"), ("ours", "filled")]
    assert all(0 < row["first_s"] < row["third_s"] for row in rows)
    *_, line = tables(capsys.readouterr().out)
    assert line[:3] == ["ours", "dense", "filled"]
    assert line[5] == "+0.0"


def watched(job: AdapterJob) -> Any:
    """Ours, of which PEFT computes one adapter."""
    model = arms.ours(job)
    first = next(module for module in model.modules() if hasattr(module, "lora_A"))
    first.lora_A["default"].register_forward_hook(lambda *_: None)
    return model


def test_fallbacks_of_ours_are_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARMS, "ours", AdapterArm(watched))
    (row,) = bench("--arms ours --lengths 8 --checkpointing none")["rows"]
    assert row["s"] > 0
    assert row["note"].startswith("fallback: PEFT computed an adapter: lora_A or lora_B has hooks")
    assert report.matrix_lines({"rows": [row]})[2] == f"| ours | none | {row['s']:.3f} / 0.0 |"


def doubled(job: AdapterJob) -> Any:
    """Something else than eager: the adapters count twice."""
    model = arms.eager(job)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = dict.fromkeys(module.scaling, 2.0)
    return model


def failing(job: AdapterJob) -> Any:
    raise NotImplementedError("it knows no such model")


def too_large(job: AdapterJob) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_arms_that_are_wrong_or_fail_end_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for arm, build in (("liger", doubled), ("axolotl", failing), ("unsloth", too_large)):
        monkeypatch.setitem(ARMS, arm, AdapterArm(build))
    rows = {row["arm"]: row for row in bench("--arms liger,axolotl,unsloth,eager")["rows"]}
    assert rows["eager"]["note"] == ""
    assert rows["liger"]["note"].startswith("WRONG: its gradient_norm is ")
    assert rows["axolotl"]["note"] == "failed: NotImplementedError: it knows no such model"
    assert rows["unsloth"]["note"] == "out of memory"
    monkeypatch.setitem(ARMS, "ours", AdapterArm(doubled))
    assert bench("--arms eager,ours", code=1)["rows"][1]["note"].startswith("WRONG: its gradient_norm is ")


def test_a_length_that_does_not_fit_does_not_end_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = steps.measure

    def measured(model: Any, job: AdapterJob, tokens: int) -> steps.StepRow:
        if tokens == 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(model, job, tokens)

    monkeypatch.setattr(steps, "measure", measured)
    rows = bench("--arms eager --lengths 24,8")["rows"]
    assert [(row["tokens"], row["note"]) for row in rows] == [(24, "out of memory"), (8, "")]
    assert rows[1]["s"] > 0


@pytest.fixture
def unsloths_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package that reads a model out of a folder, as unsloth does; the options of its loader."""
    import peft
    from transformers import AutoModelForCausalLM

    package: Any = types.ModuleType("unsloth")
    calls: list[dict[str, Any]] = []

    class FastLanguageModel:
        @staticmethod
        def from_pretrained(model_name: str, dtype: torch.dtype, **options: Any) -> Any:
            calls.append(options)
            model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype)
            model.for_training = model.train
            return model, None

        @staticmethod
        def get_peft_model(model: Any, use_gradient_checkpointing: Any, **options: Any) -> Any:
            ours = ("random_state", "max_seq_length")
            return peft.get_peft_model(
                model, peft.LoraConfig(**{key: options[key] for key in options.keys() - {*ours}})
            )

    package.FastLanguageModel = FastLanguageModel
    package.__spec__ = importlib.machinery.ModuleSpec("unsloth", None)
    monkeypatch.setitem(sys.modules, "unsloth", package)
    return calls


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_unsloths_loader_reads_the_same_weights_and_checkpoints_twice(
    trained: str, bench: Bench, unsloths_calls: list[dict[str, Any]]
) -> None:
    rows = bench(f"--trained {trained} --arms eager,unsloth")["rows"]
    assert [(row["arm"], row["checkpointing"]) for row in rows] == [
        *(("eager", "hf"), ("unsloth", "hf"), ("unsloth", "own"))
    ]
    assert [row["note"] for row in rows] == [""] * 3
    for measured in ("loss", "gradient_norm"):  # of adapters, or of every weight
        assert rows[1][measured] == pytest.approx(rows[0][measured], abs=1e-6)
    assert [call["use_gradient_checkpointing"] for call in unsloths_calls] == [True, "unsloth"]
    assert {(call["load_in_4bit"], call["full_finetuning"]) for call in unsloths_calls} == {(False, trained == "full")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--arms ours,lger", "unknown arms ['lger']; there are ['eager', 'ours'"),
        ("--arms truth", "unknown arms ['truth']"),
        ("--checkpointing all", "unknown checkpointing ['all']; there are ['none', 'hf', 'own']"),
        ("--lengths 4k", "--lengths is '4k'; it must be like 4096,16384"),
        ("--lengths 0", "must be at least 1"),
        ("--trained dora --check --quantised no", "--trained dora is measured with --quantised no, without --check"),
        ("--trained full", "--trained full is measured with --quantised no"),
        ("--check --from-start", "--check and --from-start are two runs"),
        ("--path unsloth=/nowhere", "--path: ['unsloth'] must be ARM=DIR"),
        ("--json /nowhere/at/all.json", "there is no folder /nowhere/at"),
    ],
)
def test_what_is_wrong_with_the_arguments(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(options.split())
    assert message in capsys.readouterr().err


def test_without_a_gpu_and_not_tiny(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "need a GPU" in capsys.readouterr().err


def test_a_page_names_the_command_and_the_machine_of_every_table(bench: Bench, tmp_path: Path) -> None:
    results = [bench("--arms eager --lengths 8,4"), bench("--from-start --arms eager")]
    for name, found in zip(("steps", "start"), results, strict=True):
        found["device"] = "NVIDIA H200"
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    page.main([str(tmp_path / "steps.json"), str(tmp_path / "start.json"), "--out", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert text == page.page(results)
    for found in results:
        captions = " ".join(text.split())
        assert f"`{found['command']}`; NVIDIA H200, {found['date']}." in captions
    assert f"under bfloat16 autocast; torch {torch.__version__}, " in captions
    other = [results[0], {**results[1], "versions": {"torch": "2.0"}, "precision": "bfloat16", "layers": 2}]
    captions = " ".join(page.page(other).split())
    assert f"NVIDIA H200, torch {torch.__version__}, {found['date']}." in captions
    assert (
        f"NVIDIA H200, torch 2.0, {found['date']}; bfloat16 adapters and base without autocast, 2 layers." in captions
    )
    row = results[0]["rows"][0]
    assert f"| eager | on the GPU | {row['s']:.3f} / 0.0 |" in text
    assert text.count("Not measured: `python") == 1  # --check
    assert page.PAGE.read_text(encoding="utf-8").startswith(page.page([]).partition("## Time")[0])


def test_a_page_needs_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(SystemExit):
        page.main([str(tmp_path / "result.json"), "--out", str(tmp_path / "page.md")])
    assert "is not what python -m benchmarks.adapters --json writes" in capsys.readouterr().err


def test_where_packages_lie_is_not_in_the_command() -> None:
    given = "--arms ours --path unsloth=/some/where --json=x.json --path=liger=/there --json y.json --check"
    shown = "python -m benchmarks.adapters --arms ours --path unsloth=DIR --path liger=DIR --check"
    assert command.command(given.split()) == shown


MODULE = """
import json, os, sys, time
print(json.dumps({"arguments": sys.argv[1:], "here": os.listdir("."), "variable": os.environ.get("ARM")}), flush=True)
print("it began", file=sys.stderr, flush=True)
if sys.argv[1:] == ["waits"]:
    time.sleep(60)
sys.exit("no such arm" if sys.argv[1:] == ["fails"] else 0)
"""


def test_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some_arm.py").write_text(MODULE)
    before = time.time()
    done = run_module("some_arm", ["one", "two"], paths=[str(tmp_path)], environment={"ARM": "ours"})
    assert json.loads(done.output) == {"arguments": ["one", "two"], "here": [], "variable": "ours"}
    assert done.problem == ""
    assert before <= done.started <= time.time()
    assert capfd.readouterr().err == ""
    failed = run_module("some_arm", ["fails"], paths=[str(tmp_path)], shows=True)
    assert failed.problem == "exit code 1\nit began\nno such arm\n"
    assert capfd.readouterr().err == "it began\nno such arm\n"
    slow = run_module("some_arm", ["waits"], paths=[str(tmp_path)], timeout=0.5)
    assert slow.problem.startswith("timed out after 0.5 s\n")
    assert time.time() < before + 30


def test_a_process_shows_what_it_says_when_it_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until somebody has seen it, and one that cannot look does not stop it."""
    (tmp_path / "some_arm.py").write_text(
        "import pathlib, sys, time\n"
        "print('here I am', file=sys.stderr, flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "print(100 * 'much more\\n' * 100, file=sys.stderr)\n"
    )

    class Screen:
        def write(self, line: str) -> None:
            (tmp_path / "seen").touch()
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Screen())
    done = run_module("some_arm", [str(tmp_path / "seen")], paths=[str(tmp_path)], timeout=60, shows=True)
    assert done.problem == ""


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    """Else it would keep the pipes open, and its output would end with it."""
    (tmp_path / "some_arm.py").write_text("import subprocess\nsubprocess.Popen(['sleep', '600'])\n")
    before = time.time()
    done = run_module("some_arm", paths=[str(tmp_path)])
    assert done.problem == ""
    assert time.time() < before + 300


def test_a_plan_arrives_in_the_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_one(module: str, arguments: list[str], **options: Any) -> Finished:
        assert module == "benchmarks.adapters.worker"
        calls.append(options)
        monkeypatch.setattr("sys.argv", [module, *arguments])
        worker.main()
        return Finished(5.0, "")

    calls: list[dict[str, Any]] = []
    monkeypatch.delenv("UNSLOTH_DISABLE_STATISTICS", raising=False)  # what is set stays
    monkeypatch.setattr(command, "run_module", in_this_one)
    options = command.parse(["--tiny", "--lengths", "8", "--arms", "eager", "--timeout", "7", "--quantised", "no"])
    (job,) = command.jobs(options)
    found = command.in_own_process(options)("start", job, {"TRITON_CACHE_DIR": "/some/where"})
    assert found["started"] == 5.0
    assert len(found["ends"]) == 3
    assert calls[0]["timeout"] == 7
    assert (
        calls[0]["environment"].items()
        >= {"TRITON_CACHE_DIR": "/some/where", "UNSLOTH_DISABLE_STATISTICS": "1"}.items()
    )


def test_what_a_process_kept_before_it_died_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    job = AdapterJob("ours", lengths=[24, 16])
    kept = {"rows": [dataclasses.asdict(steps.row(job, 24, s=1.0, gib=2.0))], "note": "failed: exit code -9"}
    ((_, rows),) = command.step_rows(job, lambda kind, job, environment: {**kept, "started": 0.0})
    assert [(row["tokens"], row["s"], row["note"]) for row in rows] == [(24, 1.0, ""), (16, None, kept["note"])]
    assert report.matrix_lines({"rows": rows})[2] == "| ours | on the GPU | 1.000 / 2.0 | failed |"
