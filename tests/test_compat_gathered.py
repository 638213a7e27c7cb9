"""trl's kernel for given logits does not read logits that a patched model has not computed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import liger_kernels
from liger_kernels import trl_head
from liger_kernels.patching.logits import gathered
from liger_kernels.trl_gathered import KernelQuestion
from tests.patching_checks import batch, fallbacks, tiny
from tests.test_patching_gathered import _installed as _installed
from tests.test_patching_gathered import run

pytest.importorskip("trl.kernels.logprob_entropy", reason="trl has a kernel for given logits from 1.16")
UTILS: Any = importlib.import_module("trl.trainer.utils")


def by_trl(logits: Any, ids: Any) -> Any:
    return UTILS.selective_log_softmax(logits, ids)


def takes(logits: Any, *_: Any) -> bool:
    """As trl's function answers on a GPU. Its kernel does not run on this tensor."""
    return True


def reads(logits: Any, index: Any, **_: Any) -> Any:
    """As trl's kernel: it reads the memory of the logits."""
    assert logits.data_ptr()
    found = logits.detach().clone().requires_grad_(logits.requires_grad).log_softmax(-1)
    return found.gather(-1, index.unsqueeze(-1)).squeeze(-1), None


def asked() -> KernelQuestion:
    found = trl_head.question()
    assert found is not None
    return found


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """trl's module, as if its kernel ran here."""
    utils = UTILS
    monkeypatch.setattr(takes, "__module__", utils.__name__)
    monkeypatch.setattr(takes, "__name__", "_supports_trl_loss_kernel")
    monkeypatch.setattr(utils, "_supports_trl_loss_kernel", takes)
    monkeypatch.setattr(utils, "is_triton_available", lambda: True)
    monkeypatch.setattr(utils, "_fused_logprob_entropy", reads, raising=False)
    trl_head.install()
    yield utils
    trl_head.uninstall()
    assert utils._supports_trl_loss_kernel is takes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trls_kernel_does_not_read_logits_that_were_not_computed(utils: Any, dtype: torch.dtype) -> None:
    patched = tiny("llama").to(dtype)
    liger_kernels.patch(patched)
    run(patched, by_trl)
    assert fallbacks(patched) == {}
    assert gathered.state() == "on, 1 calls ran linear_log_probs"
    assert asked().refused == 1


def test_trls_kernel_reads_logits_that_are_there(utils: Any) -> None:
    ids = batch()["input_ids"]
    patched = tiny("llama")
    liger_kernels.patch(patched)
    logits = patched(ids).logits
    logits.sort()
    for given in (logits, torch.zeros(*ids.shape, 5, device=ids.device)):
        assert utils._supports_trl_loss_kernel(given, ids)
    assert asked().refused == 0
