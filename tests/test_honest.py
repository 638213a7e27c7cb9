"""No false alarms: every honest candidate passes, whatever its seed, last bits, order of sums or tiles.

``pytest tests`` runs a sample. ``pytest tests/test_honest.py --honest-seeds 1,2,3 --models all --honest-results FILE``
runs all of them for every model and dtype, which takes a GPU, and appends one line of JSON for each.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch

from convergence.models import MODELS, select
from convergence.records import versions
from tests.honest import candidates, judge

SAMPLE = (
    "fused_linear, rows reversed",
    "fused_linear, small tiles",
    "fused_linear, 2 chunks",
    "fused_linear, replica 3",
)
GPU = torch.cuda.is_available()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption("--honest-seeds")
    if option:
        models = [model.name for model in select(metafunc.config.getoption("--models"))]
        dtypes = ["float32", "bfloat16", *(["tf32"] if GPU else [])]
        rows = [
            (model, dtype, int(seed), honest)
            for seed in option.split(",")
            for dtype in dtypes
            for model in models
            for honest in candidates(model)
        ]
    else:
        chosen = {honest.name: honest for honest in candidates("llama-tied")}
        rows = [("llama-tied", "float32", 1, chosen[name]) for name in SAMPLE]
    metafunc.parametrize(
        ("model", "dtype", "seed", "honest"),
        [
            pytest.param(
                *row,
                id="/".join((*map(str, row[:3]), row[3].name)),
                marks=pytest.mark.xdist_group("/".join(map(str, row[:3]))),
            )
            for row in rows
        ],
    )


def test_an_honest_candidate_passes(model, dtype, seed, honest, request):
    if not MODELS[model].is_available():
        pytest.skip(f"this transformers has no {MODELS[model].architecture}")
    device = request.config.getoption("--device")
    verdict = judge(honest, model, "float32" if dtype == "tf32" else dtype, device, seed, tf32=dtype == "tf32")
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
            "failures": verdict.failures,
            "near": near,
            "shares of the bound": shares,
        }
        with Path(results).open("a", encoding="utf-8") as file:  # one write: several workers append to the same file
            file.write(json.dumps(row) + "\n")
    assert verdict.passed, verdict.failures
