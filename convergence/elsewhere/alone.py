"""Our patch with a single kernel: ``alone:rms_norm`` of this module is ``patch(model, kernels=["rms_norm"])``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

PATCH = __name__


def _alone(kernel: str, model: Any) -> Any:
    import liger_kernels

    return liger_kernels.patch(model, kernels=[kernel])


def __getattr__(name: str) -> Callable[[Any], Any]:
    """The patch with the kernel of this name. Whether there is one, the package says when the patch is called."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(_alone, name)


def placed(model: str, seed: int) -> dict[str, int]:
    """How many modules of ``model`` each kernel of the package replaces, if it is the only one."""
    from convergence import ours
    from convergence.models.rows import find

    found = {}
    for kernel in ours.kernels():
        patched = find(model).build(seed)
        _alone(kernel, patched)
        found[kernel] = ours.status(patched).counts().get(kernel, 0)
    return found
