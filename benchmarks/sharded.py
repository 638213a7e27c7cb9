"""Time and peak memory of a training step of a sharded model: a Llama-3 8B shape under FSDP2, one process a GPU.

``python -m benchmarks.sharded [--ranks 2] [--arms eager,ours,liger] [--layers N] [--tokens 2x2048]
[--checkpointing] [--json FILE]``

A step is forward and backward of random tokens, every position a target, in bfloat16, without an optimizer;
``fully_shard`` wraps every decoder layer and the model. Each arm runs in processes of its own. Its loss and the norm of
its gradient are compared with eager's: that catches an arm that computes something else, and proves nothing more
(``pytest convergence --setups fsdp2`` does). Times are medians by CUDA events, memory is the peak of a step, weights
included; the slowest and the biggest rank count. The head's time is that from the last norm's output to the loss, and
from the beginning of the backward to the gradient of that output. Kernel times are those of one profiled step.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks import models
from benchmarks.models import OPTIONS, decoder, ours_with, release
from convergence import files, tables

SHAPE = decoder(hidden=4096, inner=14336, layers=32, heads=32, keys=8, classes=128256)
WARM_UP, STEPS = 3, 8
ARMS: dict[str, Callable[[Any], Any]] = {
    **models.ARMS,
    **{name: partial(ours_with, **options) for name, options in OPTIONS.items()},
}
# What a kernel's name contains, the first that fits; all others are elementwise kernels and copies of torch.
KINDS = {"communication": ("nccl",), "attention": ("flash", "fmha"), "products": ("gemm", "nvjet", "cutlass")}


@dataclass(frozen=True)
class ShardedRow:
    """One line of the table: milliseconds, GiB, and what the step computed."""

    arm: str
    ms: float
    head_ms: float
    gib: float
    loss: float
    gradient_norm: float
    kernels_ms: dict[str, float]


def build(layers: int, checkpointing: bool) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, tie_word_embeddings=False, use_cache=False)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Clock:
    """Events of one step, around it and around its head."""

    def __init__(self) -> None:
        self.events: dict[str, torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        self.events[name] = torch.cuda.Event(enable_timing=True)
        self.events[name].record()

    def at_last_norm(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self.mark("head begins")
        output.register_hook(lambda grad: self.mark("head's backward ends"))

    def between(self, first: str, second: str) -> float:
        return self.events[first].elapsed_time(self.events[second])

    def head(self) -> float:
        return self.between("head begins", "loss") + self.between("loss", "head's backward ends")


def step(model: Any, ids: torch.Tensor, clock: Clock) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    clock.mark("begin")
    loss = model(input_ids=ids, labels=ids).loss
    clock.mark("loss")
    loss.backward()
    clock.mark("end")
    return loss.detach()


def measure(arm: str, layers: int, tokens: tuple[int, int], checkpointing: bool) -> ShardedRow:
    model = shard(ARMS[arm](build(layers, checkpointing)))
    release()
    clock = Clock()
    model.model.norm.register_forward_hook(clock.at_last_norm)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    ids = torch.randint(SHAPE["vocab_size"], tokens, device="cuda", generator=generator)
    for _ in range(WARM_UP):
        loss = step(model, ids, clock)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    torch.cuda.reset_peak_memory_stats()
    whole, head = [], []
    for _ in range(STEPS):
        dist.barrier()
        step(model, ids, clock)
        torch.cuda.synchronize()
        whole.append(clock.between("begin", "end"))
        head.append(clock.head())
    peak = torch.cuda.max_memory_allocated() / 2**30
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, ids, clock)
        torch.cuda.synchronize()
    numbers = torch.tensor([statistics.median(whole), statistics.median(head), peak], device="cuda")
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    ms, head_ms, gib = numbers.tolist()
    return ShardedRow(arm, ms, head_ms, gib, float(loss), float(norm.full_tensor()), kernels(profile))


def kernels(profile: Any) -> dict[str, float]:
    """Milliseconds of this rank's kernels by kind."""
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in profile.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        found[kind] += event.self_device_time_total / 1e3
    return found


