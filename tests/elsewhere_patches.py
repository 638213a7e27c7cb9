"""Code of another commit: a patch of norms, and this checkout's package with another norm, each in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.pages import ROOT

MODULE = "patch_of_two_commits"
PATCH = f"{MODULE}:patch"
_PATCH = """
import types

def norm(self, hidden_states):
    x = hidden_states.float()
    size = {size}
    x = x / (size / x.shape[-1] + self.variance_epsilon).sqrt()
    return self.weight * x.to(hidden_states.dtype) * {scale}

def patch(model):
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(norm, module)
"""
_SUM = "x.square().sum(-1, keepdim=True)"
_HALVES = "(x.square()[..., ::2].sum(-1, keepdim=True) + x.square()[..., 1::2].sum(-1, keepdim=True))"
_KERNEL_SUM = "tl.sum(x * x, axis=1)"
_KERNEL_HALVES = (
    "(tl.sum(tl.where((col % 2 == 0)[None, :], x * x, 0.0), axis=1)"
    " + tl.sum(tl.where((col % 2 == 1)[None, :], x * x, 0.0), axis=1))"
)
_KERNEL_NORM = "    y = x * rstd[:, None]\n"
# First what each call would import where its server has not, then what this package takes.
_NO_MODELS = """
import torch._inductor.config
AutoModelForCausalLM = PretrainedConfig = PreTrainedModel = object
"""


def write_patch(folder: Path, halves: bool = False, scale: float = 1.0) -> Path:
    """A checkout with the patch of norms. ``halves`` adds up the squares in another order."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _PATCH.format(size=_HALVES if halves else _SUM, scale=scale)
    (folder / f"{MODULE}.py").write_text(text, encoding="utf-8")
    return folder


def copy_package(folder: Path, halves: bool = False, wrong: bool = False) -> Path:
    """A checkout with this package, whose norm adds up in another order (``halves``), or is 1.01 times too large."""
    shutil.copytree(ROOT / "liger_kernels", folder / "liger_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "liger_kernels" / "ops" / "_rms_norm.py"
    text = file.read_text(encoding="utf-8")
    for there, old, new in (
        (halves, _KERNEL_SUM, _KERNEL_HALVES),
        (wrong, _KERNEL_NORM, _KERNEL_NORM.replace("x * ", "1.01 * x * ")),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new) if there else text
    file.write_text(text, encoding="utf-8")
    return folder


def write_no_models(folder: Path) -> Path:
    """A module in place of transformers: a Python that builds no model starts with it in two thirds of the time."""
    (folder / "transformers.py").write_text(_NO_MODELS, encoding="utf-8")
    return folder
