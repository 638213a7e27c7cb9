"""Time and peak memory of each op, forward and backward, against its eager formula, in one run on one GPU.

``python -m benchmarks [op ...] [--json FILE] [--repeats N]``

An op is compared with its own float64 reference first, on fewer rows; where that fails no time is reported and the run
exits 1. Times are medians of CUDA-event times. Before each measured call the L2 cache is flushed, and the launches are
queued behind a device-side sleep, so that neither warm caches nor gaps between launches are measured; the time that
the host needs to issue one forward and backward is its own column. Bytes are those of a perfect kernel: each input
read once, each output written once, in forward and in backward; they are compared with a device copy in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton

from convergence.tolerance import three_way
from liger_kernels import ops

Tensors = tuple[torch.Tensor, ...]

SLEEP_CYCLES = 8_000_000  # about 4 ms: longer than the host needs to queue one op's launches
FLUSH_BYTES = 256 << 20  # several times the L2 of any current GPU
CHECKED_ROWS = 384


@dataclass(frozen=True)
class Case:
    """One op at one shape. ``inputs(rows)`` makes leaf tensors; ours and eager take them and return a tensor or two."""

    op: str
    shape: str
    rows: int
    inputs: Callable[[int], Tensors]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    bytes: int


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, memory in MiB beyond the inputs."""

    op: str
    shape: str
    ours_ms: float
    spread_ms: float
    eager_ms: float
    of_copy: float
    ours_mib: float
    eager_mib: float
    host_ms: float


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16).requires_grad_()


def norm_case(rows: int, hidden: int, formula: str) -> Case:
    return Case(
        f"rms_norm ({formula})",
        f"{rows}x{hidden}",
        rows,
        lambda n: (randn(n, hidden), randn(hidden)),
        lambda x, w: ops.rms_norm(x, w, 1e-6, formula=formula),
        lambda x, w: ops.rms_norm_ref(x, w, 1e-6, formula=formula),
        5 * rows * hidden * 2,
    )


