"""Every trainer of the installed trl, patched and unpatched, on a tiny Llama and a tiny Gemma."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import liger_kernels
from convergence.trainers.cases import CASES
from convergence.trainers.material import plain
from convergence.trainers.observe import Arm
from convergence.trainers.rows import case_of
from matrix.trainers.judge import patch_of, prove, skip_if_missing


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


@pytest.mark.parametrize(("case", "family", "way"), [pytest.param(*row, id="-".join(row)) for row in sorted(ROWS)])
def test_trainer(case: str, family: str, way: str, folders: dict[str, Path], records: str | None) -> None:
    row = case_of(case, family, patch_of(WAYS[way]), "class" if way == "class" else "instance")
    skip_if_missing(row, records)
    arm = Arm(load=functools.partial(WAYS[way], folders[family]), expects=CASES[case].expects)
    prove(row, folders[family], records, arm)
