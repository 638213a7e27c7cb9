"""What is uploaded: it builds, holds the package and nothing else, and installs and imports with nothing optional."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOT_SHIPPED = ("tests", "convergence", "matrix", "benchmarks", "conftest", "test_")
# What the package works without; a bare environment has none of it.
OPTIONAL = ("transformers", "trl", "accelerate", "peft", "datasets", "rich", "pytest")

UV = (sys.executable, "-m", "uv")


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    call(*UV, "build", "--out-dir", folder, ROOT)
    return folder


def sources() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "liger_kernels").rglob("*.py")}


def test_the_wheel_holds_the_package_only(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == sources()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_has_no_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert [name for name in sorted(names) if name.rpartition("/")[2].startswith("test_")] == []
    assert [name for name in sorted(names) if name.startswith(NOT_SHIPPED)] == []


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it asks for, nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    (wheel,) = built.glob("*.whl")
    call(*UV, "venv", "--python", sys.executable, folder / "env")
    python = folder / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    # The one tested torch: a resolver that may choose freely brings gigabytes of CUDA packages.
    call(*UV, "pip", "install", "--python", python, "--constraint", ROOT / "constraints.txt", wheel)
    return python


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


def test_the_wheel_asks_for_what_is_documented(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    required = [line for line in archive.read(name).decode().splitlines() if line.startswith("Requires-Dist:")]
    always = [line.split()[1].partition("<")[0].partition(">")[0] for line in required if "extra ==" not in line]
    assert always == ["torch", "triton"]
