"""What tests of ops share: dtypes, random inputs, how many examples are drawn, and a counter of matrix products."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import Phase, settings
from torch.utils._python_dispatch import TorchDispatchMode

from tools.op_table.row import randn as randn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The same examples every time; a failing one is shown as it is, since shrinking it would take minutes of interpreter.
EXAMPLES = settings(
    derandomize=True, deadline=None, max_examples=40, phases=[Phase.explicit, Phase.generate], database=None
)


def eps_for(columns: int, eps: float, scale: float) -> float:
    """With few columns and a small eps a norm hardly depends on x: its gradient is the difference of almost equal
    numbers, and every formula's is rounding noise. An eps of the size of x^2 leaves something to compare."""
    return eps if columns >= 16 else scale**2


# torch's products of matrices.
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm"}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in PRODUCTS
        return function(*args, **(kwargs or {}))