def rope_case(batch: int, seq: int, heads: int, kv_heads: int, dim: int) -> Case:
    def inputs(rows: int) -> Tensors:
        length = min(rows, seq)
        angles = torch.rand(1, length, dim // 2, device="cuda") * 6.3
        cos, sin = (f(angles).repeat(1, 1, 2).to(torch.bfloat16) for f in (torch.cos, torch.sin))
        # attention projects to [batch, seq, heads * dim] and rotates a transposed view of that
        q = (randn(batch, length, h, dim).transpose(1, 2).detach().requires_grad_() for h in (heads, kv_heads))
        return (*q, cos, sin)

    return Case(
        "rope",
        f"{batch}x{seq}, {heads}/{kv_heads} heads x {dim}",
        seq,
        inputs,
        ops.rope,
        ops.rope_ref,
        4 * batch * seq * (heads + kv_heads) * dim * 2,
    )


def glu_case(name: str, rows: int, inner: int) -> Case:
    ours, eager = getattr(ops, name), getattr(ops, f"{name}_ref")
    return Case(
        name, f"{rows}x{inner}", rows, lambda n: (randn(n, inner), randn(n, inner)), ours, eager, 8 * rows * inner * 2
    )


def row_weights(rows: int) -> Tensors:
    """The weight of each row and their sum, as a loss of packed rows takes them."""
    weight = torch.rand(rows, device="cuda")
    return weight, weight.sum()


def weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """``loss`` whose last two arguments are its row weights and denominator."""
    return lambda *inputs: loss(*inputs[:-2], row_weight=inputs[-2], denominator=inputs[-1])


def loss_case(rows: int, vocab: int, weights: bool = False) -> Case:
    def inputs(n: int) -> Tensors:
        return randn(n, vocab, scale=3), torch.randint(vocab, (n,), device="cuda"), *(row_weights(n) if weights else ())

    ours, eager = ops.cross_entropy, ops.cross_entropy_ref
    return Case(
        "cross_entropy (row_weight)" if weights else "cross_entropy",
        f"{rows}x{vocab}",
        rows,
        inputs,
        weighted(ours) if weights else ours,
        weighted(eager) if weights else eager,
        2 * rows * vocab * 2,  # logits read, their gradient written: one pass can do both
    )


def linear_loss_case(rows: int, hidden: int, vocab: int, weights: bool = False, memory: str | None = None) -> Case:
    def inputs(n: int) -> Tensors:
        leaves = randn(n, hidden), randn(vocab, hidden, scale=hidden**-0.5), torch.randint(vocab, (n,), device="cuda")
        return (*leaves, *(row_weights(n) if weights else ()))

    ours, eager = partial(ops.linear_cross_entropy, memory=memory), ops.linear_cross_entropy_ref
    variant = " (row_weight)" if weights else f" ({memory})" if memory else ""
    return Case(
        f"linear_cross_entropy{variant}",
        f"{rows}x{hidden}x{vocab}",
        rows,
        inputs,
        weighted(ours) if weights else ours,
        weighted(eager) if weights else eager,
        0,  # bound by its matrix products, not by memory
    )


def packing_case(rows: int, longest: int) -> Case:
    """Targets, row weights and denominator of one packed row; forward only."""

    def inputs(n: int) -> Tensors:
        most = min(longest, n // 4)
        lengths = torch.randint(1, most + 1, (8 * n // most,))  # four times as many tokens as are taken
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[:n]
        labels = torch.randint(100, (1, n)).masked_fill(torch.rand(1, n) < 0.3, -100)
        return labels.to("cuda"), positions[None].to("cuda")

    def ours(labels: torch.Tensor, positions: torch.Tensor) -> Tensors:
        found = ops.packing_weights(labels, position_ids=positions, loss_reduction="square")
        return found.row_weight, found.denominator

    def eager(labels: torch.Tensor, positions: torch.Tensor) -> Tensors:
        index = (positions[0] == 0).cumsum(0)
        goes_on = torch.nn.functional.pad(index[1:] == index[:-1], (0, 1))
        counted = goes_on & (labels[0].roll(-1) != -100)
        counts = torch.bincount(index, weights=counted.double())[index]
        weight = torch.where(counted, counts.clamp(min=1).rsqrt(), 0.0)
        return weight.float(), weight.sum().float()

    return Case("packing_weights", f"{rows} tokens", rows, inputs, ours, eager, rows * (8 + 8 + 8 + 4 + 4))


CASES = [
    norm_case(2048, 4096, "cast_then_scale"),
    norm_case(8192, 4096, "cast_then_scale"),
    norm_case(8192, 4096, "offset_scale_then_cast"),
    norm_case(8192, 8192, "cast_then_scale"),
    norm_case(32768, 4096, "cast_then_scale"),
    rope_case(4, 8192, 32, 8, 128),
    glu_case("swiglu", 8192, 11008),
    glu_case("geglu", 8192, 14336),
    loss_case(8192, 32768),
    loss_case(8192, 128256),
    loss_case(8192, 128256, weights=True),
    linear_loss_case(8192, 4096, 128256),
    linear_loss_case(8192, 4096, 128256, weights=True),
    linear_loss_case(8192, 2048, 262144),
    *(
        linear_loss_case(*shape, memory=memory)
        for shape in ((8192, 4096, 128256), (8192, 2048, 262144))
        for memory in ("fast", "balanced", "small")
    ),
    packing_case(1 << 20, 4096),
]


def backward(outputs: Tensors, wanted: list[torch.Tensor], upstream: list[torch.Tensor]) -> Tensors:
    """The gradients of the inputs ``wanted``; none where none has any."""
    return torch.autograd.grad(outputs, wanted, upstream) if wanted else ()


def forward_backward(function: Callable[..., Any], inputs: Tensors, seed: int = 0) -> tuple[Tensors, Tensors]:
    """The outputs, and the gradients of the inputs under random upstream gradients."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(seed)
    upstream = [torch.randn_like(y) for y in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    return outputs, backward(outputs, wanted, upstream)


def check(case: Case) -> None:
    """The three-way rule on fewer rows. Raises AssertionError."""
    torch.manual_seed(1)
    inputs = case.inputs(min(case.rows, CHECKED_ROWS))
    wide = tuple(x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs)
    results = [forward_backward(*arm) for arm in ((case.ours, inputs), (case.eager, inputs), (case.eager, wide))]
    for group in range(2):
        for i, (ours, eager, truth) in enumerate(zip(*(result[group] for result in results), strict=True)):
            three_way(ours, eager, truth, ours.dtype, f"{case.op} {('output', 'gradient')[group]} {i}")


def measure(function: Callable[..., Any], inputs: Tensors, repeats: int) -> tuple[list[float], float, float]:
    """Forward plus backward: device times in ms (one per repeat), peak MiB beyond the inputs, host time in ms."""
    wanted = [x for x in inputs if x.requires_grad]
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda")

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end)

    def step() -> float:
        outputs, forward = timed(lambda: function(*inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.ones_like(y) for y in outputs]
        _, back = timed(lambda: backward(outputs, wanted, upstream))
        return forward + (back if wanted else 0.0)

    for _ in range(3):
        step()
    times = [step() for _ in range(repeats)]

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward_backward(function, inputs)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20

    outputs = function(*inputs)
    upstream = [torch.ones_like(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]
    del outputs
    host = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = function(*inputs)
        backward(outputs if isinstance(outputs, tuple) else (outputs,), wanted, upstream)
        host.append((time.perf_counter() - start) * 1e3)
    return times, peak, statistics.median(host)


def copy_gb_per_s() -> float:
    """What a device-to-device copy of 1 GiB reaches, counting bytes read and written."""
    a = torch.empty(1 << 28, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * a.numel() * 4 / statistics.median(times) / 1e6


def table(rows: list[Row], ceiling: float) -> str:
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16, "
        f"{datetime.date.today()}; device copy {ceiling:.0f} GB/s",
        "",
        "| op | shape | ours, ms | eager, ms | eager / ours | of copy | ours, MiB | eager, MiB | host, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        of_copy = f"{r.of_copy:.0%}" if r.of_copy else ""
        lines.append(
            f"| {r.op} | {r.shape} | {r.ours_ms:.3f} ± {r.spread_ms:.3f} | {r.eager_ms:.3f} | "
            f"{r.eager_ms / r.ours_ms:.1f} | {of_copy} | {r.ours_mib:.0f} | {r.eager_mib:.0f} | {r.host_ms:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    names = sorted({case.op.split()[0] for case in CASES})
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="op", help=f"which ops, of {', '.join(names)}; all by default")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE, too")
    parser.add_argument("--repeats", type=int, default=20, help="measured calls per arm (default 20)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.ops) - set(names))
    if unknown:
        parser.error(f"unknown ops {unknown}; there are {names}")
    if not torch.cuda.is_available():
        parser.error("benchmarks need a GPU; torch.cuda.is_available() is False")
    ceiling = copy_gb_per_s()
    rows: list[Row] = []
    failed = False
    for case in CASES:
        if arguments.ops and case.op.split()[0] not in arguments.ops:
            continue
        try:
            check(case)
        except AssertionError as error:
            failed = True
            print(f"{case.op} {case.shape}: WRONG, not measured: {error}", flush=True)
            continue
        torch.manual_seed(0)
        inputs = case.inputs(case.rows)
        times, ours_mib, host_ms = measure(case.ours, inputs, arguments.repeats)
        eager_times, eager_mib, _ = measure(case.eager, inputs, arguments.repeats)
        ours_ms = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4)
        rows.append(
            Row(
                case.op,
                case.shape,
                ours_ms,
                (quartiles[2] - quartiles[0]) / 2,
                statistics.median(eager_times),
                case.bytes / ours_ms / 1e6 / ceiling,
                ours_mib,
                eager_mib,
                host_ms,
            )
        )
        print(f"{case.op} {case.shape}: {ours_ms:.3f} ms, eager {rows[-1].eager_ms:.3f} ms", flush=True)
        del inputs
        torch.cuda.empty_cache()
    print("\n" + table(rows, ceiling))
    if arguments.json:
        with open(arguments.json, "w") as file:
            result = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "copy_gb_per_s": ceiling,
                "rows": [asdict(row) for row in rows],
            }
            json.dump(result, file, indent=1)
    return int(failed or not rows)


if __name__ == "__main__":
    sys.exit(main())
