"""The flags by which transformers and trl patch a model themselves, answered by ``liger_kernels.compat``."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from matrix.trainers.cases import CASES, find, takes
from matrix.trainers.judge import TrainerRecord, judge, skip_if_missing
from matrix.trainers.observe import Arm, plain

# What the flag itself makes trl say: that it is deprecated, and that it loads a model that is given as a string.
EXPECTED = ("use_liger_kernel", "You passed a model")


def flagged(option: str, load: Any = plain) -> Arm:
    return Arm(load=load, options=((option, True),), expects=EXPECTED)


def flagged_sft() -> Arm:
    """``use_liger=True`` with a model given as a string, or ``use_liger_kernel=True``."""
    return flagged("use_liger", str) if takes(find("SFTConfig"), "use_liger") else flagged("use_liger_kernel")


def test_trainer(folders: dict[str, Path], records: str | None) -> None:
    """transformers' own ``use_liger_kernel=True``."""
    arm = flagged("use_liger_kernel")
    record = judge("trainer", "llama", folders["llama"], "flag", arm)
    record.check(records)
    assert record.census["linear_cross_entropy"] == 1
    assert not record.not_logged


def test_sft(folders: dict[str, Path], records: str | None) -> None:
    """Where trl then asks the model for the token accuracy, the accuracy that it logs is the unpatched one."""
    case = "sft-nll" if takes(find("SFTConfig"), "loss_type") else "sft"
    record = judge(case, "llama", folders["llama"], "flag", flagged_sft())
    record.check(records)
    if "return_token_accuracy" in inspect.getsource(find("SFTTrainer").compute_loss):
        assert record.not_logged == ["logged entropy", "logged eval_entropy"]
        assert not record.fallbacks
    assert set(record.not_logged) <= {
        f"logged {p}{m}" for p in ("", "eval_") for m in ("entropy", "mean_token_accuracy")
    }


@pytest.mark.parametrize("case", ["dpo", "kto", "grpo"])
def test_preference_trainers(case: str, folders: dict[str, Path], records: str | None, tmp_path: Path) -> None:
    """Where the flag needs a chunked loss, constructing the trainer says that there is none; elsewhere it patches."""
    skip_if_missing(case, "llama", "flag", records)
    option = "use_liger_loss|use_liger_kernel"
    module = vars(sys.modules[find(CASES[case].trainer).__module__])
    losses = [name for name in module if name.startswith("LigerFusedLinear")]
    if not losses:
        judge(case, "llama", folders["llama"], "flag", flagged(option)).check(records)
        return
    make = functools.partial(CASES[case].make, folders["llama"], tmp_path)
    with pytest.raises(NotImplementedError, match=losses[0]) as raised:
        make(plain(folders["llama"]), {option: True})
    TrainerRecord(case, "llama", "flag", "not provided", str(raised.value)).write(records)
