"""The flags by which transformers and trl patch a model themselves, answered by ``liger_kernels.compat``."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from convergence.report.records import Case, Outcome
from convergence.trainers.cases import CASES, find, takes
from convergence.trainers.material import plain
from convergence.trainers.observe import Arm
from convergence.trainers.rows import case_of
from matrix.trainers.judge import patch_of, prove, skip_if_missing, write_fact

# What the flag itself makes trl say: that it is deprecated, and that it loads a model that is given as a string.
EXPECTED = ("use_liger_kernel", "You passed a model")


def by_flag(folder: Path, option: str, load: Any = plain) -> Arm:
    loaded = functools.partial(load, folder)
    return Arm(load=loaded, options={option: True}, expects=EXPECTED, logs_less=True)


def by_flag_of_sft(folder: Path) -> Arm:
    """``use_liger=True`` with a model given as a string, or ``use_liger_kernel=True``."""
    old = takes(find("SFTConfig"), "use_liger")
    return by_flag(folder, "use_liger", str) if old else by_flag(folder, "use_liger_kernel")


def row_of(case: str) -> Case:
    return case_of(case, "llama", patch_of(by_flag))


def not_logged(outcome: Outcome) -> list[str]:
    """What the trainer chose not to log."""
    return [note.partition(":")[0] for note in outcome.notes if note.endswith(": not logged")]


def test_trainer(folders: dict[str, Path], records: str | None) -> None:
    """transformers' own ``use_liger_kernel=True``."""
    folder = folders["llama"]
    outcome = prove(row_of("trainer"), folder, records, by_flag(folder, "use_liger_kernel"))
    assert outcome.census["linear_cross_entropy"] == 1
    assert not not_logged(outcome)


def test_sft(folders: dict[str, Path], records: str | None) -> None:
    """Where trl then asks the model for the token accuracy, the accuracy that it logs is the unpatched one."""
    case = "sft-nll" if takes(find("SFTConfig"), "loss_type") else "sft"
    outcome = prove(row_of(case), folders["llama"], records, by_flag_of_sft(folders["llama"]))
    if "return_token_accuracy" in inspect.getsource(find("SFTTrainer").compute_loss):
        assert not_logged(outcome) == ["logged entropy", "logged eval_entropy"]
        assert not outcome.fallbacks
    assert set(not_logged(outcome)) <= {
        f"logged {p}{m}" for p in ("", "eval_") for m in ("entropy", "mean_token_accuracy")
    }


@pytest.mark.parametrize("case", ["dpo", "kto", "grpo"])
def test_preference_trainers(case: str, folders: dict[str, Path], records: str | None, tmp_path: Path) -> None:
    """Where the flag needs a chunked loss, constructing the trainer says that there is none; elsewhere it patches."""
    row, folder = row_of(case), folders["llama"]
    skip_if_missing(row, records)
    option = "use_liger_loss|use_liger_kernel"
    module = vars(sys.modules[find(CASES[case].trainer).__module__])
    losses = [name for name in module if name.startswith("LigerFusedLinear")]
    if not losses:
        prove(row, folder, records, by_flag(folder, option))
        return
    make = functools.partial(CASES[case].make, folder, tmp_path)
    with pytest.raises(NotImplementedError, match=losses[0]) as raised:
        make(plain(folder), {option: True})
    name = "/".join((row.model, row.setup, row.order, row.dtype, by_flag.__name__))
    write_fact(name, "not provided", str(raised.value), records)
