"""What a patch did: what was replaced by what, what was left and why, and what ran unfused since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replacement:
    """One patched object: where it is, which kernel runs there, what class it was, which formula matched."""

    path: str
    kernel: str
    was: str
    formula: str


@dataclass(frozen=True)
class Left:
    """One object that looked like a candidate and was left alone, and why."""

    path: str
    what: str
    reason: str


@dataclass
class PatchReport:
    """The outcome of ``patch(model)``; ``print`` it for a table.

    Attributes:
        kernels: the kernels that were asked for.
        replaced: what was replaced.
        left: what was left alone, with the reason.
        fallbacks: how often real logits had to be computed in a training forward, or another schedule than ``memory``
            had to run, by reason; it goes on counting.
        loss_reduction: what the loss averages over: "token", "square" or "sample".
        memory: the schedule of the fused loss that was chosen: "fast", "balanced" or "small"; None where it follows
            shape and dtype.
        forwards: how often the model's forward has run since.
    """

    kernels: tuple[str, ...]
    replaced: list[Replacement] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    loss_reduction: str = "token"
    memory: str | None = None
    forwards: int = 0

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
            groups = Counter((r.kernel, r.was, r.formula) for r in self.replaced)
            lines += _table(
                ("kernel", "replaces", "formula", "times", "first at"),
                [
                    (*key, str(n), next(r.path for r in self.replaced if (r.kernel, r.was, r.formula) == key))
                    for key, n in groups.items()
                ],
            )
        else:
            lines.append("NOTHING WAS REPLACED: this model runs exactly as it did.")
        if self.left:
            reasons = Counter((item.what, item.reason) for item in self.left)
            lines += ["", "left alone:"]
            lines += _table(
                ("what", "times", "why", "first at"),
                [
                    (key[0], str(n), key[1], next(i.path for i in self.left if (i.what, i.reason) == key))
                    for key, n in reasons.items()
                ],
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
        if self.fallbacks:
            lines += ["", "real logits were computed in training, or another schedule ran, because:"]
            lines += [f"  {count} x {reason}" for reason, count in self.fallbacks.most_common()]
        return "\n".join(lines)


def _table(header: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, tuple("-" * width for width in widths), *body)
    ]
