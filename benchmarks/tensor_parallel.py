"""A head whose classes are split over several GPUs of one machine: ours, and heads that gather their logits.

``python -m benchmarks.tensor_parallel [--ranks 2] [--shapes 8192x4096x128256,...] [--json FILE]``

Loss and gradients of a mean over all tokens, in bfloat16, the weight split by classes. Every arm is compared with the
whole head in float64 on some rows before it is measured. Times are medians by CUDA events; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.case import CHECKED_ROWS, Site
from benchmarks.timing import FEWEST, Gpu
from convergence import files, tables
from convergence.judge.tolerance import three_way
from liger_kernels import ops
from liger_kernels.ops.loss.vocab_parallel import VocabShard, logits_of_all

SHAPES = ((8192, 4096, 128256), (8192, 2048, 262144))


def arms(shard: VocabShard | None) -> dict[str, Callable[..., Any]]:
    """From hidden states, this rank's weight and targets to the loss."""

    def gathered(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda hidden, weight, targets: loss(logits_of_all(hidden, weight, None, shard), targets)

    split: Callable[..., Any] = partial(ops.linear_cross_entropy, group=shard)
    return {
        "ours (fast)": partial(split, memory="fast"),
        "ours (small)": partial(split, memory="small"),
        "gathered logits, our cross_entropy": gathered(ops.cross_entropy),
        "gathered logits, torch in float32": gathered(lambda x, targets: F.cross_entropy(x.float(), targets)),
    }


def inputs(site: Site, rows: int, hidden: int, vocab: int) -> tuple[Any, ...]:
    """The same on every rank, the whole weight."""
    torch.manual_seed(1)
    return site.randn(rows, hidden), site.randn(vocab, hidden, scale=hidden**-0.5), site.targets(rows, vocab)


def part(weight: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
    if shard is None:
        return weight
    mine = weight.detach()[shard.first : shard.first + shard.sizes[dist.get_rank(shard.group)]]
    return mine.clone().requires_grad_()


def check(function: Callable[..., Any], whole: tuple[Any, ...], shard: VocabShard | None) -> None:
    """Hold this rank's loss and gradients to the three-way rule against the whole head's.

    Raises:
        AssertionError: naming what is further from the truth than torch's.
    """
    hidden, weight, targets = whole

    def evaluated(op: Callable[..., Any], hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        loss = op(hidden, weight, targets)
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    ours = evaluated(function, hidden, part(weight, shard))
    torchs = evaluated(lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t), hidden, weight)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = evaluated(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), *wide)
    for name, mine, theirs, true in zip(("loss", "d hidden", "d weight"), ours, torchs, truth, strict=True):
        if name == "d weight":
            theirs, true = part(theirs, shard), part(true, shard)
        three_way(mine, theirs, true, hidden.dtype, name, chain=3)


def measure(site: Site, gpu: Any, shard_of: Callable[[int], VocabShard | None], shape: tuple[int, int, int]) -> Any:
    """A row of each arm at ``shape``: its name, its shape, milliseconds, and MiB beyond the inputs of a rank."""
    rows, hidden, vocab = shape
    shard = shard_of(vocab)
    found = []
    for name, function in arms(shard).items():
        check(function, inputs(site, min(rows, CHECKED_ROWS), hidden, vocab), shard)
        states, weight, targets = inputs(site, *shape)
        weight = part(weight, shard)
        gpu.release()
        # A number of repetitions that the ranks agree on: each waits for the others.
        measured = gpu.measure(function, (states, weight, targets), FEWEST)
        numbers = torch.tensor([measured.ms, measured.mib], device=site.device)
        if shard is not None:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=shard.group)
        found.append((name, "x".join(map(str, shape)), *numbers.tolist()))
        gpu.release()
    return found


def even(vocab: int) -> VocabShard | None:
    ranks = dist.get_world_size()
    most = -(-vocab // ranks)
    sizes = tuple([max(0, min(most, vocab - rank * most)) for rank in range(ranks)])
    return VocabShard(dist.group.WORLD, sizes) if ranks > 1 else None


def worker(rank: int, ranks: int, shapes: list[tuple[int, int, int]], json: Path | None) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", 29533, ranks, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    rows = [row for shape in shapes for row in measure(Site(f"cuda:{rank}"), Gpu(), even, shape)]
    if rank == 0:
        packages = ", ".join(f"{name} {version}" for name, version in files.versions(["torch", "triton"]).items())
        print(f"{ranks} x {torch.cuda.get_device_name()}, {packages}, bfloat16, {datetime.date.today()}\n")
        cells = [(name, shape, f"{ms:.1f}", f"{mib:.0f}") for name, shape, ms, mib in rows]
        print("\n".join(tables.markdown(("head", "shape", "ms", "MiB a rank"), cells)), flush=True)
        if json:
            files.write_json({"device": torch.cuda.get_device_name(), "ranks": ranks, "rows": rows}, json)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use (default: %(default)s)")
    parser.add_argument("--shapes", help="tokens x hidden size x classes, separated by commas")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE, too")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        parser.error(f"--ranks {arguments.ranks} needs as many GPUs; there are {torch.cuda.device_count()}")
    shapes = [tuple(map(int, shape.split("x"))) for shape in (arguments.shapes or "").split(",") if shape] or [*SHAPES]
    torch.multiprocessing.spawn(worker, (arguments.ranks, shapes, arguments.json), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
