"""``python -m benchmarks.adapters.worker PLAN RESULT``: one arm, here. :mod:`benchmarks.adapters` starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.adapters import check, steps
from benchmarks.adapters.arms import ARMS
from benchmarks.adapters.job import TRUTH, AdapterJob
from benchmarks.adapters.model import set_adapters
from convergence import files

PACKAGES = ("torch", "triton", "transformers", "peft")


def measure(kind: str, job: AdapterJob, keep: Callable[[dict[str, Any]], None]) -> None:
    """What is found out of ``kind``: "steps", "check" or "start". ``keep`` gets all that is there, again and again.

    Without numbers, its "note" says why.
    """
    arm = ARMS[job.arm]
    if missing := arm.absent(job):
        keep({"note": f"absent: {missing}"})
        return
    try:
        model = arm.build(job)
        set_adapters(model, job)
    except torch.OutOfMemoryError:
        keep({"note": "out of memory"})
        return
    except Exception as error:  # whatever a package does, the others are measured
        keep({"note": f"failed: {files.reason(error)}"})
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    model.train()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    quantised = ["bitsandbytes"] if job.quantised else []
    found = {"where": report.where(device, [*PACKAGES, *quantised, *arm.distributions])}
    keep(found)
    if kind == "steps":
        rows: list[dict[str, Any]] = []

        def keep_row(row: steps.StepRow) -> None:
            rows.append(asdict(row))
            keep({**found, "rows": rows})

        steps.measure_lengths(model, job, keep_row)
        return
    try:
        if kind == "start":
            keep({**found, "ends": steps.third_step(model, job)})
            return
        gradients, folder = check.outcome(model, job), Path(job.truth)
        if job.arm == TRUTH:
            check.keep_truth(gradients, folder)
        else:
            keep({**found, "errors": check.errors(gradients, folder)})
    except Exception as error:
        keep({**found, "note": f"failed: {files.reason(error)}"})


def main() -> None:
    plan, result = files.read_json(Path(sys.argv[1])), Path(sys.argv[2])
    measure(plan["kind"], AdapterJob(**plan["job"]), lambda found: files.write_json(found, result))


if __name__ == "__main__":
    main()
