"""Launching a compiled kernel again without asking Triton which one it is.

To find the program of a launch, Triton binds the arguments, what it specialises on and all options anew, which takes
the host longer than some kernels run (40 to 90 us of a norm, forward and backward). Here it is asked once for each set
of what it would specialise on. That repeats a rule of Triton's, so it is on only for the versions of Triton in which a
cell of the matrix compared it with Triton's own (tests/test_ops_runtime.py); elsewhere Triton launches.

``LIGER_KERNELS_LAUNCHER=triton`` turns it off, ``=kept`` on in any version.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from liger_kernels.ops.runtime.ahead import wait_for

try:
    import triton
except ImportError:
    triton = None

VARIABLE = "LIGER_KERNELS_LAUNCHER"
TESTED = ((3, 4), (3, 9))  # the oldest and the newest Triton of the matrix

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_programs: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}


def state(interpret: bool) -> str:
    """ "on", or "off" and why.

    Args:
        interpret: whether kernels run in Triton's interpreter.

    Raises:
        ValueError: the environment variable has a value that means nothing.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "triton", "kept"):
        raise ValueError(f"{VARIABLE} is {wanted!r}; allowed are 'triton', 'kept', or nothing")
    if triton is None:
        return "off, Triton is not installed"
    if interpret:
        return "off, kernels run in Triton's interpreter"
    if torch.version.hip is not None:
        return "off, it is for NVIDIA's GPUs"
    if wanted:
        return "on" if wanted == "kept" else f"off, {VARIABLE}=triton"
    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if TESTED[0] <= version <= TESTED[1]:
        return "on"
    oldest, newest = (".".join(map(str, bound)) for bound in TESTED)
    return f"off, Triton {triton.__version__} is not one of {oldest} to {newest}, in which it was tested"


def start_kept(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Launch on the current device, which is that of the tensors in ``args``."""
    key, values = _program_key(kernel, device, args, kwargs)
    known = _programs.get(key)
    if known is None:
        wait_for(kernel)
        program = kernel[grid](*args, **kwargs)
        constants = tuple(kwargs[name] for name in kernel.arg_names[len(args) :])
        _programs[key] = program, constants, kernel  # the kernel is held, or another one might get its id
        return
    program, constants, _ = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    if _is_watched():
        program[x, y, z](*values, *constants, stream=stream)
    else:  # the same, without a description of the launch that nobody reads
        program.run(x, y, z, stream, program.function, program.packed_metadata, None, None, None, *values, *constants)


def _is_watched() -> bool:
    """Whether anybody, such as Triton's profiler, wants to hear of launches."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _program_key(
    kernel: Any, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Whatever Triton compiles into a program for an NVIDIA GPU: dtypes, which addresses and numbers are multiples of
    16, which numbers are 1 or need 64 bits, which arguments are None, and all constants and options; and the arguments,
    tensors as their addresses, about which the launcher then does not ask the driver."""
    key: list[Any] = [id(kernel), device.index]
    values: list[Any] = []
    add, put = key.append, values.append
    for a in args:
        kind = type(a)
        if kind is int:
            # One number for each case, from 8 on: no truth value is equal to it.
            add(8 + (a == 1) + 2 * (a & 15 == 0) + 4 * (-0x80000000 <= a < 0x80000000))
        elif kind is _Tensor or kind is _Parameter or isinstance(a, _Tensor):
            add(a.dtype)
            a = a.data_ptr()
            add(a & 15 == 0)
        else:
            add(float if kind is float else a)
        put(a)
    return (*key, *kwargs.values()), values
