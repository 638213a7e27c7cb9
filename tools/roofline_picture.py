"""Draws what ``python -m benchmarks --json`` measured under its two ceilings, a copy and a matrix product.

``python -m tools.roofline_picture JSON SVG`` (needs matplotlib). Nothing is measured here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence.files import read_json

OURS, PEERS, CEILING = "#0072b2", "0.6", "black"
MARKERS = "os^vDPX*<>ph"


@dataclass(frozen=True)
class Point:
    """One measured arm: operations per byte, TFLOP/s, and the share of what the nearer ceiling allows there."""

    op: str
    label: str
    ours: bool
    intensity: float
    tflop_per_s: float
    share: float


def points(result: dict[str, Any]) -> Iterator[Point]:
    """Ours of every row; a formula's peers once for each shape, by the operations of its plainest schedule."""
    fewest: dict[tuple[str, str], int] = {}
    for row in result["rows"]:
        key = row["formula"], row["shape"]
        fewest[key] = min(row["flops"], fewest.get(key, row["flops"]))
    for row in result["rows"]:
        key = row["formula"], row["shape"]
        times = [(True, row["ours_ms"], row["flops"])]
        if key in fewest:
            flops = fewest.pop(key)
            times += [(False, peer["ms"], flops) for peer in row["peers"].values() if "ms" in peer]
        for ours, ms, flops in times:
            intensity, reached = flops / row["bytes"], flops / ms / 1e9
            share = reached / allowed(result, intensity)
            yield Point(row["formula"].split()[0], f"{row['op']} {row['shape']}", ours, intensity, reached, share)


def allowed(result: dict[str, Any], intensity: float) -> float:
    """TFLOP/s that both ceilings leave to a kernel of that many operations per byte."""
    return min(result["matmul_tflop_per_s"], intensity * result["copy_gb_per_s"] / 1e3)


def draw(result: dict[str, Any], path: Path) -> None:
    """Left the roofline, right the share of the nearer ceiling, case by case."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "roofline", "font.family": "sans-serif"})
    found = list(points(result))
    labels = list(dict.fromkeys(point.label for point in found))
    markers = {op: MARKERS[i % len(MARKERS)] for i, op in enumerate(dict.fromkeys(point.op for point in found))}
    figure, (roof, shares) = plt.subplots(
        1, 2, figsize=(13, max(4.5, 0.24 * len(labels) + 1.2)), width_ratios=(1.2, 1), layout="constrained"
    )

    ridge = result["matmul_tflop_per_s"] * 1e3 / result["copy_gb_per_s"]
    low, high = (pick(point.intensity for point in found) for pick in (min, max))
    edges = [min(low, ridge) / 3, ridge, max(high, ridge) * 3]
    roof.loglog(edges, [allowed(result, intensity) for intensity in edges], color=CEILING, linewidth=1.2, zorder=1)
    copy, matmul = f"copy, {result['copy_gb_per_s']:.0f} GB/s", f"matmul, {result['matmul_tflop_per_s']:.0f} TFLOP/s"
    roof.annotate(copy, (ridge / 9, allowed(result, ridge / 6)), ha="right")
    roof.annotate(matmul, (ridge, result["matmul_tflop_per_s"] * 1.15), ha="left")
    for point in found:
        style = {"color": OURS, "s": 40, "zorder": 3} if point.ours else {"color": PEERS, "s": 18, "zorder": 2}
        for panel, x, y in (
            (roof, point.intensity, point.tflop_per_s),
            (shares, 100 * point.share, labels.index(point.label)),
        ):
            panel.scatter(x, y, marker=markers[point.op], linewidths=0, **style)
    for op, marker in markers.items():
        roof.scatter([], [], marker=marker, color=OURS, label=op)
    roof.scatter([], [], marker="o", color=PEERS, s=18, label="peers, eager and compiled")
    roof.legend(loc="lower right", frameon=False)
    roof.set_xlabel("operations per byte of a perfect kernel")
    roof.set_ylabel("TFLOP/s")
    roof.grid(alpha=0.25)

    shares.set_yticks(range(len(labels)), labels, fontsize=8)
    shares.invert_yaxis()
    shares.set_xlim(left=0)
    shares.axvline(100, color=CEILING, linewidth=1.2, zorder=1)
    shares.set_xlabel("percent of the nearer ceiling")
    shares.grid(alpha=0.25)
    for panel in (roof, shares):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['device']}, {result['dtype']}, forward and backward")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.roofline_picture", description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="what python -m benchmarks --json wrote")
    parser.add_argument("svg", type=Path, help="the picture to write")
    options = parser.parse_args(arguments)
    try:
        result = read_json(options.json)
    except ValueError as error:
        parser.error(str(error))
    wanted = {"device", "dtype", "copy_gb_per_s", "matmul_tflop_per_s", "rows"}
    if not isinstance(result, dict) or not wanted <= result.keys() or not result["rows"]:
        parser.error(f"{options.json} is not what python -m benchmarks --json writes: it needs {sorted(wanted)}")
    draw(result, options.svg)


if __name__ == "__main__":
    main()
