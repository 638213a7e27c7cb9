"""Which GPUs run the kernels, asked once of each device."""

from __future__ import annotations

from typing import Any

import torch

# The oldest NVIDIA GPU for which Triton compiles bfloat16.
CAPABILITY = (8, 0)
# What a program takes of a GPU's shared memory at most, in bytes, where it loads nothing ahead; and how much those that
# do load ahead then fill, as far as there is so much (:func:`room_for_loads`).
SHARED_MEMORY = 16 * 1024
LOADED_AHEAD = 128 * 1024
THREADS = 1024  # of a program at most, on every GPU

_obstacles: dict[tuple[str, int | None], str] = {}
_rooms: dict[tuple[str, int | None], int] = {}


def obstacle(device: torch.device) -> str:
    """Why no kernel runs on ``device``, so that every op runs its reference; empty where they run.

    In a program that is being traced, a device that was not asked before counts as one that runs them.
    """
    key = device.type, device.index
    known = _obstacles.get(key)
    if known is None:
        if torch.compiler.is_compiling():
            return ""
        known = _obstacles[key] = _ask(device)
    return known


def _ask(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    if torch.version.hip is None and capability < CAPABILITY:
        shown, needed = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
        return f"its compute capability is {shown}; kernels need {needed}"
    shared = shared_memory(properties)
    if shared is not None and shared < SHARED_MEMORY:
        return f"a program has {shared} bytes of shared memory; kernels need {SHARED_MEMORY}"
    return ""


def most_warps(lanes: int) -> int:
    """How many warps a program may have. A warp has 32 ``lanes``, or 64 on AMD's data center GPUs."""
    return THREADS // lanes


def room_for_loads(device: torch.device) -> int:
    """Bytes of shared memory that a program on ``device`` may fill with what it loads ahead: 128 KiB; less on GPUs that
    have less, such as those of capability 8.6 and 8.9 (99 KiB), and AMD's (64 KiB). While a program is traced, as
    :func:`obstacle`."""
    key = device.type, device.index
    known = _rooms.get(key)
    if known is None:
        if device.type != "cuda" or torch.compiler.is_compiling():
            return LOADED_AHEAD
        shared = shared_memory(torch.cuda.get_device_properties(device))
        known = _rooms[key] = LOADED_AHEAD if shared is None else min(LOADED_AHEAD, shared - 2048)
    return known


def shared_memory(properties: Any) -> int | None:
    """The bytes of shared memory that one program may have, or None where this torch does not say."""
    found = [getattr(properties, f"shared_memory_per_block{way}", None) for way in ("_optin", "")]
    return max((size for size in found if size), default=None)
