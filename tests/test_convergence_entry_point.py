"""An installed proof costs another pytest run nothing. Where it is named it is there, with ``liger_kernels`` or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.suite import ISOLATED, QUICK

ROOT = Path(__file__).parents[1]
UNTOUCHED = """
import os
import sys

def test_it():
    assert not {"torch", "transformers", "triton", "numpy", "convergence.plugin"} & set(sys.modules)
    assert "TRITON_INTERPRET" not in os.environ
"""
ITS_OWN_OPTIONS = """
def pytest_addoption(parser):
    for name in ("--device", "--profile", "--report", "--models"):
        parser.addoption(name)
"""
# As if it were not installed, in every process that reads this.
WITHOUT_LIGER_KERNELS = """
import functools
import sys

def find(own, name, *rest):
    return None if name.partition(".")[0] == "liger_kernels" else own(name, *rest)

for finder in sys.meta_path:
    finder.find_spec = functools.partial(find, finder.find_spec)
"""
PATCHES = """
import os
import torch

assert os.environ["TRITON_INTERPRET"] == "1", "the interpreter is chosen before the patch is imported"

def patch(model, error=0.0):
    for layer in model.model.layers:
        norm = layer.input_layernorm
        def forward(x, norm=norm):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            return norm.weight * wide.to(x.dtype) * (1 + error)
        norm.forward = forward

def wrong(model):
    patch(model, error=0.01)
"""
NAMED = ("--pyargs", "convergence", "--models", "llama-tied", "--dtypes", "float32", "--device", "cpu")


def install(tmp_path: Path, files: dict[str, str], at_start: str = "") -> tuple[Path, Path]:
    """A folder with what an installed package says to pytest and with what is run ``at_start`` of every process, and a
    folder of ``files``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (group,) = re.findall(r"\[project\.entry-points\.pytest11\]\n(.*?)\n\n", text, re.DOTALL)
    installed, folder = tmp_path / "installed", tmp_path / "folder"
    written = {
        installed / "proof-1.dist-info" / "METADATA": "Metadata-Version: 2.1\nName: proof\nVersion: 1\n",
        installed / "proof-1.dist-info" / "entry_points.txt": f"[pytest11]\n{group.replace(chr(34), '')}\n",
        installed / "sitecustomize.py": at_start,
        **{folder / name: text for name, text in files.items()},
    }
    folder.mkdir()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return installed, folder


def run(tmp_path: Path, *arguments: str, files: dict[str, str], at_start: str = "") -> tuple[int, str]:
    """``pytest arguments`` as a command, in a folder of ``files``: exit code and output.

    On PYTHONPATH is what an installed package says to pytest; ``at_start`` is run first in every process.
    """
    installed, folder = install(tmp_path, files, at_start)
    unset = ("PYTEST_", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    environment["PYTHONPATH"] = f"{installed}{os.pathsep}{ROOT}"
    command = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    command += ["-m", "pytest", "-p", "no:cacheprovider", "-q", *QUICK, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", ["0", "1"])
def test_another_run_imports_nothing_and_keeps_its_options(tmp_path: Path, workers: str) -> None:
    files = {"test_it.py": UNTOUCHED, "conftest.py": ITS_OWN_OPTIONS}
    status, output = run(tmp_path, "-n", workers, "--device", "tpu", files=files)
    assert status == 0, output


@pytest.mark.slow
def test_patches_of_others_in_the_current_folder_are_judged_and_reported(tmp_path: Path) -> None:
    """Without ``liger_kernels``, by a worker whose records go into the report."""
    options = ("--profile", "plain", "--patch", "others:patch,others:wrong", "--no-blame", "-n", "1")
    report = ("--report", str(tmp_path / "reports" / "report.html"))
    status, output = run(
        tmp_path, *NAMED, *options, *report, files={"others.py": PATCHES}, at_start=WITHOUT_LIGER_KERNELS
    )
    assert status == 1, output
    assert "llama-tied/float32/patch: equal" in output
    assert "llama-tied/float32/wrong: different" in output
    assert f"report: {report[1]}" in output
    page = Path(report[1]).read_text(encoding="utf-8").replace("<wbr>", "")
    for part in ("1 of 2 cases failed", "<polyline", "gradient of model.embed_tokens", "transformers"):
        assert part in page


def test_without_a_patch_there_is_nothing_to_judge(tmp_path: Path) -> None:
    status, output = run(tmp_path, *NAMED, files={}, at_start=WITHOUT_LIGER_KERNELS)
    assert status == 4
    assert "liger_kernels is not installed here: name the patch to judge" in output


def test_a_conftest_that_loads_the_proof_as_well_is_no_clash(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: pytest counts what a run has registered, and not what was imported before."""
    installed, folder = install(tmp_path, {"conftest.py": 'pytest_plugins = ["convergence.plugin"]\n'})
    monkeypatch.syspath_prepend(installed)
    monkeypatch.delitem(sys.modules, "conftest", raising=False)  # that of this run
    with mock.patch.dict(os.environ), monkeypatch.context() as inside:
        inside.chdir(folder)
        status = pytest.main([*NAMED, "--collect-only", "-q", *ISOLATED])
    output = "".join(capfd.readouterr())
    assert status == 0, output
    assert "[llama-tied/float32/fused_linear]" in output


def test_a_folder_that_is_only_called_so_is_not_the_proof(tmp_path: Path) -> None:
    status, output = run(tmp_path, "convergence", files={})
    assert (status, "file or directory not found: convergence" in output) == (4, True), output
    assert "convergence: device" not in output
