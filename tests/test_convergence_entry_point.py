"""An installed proof costs another pytest run nothing, and is there when it is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
NAMED = ("--pyargs", "convergence", "--collect-only", "--models", "llama-tied", "--dtypes", "float32")
PATCH = "import os\nassert os.environ['TRITON_INTERPRET'] == '1'\ndef patch(model): pass\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that says, on PYTHONPATH, what an installed package says to pytest."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (group,) = re.findall(r"\[project\.entry-points\.pytest11\]\n(.*?)\n\n", text, re.DOTALL)
    folder = tmp_path / "installed" / "proof-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: proof\nVersion: 1\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(f"[pytest11]\n{group.replace(chr(34), '')}\n", encoding="utf-8")
    return folder.parent


def run(installed: Path, *arguments: str, files: dict[str, str]) -> tuple[int, str]:
    """``pytest arguments`` as a command, in a folder of ``files``: exit code and output."""
    folder = installed.parent / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    unset = ("PYTEST_", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    environment["PYTHONPATH"] = f"{installed}{os.pathsep}{ROOT}"
    command = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    command += ["-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", ["0", "1"])
def test_another_run_imports_nothing_and_keeps_its_options(installed: Path, workers: str) -> None:
    files = {"test_it.py": UNTOUCHED, "conftest.py": ITS_OWN_OPTIONS}
    status, output = run(installed, "-n", workers, "--device", "tpu", files=files)
    assert status == 0, output


def test_a_patch_in_the_current_folder_is_found(installed: Path) -> None:
    """The interpreter is chosen before the patch is imported."""
    status, output = run(installed, *NAMED, "--device", "cpu", "--patch", "others:patch", files={"others.py": PATCH})
    assert status == 0, output
    assert "test_convergence[llama-tied/float32/patch]" in output
    assert "no tests ran" not in output


def test_a_conftest_that_loads_the_proof_as_well_is_no_clash(installed: Path) -> None:
    conftest = {"conftest.py": 'pytest_plugins = ["convergence.plugin"]\n'}
    status, output = run(installed, *NAMED, "--device", "cpu", files=conftest)
    assert status == 0, output
    assert "[llama-tied/float32/fused_linear]" in output


def test_a_folder_that_is_only_called_so_is_not_the_proof(installed: Path) -> None:
    status, output = run(installed, "convergence", files={})
    assert (status, "file or directory not found: convergence" in output) == (4, True), output
    assert "convergence: device" not in output
