"""What every op test gets: a device, and memory that is NaN until somebody writes it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from convergence.files import make_once
from convergence.models.data import default_text, seed_generators
from convergence.op.memory import deterministic


def pytest_configure() -> None:
    # Python would look for reference cycles after each 700 new objects, for a twentieth of the time of all tests.
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long, or waits for other processes, begins: at the end, one worker would wait for the other."""
    items.sort(key=lambda item: not {"compiled", "nodes"} & {*getattr(item, "fixturenames", ())})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("evidence", "how often an honest candidate fails, and whether a fault passes")
    group.addoption("--honest-seeds", metavar="N,N", help="run every honest candidate of --models with these seeds")
    group.addoption("--honest-results", metavar="FILE", help="append a line of JSON for each honest candidate")
    group.addoption(
        "--mutants",
        choices=("sample", "all"),
        default="sample",
        help="which faults the proof is tried on: some, in float32, or all, in every dtype (default: sample)",
    )
    group = parser.getgroup("kernels", "what is compiled for GPUs that are not there")
    group.addoption(
        "--programs",
        choices=("all", "largest"),
        default="all",
        help="which programs of tests/test_ops_compile.py: all, or what another Triton can break (default: all)",
    )


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one; else the CPU, on which kernels run in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder in every xdist worker of this run, for what one of them makes for all."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session")
def once(shared_folder: Path) -> Callable[[str, Callable[[], Any]], Any]:
    """``once(name, find)``: what ``find()`` returned in the xdist worker of this run that asked first, as JSON has it.
    The others wait."""

    def once(name: str, find: Callable[[], Any]) -> Any:
        file = shared_folder / f"{name}.json"
        make_once(file, lambda path: path.write_text(json.dumps(find())))
        return json.loads(file.read_text())

    return once


@pytest.fixture(scope="session", autouse=True)
def first_compilation() -> None:
    """Dynamo changes ``torch.nn.Module`` when it first compiles: before the proof remembers what is unpatched, so that
    a worker may run a test that compiles between two of the proof."""
    if "convergence.case" in sys.modules:
        torch.compile(lambda x: x, backend="eager")(torch.ones(1))


@pytest.fixture(scope="session", autouse=True)
def shared_references(shared_folder: Path) -> Iterator[None]:
    """Truth and baseline of a case are trained once in this run, by the xdist worker that needs them first."""
    from convergence.kept import keep_in

    folder = shared_folder / "references"
    folder.mkdir(exist_ok=True)
    (user := folder / f"used-by-{os.getpid()}").touch()
    with keep_in(folder):
        yield
    user.unlink()
    if not any(folder.glob("used-by-*")):  # the last one clears up: they are hundreds of megabytes each
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a text for rows of a checkpoint: the default one, which is made tokens of for each checkpoint, takes
    half a second."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(default_text()[:4000], encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers whichever ran before it, on whichever worker."""
    seed_generators(0)


@pytest.fixture(autouse=True)
def poisoned_empty() -> Iterator[None]:
    """``torch.empty`` returns NaN (the largest integer for integers), so that an element nobody writes is seen."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    with deterministic(True):
        yield
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.fixture
def untouched_memory(device: torch.device, poisoned_empty: None) -> Callable[[int, torch.dtype], torch.Tensor]:
    """``allocate(elements, dtype)``: memory that nobody has written, so that on a CPU only used pages cost anything."""

    def allocate(elements: int, dtype: torch.dtype) -> torch.Tensor:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            return torch.empty(elements, dtype=dtype, device=device)
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    return allocate


@pytest.fixture
def references_on_a_cpu() -> Iterator[None]:
    """Ops compute by their references on a CPU: for tests of what is around them, which the interpreter makes slow."""
    from liger_kernels.ops.runtime import dispatch

    with mock.patch.object(dispatch, "INTERPRET", False):
        yield


@pytest.fixture
def right_four_bits(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """bitsandbytes' 4 bits by their definition, on a machine where bitsandbytes is wrong."""
    functional = pytest.importorskip(
        "bitsandbytes", reason="needs bitsandbytes 0.50 or newer, of the extra qlora"
    ).functional
    from tests.nf4_checks import by_definition

    weight = torch.arange(5.0 * 96, device=device).sin().view(5, 96) * torch.logspace(-3, 3, 5, device=device)[:, None]
    packed, state = functional.quantize_4bit(weight, blocksize=256, quant_type="nf4")
    expected = by_definition(packed, state.absmax, state.blocksize, "nf4", state.shape, state.dtype)
    if not torch.equal(functional.dequantize_4bit(packed, state), expected):
        monkeypatch.setattr(torch.ops.bitsandbytes, "dequantize_4bit", SimpleNamespace(default=by_definition))


@pytest.fixture
def small_slabs() -> Iterator[None]:
    """Slabs of the vocabulary as small as the shapes that the fused head is tested with."""
    from liger_kernels.ops.loss.schedules.slab_plan import SlabSizes
    from liger_kernels.ops.runtime.tiling import tiled
    from tests.linear_cross_entropy_checks import SLAB

    with tiled(slabs=lambda choose, tokens, hidden: SlabSizes(SLAB, SLAB)):
        yield
