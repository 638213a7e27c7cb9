"""``--compare-to``: a refactored patch observes what it did, bit for bit; what cannot be compared is a usage error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from convergence.arms import isolate
from convergence.report.records import Digests, Record, load_folder, versions, write
from tests.suite import assert_refused, collect, suite

PATCH = "patch_of_this_test:patch"
CASE = ("--models", "llama-untied", "--dtypes", "float32", "--profile", "plain", "--device", "cpu", "--patch", PATCH)
SCALED = "model.layers.1.mlp.down_proj.weight"

HONEST = "from tests.convergence_faults import honest as patch\n"
ONE_BIT = f"""
import torch
from tests.convergence_faults import honest

def one_bit(grad):
    grad = grad.clone()
    grad[3, 5] = torch.nextafter(grad[3, 5], torch.full((), torch.inf))
    return grad

def patch(model):
    honest(model)
    model.get_parameter("{SCALED}").register_hook(one_bit)
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of a run of the honest patch, in a process of its own that trains everything anew."""
    folder = tmp_path_factory.mktemp("before")
    assert isolate.call(run, folder, HONEST, "--records", str(folder / "records")) == 0
    return folder / "records"


def run(folder: Path, code: str, *options: str) -> int:
    """``pytest convergence`` where the patch is ``code`` in ``folder``; it is imported in a process of its own."""
    (folder / "patch_of_this_test.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        return suite(*CASE, *options)


@pytest.mark.slow
def test_the_same_patch_is_the_same_bit_for_bit(before, tmp_path):
    """Into the same folder: the run adds a record and is compared with the one that was there."""
    assert run(tmp_path, HONEST, "--compare-to", str(before), "--records", str(before)) == 0
    assert len(list(before.glob("*.json"))) == 2


def test_one_bit_of_one_gradient_is_named(before, tmp_path, capfd):
    records = tmp_path / "records"
    code = run(tmp_path, ONE_BIT, "--compare-to", str(before), "--records", str(records))
    shown = capfd.readouterr().out
    assert code == pytest.ExitCode.TESTS_FAILED, shown
    assert "not bit for bit what the earlier run observed" in shown
    (record,) = load_folder(records)
    first = next(iter(record.losses["truth"]))
    quantity, step, statistic, *_ = record.failures[0]
    assert (quantity, step, statistic) == (f"gradient of {SCALED}", first, "bit for bit")
    # The proof itself has nothing against one bit: every failure is of this tier.
    assert {row[2] for row in record.failures} == {"bit for bit"}
    assert record.reason.startswith(f"gradient of {SCALED} {first} bit for bit")


@pytest.mark.parametrize(
    ("change", "options", "shown"),
    [
        ({"device": "cuda"}, (), ["not recorded", "device cuda (here cpu)"]),
        ({}, ("--profile", "hard"), ["not recorded", "profile plain (here hard)"]),
        ({}, ("--models", "gemma"), ["not recorded", "model llama-untied (here gemma)"]),
        ({}, ("--dtypes", "float32,bfloat16"), ["1 cases", "dtype float32 (here bfloat16)"]),
        ({"seed": 7}, (), ["not recorded", "seed 7 (here 0)"]),
        ({"versions": {"torch": "2.0.0"}}, (), ["another environment", "torch 2.0.0 (here"]),
        ({"versions": {"threads": "99"}}, (), ["another environment", "threads 99 (here"]),
        ({"digests": {}}, (), ["not trained to the end"]),
        ({"schema": 1}, (), ["'schema' is 1", "allowed is"]),
        (None, (), ["no record in there"]),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(change, options, shown, tmp_path, capfd):
    if change is not None:
        write(recorded(change), tmp_path)
    assert_refused(capfd, ("--compare-to", *shown), *CHOSEN, *options, "--compare-to", str(tmp_path))


def test_what_can_be_compared_is_collected(tmp_path):
    """What the usage errors above start from is none."""
    write(recorded({"versions": {"platform": "another", "liger-kernels": "0.0.1"}}), tmp_path)
    assert collect(*CHOSEN, "--compare-to", str(tmp_path)) == pytest.ExitCode.OK


BUILT_IN = "convergence.patches:fused_linear"
CHOSEN = (*CASE[:-1], BUILT_IN)


def recorded(change: dict[str, Any]) -> Record:
    digests: dict[str, list[Digests]] = {"baseline": [], "candidate": []}
    fields = {"digests": digests, **change, "versions": {**versions("cpu"), **change.get("versions", {})}}
    return Record("llama-untied", "float32", BUILT_IN, **{"profile": "plain", "device": "cpu", "seed": 0, **fields})
