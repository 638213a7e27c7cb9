"""Keeps trl's kernel for log-probabilities of given logits (trl 1.16 and later) from logits that nobody has computed.

trl asks a function of its own whether the kernel takes the logits, and else runs operations of torch. A patched model
computes these operations without logits (:mod:`liger_kernels.patching.logits.gathered`). The kernel would read logits.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

__all__ = ["KernelQuestion"]


class KernelQuestion:
    """Stands in for trl's function: no for logits without values, and else what trl's function answers.

    Attributes:
        own: trl's function.
        refused: how many calls were about logits without values.
    """

    def __init__(self, function: Any) -> None:
        self.own, self.refused = function, 0
        self._module = sys.modules[function.__module__]

        @functools.wraps(function)
        def supports(logits: Any, *args: Any, **kwargs: Any) -> Any:
            from liger_kernels.patching.logits.gathered import has_no_values

            if has_no_values(logits):
                self.refused += 1
                return False
            return function(logits, *args, **kwargs)

        self._supports: Any = supports
        setattr(self._module, function.__name__, supports)

    def undo(self) -> None:
        """Give the module its own function back, unless somebody else has replaced it since."""
        name = self.own.__name__
        if getattr(self._module, name, None) is self._supports:
            setattr(self._module, name, self.own)
