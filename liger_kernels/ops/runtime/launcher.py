"""Launching a compiled kernel again without asking Triton which one it is.

To find the program of a launch, Triton binds the arguments, what it specialises on and all options anew, which takes
the host longer than some kernels run (40 to 90 us of a norm, forward and backward). Here it is asked once for each set
of what it would specialise on. That repeats a rule of Triton's, so it is on only for the versions of Triton in which a
cell of the matrix compared it with Triton's own (tests/test_ops_runtime.py); elsewhere Triton launches.

``LIGER_KERNELS_LAUNCHER=triton`` turns it off, ``=kept`` on in any version.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from liger_kernels.ops.runtime.ahead import wait_for

try:
    import triton
except ImportError:
    triton = None

VARIABLE = "LIGER_KERNELS_LAUNCHER"
TESTED = ((3, 4), (3, 9))  # the oldest and the newest Triton of the matrix

_Program = tuple[Any, tuple[Any, ...], Any]  # a program, the constants that it takes, and its kernel
_programs: dict[tuple[Any, ...], _Program] = {}  # by the rule
# By the numbers themselves, which costs the host less to look up.
_calls: dict[tuple[Any, ...], _Program] = {}
_MOST_CALLS = 4096
_Taking = Callable[[tuple[Any, ...]], tuple[Any, ...]]
_Layout = tuple[tuple[int, ...], _Taking, _Taking]
_layouts: dict[tuple[type, ...], _Layout] = {}
_address, _dtype, _of_16 = torch.Tensor.data_ptr, operator.attrgetter("dtype"), (15).__and__
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


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


def start_kept(kernel: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Launch on ``device``, which is the current one, and that of the tensors in ``args``."""
    types = tuple(map(type, args))
    at, tensors_of, numbers_of = _layouts.get(types) or _layout_of(types)
    tensors, values = tensors_of(args), [*args]
    addresses = [*map(_address, tensors)]
    for i, address in zip(at, addresses, strict=True):  # then the launcher does not ask the driver about the tensors
        values[i] = address
    of_tensors = *map(_dtype, tensors), *map(_of_16, addresses)
    call = id(kernel), device, types, numbers_of(args), of_tensors, *kwargs.values()
    known = _calls.get(call)
    if known is None:
        known = _program_of(kernel, grid, device, args, kwargs)
        if known is None:
            return
        if len(_calls) == _MOST_CALLS:
            _calls.clear()
        _calls[call] = known
    program, constants, _ = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = current_stream(device)
    if _is_watched():
        program[x, y, z](*values, *constants, stream=stream)
    else:  # the same, without a description of the launch that nobody reads
        program.run(x, y, z, stream, program.function, program.packed_metadata, None, None, None, *values, *constants)


def _layout_of(types: tuple[type, ...]) -> _Layout:
    """Where among arguments of these ``types`` the tensors are, and what takes them out of the arguments, and what
    takes out the numbers other than floats."""
    at = [i for i, kind in enumerate(types) if issubclass(kind, torch.Tensor)]
    numbers = [i for i, kind in enumerate(types) if i not in at and kind not in (float, type(None))]
    layout = _layouts[types] = tuple(at), _taking(at), _taking(numbers)
    return layout


def _taking(places: list[int]) -> _Taking:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple([args[i] for i in places])


def _program_of(
    kernel: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Program | None:
    """The program of a launch; None where Triton found it, and launched."""
    key = _program_key(kernel, device, args, kwargs)
    known = _programs.get(key)
    if known is None:
        wait_for(kernel)
        program = kernel[grid](*args, **kwargs)
        constants = tuple(kwargs[name] for name in kernel.arg_names[len(args) :])
        _programs[key] = program, constants, kernel  # the kernel is held, or another one might get its id
    return known


def _is_watched() -> bool:
    """Whether anybody, such as Triton's profiler, wants to hear of launches."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _program_key(kernel: Any, device: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Whatever Triton compiles into a program for an NVIDIA GPU: dtypes, which addresses and numbers are multiples of
    16, which numbers are 1 or need 64 bits, which arguments are None, and all constants and options."""
    key: list[Any] = [id(kernel), device]
    for a in args:
        kind = type(a)
        if kind is int:
            # One number for each case, from 8 on: no truth value is equal to it.
            key.append(8 + (a == 1) + 2 * (a & 15 == 0) + 4 * (-0x80000000 <= a < 0x80000000))
        elif isinstance(a, torch.Tensor):
            key += [a.dtype, a.data_ptr() & 15 == 0]
        else:
            key.append(float if kind is float else a)
    return *key, *kwargs.values()
