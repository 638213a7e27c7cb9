"""Time, peak memory and error of each op, forward and backward, ours and its peers', in one run on one GPU.

``python -m benchmarks [op ...] [--peers eager,compile,liger,fla,cce,quack,trl] [--dtype bfloat16] [--json FILE]``

An op is compared with its own float64 reference first; where that fails no time is reported and the run exits 1. A peer
that is wrong, or raises, gets no time either, but the run goes on and its exit code is the same.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, timing
from benchmarks.case import BenchmarkCase, Site, Tensors
from benchmarks.cases import cases
from benchmarks.peers import DISTRIBUTIONS, PEERS, Table
from benchmarks.report import BenchmarkRow, PeerResult
from benchmarks.timing import Gpu
from convergence.files import write_json
from convergence.judge.tolerance import three_way

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WRONG_FROM = 0.1  # a relative error that no rounding explains: the peer computes something else
Results = tuple[Tensors, Tensors]


def results(function: Callable[..., Any], inputs: Tensors, dtype: torch.dtype) -> Results:
    """The outputs, and the gradients of the inputs under upstream gradients that are the same for every ``function``:
    random numbers of ``dtype``, whatever the dtype of an output is. The inputs stay as they are."""
    inputs = timing.copies(inputs)
    outputs = timing.as_tuple(function(*inputs))
    kept = tuple(y.detach().clone() for y in outputs)
    generator = torch.Generator(outputs[0].device).manual_seed(0)
    upstream = [torch.randn(y.shape, generator=generator, device=y.device).to(dtype).to(y.dtype) for y in outputs]
    return kept, timing.backward(outputs, [x for x in inputs if x.requires_grad], upstream)


def error(found: Results, truth: Results) -> float:
    """The norm of the difference over the truth's, the worst over outputs and gradients."""
    worst = 0.0
    for ours, theirs in zip((*found[0], *found[1]), (*truth[0], *truth[1]), strict=True):
        if ours.shape != theirs.shape:
            return math.inf
        exact = theirs.detach().double()
        size = float(exact.norm())
        relative = float((ours.detach().double() - exact).norm()) / size if size else 0.0
        worst = math.nan if math.isnan(relative) else max(worst, relative)
    return worst


def compare(case: BenchmarkCase, dtype: torch.dtype) -> tuple[float, Tensors, Results]:
    """Holds ours to the three-way rule against eager and float64. Returns its error, the inputs and the truth.

    Raises:
        AssertionError: naming the output or gradient that is further from the truth than eager's.
    """
    torch.manual_seed(1)
    inputs = case.inputs(case.checked_rows or case.rows)
    wide = tuple(x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs)
    ours, eager = (results(function, inputs, dtype) for function in (case.ours, case.eager))
    truth = results(case.truth or case.eager, wide, dtype)
    for group, kind in enumerate(("output", "gradient")):
        for i, tensors in enumerate(zip(ours[group], eager[group], truth[group], strict=True)):
            three_way(*tensors, tensors[0].dtype, f"{case.op} {kind} {i}")
    return error(ours, truth), inputs, truth


def try_peer(
    function: Callable[..., Any], checked: Tensors, truth: Results, inputs: Tensors, gpu: Gpu, n: int
) -> PeerResult:
    """Its error on the inputs ``checked`` and its times on ``inputs``, or why there are none."""
    try:
        found = error(results(function, checked, checked[0].dtype), truth)
        if not found <= WRONG_FROM:
            return PeerResult(None, found, f"WRONG: its relative error is {found:.1e}")
        return PeerResult(gpu.measure(function, inputs, n), found)
    except Exception as problem:  # whatever a peer does, the others are measured
        first_line = (str(problem).splitlines() or [""])[0]
        return PeerResult(None, None, f"failed: {type(problem).__name__}: {first_line}")


