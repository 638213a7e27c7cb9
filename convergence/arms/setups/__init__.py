"""The set-ups that people train in: how a model is wrapped, run and sharded. An axis of the proof.

Baseline, replicas and candidate of a case train in the same set-up. Their truth trains in float64 in one process,
without the set-up, on the batches of all ranks. A new set-up is a class in a file here and a line in :data:`SETUPS`.
"""

from __future__ import annotations

import functools

from convergence.arms.setup import Setup
from convergence.arms.setups.adapters import (
    Dora,
    Float8,
    Lora,
    LoraAutocast,
    LoraDropout,
    LoraExperts,
    LoraHead,
    LoraSingle,
    Qdora,
    Qlora,
    Qlora8Bit,
    with_checkpointing,
)
from convergence.arms.setups.one_process import (
    Autocast,
    Checkpointing,
    Compile,
    DeviceMap,
    Fp16Scaler,
    ReentrantCheckpointing,
)
from convergence.arms.setups.sharded import (
    RANKS as RANKS,
)
from convergence.arms.setups.sharded import (
    Ddp,
    Fsdp1,
    Fsdp2,
    LoraFsdp2,
    SequenceParallel,
    TensorParallel,
    Zero3,
)

_CLASSES: tuple[type[Setup], ...] = (
    Setup,
    *with_checkpointing(Autocast),
    Fp16Scaler,
    Checkpointing,
    ReentrantCheckpointing,
    Compile,
    *with_checkpointing(
        Lora, LoraSingle, LoraDropout, LoraAutocast, LoraExperts, LoraHead, Dora, Qlora, Qdora, Qlora8Bit, Float8
    ),
    DeviceMap,
    *with_checkpointing(Ddp, Fsdp2, LoraFsdp2),
    Fsdp1,
    Zero3,
    TensorParallel,
    SequenceParallel,
)
SETUPS: dict[str, Setup] = {cls.name: cls() for cls in _CLASSES}


@functools.cache
def select(names: str) -> tuple[Setup, ...]:
    """The set-ups that ``--setups`` names: ``all``, or a comma-separated list.

    Raises:
        ValueError: for an unknown name, with the allowed ones.
    """
    wanted = [part.strip() for part in names.split(",")]
    for name in wanted:
        if name != "all" and name not in SETUPS:
            raise ValueError(f"unknown set-up {name!r}; allowed are {', '.join(['all', *SETUPS])}")
    return tuple(setup for name, setup in SETUPS.items() if "all" in wanted or name in wanted)
