"""Every causal LM of the installed transformers: what a patch replaces in it, and that signatures stay upstream's.

No model is named: ``classes.py`` finds whatever transformers has, and ``zoo.py`` shrinks it. Nothing is trained here;
that patched models train alike is what the proof and ``tests/test_patching_zoo.py`` show. With ``--records DIR``, a
record per class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_kernels
from convergence.files import write_json
from liger_kernels.ops import launches
from matrix.checks import zoo
from matrix.checks.classes import ModelClass, causal
from matrix.checks.signatures import other_signatures

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with zoo.quiet():
        yield


def leave_record(config: pytest.Config, name: str, **found: Any) -> None:
    folder = config.getoption("--records")
    if folder:
        write_json({"name": name, **found}, Path(folder) / f"{name}.json")


@pytest.mark.parametrize("found", [pytest.param(found, id=found.name) for found in causal()])
def test_patched(found: ModelClass, request: pytest.FixtureRequest) -> None:
    name = found.name
    try:
        upstream = zoo.build(found, DEVICE)
    except zoo.CannotShrink as error:
        leave_record(request.config, name, verdict="absent", reason=f"not in the zoo: {error}")
        pytest.skip(f"not in the zoo: {error}")
    patched = copy.deepcopy(upstream)
    report = liger_kernels.patch(patched)
    wrong = other_signatures(patched, upstream)  # before the forward: some models swap modules in it
    before = launches()
    with torch.no_grad():
        loss = patched(**{key: value.to(DEVICE) for key, value in zoo.tiny_batch(patched).items()}).loss
    ran = {kernel: count - before.get(kernel, 0) for kernel, count in launches().items()}
    leave_record(
        request.config,
        name,
        verdict="different" if wrong or not torch.isfinite(loss) else "patched",
        reason="; ".join(wrong),
        census=report.counts(),
        launches={kernel: count for kernel, count in ran.items() if count},
        fallbacks=dict(report.fallbacks),
    )
    assert torch.isfinite(loss)
    assert not wrong
