"""Runs a function on ranks, two by default, each in a process of its own, and brings back what they found."""

from __future__ import annotations

import datetime
import importlib
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from convergence.arms import isolate

RANKS = 2
TIMEOUT = 560.0
WAIT = datetime.timedelta(seconds=120)  # for another rank, which may have failed


def on_ranks(function: Callable[..., Any], *args: Any, ranks: int = RANKS) -> list[Any]:
    """What ``function(rank, *args)`` returns on each of the ``ranks``, which are a group and on the CPU, also where
    there is a GPU.

    Raises:
        Exception: what it raised on the first rank that failed; ProcessDied where one died or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ThreadPoolExecutor(ranks) as threads:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = function.__module__, function.__name__, f"file://{folder}/store", free.getsockname()[1], ranks
        calls = [threads.submit(isolate.call, _joined, rank, *place, *args, timeout=TIMEOUT) for rank in range(ranks)]
        return [call.result() for call in calls]


def _joined(rank: int, module: str, name: str, store: str, port: int, ranks: int, *args: Any) -> Any:
    """Make this process ``rank`` of the group, and call the function, whose module may ask at import for a GPU."""
    warnings.simplefilter("ignore")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # for a second group, as torchrun says it
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=WAIT)
    try:
        return getattr(importlib.import_module(module), name)(rank, *args)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
