"""What is uploaded: it builds, holds package, proof and matrix only, needs nothing optional, and proves a foreign
patch, also by the matrix of another repository."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ("liger_kernels", "convergence")
OF_MATRIX = ("matrix/*.py", "matrix/repository/*.py")
NOT_SHIPPED = (
    *("tests", "benchmarks", "tools", "examples", "conftest"),
    *(f"matrix/{name}" for name in ("checks/", "trainers/", "cells/", "baseline.json", "census.json")),
)
# What the package works without; a bare environment has none of it.
OPTIONAL = ("transformers", "trl", "accelerate", "peft", "datasets", "rich", "pytest")

OF_CALLER = ("PYTEST_", "PYTHONPATH", "TRITON_", "MATRIX_", "TOX_")

UV = (sys.executable, "-m", "uv")


# What the proof judges from outside of the repository: one norm in plain torch, and the same off by a hundredth.
PATCHES = """
import torch

def right(model, error=0.0):
    norm = model.model.layers[0].input_layernorm
    def forward(x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * wide.to(x.dtype) * (1 + error)
    norm.forward = forward

def wrong(model):
    right(model, error=0.01)
"""


def call(*command: str | Path, cwd: Path = ROOT, status: int = 0) -> str:
    # Only what is installed counts, not what the caller's environment points to.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(OF_CALLER)}
    environment["COLUMNS"] = "200"
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    call(*UV, "build", "--out-dir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def sources() -> set[str]:
    files = [path for top in SHIPPED for path in (ROOT / top).rglob("*") if path.is_file()]
    files += [path for pattern in OF_MATRIX for path in ROOT.glob(pattern)]
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_holds_package_proof_and_matrix_only(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == sources()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_has_no_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() | {"pyproject.toml", "README.md", "LICENSE"} <= names
    tests = {name for name in names if name.rpartition("/")[2].startswith("test_")}
    assert tests == {"convergence/test_convergence.py"}
    assert [name for name in sorted(names) if name.startswith(NOT_SHIPPED)] == []


def in_repository(python: Path, root: Path, *arguments: str, status: int = 0) -> str:
    """``python -m matrix`` where only the wheel is installed."""
    return call(python, "-m", "matrix", *arguments, cwd=root, status=status)


def environment(wheel: Path, folder: Path, extra: str = "") -> Path:
    """The Python of an environment that has the wheel and what it asks for, nothing else."""
    call(*UV, "venv", "--python", sys.executable, folder / "env")
    python = folder / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    # The one tested torch: a resolver that may choose freely brings gigabytes of CUDA packages.
    constraint = ("--constraint", ROOT / "constraints.txt")
    call(*UV, "pip", "install", "--python", python, *constraint, f"liger-kernels{extra} @ {wheel.as_uri()}")
    return python


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(wheel, tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def proof(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(wheel, tmp_path_factory.mktemp("proof"), "[proof,matrix]")


def test_it_imports_with_nothing_optional(bare: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, pathlib, sys; import liger_kernels, liger_kernels.ops, torch\n"
        f"assert not [name for name in {OPTIONAL!r} if u.find_spec(name)]\n"
        "assert pathlib.Path(liger_kernels.__file__).is_relative_to(sys.prefix), liger_kernels.__file__\n"
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "liger_kernels.ops.rms_norm(x, torch.ones(8)).square().sum().backward(); assert x.grad.isfinite().all()\n"
        "print(liger_kernels.patch.__name__)"
    )
    assert call(bare, "-c", code, cwd=tmp_path).strip() == "patch"


@pytest.mark.parametrize(("patch", "status"), [("right", 0), ("wrong", 1)])
def test_the_proof_judges_a_patch_from_an_empty_folder(proof: Path, tmp_path: Path, patch: str, status: int) -> None:
    """By the names that are documented: the ``pytest`` command, in a folder that has nothing but the patch."""
    (tmp_path / "others.py").write_text(PATCHES, encoding="utf-8")
    command = (proof.parent / "pytest", "--pyargs", "convergence", "--patch", f"others:{patch}")
    options = ("--models", "llama-tied", "--dtypes", "float32", "--device", "cpu", "-p", "no:cacheprovider")
    shown = call(*command, *options, "--records=records", "--report=report.html", cwd=tmp_path, status=status)
    assert f"llama-tied/float32/{patch}: {'different' if status else 'equal'}" in shown
    assert "llama-tied" in (tmp_path / "report.html").read_text(encoding="utf-8")
    summary = call(proof, "-m", "convergence", "report", "records", cwd=tmp_path)
    assert f"| llama-tied/float32/{patch} |" in summary


def test_the_matrix_of_a_kernel_package_runs_from_the_wheel(proof: Path, tmp_path: Path) -> None:
    """The example, outside of this checkout: a cell runs, its record is accepted, and a wrong kernel fails the gate."""
    root = tmp_path / "kernel_package"
    shutil.copytree(ROOT / "examples" / "kernel_package", root, ignore=shutil.ignore_patterns("__pycache__", "build"))
    call("git", "init", "--quiet", cwd=root)
    for key, value in {"user.name": "Somebody", "user.email": "some@example.org"}.items():
        call("git", "config", key, value, cwd=root)
    listed = json.loads(in_repository(proof, root, "ci"))
    assert [job["cell"] for job in listed["include"]] == ["tf4.56", "tf5.11", "tf5.23"]
    assert "tf5.23" in in_repository(proof, root, "list")
    assert "op passed, 1 passed" in in_repository(proof, root, "cell", "tf5.23", "--workers", "1")
    judge = ("gate", "--no-run", "--cells", "tf5.23")
    assert "nothing was ever" in in_repository(proof, root, *judge, status=1)
    in_repository(proof, root, *judge, "--accept", "the first")
    assert "gate: pass" in in_repository(proof, root, *judge)
    kernel = root / "fast_silu" / "__init__.py"
    right = kernel.read_text(encoding="utf-8")
    kernel.write_text(right.replace("dy * s * (1 + x * (1 - s))", "dy * s * (1 + x * (1 + s))"), encoding="utf-8")
    assert kernel.read_text(encoding="utf-8") != right
    assert "stale record" in in_repository(proof, root, *judge, status=1)
    in_repository(proof, root, "cell", "tf5.23", "--stages", "op", status=1)  # which takes seconds
    said = in_repository(proof, root, *judge, status=1)
    assert "failed case" in said
    assert "gate: fail" in said


def test_the_proof_does_nothing_to_another_run(proof: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, sys\n\ndef test_it():\n"
        "    assert not {'torch', 'triton', 'transformers', 'convergence.plugin'} & set(sys.modules)\n"
        "    assert 'TRITON_INTERPRET' not in os.environ\n",
        encoding="utf-8",
    )
    for workers in ("0", "1"):
        shown = call(proof.parent / "pytest", "-n", workers, "-p", "no:cacheprovider", cwd=tmp_path)
        assert "liger-kernels-" in shown


def test_the_wheel_asks_for_what_is_documented(metadata: Message) -> None:
    required = map(Requirement, metadata.get_all("Requires-Dist", []))
    assert [one.name for one in required if "extra ==" not in str(one.marker)] == ["torch", "triton"]


def test_versions_types_and_extras_are_declared(wheel: Path, metadata: Message) -> None:
    text = (ROOT / "liger_kernels" / "__init__.py").read_text(encoding="utf-8")
    (version,) = (line.split('"')[1] for line in text.splitlines() if line.startswith("__version__"))
    assert metadata["Version"] == version
    assert {*metadata.get_all("Provides-Extra", [])} >= {"transformers", "trl", "proof", "matrix", "ray", "docs"}
    assert {f"{top}/py.typed" for top in SHIPPED} <= set(zipfile.ZipFile(wheel).namelist())
