"""Triton's interpreter, which runs kernels on a CPU: what it gets wrong or lacks, and what makes it faster. PyTorch
computes the products around the kernels, one kind of them wrongly on some CPUs.

It replaces functions of Triton's in this process, for the kernels of every package: so it belongs to the proof, and a
program that uses the kernels never does it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


@functools.cache
def prepare() -> None:
    """Repair and hurry the interpreter, once in a process, where ``TRITON_INTERPRET=1`` said at Triton's import that it
    is used: in another process, the compiler would run what is replaced."""
    if isinstance(tl.sum, interpreter.InterpretedFunction):
        _leave_amx_out()
        _repair_bfloat16()
        _compute_in_bfloat16()
        _repair_integers()
        define_libdevice()
        from convergence.arms.interpreter import hurried  # it takes Triton's own functions as they are now

        hurried.install()


def _leave_amx_out() -> None:
    """Let PyTorch's products of bfloat16 use everything that the CPU has but Intel's AMX, unless the user chose.

    oneDNN (as of torch 2.13) reads behind the end of a row there, if the rows lie further apart than they are long. It
    multiplies what it reads by zero, and NaN by zero is NaN. Logits have such rows, and the memory between them has no
    value. oneDNN reads this variable before its first product.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _repair_bfloat16() -> None:
    """Make Triton's interpreter convert between float32 and bfloat16 as every device does.

    Triton (3.6, 3.7) truncates where it should round to nearest: twice the error, and all of it towards zero, which
    moves gradients by parts of 1000 in one direction. The way back gets subnormal numbers wrong.
    """
    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16) and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return _rounded(data)
        if (source, target) == (tl.bfloat16, tl.float32):
            return _widened(data)
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float


def _rounded(values: Any) -> Any:
    """The bits of ``values`` in bfloat16, as the interpreter stores them."""
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()


def _widened(bits: Any) -> Any:
    """The values in float32 of what :func:`_rounded` returns."""
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16).to(torch.float32).numpy()


def _values(handle: Any) -> Any:
    """The values of a handle: those of bfloat16 in float32."""
    return _widened(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data


def _compute_in_bfloat16() -> None:
    """Let a kernel compute in bfloat16, as in ``tl.load(x) * 2``.

    Triton's interpreter takes integers for the bits of such numbers, and negates the bits (up to 3.9). That of 3.7 also
    adds and multiplies the bits as integers, and has no constants of bfloat16. Values are float32 here, and every
    result is rounded once, as on a device.
    """
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    fma, cast = builder.create_fma, builder.cast_impl

    def on_values(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *given: Any) -> Any:
            *handles, op = given
            if handles[-1].dtype.scalar != tl.bfloat16:
                return compute(self, *given)
            found = op(*map(_values, handles))
            return handle(found, tl.int1) if found.dtype == np.bool_ else handle(_rounded(found), tl.bfloat16)

        return call

    def multiply_and_add(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.bfloat16:
            return fma(self, x, y, z)
        return handle(_rounded(_values(x) * _values(y) + _values(z)), tl.bfloat16)

    def converted(self: Any, source: Any, target: Any) -> Any:
        if target.scalar != tl.bfloat16 or source.dtype.scalar in (tl.bfloat16, tl.float32):
            return cast(self, source, target)
        return handle(_rounded(source.data), tl.bfloat16)

    builder.get_bf16 = lambda self, value: handle(_rounded([value]), tl.bfloat16)
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, on_values(getattr(builder, name)))
    builder.create_fma, builder.cast_impl = multiply_and_add, converted


def _repair_integers() -> None:
    """Let a kernel count with a number that it was given, as in ``range(0, n)``.

    Triton (3.4 to 3.6) asks NumPy for the number of an array that has one element and one dimension. NumPy does that no
    more as of 2.4.
    """
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        (scope[0].set_attr if scope else setattr)(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def define_libdevice() -> None:
    """Give the interpreter CUDA's mathematical functions.

    It has no body for ``libdevice.tanh`` and others: they return None, and a kernel that calls one cannot run on a CPU.
    Those that torch has under the same name are computed by torch. A package imports them by name, so this must come
    before the package.
    """
    for name, stub in list(vars(libdevice).items()):
        function = getattr(torch, name, None)
        if callable(stub) and not name.startswith("_") and callable(function):
            setattr(libdevice, name, functools.partial(_elementwise, function))


def _elementwise(function: Callable[..., torch.Tensor], *args: Any, **_: Any) -> Any:
    shaped = next(x for x in args if isinstance(x, tl.tensor))
    values = [torch.from_numpy(np.array(x.handle.data)) if isinstance(x, tl.tensor) else torch.tensor(x) for x in args]
    result = function(*values).numpy()
    kind = tl.int1 if result.dtype == np.bool_ else shaped.dtype
    shape = shaped.type.with_element_ty(kind) if shaped.type.is_block() else kind
    return tl.tensor(interpreter.TensorHandle(result, kind), shape)
