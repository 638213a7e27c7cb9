"""Set-ups as an axis of the proof: options, what is absent, a rank that dies, faults of set-ups, the table."""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from convergence.__main__ import main
from convergence.arms.quantities import Failure, Finding, Moment
from convergence.arms.setups import SETUPS, select
from convergence.case import Case, absent, prove
from convergence.report import progress, report
from convergence.report.records import Record, write
from tests import setup_faults
from tests.suite import collect

OURS = "convergence.patches:fused_linear"


def test_select():
    assert [setup.name for setup in select("fsdp2, plain")] == ["plain", "fsdp2"]
    assert [setup.name for setup in select("all")] == list(SETUPS)
    with pytest.raises(ValueError, match=r"'fsdp3'; allowed are all, plain, bf16-autocast"):
        select("fsdp3")


def test_the_names_of_cases(capfd):
    assert collect("--setups", "plain,ddp", "--models", "gemma", "--dtypes", "float32", "--device", "cpu") == 0
    names = [line.partition("[")[2][:-1] for line in capfd.readouterr().out.splitlines() if "::" in line]
    assert names == [
        "gemma/float32/fused_linear",
        "gemma/float32/fused_cross_entropy",
        "gemma/ddp/float32/fused_linear",
    ]


@pytest.mark.parametrize(
    ("setup", "model", "dtype", "reason"),
    [
        ("bf16-autocast", "llama-tied", "bfloat16", "for parameters in float32"),
        (
            "lora",
            "phi3",
            "float32",
            "adapts q_proj, v_proj, k_proj, gate_proj, up_proj, which this model does not have",
        ),
        ("lora-head", "llama-tied", "float32", ""),
        ("qlora", "phi3", "float32", "adapts q_proj" if find_spec("bitsandbytes") else "needs bitsandbytes"),
        ("fsdp2", "llama-tied", "float32", ""),
    ],
)
def test_what_cannot_be_had_is_absent(setup, model, dtype, reason):
    found = absent(Case(model, dtype, OURS, setup=setup))
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_missing_package_is_absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs deepspeed, which is not installed" in absent(Case("llama-tied", "float32", OURS, setup="zero3"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "peft" or None)
    for setup, package in (
        ("qlora", "bitsandbytes"),
        ("qlora-8bit-checkpointing", "bitsandbytes"),
        ("float8", "torchao"),
    ):
        assert f"needs {package}, which is not installed" in absent(Case("llama-tied", "float32", OURS, setup=setup))


def test_too_few_gpus_are_absent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    case = Case("llama-tied", "float32", OURS, setup="ddp", device="cuda")
    assert "needs 2 GPUs; this machine has 1" in absent(case)


@pytest.mark.slow
def test_our_patch_is_equal_and_fused():
    said: list[tuple[Any, ...]] = []
    with progress.told_to(said.append):
        record = prove(case := Case("llama-tied", "float32", OURS, setup="checkpointing"))
    assert (record.verdict, record.reason, record.fused) == ("equal", "", "yes")
    # what trained said so, out of its own process: all that it had promised, from the first step on
    arms = [arm for kind, arm, *_ in said if kind == "begin"]
    assert said[0] == ("expect", len(arms))
    assert (arms[0], arms[1], arms[-1]) == ("truth", "baseline", "candidate")
    parts = [(done, of) for kind, _, done, of in (m for m in said if m[0] == "reach")]
    assert parts == [(done, parts[0][1]) for done in range(1, parts[0][1] + 1)] * len(arms)
    assert str(case) == "llama-tied/checkpointing/float32/fused_linear"
    assert {Moment.parse(s.step).phase for s in record.statistics} >= {"initial", "SGD"}


def test_a_patch_that_does_nothing_is_not_patched():
    record = prove(Case("llama-tied", "float32", "tools.honest:unpatched", "plain", setup="bf16-autocast"))
    assert [row[2] for row in record.failures] == ["not patched"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "verdict", "said"),
    [("before", "equal", ""), ("after", "cannot run", "another model than the wrapped one")],
)
def test_a_returned_model_is_wrapped_and_takes_no_wrapped_ones_place(order, verdict, said):
    patch = "tests.isolation_patches:makes_a_model"
    record = prove(Case("llama-tied", "float32", patch, "plain", setup="ddp", order=order))
    assert record.verdict == verdict
    assert said in record.reason


@pytest.mark.slow
def test_a_rank_that_dies_is_a_verdict():
    record = prove(Case("llama-tied", "float32", "tests.setup_faults:second_rank_dies", "plain", setup="ddp"))
    assert record.verdict == "different"
    assert record.failures[0][2] in ("died", "raised")


@pytest.mark.slow
@pytest.mark.parametrize("fault", setup_faults.FAULTS)
def test_a_fault_is_seen(fault, request):
    """Those of one process by default; all with ``--mutants all``."""
    setup, model, _ = setup_faults.FAULTS[fault]
    case = Case(model, "float32", f"tests.setup_faults:{fault}", setup=setup, order=SETUPS[setup].orders[0])
    why = absent(case)
    assert not why or "is not installed" in why
    if why:
        pytest.skip(why)
    if fault not in setup_faults.SAMPLE and request.config.getoption("--mutants") != "all":
        pytest.skip("not in the sample; --mutants all runs it")
    record = prove(case)
    assert record.verdict == "different", record.statistics[:3]
    assert any(row[2] in report.STATISTICS for row in record.failures), record.failures[:5]


def test_what_a_patch_changes_for_its_process_fails():
    """In the processes of a set-up, too, which change by the set-up itself before."""
    patch = "tests.isolation_patches:sets_precision"
    record = prove(Case("llama-untied", "float32", patch, "plain", setup="checkpointing"), blames=False)
    changed = [row[3] for row in record.failures if row[2] == "patched too"]
    assert changed == ["the precision of float32 products (highest before, medium now)"]


def test_the_table(tmp_path, capsys):
    for setup, fused, verdict in (("plain", "yes", "equal"), ("lora", "no", "different"), ("zero3", "", "absent")):
        failures = [Failure("loss", "SGD", Finding.GAIN, "2", "1")] if verdict == "different" else []
        given = {"setup": setup, "fused": fused, "verdict": verdict, "reason": "why", "order": SETUPS[setup].orders[0]}
        write(Record("llama-tied", "float32", OURS, "hard", "cpu", 0, failures=failures, **given), tmp_path)
    assert main(["setups", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| set-up | patch | model | dtype | fused | verdict |")
    assert "| lora | after wrapping | llama-tied | float32 | no | different: why | - | - |" in lines
    assert "| plain | - | llama-tied | float32 | yes | equal | - | - |" in lines
    assert "| zero3 | before wrapping | llama-tied | float32 | - | absent | - | - |" in lines
