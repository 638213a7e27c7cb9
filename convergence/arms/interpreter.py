"""Triton's interpreter, which runs kernels on a CPU: one repair, and what makes it faster.

It replaces functions of Triton's in this process, for the kernels of every package: so it belongs to the proof, and a
program that uses the kernels never does it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def prepare() -> None:
    """Repair and hurry the interpreter, once in a process, where ``TRITON_INTERPRET=1`` said at Triton's import that it
    is used: in another process, the compiler would run what is replaced."""
    if isinstance(tl.sum, interpreter.InterpretedFunction):
        _repair_bfloat16()
        from convergence.arms import hurried  # it takes Triton's own functions as they are now

        hurried.install()


def _repair_bfloat16() -> None:
    """Make Triton's interpreter convert between float32 and bfloat16 as every device does.

    Triton (3.6, 3.7) truncates where it should round to nearest: twice the error, and all of it towards zero, which
    moves gradients by parts of 1000 in one direction. The way back gets subnormal numbers wrong.
    """
    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16) and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.uint16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.from_numpy(np.array(data)).view(torch.bfloat16).to(torch.float32).numpy()
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float
