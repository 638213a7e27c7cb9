"""The proof: trains patched and unpatched mini models and decides whether a patch is still the same mathematics; and
``check_op``, which decides it of a single op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convergence.op.check import check_op

__all__ = ["check_op"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: every run of pytest imports this package, and most have no use for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from convergence.op.check import check_op

    return check_op
