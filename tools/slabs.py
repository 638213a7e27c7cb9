"""Slabs of the vocabulary that are as small as a call needs them."""

from __future__ import annotations

import contextlib
from typing import Any

from liger_kernels.ops.loss.schedules.slab_plan import SlabSizes
from liger_kernels.ops.runtime.tiling import tiled


def slabs_of(classes: int, chunk: int = 1024) -> contextlib.AbstractContextManager[None]:
    """Inside, slabs whose logits need memory of their own have ``classes``; a first slab of more is worth it."""

    def sizes(choose: Any, tokens: int, hidden_size: int) -> SlabSizes:
        return SlabSizes(classes, classes, worth=2 * tokens * classes + min(tokens, 1), chunk=chunk)

    return tiled(slabs=sizes)
