"""The page of differences: each kernel of our patch alone, on two sides, against one truth.

A side is where a candidate is from: a commit, an environment, or a folder of kept candidates. Bits say whether a kernel
changed at all. Errors and gains against the truth in float64 say whether it became better or worse.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from convergence import files

DONE = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    for side in "AB":
        parser.add_argument(
            side.lower(), metavar=side, help="a checkout, an environment, a folder of candidates, or . for here"
        )
    parser.add_argument("--models", default="llama-tied", help="a comma-separated list (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32", help="float32, bfloat16 (default: %(default)s)")
    parser.add_argument("--profile", default="hard", choices=("plain", "hard"), help="(default: %(default)s)")
    parser.add_argument("--kernels", default="", help="a comma-separated list (default: all that the models have)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where the page goes (default: the output)")


def write(options: argparse.Namespace) -> int:
    """Train every kernel on both sides, and write the page.

    Raises:
        ValueError: an option makes no sense, or a side cannot be used.
    """
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; allowed here is cpu")
    if device == "cpu":  # as Triton decides at its import
        os.environ["TRITON_INTERPRET"] = "1"
    from convergence.arms.interpreter import prepare
    from convergence.elsewhere.sides import compared
    from convergence.models.models import select

    prepare()
    dtypes = _names(options.dtypes)
    for dtype in dtypes:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtypes {dtype!r} is unknown; allowed are float32, bfloat16")
    models = [model.name for model in select(options.models)]
    chosen = [(model, dtype) for model in models for dtype in dtypes]
    page = compared((options.a, options.b), chosen, _names(options.kernels), options.profile, device).markdown()
    if options.markdown is None:
        print(page, end="")
    else:
        files.write(page, options.markdown)
    return DONE


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