def run(
    chosen: Sequence[BenchmarkCase],
    peers: Table,
    dtype: torch.dtype,
    repeats: int,
    ceilings: Mapping[str, float],
    gpu: Gpu,
    keep: Callable[[list[BenchmarkRow]], None],
) -> tuple[list[BenchmarkRow], bool]:
    """The rows of ``chosen``, and whether ours was right in all. Arms of one formula and shape are measured once.
    ``keep`` gets the rows so far after each case: what was measured outlives a run that is cut off."""
    rows: list[BenchmarkRow] = []
    tried: dict[tuple[str, str], dict[str, PeerResult]] = {}
    right = True
    for case in chosen:
        try:
            found, checked, truth = compare(case, dtype)
        except Exception as problem:
            right = False
            what = "WRONG" if isinstance(problem, AssertionError) else f"failed: {type(problem).__name__}"
            print(f"{case.op} {case.shape}: {what}, not measured: {problem}", flush=True)
            continue
        torch.manual_seed(0)
        inputs = case.inputs(case.rows)
        ours = gpu.measure(case.ours, inputs, repeats)
        arms = tried.setdefault((case.formula, case.shape), {})
        if not arms:
            for arm, function in peers.arms(case).items():
                arms[arm] = try_peer(function, checked, truth, inputs, gpu, repeats)
                gpu.release()
        shown = [f"{arm} {peer.note or f'{peer.ms:.3f} ms'}" for arm, peer in arms.items()]
        print(", ".join([f"{case.op} {case.shape}: {ours.ms:.3f} ms", *shown]), flush=True)
        del inputs, checked, truth
        gpu.release()
        gb_per_s, tflop_per_s = case.bytes / ours.ms / 1e6, case.flops / ours.ms / 1e9
        of_copy, of_matmul = gb_per_s / ceilings["copy_gb_per_s"], tflop_per_s / ceilings["matmul_tflop_per_s"]
        of_own_copy = gb_per_s / gpu.copy_gb_per_s(case.bytes)
        rows.append(BenchmarkRow(case, ours, found, of_copy, of_own_copy, of_matmul, arms))
        keep(rows)
    return rows, right


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = sorted({case.name for case in cases(Site("cpu"))})
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="op", help=f"which ops, of {', '.join(names)}; all by default")
    parser.add_argument("--peers", default="eager", help=f"of {','.join(PEERS)}, or all (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help=f"of {', '.join(DTYPES)} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured to FILE, too")
    parser.add_argument(
        "--repeats", type=int, default=20, help="measured calls per arm, fewer of slow ones (default 20)"
    )
    options = parser.parse_args(arguments)
    options.peers = list(PEERS) if options.peers == "all" else options.peers.split(",")
    for kind, given, known in (
        ("ops", options.ops, names),
        ("peers", options.peers, PEERS),
        ("dtypes", [options.dtype], DTYPES),
    ):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"unknown {kind} {unknown}; there are {list(known)}")
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}; a median and its spread need at least 2")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")
    return options


def benchmark(options: argparse.Namespace, known: Sequence[BenchmarkCase], peers: Table, gpu: Gpu) -> int:
    """Measures what the ``options`` name of the cases ``known``, prints and writes it. Returns the exit code."""
    for peer, why in peers.skipped.items():
        print(f"{peer}: {why}", flush=True)
    dtype = DTYPES[options.dtype]
    ceilings = {"copy_gb_per_s": gpu.copy_gb_per_s(), "matmul_tflop_per_s": gpu.matmul_tflop_per_s(dtype)}
    chosen = [case for case in known if not options.ops or case.name in options.ops]
    packages = ["torch", "triton", *(DISTRIBUTIONS[peer] for peer in peers.loaded)]
    where = {**report.where(gpu.name, packages), "dtype": options.dtype, **ceilings}

    def keep(rows: list[BenchmarkRow]) -> None:
        if options.json:
            write_json(report.as_json(where, rows, peers.skipped), options.json)

    rows, right = run(chosen, peers, dtype, options.repeats, ceilings, gpu, keep)
    if rows:
        print("\n" + report.table(where, rows, peers.skipped))
    return int(not right or not rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("benchmarks need a GPU; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    gpu = Gpu()
    return benchmark(options, cases(Site(gpu.device, DTYPES[options.dtype])), Table(options.peers), gpu)


if __name__ == "__main__":
    sys.exit(main())
