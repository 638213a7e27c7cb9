"""Starts a function on ranks, two by default, each in a process of its own, and brings back what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from convergence.interpreter import prepare

ROOT = Path(__file__).parents[1]
RANKS = 2


def on_ranks(module: str, folder: Path, ranks: int = RANKS) -> list[dict[str, Any]]:
    """What ``python -m module rank folder`` of each rank wrote to ``folder/rank.json``, by rank."""
    start("-m", module, folder, ranks=ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def start(how: str, what: str, folder: Path, timeout: float = 560, ranks: int = RANKS) -> None:
    """Run ``python how what rank folder`` on each rank. The ranks are on the CPU, also where there is a GPU.

    Raises:
        AssertionError: a rank failed or took longer than ``timeout`` seconds; with the end of its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", how, what, str(rank), str(folder)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"rank {rank}: {output[-4000:]}"
    finally:
        for process in processes:
            process.kill()


def join(rank: int, folder: Path) -> None:
    """Make this process ``rank`` of the group."""
    prepare()
    ranks = int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
