"""The longest sequence that trains under a limit of memory, measured: ours and other packages', on one GPU.

``python -m benchmarks.longest [--method qlora] [--gpu-memory 24,80] [--arms ours,...] [--tokens N] [--sequence N]``

The model is the Llama-3 8B shape of ``benchmarks.adapters``, one sequence of random tokens, every position a target,
with checkpointing. A length trains if two steps with their optimizer end: AdamW, over adapters of rank 16 or over every
weight in bfloat16. PyTorch's allocator gets what a card of that size has left besides CUDA's own memory. Each arm is a
process of its own. Two short lengths give a line, and the search goes where it reaches the limit; that of a larger
limit goes on from there. Next to what is found stands what ``liger_kernels.fit`` calculates for our arms, and where the
line ends elsewhere, the search goes there. ``--tokens`` tries one length and no other.

A step over one long sequence is mostly attention, which takes minutes from 200,000 tokens on, and hardly any memory.
``--sequence 1024`` makes each length many sequences of 1024 tokens: as many bytes a token, in seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, report
from benchmarks.adapters.arms import ARMS, OWN
from benchmarks.adapters.job import TRUTH, AdapterJob
from benchmarks.adapters.model import autocast, batch, configuration, set_adapters
from benchmarks.adapters.steps import fallbacks
from benchmarks.process import add_options, check_options, run_module
from convergence import files, tables
from liger_kernels.fitting import GIB, RESERVE
from liger_kernels.fitting.longest import longest
from liger_kernels.fitting.step import MetaStep
from liger_kernels.fitting.training import Training

Found = dict[str, Any]
Start = Callable[[argparse.Namespace, Found], dict[str, Found]]  # a plan's results, by limit
METHODS = ("lora", "qlora", "full")
DEFAULT = ("ours", "ours-offload", "ours-offload-recompute", "liger", "unsloth")
STEP = 1024  # tokens; what is found is a multiple of it
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false"}


def job_of(method: str, arm: str, tiny: bool = False) -> AdapterJob:
    full = method == "full"
    return AdapterJob(
        arm,
        quantised=method == "qlora",
        checkpointing="own" if ARMS[arm].own else "hf",
        precision="bfloat16" if full else "trainer",
        tiny=tiny,
        trained="full" if full else "lora",
    )


def calculated(job: AdapterJob, limits: Sequence[float]) -> dict[float, int]:
    """What ``liger_kernels.fit`` calculates for one of our arms and one long sequence, by limit."""
    if job.arm not in ("ours", *models.OPTIONS):
        return {}
    setup = Training(None if job.full else job.rank, quantised=job.quantised, **models.OPTIONS.get(job.arm, {}))
    step = MetaStep(configuration(job), setup)
    return {gib: longest(lambda tokens: step.count(tokens).peak, int(gib * GIB) - RESERVE) for gib in limits}


def limit(gib: float) -> int:
    """Bytes that PyTorch may take of a card of ``gib`` GiB: all but what CUDA itself holds. It takes no more.

    Raises:
        RuntimeError: another process holds memory of this GPU, which would be counted as CUDA's.
    """
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    held = total - free - torch.cuda.memory_reserved()
    if held > RESERVE:
        raise RuntimeError(
            f"{held / GIB:.1f} GiB of this GPU are held outside of PyTorch, more than CUDA needs: end the other "
            "processes that use it"
        )
    most = int(gib * GIB) - held
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))
    return most


class Steps:
    """Steps of a model, of any length, each with its peak; those that were tried under one limit, in ``tried``.

    Args:
        sequence: tokens of one sequence of a step; all of them, where it is None.
    """

    def __init__(self, model: Any, job: AdapterJob, sequence: int | None = None):
        self.model, self.job, self.sequence = model, job, sequence
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=job.device.type == "cuda")
        self.tried: list[Found] = []

    def limited(self, capacity: int, keep: Callable[[list[Found]], None]) -> dict[int, int]:
        """From here on, steps have ``capacity`` bytes, and ``keep`` gets what was tried. What ran out of memory before
        is forgotten; the bytes of what did not are returned, by tokens."""
        self.capacity, self.keep = capacity, keep
        self.tried = [one for one in self.tried if one["bytes"] is not None]
        return {one["tokens"]: one["bytes"] for one in self.tried}

    def peak(self, tokens: int) -> int:
        """Bytes at the peak of the second of two steps; more than the capacity where memory ran out."""
        length = self.sequence or tokens
        given = batch(self.model.config, length, self.job.but(batch=tokens // length))
        run = partial(models.step, self.model, given, partial(autocast, self.job))
        found: Found = {"tokens": tokens, "bytes": None, "s": None}
        try:
            for _ in range(2):
                models.release()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                run()
                self.optimizer.step()
                torch.cuda.synchronize()
                found["s"] = time.perf_counter() - start
            found["bytes"] = torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            found["s"] = None
        self.model.zero_grad(set_to_none=True)
        models.release()
        return self.known(found)

    def known(self, found: Found) -> int:
        """Bytes of what was tried, and kept. Where memory ran out, a line through what fitted tells them."""
        self.tried.append(found)
        self.keep(self.tried)
        print(self.job.arm, found, file=sys.stderr, flush=True)
        if found["bytes"] is not None:
            return int(found["bytes"])
        fitted = sorted((one["tokens"], one["bytes"]) for one in self.tried if one["bytes"] is not None)
        if len(fitted) < 2:
            return 2 * self.capacity
        (a, low), (b, high) = fitted[-2:]
        return max(self.capacity + 1, int(high + (found["tokens"] - b) * (high - low) / (b - a)))


def most_on_host(job: AdapterJob, gib: float | None) -> int | None:
    """The tokens whose layer inputs ``gib`` GiB of the host hold, for an arm that keeps them there, as checkpointing of
    a package's own does, too."""
    if gib is None or not (ARMS[job.arm].own or "offload" in models.OPTIONS.get(job.arm, {})):
        return None
    config = configuration(job)
    return int(gib * GIB) // (config.num_hidden_layers * config.hidden_size * job.dtype.itemsize)


