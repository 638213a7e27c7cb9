"""Draws docs/explanation/packing.svg: how much a sample counts, by its number of targets.

``python -m tools.packing_picture`` (needs matplotlib).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

from liger_kernels.ops import packing_weights

MODES = {"token": "#b3541e", "square": "#5a7d2a", "sample": "#2a5d9f"}
LENGTHS = [2**i for i in range(13)]
OF_LENGTH = 64  # the sample that the others are compared with


def weights(mode: str) -> tuple[list[float], list[float]]:
    """What each sample of one packed row counts, and each of its targets, as the package computes it."""
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    found = packing_weights(shift_labels=torch.zeros_like(index), seq_idx=index, loss_reduction=mode)
    shares = torch.zeros(len(LENGTHS)).index_add_(0, index, found.row_weight)
    targets = shares / torch.tensor(LENGTHS)
    at = LENGTHS.index(OF_LENGTH)
    return (shares / shares[at]).tolist(), (targets / targets[at]).tolist()


def main() -> None:
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "packing", "font.family": "sans-serif"})
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    ticks = [2.0**i for i in range(-6, 7, 2)]
    for mode, colour in MODES.items():
        for panel, values in zip(panels, weights(mode), strict=True):
            panel.loglog(LENGTHS, values, color=colour, marker="o", markersize=3, label=mode, base=2)
    for panel, title in zip(panels, ("a whole sample", "each of its targets"), strict=True):
        panel.set_title(f"what {title} counts")
        panel.set_xlabel("targets of the sample")
        panel.set_xticks(LENGTHS[::3], [str(n) for n in LENGTHS[::3]])
        panel.axvline(OF_LENGTH, color="0.8", linewidth=1, zorder=0)
        panel.set_yticks(ticks, [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks])
        panel.grid(alpha=0.2)
    panels[0].set_ylabel(f"relative to a sample of {OF_LENGTH}")
    panels[0].legend(title="loss_reduction")
    figure.savefig(Path("docs/explanation/packing.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
