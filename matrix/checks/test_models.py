"""Every causal LM of the installed transformers: what a patch replaces in it, and that signatures stay upstream's.

No model is named: ``classes.py`` finds whatever transformers has, and ``zoo.py`` shrinks it. Nothing is trained here;
that patched models train alike is what the proof and ``tests/test_patching_zoo.py`` show. With ``--records DIR``, a
record per class.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_kernels
from convergence.files import write_json
from liger_kernels.ops import launches
from matrix.checks import zoo
from matrix.checks.classes import ModelClass, causal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with zoo.quiet():
        yield


def differs(patched: Callable[..., Any], upstream: Callable[..., Any]) -> str:
    """Why ``patched`` does not accept exactly what ``upstream`` does; empty when it does.

    A signature can be borrowed (``functools.wraps``), so code that is not upstream's must hand everything on.
    """
    expected, shown = (list(inspect.signature(function).parameters.values()) for function in (upstream, patched))
    if expected != shown:
        return f"it takes {', '.join(map(str, shown))} instead of {', '.join(map(str, expected))}"
    theirs, ours = (getattr(function, "__func__", function) for function in (upstream, patched))
    borrowed = hasattr(ours, "__wrapped__") or hasattr(ours, "__signature__")
    everything = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if borrowed and ours.__code__ is not theirs.__code__ and ours.__code__.co_flags & everything != everything:
        return "its signature is borrowed, and it does not hand everything on"
    return ""


def other_signatures(patched: Any, upstream: Any) -> list[str]:
    """Every module of ``patched`` whose forward does not accept exactly what its twin's in ``upstream`` does."""
    twins = dict(upstream.named_modules())
    found = ((path, differs(part.forward, twins[path].forward)) for path, part in patched.named_modules())
    return [f"{path or type(patched).__name__}.forward: {why}" for path, why in found if why]


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
