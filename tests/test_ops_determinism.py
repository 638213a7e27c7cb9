"""The ops compute the same bits again, and for a row the same bits in any batch, where that is promised."""

from __future__ import annotations

import itertools
import re
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


def test_atomics_do_nothing_but_count() -> None:
    """Triton's interpreter runs one program after the other, so only a GPU would show that their order is not fixed. A
    count of ones is the same in any order."""
    files = sorted(Path(ops.__file__).parent.rglob("*.py"))
    assert len(files) > 25
    atomics = [
        call for file in files for call in re.findall(r"tl\.atomic\w+\([^)]*\)*[^)]*\)", file.read_text("utf-8"))
    ]
    assert len(atomics) == 2
    assert not [call for call in atomics if not re.match(r"tl\.atomic_add\(done_ptr \+ [\w.]+(\(0\))?, 1, ", call)]


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
    assert broken("rope, half", found) == [f"odd run: {RUNS}", f"odd run: {BATCH}", f"odd sum: {RUNS}"]
