"""Options that make no sense end the run with pytest's exit code 4, and the message names what is allowed."""

from __future__ import annotations

import os

import pytest
import torch

from convergence.__main__ import main
from convergence.models.models import MODELS, select
from tests.suite import assert_refused, collect

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--models", "lama"), ("'lama'", "core", "all", "llama-tied", "gemma3")),
        (("--models", ""), ("''", "core", "all")),
        (("--dtypes", "float8"), ("'float8'", "float32", "bfloat16")),
        (("--dtypes", "float32,half"), ("'half'", "float32", "bfloat16")),
        (("--device", "tpu"), ("'tpu'", "cpu", "cuda")),
        pytest.param(("--device", "cuda"), ("no CUDA device",), marks=without_cuda),
        pytest.param(("--profile", "scale"), ("--profile scale needs a CUDA device",), marks=without_cuda),
        (("--profile", "soft"), ("'soft'", "plain", "hard")),
        (("--setups", "fsdp3"), ("unknown set-up 'fsdp3'; allowed are",)),
        (("--scope", "module"), ("'module'", "instance", "class")),
        (("--patch", ""), ("--patch names no patch; it takes package.module:function",)),
        (("--patch", " ,"), ("--patch names no patch; it takes package.module:function",)),
        (("--patch", "convergence.patches"), ("package.module:function",)),
        (("--patch", "no.such.module:patch"), ("cannot be imported", "No module named 'no'")),
        (("--patch", "tests.no_such:patch"), ("cannot be imported", "No module named 'tests.no_such'")),
        (("--patch", "convergence.patches:no_such"), ("cannot be imported", "no_such")),
        (("--patch", "convergence.report.records:SCHEMA"), ("takes a function",)),
        (("--patch-timeout", "0"), ("--patch-timeout", "above 0")),
        (("--patch-timeout", "inf"), ("--patch-timeout", "above 0")),
        (("--layers", "2", "--device", "cpu"), ("--checkpoint PATH",)),
        (("--report", ".", "--device", "cpu"), ("'.' is a folder",)),
        (("--records", "pyproject.toml", "--device", "cpu"), ("'pyproject.toml' is a file",)),
        (("--compare-to", "no/such/folder", "--device", "cpu"), ("no/such/folder: does not exist",)),
    ],
)
def test_a_usage_error(options, shown, capfd):
    assert_refused(capfd, shown, *options)


@pytest.mark.parametrize(("command", "needs"), [("prove", "PATH"), ("peers", "DIR")])
def test_a_command_without_its_argument_is_a_usage_error(command, needs, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == 4
    assert f"the following arguments are required: {needs}" in capsys.readouterr().err


def test_the_default_is_every_core_model_in_both_dtypes_with_both_losses(capfd):
    assert collect("--device", "cpu") == 0
    collected = [line for line in capfd.readouterr().out.splitlines() if "::" in line]
    assert len(collected) == 6 * 2 * 2
    for model in ("llama-tied", "llama-untied", "llama-bias", "gemma", "gemma2", "gemma3"):
        for dtype in ("float32", "bfloat16"):
            for loss in ("fused_linear", "fused_cross_entropy"):
                assert any(f"[{model}/{dtype}/{loss}]" in line for line in collected)


def test_select_takes_names_families_and_groups():
    assert [m.name for m in select("all")] == list(MODELS)
    assert {m.family for m in select("core")} == {"llama", "gemma", "gemma2", "gemma3"}
    assert [m.name for m in select("llama-tied")] == ["llama-tied"]
    assert [m.name for m in select("gemma2, llama")] == ["gemma2", "llama-untied", "llama-tied", "llama-bias"]


def test_a_proof_in_a_test_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = dict(os.environ)
    assert collect("--device", "cpu") == 0
    assert os.environ == before
