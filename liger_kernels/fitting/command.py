"""``python -m liger_kernels fit MODEL``: how much memory a training step takes, and the longest sequence that fits."""

from __future__ import annotations

import argparse
import ast
import contextlib
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from liger_kernels.fitting.training import OPTIMIZERS


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m liger_kernels fit",
        description="The memory of a training step of a patched model, calculated. Nothing is downloaded.",
    )
    found.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a class such as LlamaConfig")
    found.add_argument("sizes", metavar="NAME=VALUE", nargs="*", help="of the configuration, such as hidden_size=4096")
    how = found.add_mutually_exclusive_group()
    how.add_argument("--lora", metavar="R", type=int, help="adapters of that rank on every linear layer")
    how.add_argument("--qlora", metavar="R", type=int, help="the same over layers in four bits")
    how.add_argument("--full", metavar="OPTIMIZER", help=f"train every weight: {', '.join(OPTIMIZERS)} (default adamw)")
    found.add_argument("--gpu", metavar="GIB", type=float, help="memory of the GPU, for the longest sequence")
    found.add_argument("--tokens", metavar="N", type=int, help="of a row (default: as many as fit, or 4096)")
    found.add_argument("--batch", metavar="N", type=int, default=1, help="rows of a step (default 1)")
    found.add_argument("--no-checkpointing", action="store_true", help="keep what every layer saves")
    found.add_argument("--memory", choices=("fast", "balanced", "small"), help="the schedule of the loss")
    found.add_argument("--offload", choices=("layers",), help="keep layer inputs in the host's memory")
    found.add_argument("--recompute", choices=("mlp",), help="keep the input of a gated MLP alone")
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints what :func:`liger_kernels.fit` finds. Returns 0, or 2 where an argument is wrong."""
    own = parser()
    given = vars(own.parse_args(arguments))
    sizes = dict(_size(own, word) for word in given.pop("sizes"))
    checkpointing = not given.pop("no_checkpointing")
    from liger_kernels.fitting import fit

    logging.getLogger("transformers").setLevel(logging.ERROR)  # of a model that nobody will train
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(fit(**given, sizes=sizes, checkpointing=checkpointing))
    except (TypeError, ValueError, ImportError) as error:
        print(f"{own.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _size(own: argparse.ArgumentParser, word: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if not equals or not name.isidentifier():
        own.error(f"{word!r} must be NAME=VALUE, such as hidden_size=4096")
    value: Any = {"true": True, "false": False, "null": None}.get(text, text)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError):  # a word
            value = ast.literal_eval(value)
    return name, value
