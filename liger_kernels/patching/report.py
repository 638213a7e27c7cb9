"""The report of a patch: what was replaced by what, what was left and why, and what has run unfused since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# The attribute of a patched module with the report of its patch. Copies and pickles of the module keep it, too.
REPORT = "_liger_kernels"


@dataclass(frozen=True)
class Replacement:
    """One patched object: its path, its kernel, its old class, and the formula that matched."""

    path: str
    kernel: str
    was: str
    formula: str


@dataclass(frozen=True)
class Left:
    """One norm, MLP, rotary function, block of experts or head that was not replaced, and why."""

    path: str
    what: str
    reason: str
    since: bool = False  # whether this happened after patch()


@dataclass
class PatchReport:
    """The outcome of ``patch(model)``; ``print`` it for a table.

    Attributes:
        kernels: the requested kernels.
        replaced: the replaced objects.
        left: the objects that were not replaced, each with the reason.
        fallbacks: counts by reason, which go on counting. A count grows when a training forward computes real logits,
            another schedule than ``memory`` runs, or PEFT's own forward runs in place of ``lora_linear`` or
            ``lora_experts``. It also grows when ``offload`` finds nothing to move, or an MLP saves more than
            ``recompute`` allows.
        loss_reduction: what the loss averages over: "token", "square" or "sample".
        memory: the chosen schedule of the fused loss: "fast", "balanced" or "small". None lets shape and dtype decide.
        offload: "layers" if the inputs of checkpointed layers go to host memory.
        recompute: "mlp" if gated MLPs save only their input.
        invariant: whether the bits of a row depend on this row alone in everything that the patch computes.
        not_invariant: with ``invariant``, the modules that multiply outside the patch, for example attention.
        linear_attention: the gated delta rules and their convolutions, which are not patched. Each entry says which
            package computes it, and what keeps the samples of a packed row apart (docs/how-to/packed-samples.md).
        forwards: the number of forwards of the model since the patch.
        never_ran: the replaced objects that ran in none of these forwards; :func:`liger_kernels.status` fills it.
    """

    kernels: tuple[str, ...]
    replaced: list[Replacement] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    loss_reduction: str = "token"
    memory: str | None = None
    forwards: int = 0
    never_ran: list[Replacement] = field(default_factory=list)
    offload: str | None = None
    recompute: str | None = None
    invariant: bool = False
    not_invariant: list[Left] = field(default_factory=list)
    linear_attention: list[Left] = field(default_factory=list)

    @property
    def fuses_head(self) -> bool:
        """Whether the loss is computed from hidden states and weight, without logits."""
        return any(replacement.kernel == "linear_cross_entropy" for replacement in self.replaced)

    def counts(self) -> dict[str, int]:
        """How many objects each kernel replaced."""
        return dict(Counter(replacement.kernel for replacement in self.replaced))

    def __str__(self) -> str:
        lines = []
        if self.replaced:
            lines += _grouped(
                ("kernel", "replaces", "formula", "times", "first at"),
                [((r.kernel, r.was, r.formula), r.path) for r in self.replaced],
            )
            lines.append("Tools that ask for the exact class of a module come before patch(), or after unpatch().")
        else:
            lines.append("NOTHING WAS REPLACED: this model runs exactly as it did.")
        if self.left:
            lines += ["", "left alone:"]
            lines += _grouped(("what", "why", "times", "first at"), [((i.what, i.reason), i.path) for i in self.left])
        if self.linear_attention:
            lines += ["", "linear attention, which is not patched:"]
            lines += _grouped(
                ("what", "computed by", "times", "first at"),
                [((i.what, i.reason), i.path) for i in self.linear_attention],
            )
        if self.never_ran:
            lines += ["", f"replaced, but never ran in {self.forwards} forward{'s' * (self.forwards != 1)}:"]
            lines += _grouped(
                ("kernel", "replaces", "times", "first at"), [((r.kernel, r.was), r.path) for r in self.never_ran]
            )
        if self.loss_reduction != "token":
            lines += ["", f"the loss of packed rows is weighted: loss_reduction={self.loss_reduction!r}"]
        if self.memory is not None:
            effect = (
                "the schedule of the fused loss"
                if self.fuses_head
                else "without effect: no loss is computed from hidden states"
            )
            lines += ["", f"memory={self.memory!r}: {effect}"]
        if self.offload is not None:
            lines += ["", f"offload={self.offload!r}: the inputs of checkpointed layers go to the host's memory"]
        if self.recompute is not None:
            lines += ["", f"recompute={self.recompute!r}: gated MLPs save their input, and compute the rest again"]
        if self.invariant:
            lines += ["", "invariant=True: products go in blocks of rows, and a row's bits depend on this row alone"]
        if self.not_invariant:
            lines += ["", "not invariant, because the patch does not compute it:"]
            lines += _grouped(
                ("what", "why", "times", "first at"), [((i.what, i.reason), i.path) for i in self.not_invariant]
            )
        if self.fallbacks:
            lines += ["", "real logits were computed in training, or another schedule or forward ran, because:"]
            lines += [f"  {count} x {reason}" for reason, count in self.fallbacks.most_common()]
        return "\n".join(lines)


def is_invariant(module: Any) -> bool:
    """Whether ``module`` was patched to compute each row with bits that do not depend on other rows."""
    report = module.__dict__.get(REPORT)
    return report is not None and report.invariant


def _grouped(header: tuple[str, ...], rows: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """A table with one row for each distinct key: the key, its count and the first path."""
    first: dict[tuple[str, ...], str] = {}
    for key, path in rows:
        first.setdefault(key, path or "the model itself")
    times = Counter(key for key, _ in rows)
    body = [(*key, str(times[key]), path) for key, path in first.items()]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, ["-" * width for width in widths], *body)
    ]
