"""Open ``patched()`` blocks. Each module that one has patched knows which blocks hold it, so that they may overlap.

A module that is patched and that no block holds was patched for good. A copy of a held one is, too: no block ends it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from torch import nn

from liger_kernels.patching.report import REPORT
from liger_kernels.patching.swap import BLOCKS


def patched_for_good(model: nn.Module) -> set[nn.Module]:
    """The modules of ``model`` that were patched outside of any block."""
    return {module for module in model.modules() if REPORT in module.__dict__ and BLOCKS not in module.__dict__}


def held(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """The modules of ``model`` that blocks hold, and which blocks."""
    return {module: module.__dict__[BLOCKS] for module in model.modules() if BLOCKS in module.__dict__}


def hold(modules: Iterable[nn.Module], before: dict[nn.Module, tuple[str, ...]]) -> str:
    """Open a block that holds ``modules``, next to those that held them ``before``. Returns its name."""
    block = uuid.uuid4().hex  # not a number: pickles bring those of other processes
    for module in modules:
        module.__dict__[BLOCKS] = (*before.get(module, ()), block)
    return block


def let_go(model: nn.Module, block: str) -> list[nn.Module]:
    """End ``block``. Returns the modules of ``model``, as it is now, that it was the last to hold."""
    ended = []
    for module, blocks in held(model).items():
        if block in blocks:
            module.__dict__[BLOCKS] = tuple(other for other in blocks if other != block)
            if blocks == (block,):
                del module.__dict__[BLOCKS]
                ended.append(module)
    return ended


def hold_as(other: nn.Module, module: nn.Module) -> None:
    """Let the blocks that hold ``other``, which was patched before, hold ``module``, too."""
    if BLOCKS in other.__dict__:
        module.__dict__[BLOCKS] = other.__dict__[BLOCKS]
