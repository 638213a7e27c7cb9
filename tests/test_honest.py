"""No false alarms: every honest candidate passes, whatever its seed, last bits, order of sums or tiles.

``pytest tests`` runs a sample. ``pytest tests/test_honest.py --honest-seeds 1,2,3 --models all --honest-results FILE``
runs all of them for every model and dtype, which takes a GPU, and appends one line of JSON for each. With ``--profile
scale`` models are shapes of real width, small ones first: whoever stops it keeps what has run, and ``--models`` and
``--dtypes`` choose a part. Several runs may append to one file.
"""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path

import pytest
import torch
import transformers

from convergence import case
from convergence.arms.train import train
from convergence.judge import bitwise
from convergence.judge.tolerance import FLOOR_ROUNDOFFS, unit_roundoff
from convergence.models import scale
from convergence.models.models import select
from convergence.models.rows import find
from convergence.report.records import versions
from liger_kernels.ops import cross_entropy
from tools.honest import candidates, judge, small_tiles

SMALL_SHAPE = "llama3-8b-odd?divided=64"
# By model and seed; the first has references that other tests train, too.
SAMPLES = {
    ("llama-untied", 0): ("fused_linear, rows reversed", "fused_linear, small tiles"),
    (SMALL_SHAPE, 1): (
        "fused_linear, replica 1",
        "fused_linear, 11 chunks, replica 2",
        "fused_linear, small tiles, replica 3",
        "fused_linear_small, narrow slabs, replica 4",
        "fused_cross_entropy, rows reversed, replica 5",
    ),
}
GPU = torch.cuda.is_available()


def selected(config: pytest.Config) -> list[tuple[str, str]]:
    """The models and dtypes that the options name."""
    asked = config.getoption("--dtypes")
    dtypes = asked.split(",") if asked else ["float32", "bfloat16", *(["tf32"] if GPU else [])]
    names = config.getoption("--models")
    if config.getoption("--profile") != scale.PROFILE:
        return [(model.name, dtype) for dtype in dtypes for model in select(names)]
    device = config.getoption("--device")
    rows = [(row, dtype) for row in scale.select(names) for dtype in (dtypes if asked else row.dtypes)]
    rows.sort(key=lambda pair: pair[0].plan(pair[1], device).size)
    return [(row.name, dtype) for row, dtype in rows]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "honest" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption("--honest-seeds")
    if option:
        rows = [
            (model, dtype, int(seed), honest)
            for seed in option.split(",")
            for model, dtype in selected(metafunc.config)
            for honest in candidates(model, dtype)
        ]
    else:
        rows = [
            (model, "float32", seed, honest)
            for (model, seed), names in SAMPLES.items()
            for honest in candidates(model)
            if honest.name in names
        ]
    parameters = []
    for *chosen, honest in rows:
        group = "/".join(map(str, chosen))
        marks = pytest.mark.xdist_group(group)
        parameters.append(pytest.param(*chosen, honest, id=f"{group}/{honest.name}", marks=marks))
    metafunc.parametrize(("model", "dtype", "seed", "honest"), parameters)


@pytest.mark.power
def test_an_honest_candidate_passes(model, dtype, seed, honest, request):
    device = request.config.getoption("--device")
    began, judged = time.perf_counter(), "float32" if dtype == "tf32" else dtype
    if missing := find(model).absent(judged, device):
        pytest.skip(f"transformers {transformers.__version__}, {device}: {missing}")
    verdict = judge(honest, model, judged, device, seed, tf32=dtype == "tf32")
    results = request.config.getoption("--honest-results")
    if results:
        shares: dict[str, list[float]] = {}
        near = []
        for statistic in verdict.statistics:
            share = float(f"{statistic.value / statistic.bound:.3g}")
            shares.setdefault(statistic.statistic, []).append(share)
            if share > 0.7:
                near.append((share, statistic.statistic, statistic.quantity, statistic.step))
        row = {
            "model": model,
            "dtype": dtype,
            "seed": seed,
            "candidate": honest.name,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "versions": versions(device),
            "at": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "seconds": round(time.perf_counter() - began, 2),
            "failures": verdict.failures,
            "near": near,
            "shares of the bound": shares,
        }
        with Path(results).open("a", encoding="utf-8") as file:  # one write: several workers append to the same file
            file.write(json.dumps(row) + "\n")
    assert verdict.passed, verdict.failures


def test_at_scale_there_are_more_than_200():
    shapes = [(name, dtype) for name, row in scale.SHAPES.items() for dtype in row.dtypes]
    names = [(*shape, honest.name) for shape in shapes for honest in candidates(*shape)]
    assert len(set(names)) == len(names) > 200


def test_small_tiles_round_in_no_direction_even_of_many_classes(device):
    """Each row's own rounding averages out of the mean over rows; what every row loses alike does not. In blocks of 128
    that was 17 units of roundoff."""
    logits = 1.5 * torch.randn(64, 151_936, generator=torch.Generator().manual_seed(0))
    logits[:, ::16] *= 4  # as the heads of the proof: a few classes have nearly all of the probability
    likely = logits.argmax(1)  # a small loss has no roundoff to speak of
    with small_tiles():
        loss = cross_entropy(logits.to(device), likely.to(device), reduction="none").cpu()
    off = loss.double() - torch.nn.functional.cross_entropy(logits.double(), likely, reduction="none")
    assert abs(float(off.mean())) < FLOOR_ROUNDOFFS * unit_roundoff(torch.float32)


def test_at_scale_every_candidate_rounds_in_a_way_of_its_own(device):
    """Whoever starts from one replica's weights and has the bits of another candidate is no second draw."""
    # So few classes are one slab, in which the schedule of slabs is the fast one.
    rows = [honest for honest in candidates(SMALL_SHAPE) if "fused_linear_small, replica" not in honest.name]
    given = case.inputs(SMALL_SHAPE, "float32", scale.PROFILE, 1)
    digests = {}
    for honest in rows:
        nudge = honest.replica - 1 if honest.replica else None
        with honest.around():
            arm = train(given.run(torch.float32, torch.device(device), patch=honest.patch, nudge=nudge))
        digests.setdefault(json.dumps(bitwise.digest(arm)), []).append(honest.name)
    assert [names for names in digests.values() if len(names) > 1] == []
