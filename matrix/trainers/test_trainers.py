"""Every trainer of the installed trl, patched and unpatched, on a tiny Llama and a tiny Gemma.

With ``--patch module:function`` the patch is somebody else's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import liger_kernels
from convergence.trainers.observe import Arm
from matrix.trainers.cases import CASES
from matrix.trainers.judge import case_of, patch_of, prove, skip_if_missing
from matrix.trainers.material import plain


def by_instance(folder: Path) -> Any:
    """The model exists already: ``patch(model)``."""
    model = plain(folder)
    liger_kernels.patch(model)
    return model


def by_class(folder: Path) -> Any:
    """Before it exists: ``apply_liger_kernel_to_<family>()``, then loaded as ever."""
    family = "gemma" if "gemma" in folder.name else "llama"
    getattr(liger_kernels, f"apply_liger_kernel_to_{family}")()
    try:
        return plain(folder)
    finally:
        liger_kernels.revert_liger_kernel()


def by_auto_class(folder: Path) -> Any:
    return liger_kernels.AutoLigerKernelForCausalLM.from_pretrained(folder)


WAYS = {"instance": by_instance, "class": by_class, "auto": by_auto_class}
# Each trainer on Llama; Gemma and the other ways to patch where they meet another path of a trainer.
ROWS = [
    *((case, "llama", "instance") for case in CASES),
    *((case, "llama", "class") for case in ("trainer", "sft", "dpo")),
    ("sft", "llama", "auto"),
    *((case, "gemma", "instance") for case in ("trainer", "sft-packing", "dpo")),
    ("trainer", "gemma", "class"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With ``--patch``, every trainer on Llama for each patch that it names."""
    patches = metafunc.config.getoption("--patch")
    rows = [(case, "llama", patch) for patch in patches.split(",") for case in CASES] if patches else ROWS
    metafunc.parametrize(("case", "family", "way"), [pytest.param(*row, id="-".join(row)) for row in sorted(rows)])


def test_trainer(
    case: str, family: str, way: str, folders: dict[str, Path], records: str | None, pytestconfig: pytest.Config
) -> None:
    folder = folders[family]
    if way in WAYS:
        row = case_of(case, family, patch_of(WAYS[way]), "class" if way == "class" else "instance")
        arm = Arm(load=functools.partial(WAYS[way], folder), expects=CASES[case].expects)
        skip_if_missing(row, records)
        prove(row, folder, records, arm)
    else:
        row = case_of(case, family, way, pytestconfig.getoption("--scope"))
        skip_if_missing(row, records)
        prove(row, folder, records, timeout=pytestconfig.getoption("--patch-timeout"))
