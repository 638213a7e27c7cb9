"""How much memory a training step takes, and the longest sequence that fits: calculated, without a GPU.

The step runs on the meta device, where tensors have shapes and no memory, with the patch, and what it allocates is
counted. No formula is written down for any model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from liger_kernels.fitting.config import find_config
from liger_kernels.fitting.longest import longest
from liger_kernels.fitting.step import Counted, MetaStep
from liger_kernels.fitting.training import Training, check_training
from liger_kernels.ops.loss.linear_cross_entropy import Memory
from liger_kernels.ops.runtime.arguments import checked
from liger_kernels.patching.offload import Offload
from liger_kernels.patching.recompute import Recompute

__all__ = ["Fit", "Switch", "fit"]

GIB = 2**30
RESERVE = 2 * GIB  # the CUDA context, workspaces of cuBLAS, what the allocator cannot use
TOKENS = 4096  # of a step, where nobody says


@dataclass(frozen=True)
class Switch:
    """What could be switched on.

    Attributes:
        name: as a user writes it.
        peak: bytes of the same step with it.
        longest: tokens of the longest row with it; None without a GPU's size.
        host: bytes of the host's memory that the same step takes with it.
    """

    name: str
    peak: int
    longest: int | None = None
    host: int = 0


@dataclass(frozen=True)
class Fit:
    """What :func:`fit` found; ``str`` of it is a table.

    Attributes:
        model: the class of the configuration.
        setup: how it is trained, in words.
        tokens: of each row of the step; ``batch`` rows.
        parts: bytes at the step's peak, by what they are for.
        gpu: GiB that the GPU has; None if nobody said.
        longest: tokens of the longest row that fits; 0 where none does, None without ``gpu``.
        switches: what could be switched on, where it brings something.
        notes: what else there is to know.
        host: bytes of layer inputs in the host's memory.
    """

    model: str
    setup: str
    tokens: int
    batch: int
    parts: Mapping[str, int]
    gpu: float | None = None
    longest: int | None = None
    switches: tuple[Switch, ...] = ()
    notes: tuple[str, ...] = ()
    host: int = 0

    @property
    def peak(self) -> int:
        """Bytes that the step holds at most."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        rows = [*self.parts.items(), ("together", self.peak)]
        lines = [f"{self.model}, {self.setup}: calculated, bfloat16", ""]
        lines += [f"At the peak of a step of {self.batch} x {self.tokens:,} tokens, GiB:"]
        lines += [f"  {name:<22}{size / GIB:>8.2f}" for name, size in rows]
        if self.host:
            lines += [f"  {'on the host, pinned':<22}{self.host / GIB:>8.2f}"]
        if self.longest is not None:
            room = f"{self.gpu:g} GiB, of which {RESERVE / GIB:g} are for CUDA and fragments"
            found = f"{self.longest:,} tokens" if self.longest else "none: not even the shortest fits"
            lines += ["", f"Longest sequence in {room}: {found}"]
        if self.switches:
            lines += ["", "You could switch on:"]
        for switch in self.switches:
            brings = f"{switch.peak / GIB:.2f} GiB"
            brings += "" if switch.longest is None else f", longest {switch.longest:,} tokens"
            brings += f"; {switch.host / GIB:.2f} GiB on the host" if switch.host else ""
            lines += [f"  {switch.name}: {brings}"]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


@checked
def fit(
    model: Any,
    *,
    lora: int | None = None,
    qlora: int | None = None,
    full: str | None = None,
    gpu: float | None = None,
    tokens: int | None = None,
    batch: int = 1,
    checkpointing: bool = True,
    memory: Memory | None = None,
    offload: Offload | None = None,
    recompute: Recompute | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> Fit:
    """Calculate the memory of a training step of a patched causal language model in bfloat16. Needs no GPU.

    Args:
        model: a configuration of transformers, the path of a folder or file of one, or the name of its class.
        lora, qlora: the rank of adapters on every linear layer, in float32 under autocast; with ``qlora`` these layers
            are kept in four bits. The optimizer is AdamW.
        full: train every weight, with this optimizer in its fused form: "adamw" (the default), "adam", "sgd". States
            are in bfloat16 like the weights. torch's default form copies all weights once more while it steps.
        gpu: GiB of the GPU, for the longest sequence.
        tokens: of a row; by default as many as fit, or 4096 without ``gpu``.
        batch: rows of a step.
        checkpointing: whether each layer is computed again in the backward, without reentry.
        memory: the schedule of the loss, as :func:`liger_kernels.patch` takes it.
        offload: "layers" keeps the inputs of checkpointed layers in the host's memory, as there.
        recompute: "mlp" keeps the input of a gated MLP alone, as there.
        sizes: attributes of the configuration that are to be others.

    Returns:
        A :class:`Fit`. What attention allocates, what four-bit layers take and what CUDA keeps for itself are
        estimates; everything else is counted.

    Raises:
        TypeError: an argument is of a type that makes no sense.
        ValueError: nothing such as ``model`` is there, it is no causal language model, its step needs data, or another
            argument is out of range.
    """
    setup = check_training(lora, qlora, full, batch, memory, offload, recompute, checkpointing)
    for name, number in (("tokens", tokens), ("gpu", gpu)):
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} is {number}; it must be more than 0")
    config = find_config(model, sizes or {})
    step = MetaStep(config, setup)
    most = _longest(step, gpu)
    tokens = tokens or most or TOKENS
    counted = step.count(tokens)
    switches = []
    for name, other in _others(setup):
        changed = MetaStep(config, other)
        found = changed.count(tokens)
        if found.peak < counted.peak:
            switches.append(Switch(name, found.peak, _longest(changed, gpu), found.host))
    return Fit(
        type(config).__name__.removesuffix("Config"),
        str(setup),
        tokens,
        batch,
        counted.parts,
        gpu,
        most,
        tuple(switches),
        tuple(_notes(config, counted, tokens, batch)),
        counted.host,
    )


def _notes(config: Any, counted: Counted, tokens: int, batch: int) -> list[str]:
    """What the reader should know of the step besides its memory."""
    notes = [f"The loss is not fused: {reason}." for reason in counted.fallbacks]
    if counted.square:
        notes.append(
            f"A tensor of tokens x tokens is made ({counted.square / GIB:.2f} GiB): a mask, or scores of attention "
            "that is not fused."
        )
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        notes.append(f"The model's own limit is {limit:,} positions.")
    if batch > 1:
        notes.append("Padding takes as much as tokens do: pack samples into rows.")
    return notes


def _longest(step: MetaStep, gpu: float | None) -> int | None:
    if gpu is None:
        return None
    return longest(lambda tokens: step.count(tokens).peak, int(gpu * GIB) - RESERVE)


def _others(setup: Training) -> list[tuple[str, Training]]:
    """What takes less memory and is not on, alone and together."""
    changes: dict[str, dict[str, Any]] = {}
    if not setup.checkpointing:
        changes["checkpointing"] = {"checkpointing": True}
    if setup.memory != "small":
        changes['memory="small"'] = {"memory": "small"}
    if setup.offload is None:
        changes['offload="layers"'] = {"offload": "layers"}
    if setup.recompute is None:
        changes['recompute="mlp"'] = {"recompute": "mlp"}
    groups: list[tuple[str, ...]] = [
        (name,) for name in changes if setup.checkpointing or "offload" not in changes[name]
    ]
    if len(changes) > 1:
        groups.append(tuple(changes))
    every = {names: {key: value for name in names for key, value in changes[name].items()} for names in groups}
    return [(" and ".join(names), replace(setup, **options)) for names, options in every.items()]
