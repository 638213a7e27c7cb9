"""Time and peak memory of a LoRA or QLoRA step of the Llama-3 8B shape, ours and other packages', on one GPU.

``python -m benchmarks.adapters [--arms eager,ours,...] [--lengths 4096,...] [--quantised yes] [--json FILE]``

A step is forward and backward of one sequence of random tokens, every position a target, without an optimizer. Adapters
of rank 16 are on every linear layer; ``--trained`` has DoRA, experts with adapters and every weight instead. Each arm
is a process of its own, with the same weights, adapters and tokens, drawn on the GPU by name. unsloth loads the model
with its own loader, and checkpoints by itself: once on the GPU, once with its offload to the host. The loss and the
norm of the gradient of each arm are compared with eager's: that catches an arm that computes something else, and proves
nothing more. Times are the host's around steps that the device has finished, memory is the peak of a step. ``--check``
has the errors of the adapters' gradients next to float64 instead, of two layers; ``--from-start`` the seconds from the
beginning of the process to the end of its third step, first with empty caches of compiled kernels, then with what the
first run left in them. A package that is not installed is a row that says so. ``python -m benchmarks.adapters.page``
makes the page of the documentation from JSON files.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters import report, steps
from benchmarks.adapters.arms import ARMS, DEFAULT, OWN
from benchmarks.adapters.job import CHECKPOINTING, PRECISIONS, TRAINED, TRUTH, AdapterJob
from benchmarks.process import add_options, check_options, run_module
from convergence import files

Found = dict[str, Any]
Start = Callable[[str, AdapterJob, Mapping[str, str]], Found]  # kind, job, variables of the environment
QUANTISED = {"no": (False,), "yes": (True,), "both": (False, True)}
LENGTHS = {"steps": (4096, 16384, 32768), "check": (512,), "start": (4096,)}
CHECKED_LAYERS = 2
ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
}
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default=",".join(DEFAULT), help=f"of {', '.join(ARMS)} (default: %(default)s)")
    parser.add_argument("--lengths", help=f"tokens of a step (default: {','.join(map(str, LENGTHS['steps']))})")
    parser.add_argument("--quantised", choices=QUANTISED, default="both", help="NF4 bases (default: %(default)s)")
    parser.add_argument(
        "--checkpointing",
        help=f"of {','.join(CHECKPOINTING)}; 'own' is for arms that have their own in addition (default: hf,own)",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="trainer", help="'trainer': float32 adapters under bfloat16 autocast"
    )
    parser.add_argument(
        "--trained",
        choices=TRAINED,
        default="lora",
        help="'experts': LoRA of the Qwen3-MoE shape; 'full': every weight, of a bfloat16 base without autocast",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step (default 1)")
    parser.add_argument("--check", action="store_true", help="errors of the adapters' gradients next to float64")
    parser.add_argument("--from-start", action="store_true", help="seconds from the process's start to the third step")
    parser.add_argument("--layers", type=int, metavar="N", help="cut the model to its first N layers")
    parser.add_argument("--repeats", type=int, default=4, help="measured steps, fewer of slow ones (default 4)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one process (default 300)")
    parser.add_argument("--tiny", action="store_true", help="a model of 64 features, which a CPU runs, too")
    add_options(parser)
    options = parser.parse_args(arguments)
    options.command = command(sys.argv[1:] if arguments is None else arguments)
    options.kind = "check" if options.check else "start" if options.from_start else "steps"
    options.arms = options.arms.split(",")
    options.checkpointing = (options.checkpointing or ("hf,own" if options.kind == "steps" else "hf")).split(",")
    for kind, given, known in (("arms", options.arms, ARMS), ("checkpointing", options.checkpointing, CHECKPOINTING)):
        if unknown := sorted(set(given) - {*known} | {TRUTH} & {*given}):
            parser.error(f"unknown {kind} {unknown}; there are {[name for name in known if name != TRUTH]}")
    if options.trained != "lora" and (options.check or options.from_start or options.quantised != "no"):
        parser.error(f"--trained {options.trained} is measured with --quantised no, without --check and --from-start")
    if options.trained == "full":
        options.precision = "bfloat16"
    if options.check and options.from_start:
        parser.error("--check and --from-start are two runs; give one of them")
    default = [64] if options.tiny else LENGTHS[options.kind]
    try:
        options.lengths = [int(length) for length in options.lengths.split(",")] if options.lengths else [*default]
    except ValueError:
        parser.error(f"--lengths is {options.lengths!r}; it must be like 4096,16384")
    if min(*options.lengths, options.batch, options.repeats, options.layers or 1, 1) < 1:
        parser.error("--lengths, --batch, --repeats and --layers must be at least 1")
    options.layers = options.layers or (CHECKED_LAYERS if options.check else None)
    check_options(parser, options, ARMS)
    return options


def command(arguments: Sequence[str]) -> str:
    """The command of a page: without the file it wrote, and without where packages lay."""
    kept, rest = ["python", "-m", "benchmarks.adapters"], iter(arguments)
    for word in rest:
        option, _, value = word.partition("=")
        if option in ("--json", "--path"):
            value = value or next(rest, "")
        kept += [word] if option not in ("--json", "--path") else []
        kept += ["--path", f"{value.partition('=')[0]}=DIR"] if option == "--path" else []
    return shlex.join(kept)


def in_own_process(options: argparse.Namespace) -> Start:
    """Starts :mod:`benchmarks.adapters.worker`; what it kept is there even if it ended badly, with a note."""

    def start(kind: str, job: AdapterJob, environment: Mapping[str, str]) -> Found:
        with tempfile.TemporaryDirectory() as name:
            plan, result = Path(name) / "plan.json", Path(name) / "result.json"
            files.write_json({"kind": kind, "job": asdict(job)}, plan)
            variables = {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
            done = run_module(
                "benchmarks.adapters.worker",
                [str(plan), str(result)],
                paths=options.path[job.arm],
                environment={**variables, **environment},
                timeout=options.timeout,
            )
            found: Found = files.read_json(result) if result.exists() else {}
        if done.problem:
            print(f"{job.arm}: {done.problem}", flush=True)
            found.setdefault("note", f"failed: {done.problem.splitlines()[0]}")
        return {**found, "started": done.started}

    return start


def jobs(options: argparse.Namespace) -> Iterator[AdapterJob]:
    for quantised in QUANTISED[options.quantised]:
        for checkpointing in options.checkpointing:
            for arm in options.arms:
                if checkpointing != "own" or ARMS[arm].own:
                    yield AdapterJob(
                        arm,
                        quantised,
                        checkpointing,
                        options.precision,
                        options.lengths,
                        options.layers,
                        options.tiny,
                        options.repeats,
                        trained=options.trained,
                        batch=options.batch,
                    )


def step_rows(job: AdapterJob, start: Start) -> Iterator[tuple[Found, list[Found]]]:
    """What the process of a job found, and its rows: one for each length."""
    found = start("steps", job, {})
    rows = {row["tokens"]: row for row in found.get("rows", ())}
    note = found.get("note", "failed: no row of this length")
    yield found, [rows.get(length) or asdict(steps.row(job, length, note=note)) for length in job.lengths]


def start_rows(job: AdapterJob, start: Start) -> Iterator[tuple[Found, list[Found]]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for caches in ("empty", "filled"):
            found = start("start", job, {name: f"{folder}/{name.lower()}" for name in CACHES})
            ends = [end - found["started"] for end in found.get("ends", ())]
            first, third = (ends[0], ends[2]) if ends else (None, None)
            row = {"arm": job.arm, "quantised": job.quantised, "checkpointing": job.checkpointing, "caches": caches}
            yield found, [{**row, "first_s": first, "third_s": third, "note": found.get("note", "")}]
            if not ends:
                return


def check_rows(job: AdapterJob, start: Start) -> Iterator[tuple[Found, list[Found]]]:
    found = start("check", job, {})
    row = {"arm": job.arm, "quantised": job.quantised, "checkpointing": job.checkpointing}
    yield found, [{**row, "errors": found.get("errors", {}), "note": found.get("note", "")}]


def with_truth(planned: Sequence[AdapterJob], start: Start, folder: str) -> Iterator[AdapterJob]:
    """``planned``, in a folder with their truths, which are computed first."""
    for quantised in dict.fromkeys(job.quantised for job in planned):
        alike = [job.but(truth=folder) for job in planned if job.quantised == quantised]
        note = start("check", alike[0].but(arm=TRUTH, checkpointing="none"), {}).get("note")
        if note:
            print(f"truth, {report.base(quantised)}: {note}", flush=True)
        else:
            yield from alike


def measure(options: argparse.Namespace, start: Start) -> Found:
    """Everything that the ``options`` name, as its JSON file has it, which is written again after each process."""
    found: Found = {"kind": options.kind, "command": options.command, "precision": options.precision}
    found |= {
        "trained": options.trained,
        "batch": options.batch,
        "layers": options.layers,
        "tiny": options.tiny,
        "device": "",
        "versions": {},
        "date": "",
        "rows": [],
    }
    versions: dict[str, dict[str, None]] = {}  # an arm's folder may have another one
    of_kind = {"steps": step_rows, "start": start_rows, "check": check_rows}[options.kind]
    with tempfile.TemporaryDirectory() as folder:
        planned: Any = [*jobs(options)]
        for job in with_truth(planned, start, folder) if options.check else planned:
            for one, rows in of_kind(job, start):
                where = one.get("where", {"versions": {}})
                for name, version in where["versions"].items():
                    versions.setdefault(name, {})[version] = None
                found |= {key: where[key] for key in ("device", "date") if key in where}
                found["versions"] = {name: " and ".join(all_of_it) for name, all_of_it in versions.items()}
                found["rows"] += rows
                if options.kind == "steps":
                    found["rows"] = [asdict(row) for row in report.judged(report.rows_of(found))]
                if options.json:
                    files.write_json(found, options.json)
                for row in rows:
                    print(shown(row), flush=True)
    return found


def shown(row: Found) -> str:
    """A row while the run goes on."""
    numbers = [f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float) and value]
    words = [
        row["arm"],
        report.base(row["quantised"]),
        row["checkpointing"],
        *(str(row[k]) for k in ("tokens", "caches") if k in row),
    ]
    worst = [f"largest error {max(row['errors'].values()):.1e}"] if row.get("errors") else []
    return " ".join([*words, *numbers, *worst, row["note"]]).strip()


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    options = parse(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print("benchmarks need a GPU; torch.cuda.is_available() is False; --tiny runs without", file=sys.stderr)
        return 2
    found = measure(options, start or in_own_process(options))
    print(f"\n{report.caption(found)}\n\n{report.table(found)}")
    bad = [row for row in found["rows"] if row["arm"] in OWN and row["note"].startswith(("failed", "WRONG"))]
    return int(bool(bad) or not found["rows"])


if __name__ == "__main__":
    sys.exit(main())