def worker(
    rank: int, ranks: int, arm: str, layers: int, tokens: tuple[int, int], checkpointing: bool, folder: str
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/{arm}", rank=rank, world_size=ranks)
    row = measure(arm, layers, tokens, checkpointing)
    if rank == 0:
        files.write_json(asdict(row), Path(folder) / f"{arm}.json")
    dist.destroy_process_group()


class StepResult(Protocol):
    """What a step computed."""

    @property
    def loss(self) -> float: ...

    @property
    def gradient_norm(self) -> float: ...


def differs(row: StepResult, expected: StepResult) -> str:
    """Why an arm is not the eager model; empty when it is."""
    for name in ("loss", "gradient_norm"):
        mine, eagers = getattr(row, name), getattr(expected, name)
        if not abs(mine - eagers) <= 5e-3 * abs(eagers):
            return f"its {name} is {mine} instead of {eagers}"
    return ""


def table(rows: list[ShardedRow], ranks: int, layers: int, tokens: tuple[int, int], checkpointing: bool) -> str:
    packages = files.versions(["torch", "triton", "transformers", "liger-kernel"])
    heading = (
        f"{ranks} x {torch.cuda.get_device_name()}, "
        f"{', '.join(f'{name} {version}' for name, version in packages.items())}, bfloat16, FSDP2, "
        f"{layers} layers, {tokens[0]}x{tokens[1]} tokens a rank{', checkpointing' * checkpointing}, "
        f"{datetime.date.today()}"
    )
    kinds = (*KINDS, "other")
    columns = ("arm", "step, ms", "head, ms", "peak, GiB", "loss", "gradient norm", *(f"{kind}, ms" for kind in kinds))
    cells = [
        (
            *(r.arm, f"{r.ms:.1f}", f"{r.head_ms:.1f}", f"{r.gib:.2f}", f"{r.loss:.4f}", f"{r.gradient_norm:.4f}"),
            *(f"{r.kernels_ms[kind]:.1f}" for kind in kinds),
        )
        for r in rows
    ]
    return "\n".join([heading, "", *tables.markdown(columns, cells)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use (default: %(default)s)")
    parser.add_argument("--arms", default="eager,ours,ours-small,liger", help="the first is what others are held to")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="default: all %(default)s")
    parser.add_argument("--tokens", default="2x2048", help="rows x length of a rank (default: %(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="each layer is computed again in the backward")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE, too")
    arguments = parser.parse_args()
    arms = arguments.arms.split(",")
    if unknown := sorted(set(arms) - set(ARMS)):
        parser.error(f"unknown arms {unknown}; there are {list(ARMS)}")
    if torch.cuda.device_count() < arguments.ranks:
        parser.error(f"--ranks {arguments.ranks} needs as many GPUs; there are {torch.cuda.device_count()}")
    count, _, length = arguments.tokens.partition("x")
    shape = (arguments.layers, (int(count), int(length)), arguments.checkpointing)
    rows: list[ShardedRow] = []
    failed = False
    for arm in arms:
        with tempfile.TemporaryDirectory() as folder:
            try:
                torch.multiprocessing.spawn(worker, (arguments.ranks, arm, *shape, folder), nprocs=arguments.ranks)
                row = ShardedRow(**files.read_json(Path(folder) / f"{arm}.json"))
            except Exception as error:  # an arm that needs too much memory is a result, too
                failed = True
                print(f"{arm}: failed: {str(error)[-600:]}", flush=True)
                continue
        wrong = differs(row, rows[0]) if rows else ""
        failed |= bool(wrong)
        print(f"{arm}: {row.ms:.1f} ms, {row.gib:.2f} GiB{f', WRONG: {wrong}' if wrong else ''}", flush=True)
        rows.append(row)
    print("\n" + table(rows, arguments.ranks, *shape))
    if arguments.json:
        found = {
            "device": torch.cuda.get_device_name(),
            "ranks": arguments.ranks,
            "rows": [asdict(row) for row in rows],
        }
        files.write_json(found, arguments.json)
    return int(failed or not rows)


if __name__ == "__main__":
    sys.exit(main())
