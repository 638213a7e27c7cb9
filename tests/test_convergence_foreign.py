"""The proof of a patch of somebody else, where this package is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# As if it were not installed, in every process that reads this.
ABSENT = """
import functools
import sys

def find(own, name, *rest):
    return None if name.partition(".")[0] == "liger_kernels" else own(name, *rest)

for finder in sys.meta_path:
    finder.find_spec = functools.partial(find, finder.find_spec)
"""
PATCHES = """
import torch

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


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(ABSENT, encoding="utf-8")
    (folder / "others.py").write_text(PATCHES, encoding="utf-8")
    case = ("--models", "llama-tied", "--dtypes", "float32", "--profile", "plain", "--device", "cpu")
    command = [sys.executable, "-m", "pytest", "convergence", "-q", "-p", "no:cacheprovider", *case]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_patch_of_others_is_judged(tmp_path: Path, shared_folder: Path) -> None:
    options = ("--patch", "others:patch,others:wrong", "--references", str(shared_folder / "references"))
    done = run(tmp_path, *options, "--no-blame")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "llama-tied/float32/patch: equal" in done.stdout
    assert "llama-tied/float32/wrong: different" in done.stdout


def test_without_a_patch_there_is_nothing_to_judge(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 4
    assert "liger_kernels is not installed here: name the patch to judge" in done.stderr