def step_of(sequence: int | None) -> int:
    """Tokens between two lengths: whole sequences, and at least :data:`STEP`."""
    return sequence * -(-STEP // sequence) if sequence else STEP


def search(plan: Found, keep: Callable[[dict[str, Found]], None]) -> None:
    """What :func:`main` asks of a process of its own: the lengths that it tried, by limit."""
    job, limits = AdapterJob(**plan["job"]), plan["limits"]
    found: dict[str, Found] = {}

    def keep_one(gib: float, **what: Any) -> None:
        found[f"{gib:g}"] = what
        keep(found)

    def keep_tried(gib: float, tried: list[Found]) -> None:
        keep_one(gib, where=where, tried=tried)

    arm = ARMS[job.arm]
    if missing := arm.absent(job):
        for gib in limits:
            keep_one(gib, note=f"absent: {missing}")
        return
    model = arm.build(job)  # before a limit: the benchmark's loader holds the weights twice for a moment
    if not job.full:
        set_adapters(model, job)
    model.train()
    where = report.where(torch.cuda.get_device_name(), ["torch", "transformers", "peft", *arm.distributions])
    most_tokens, step = most_on_host(job, plan["host"]), step_of(plan["sequence"])
    steps = Steps(model, job, plan["sequence"])
    for gib in sorted(limits):
        models.release()
        try:
            capacity = limit(gib)
        except RuntimeError as error:
            keep_one(gib, note=str(error))
            continue
        if torch.cuda.memory_allocated() > capacity:
            keep_one(gib, note="the model alone is too large")
            continue
        known, most = steps.limited(capacity, partial(keep_tried, gib)), 0
        if not plan["tokens"]:
            most = longest(steps.peak, capacity, step, known, most_tokens, plan["near"].get(f"{gib:g}", 0))
        elif plan["tokens"] not in known and (most_tokens is None or plan["tokens"] <= most_tokens):
            steps.peak(plan["tokens"])
        ended = most_tokens is not None and max(most + step, plan["tokens"] or 0) > most_tokens
        notes = filter(None, ["the host's memory ends here" if ended else "", fallbacks(model)])
        keep_one(gib, where=where, tried=steps.tried, most=most, note="; ".join(notes))


def row(job: AdapterJob, method: str, gib: float, found: Mapping[str, Any], expected: int | None) -> Found:
    """A line of the table."""
    fitted = [one for one in found.get("tried", ()) if one["bytes"] is not None]
    best = max(fitted, key=lambda one: one["tokens"], default=None)
    note = found.get("note", "the search did not end")
    if "most" in found and best is None and found["tried"]:
        note = f"none of {', '.join(str(one['tokens']) for one in found['tried'])} tokens trained"
    numbers: Found = {"tokens": 0, "gib_peak": None, "s": None}
    if best is not None:
        numbers = {"tokens": best["tokens"], "gib_peak": best["bytes"] / GIB, "s": best["s"]}
    return {"method": method, "gib": gib, "arm": job.arm, **numbers, "calculated": expected, "note": note}


def table(rows: Sequence[Found]) -> list[str]:
    columns = ("method", "limit, GiB", "arm", "longest, tokens", "calculated", "peak, GiB", "step, s", "note")
    cells = [
        (
            *(r["method"], f"{r['gib']:g}", r["arm"], f"{r['tokens']:,}" if r["tokens"] else "-"),
            f"{r['calculated']:,}" if r["calculated"] else "-",
            *("-" if r[key] is None else f"{r[key]:.2f}" for key in ("gib_peak", "s")),
            r["note"],
        )
        for r in rows
    ]
    return tables.markdown(columns, cells)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.longest", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", default="qlora", help=f"of {', '.join(METHODS)} (default: %(default)s)")
    parser.add_argument("--gpu-memory", default="24", metavar="GIB", help="limits of memory (default: %(default)s)")
    parser.add_argument("--arms", default=",".join(DEFAULT), help=f"of {', '.join(ARMS)} (default: %(default)s)")
    parser.add_argument("--tokens", type=int, metavar="N", help="try this length and no other")
    parser.add_argument(
        "--sequence", type=int, metavar="N", help="a length is many sequences of N tokens (default: one sequence)"
    )
    parser.add_argument(
        "--host-memory", type=float, metavar="GIB", help="try no length whose layer inputs take more of the host"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one arm (default 3600)")
    parser.add_argument("--tiny", action="store_true", help="a model of 64 features")
    add_options(parser)
    options = parser.parse_args(arguments)
    options.methods, options.arms = options.method.split(","), options.arms.split(",")
    for kind, given, known in (("methods", options.methods, METHODS), ("arms", options.arms, [*ARMS])):
        if unknown := sorted(set(given) - set(known) | {TRUTH} & set(given)):
            parser.error(f"unknown {kind} {unknown}; there are {[name for name in known if name != TRUTH]}")
    try:
        options.limits = [float(word) for word in options.gpu_memory.split(",")]
    except ValueError:
        parser.error(f"--gpu-memory is {options.gpu_memory!r}; it must be like 24,80")
    given = (options.tokens, options.sequence, options.host_memory)
    if min(*options.limits, *(1 if one is None else one for one in given)) <= 0:
        parser.error("--gpu-memory, --tokens, --sequence and --host-memory must be more than 0")
    if options.tokens and options.sequence and options.tokens % options.sequence:
        parser.error(f"--tokens is {options.tokens}; it must be a multiple of --sequence, {options.sequence}")
    check_options(parser, options, ARMS)
    return options


def in_own_process(options: argparse.Namespace, plan: Found) -> dict[str, Found]:
    """What :func:`search` kept by limit, also of a process that ended badly."""
    with tempfile.TemporaryDirectory() as name:
        given, result = Path(name) / "plan.json", Path(name) / "result.json"
        files.write_json(plan, given)
        done = run_module(
            "benchmarks.longest",
            ["--search", str(given), str(result)],
            paths=options.path[plan["job"]["arm"]],
            environment=ENVIRONMENT,
            timeout=options.timeout,
            shows=True,  # a search takes minutes, and tells each length that it tried
        )
        found: dict[str, Found] = files.read_json(result) if result.exists() else {}
    if done.problem:
        print(f"{plan['job']['arm']}: {done.problem}", flush=True)
        for gib in plan["limits"]:
            found.setdefault(f"{gib:g}", {}).setdefault("note", f"failed: {done.problem.splitlines()[0]}")
    return found


def main(arguments: Sequence[str] | None = None, start: Start = in_own_process) -> int:
    words = sys.argv[1:] if arguments is None else [*arguments]
    if words[:1] == ["--search"]:
        plan, result = files.read_json(Path(words[1])), Path(words[2])
        search(plan, lambda found: files.write_json(found, result))
        return 0
    options = parse(words)
    if start is in_own_process and not torch.cuda.is_available():
        print("benchmarks need a GPU; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    rows: list[Found] = []
    where: Found = {}
    jobs = [(method, job_of(method, arm, options.tiny)) for method in options.methods for arm in options.arms]
    pool = ThreadPoolExecutor(1)  # an arm trains while what the next ones begin with is calculated
    counting = [pool.submit(calculated, job, options.limits) for _, job in jobs]
    try:
        for (method, job), counted in zip(jobs, counting, strict=True):
            plan = {"job": asdict(job), "limits": options.limits, "tokens": options.tokens}
            plan |= {"sequence": options.sequence, "host": options.host_memory}
            plan["near"] = {} if options.tokens else {f"{gib:g}": n for gib, n in counted.result().items()}
            found = start(options, plan)  # in this thread, which Ctrl-C reaches
            expected = counted.result()
            for gib in options.limits:
                one = found.get(f"{gib:g}", {})
                where = one.get("where", where)
                rows.append(row(job, method, gib, one, expected.get(gib)))
                print(table(rows)[-1], flush=True)
            if options.json:
                files.write_json({"where": where, "rows": rows}, options.json)
    finally:
        pool.shutdown(cancel_futures=True)
    print("\n".join(["", str(where), "", *table(rows)]))
    return int(any(r["arm"] in OWN and not r["tokens"] and not r["note"].startswith("absent") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
