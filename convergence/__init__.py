"""The proof: trains patched and unpatched models and decides whether a patch is still the same mathematics.
``Model`` describes a model of the user's own. ``check_op`` decides of a single op, and ``check_consistency`` of the
log-probabilities of a rollout."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convergence.consistency.check import check_consistency
    from convergence.models.own import Model
    from convergence.op.check import check_op

__all__ = ["Model", "check_consistency", "check_op"]
_MODULES = {
    "Model": "convergence.models.own",
    "check_consistency": "convergence.consistency.check",
    "check_op": "convergence.op.check",
}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: every run of pytest imports this package, and most have no use for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
