"""Calculates the memory of a training step and the longest sequence that fits, without a GPU.

The patched step runs on the meta device, where tensors have shapes but no memory. Its allocations are counted. There is
no formula for any model.
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
RESERVE = 2 * GIB  # the CUDA context, cuBLAS workspaces, and fragments that the allocator cannot use
MOST_GIB = 2**33  # sizes in bytes stay below 2**63
TOKENS = 4096  # the default length of a row


@dataclass(frozen=True)
class Switch:
    """An option that the user could switch on, or several together.

    Attributes:
        name: the option as the user writes it.
        peak: the peak in bytes of the same step with the option.
        longest: tokens of the longest row with the option; None if the GPU's size is unknown.
        host: bytes of host memory that the same step takes with the option.
    """

    name: str
    peak: int
    longest: int | None = None
    host: int = 0


@dataclass(frozen=True)
class Fit:
    """The result of :func:`fit`. ``str`` makes a table of it.

    Attributes:
        model: the class of the configuration.
        setup: the way of training, in words.
        tokens: the tokens of each row of the step.
        batch: the rows of the step.
        parts: bytes at the step's peak, by purpose.
        gpu: the GPU's size in GiB; None if unknown.
        longest: tokens of the longest row that fits; 0 if none fits, None without ``gpu``.
        switches: the options that would lower the peak.
        notes: further remarks, one a string.
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
        """The largest number of bytes that the step holds."""
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
    """Calculate the memory of a training step of a patched causal language model in bfloat16. No GPU is needed.

    Args:
        model: a configuration of transformers, the path of its folder or file, or the name of its class.
        lora, qlora: the rank of adapters on every linear layer. Adapters are float32 under autocast, and the optimizer
            is AdamW. With ``qlora`` the linear layers are kept in four bits.
        full: train every weight with this optimizer: "adamw" (the default), "adam", "sgd". Its states are bfloat16 like
            the weights. The calculation assumes ``fused=True``, because torch's default form copies all weights in a
            step.
        gpu: the GPU's size in GiB, for the longest sequence.
        tokens: the tokens of a row; by default the longest row that fits, or 4096 without ``gpu``.
        batch: the rows of a step.
        checkpointing: whether the backward recomputes each layer (``use_reentrant=False``).
        memory: the schedule of the loss, as in :func:`liger_kernels.patch`.
        offload: "layers" keeps the inputs of checkpointed layers in host memory, as in :func:`liger_kernels.patch`.
        recompute: "mlp" keeps only the input of a gated MLP, as in :func:`liger_kernels.patch`.
        sizes: attributes of the configuration to change.

    Returns:
        A :class:`Fit`. The memory of attention, of four-bit layers and of CUDA itself is estimated. Everything else is
        counted.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``model`` does not exist, is no causal language model, or has a step that needs data or fails; or
            another argument is out of range.
    """
    setup = check_training(lora, qlora, full, batch, memory, offload, recompute, checkpointing)
    for name, number in (("tokens", tokens), ("gpu", gpu)):
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} is {number}; it must be more than 0")
    if gpu is not None and gpu >= MOST_GIB:
        raise ValueError(f"gpu is {gpu}; it is in GiB and must be less than {MOST_GIB}")
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
    """The memory-saving options that ``setup`` does not use, each alone and all together."""
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
