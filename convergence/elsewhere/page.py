"""The page of differences as Markdown. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convergence import tables

_HEADER = ("model", "dtype", "kernel", "bits", "first difference", "error ratio A", "B", "gain A", "B")


@dataclass(frozen=True)
class KernelRow:
    """A kernel that ran alone on both sides.

    Attributes:
        first: the first step and tensor whose bits differ; empty if none do.
        more: how many other tensors and steps differ.
        numbers: the error ratios of both sides, then the gains: "value / bound", "-" if there is none.
        ended: why a side did not train to the end; empty if both did.
    """

    model: str
    dtype: str
    kernel: str
    first: str
    more: int
    numbers: Sequence[str]
    ended: str = ""

    def cells(self) -> list[str]:
        if self.ended:
            bits, shown = "-", self.ended
        else:
            bits = "differ" if self.first else "same"
            shown = self.first + (f" and {self.more} more" if self.more else "")
        return [self.model, self.dtype, self.kernel, bits, tables.literal(shown) if shown else "-", *self.numbers]


@dataclass(frozen=True)
class Page:
    """What was compared, where each side is from, and kernels that no model has a place for."""

    sides: Sequence[dict[str, str]]
    rows: Sequence[KernelRow]
    without: Sequence[str]
    about: str

    def markdown(self) -> str:
        differ = sum(bool(row.first) for row in self.rows)
        lines = [f"## Differences op by op: {differ} of {len(self.rows)} kernels differ in bits", ""]
        lines += [f"{self.about} Each kernel runs alone. A and B are judged against one truth in float64.", ""]
        names = list(dict.fromkeys(name for side in self.sides for name in side))
        cells = ([name, *(tables.literal(side.get(name, "-")) for side in self.sides)] for name in names)
        lines += [*tables.markdown(("", "A", "B"), cells), ""]
        lines += [*tables.markdown(_HEADER, (row.cells() for row in self.rows)), ""]
        lines.append("Error ratio and gain are the values nearest to their bounds, and the bounds. Bold is beyond.")
        if self.without:
            lines += ["", f"No model here has a place for: {', '.join(self.without)}."]
        return "\n".join(lines) + "\n"
