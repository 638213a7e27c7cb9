"""Where a kernel runs, how it is launched, and how launches are counted: one place for every op.

Dispatch is by the tensor: CUDA, ROCm and XPU tensors run Triton; CPU tensors run the op's reference, or Triton's
interpreter when ``TRITON_INTERPRET=1`` was set before this module was imported. float64 always runs the reference,
because every kernel computes in float32.

Triton is optional: without it the decorators below leave functions that cannot be launched, and every op runs its
reference.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections import Counter
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without Triton still imports, and runs the references

    class _NoTriton:
        """Accepts what a kernel file does at import time: decorators and annotations."""

        def __getattr__(self, name: str) -> _NoTriton:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    triton = tl = _NoTriton()
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def _repair_bfloat16_in_the_interpreter() -> None:
    """Make Triton's interpreter convert between float32 and bfloat16 as every device does.

    Triton (3.6, 3.7) truncates where it should round to nearest: twice the error, and all of it towards zero, which
    moves gradients by parts of 1000 in one direction. The way back gets subnormal numbers wrong.
    """
    import numpy as np
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16) and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.uint16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.from_numpy(np.array(data)).view(torch.bfloat16).to(torch.float32).numpy()
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float


def _hurry_the_interpreter() -> None:
    """Spare Triton's interpreter repeated work. It replaces the built-in functions of ``triton.language``
    when a kernel is launched, and again at every call of a device function, each time looking for them in everything
    that the modules hold; it writes a table of NumPy's dtypes each time it looks one up; and it describes the shape of
    every result anew."""
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    @functools.cache
    def functions(owner: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if inspect.isfunction(member)]

    def patch_builtin(owner: Any, *others: Any) -> None:
        for name in functions(owner):
            member = getattr(owner, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(owner, name, member, *others)

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return None  # only a launch reads what is returned, and a launch is always the first
        patched.add(id(fn.__globals__))
        return patch(fn)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    look_up, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    # Every result of every operation is a tensor with a type of its own: a quarter of the time went into their shapes.
    block_type, tensor, types, shapes = tl.core.block_type, tl.core.tensor, {}, {}
    init_type, init_tensor = block_type.__init__, tensor.__init__

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.core.dtype:  # a pointer's name does not say all about it
            init_type(self, element_ty, shape)
            return
        key = (element_ty.name, *(getattr(length, "value", length) for length in shape))
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def init(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    block_type.__init__, tensor.__init__ = init_block_type, init
    interpreter._get_np_dtype = get_np_dtype
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter.GridExecutor.__call__ = run_kernel


if INTERPRET:
    _repair_bfloat16_in_the_interpreter()
    _hurry_the_interpreter()

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_launches: Counter[str] = Counter()


def use_triton(x: torch.Tensor, *, opaque: bool = False) -> bool:
    """Whether an op over ``x`` runs its Triton kernel (else its reference).

    Dynamo would trace into the interpreter's NumPy, so while it traces a CPU program only an ``opaque`` op, one that is
    registered with ``torch.library``, keeps its interpreted kernels.
    """
    if not HAS_TRITON or x.dtype not in _KERNEL_DTYPES:
        return False
    if x.device.type == "cpu":
        return INTERPRET and (opaque or not torch.compiler.is_compiling())
    return x.device.type in ("cuda", "xpu")


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Launch ``kernel`` over ``grid`` on ``device`` and count it. An empty grid launches nothing.

    Triton launches on the *current* device, whatever the tensors say, so the tensor's own device is made current.
    """
    if 0 in grid:
        return
    if torch.compiler.is_compiling():  # Dynamo records the launch itself; there is nothing to count or guard
        kernel[grid](*args, **kwargs)
        return
    _launches[kernel.__name__] += 1
    with _device_guard(device):
        kernel[grid](*args, **kwargs)


def _device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "cuda" and device.index is not None and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if device.type == "xpu" and device.index is not None and device.index != torch.xpu.current_device():
        return torch.xpu.device(device)
    return contextlib.nullcontext()


def launches() -> dict[str, int]:
    """How often each Triton kernel has been launched in this process, by kernel name (``_rms_norm_fwd_kernel``)."""
    return dict(_launches)


def reset_launches() -> None:
    """Set every count of :func:`launches` back to zero."""
    _launches.clear()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for ``n`` of 0)."""
    return 1 << max(n - 1, 0).bit_length()
