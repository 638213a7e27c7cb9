"""``liger_kernels.report()``: what a bug report needs; and GPUs on which no kernel runs."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import liger_kernels
from liger_kernels import tested_torch
from liger_kernels.ops.runtime import device, launcher
from liger_kernels.ops.runtime.dispatch import INTERPRET, use_triton


def gpu(name: str = "A GPU", major: int = 9, minor: int = 0, shared: int = 227 * 1024) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, major=major, minor=minor, total_memory=24 * 2**30, shared_memory_per_block_optin=shared
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """GPUs that torch says it sees."""
    seen: list[SimpleNamespace] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen[getattr(device, "index", device) or 0])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(device, "_obstacles", {})
    monkeypatch.setattr(device, "_rooms", {})
    return seen


def test_what_a_machine_without_a_gpu_says(gpus: list[SimpleNamespace]) -> None:
    report = liger_kernels.report()
    assert report.gpus == ()
    assert report.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert report.versions["liger-kernels"] == liger_kernels.__version__
    assert {"Python", "torch"} <= report.versions.keys()
    assert report.kernels["rms_norm"] == (("cpu (interpreter)",) if INTERPRET else ())
    assert report.switches["interpreter"].startswith("on" if INTERPRET else "off, ")
    assert report.switches["kept programs"] == launcher.state(INTERPRET)
    lines = str(report).splitlines()
    assert any(line.split() == ["GPU", "none"] for line in lines)
    assert len({len(line) - len(re.split(r"  +", line, maxsplit=1)[1]) for line in lines}) == 1  # aligned


def test_gpus_are_told_apart(gpus: list[SimpleNamespace]) -> None:
    gpus += [gpu("H200"), gpu("T4", 7, 5, 64 * 1024), gpu("small", 8, 6, 8 * 1024)]
    report = liger_kernels.report()
    assert [found.obstacle for found in report.gpus] == [
        "",
        "its compute capability is 7.5; kernels need 8.0",
        "a program has 8192 bytes of shared memory; kernels need 16384",
    ]
    where = ("cuda:0", "cpu (interpreter)") if INTERPRET else ("cuda:0",)
    assert set(report.kernels.values()) == {where}
    assert "T4, capability 7.5, 24 GiB, 64 KiB shared memory" in str(report)
    assert "no kernels: its compute capability is 7.5; kernels need 8.0" in str(report)


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_an_op_steps_back_on_a_gpu_without_kernels(gpus, capability: tuple[int, int], runs: bool) -> None:
    gpus.append(gpu("A GPU", *capability))
    x = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    assert [use_triton(x) for _ in range(2)] == [runs, runs]
    gpus.clear()
    assert use_triton(x) == runs


def test_what_is_loaded_ahead_fits(gpus: list[SimpleNamespace]) -> None:
    gpus += [gpu("H200"), gpu("4090", 8, 9, 99 * 1024)]
    rooms = [device.room_for_loads(torch.device("cuda", index)) for index in (0, 1)]
    assert rooms == [128 * 1024, 97 * 1024]


def test_a_newer_torch_is_said_once_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    tested_torch.warn_of_a_newer_torch.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"torch 2\.99\.0 is newer than 2\.15, .* `pytest convergence`"):
            liger_kernels.patch(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*replaced nothing")
            liger_kernels.patch(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    finally:
        tested_torch.warn_of_a_newer_torch.cache_clear()
    assert liger_kernels.report().switches["torch"].startswith("2.99.0 is newer than 2.15")


def test_a_torch_that_was_tested_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.8.0", "2.15.1+cu130"):
        monkeypatch.setattr(torch, "__version__", version)
        assert tested_torch.newer_torch() == ""


def test_the_command_prints_it() -> None:
    command = [sys.executable, "-m", "liger_kernels"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"torch", "Python", "rms_norm", "kept programs"} <= {
        line.split("  ")[0] for line in done.stdout.splitlines()
    }


def test_the_bounds_are_those_of_the_matrix() -> None:
    from matrix import cells

    pins = [cell.pins for cell in cells.load_all().values() if cell.kind == "torch"]
    for package, (oldest, newest) in {"torch": tested_torch.TESTED_TORCH, "triton": launcher.TESTED}.items():
        found = sorted(tuple(int(part) for part in pin[package].split(".")[:2]) for pin in pins)
        assert (found[0], found[-1]) == (oldest, newest)
