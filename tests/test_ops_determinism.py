"""The ops compute the same bits again, and for a row the same bits in any batch, where that is promised."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from liger_kernels import ops
from tools.determinism import BATCH, CASES, DTYPES, RUNS, DeterminismCase, Fact, broken, facts


@pytest.fixture(autouse=True)
def as_users_run(poisoned_empty: None) -> None:
    """No promise needs PyTorch's deterministic algorithms."""
    torch.use_deterministic_algorithms(False)


# The interpreter runs the same programs in every dtype, and rounding to 16 bits would only hide a difference.
SHOWING = DTYPES if torch.cuda.is_available() else DTYPES[:1]


@pytest.mark.parametrize("dtype", SHOWING, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_promises_hold(name: str, dtype: torch.dtype, device: torch.device) -> None:
    found = facts(CASES[name], dtype, device)
    assert not broken(name, found), found


def test_no_kernel_uses_atomics() -> None:
    """Triton's interpreter runs one program after the other, so only a GPU would show that their order is not fixed."""
    files = sorted(Path(ops.__file__).parent.rglob("*.py"))
    assert len(files) > 25
    assert not [file.name for file in files if "tl.atomic" in file.read_text(encoding="utf-8")]


def test_every_op_has_facts() -> None:
    public = {name.removesuffix("_ref") for name in ops.__all__ if name.endswith("_ref")} | {"packing_weights"}
    assert {name.partition(",")[0] for name in CASES} == public


def test_what_depends_on_the_run_or_on_the_batch_is_found(device: torch.device) -> None:
    """A last bit is enough."""
    runs = itertools.count()

    def inputs(*_):
        return {"x": 1 + torch.rand(50, 8)}, {}

    def compute(x):
        odd = x.detach().clone()
        odd.view(torch.int32)[0, 0] ^= next(runs) % 2
        larger = x.clone()
        larger.view(torch.int32)[-1, -1] ^= 1 if len(x) == 50 else 0
        return {"x": x, "odd run": odd, "size": larger}, {"sum": x.sum(), "odd sum": odd.view(torch.int32).sum()}

    found = facts(DeterminismCase(inputs, compute), torch.float32, device)
    assert found == [
        Fact("x", True, True),
        Fact("odd run", False, False),
        Fact("size", True, True),
        Fact("sum", True, None),
        Fact("odd sum", False, None),
    ]
    assert broken("rope", found) == [f"odd run: {RUNS}", f"odd run: {BATCH}", f"odd sum: {RUNS}"]
