"""Where a kernel runs, how it is launched, and how launches are counted: one place for every op.

Dispatch is by the tensor: CUDA, ROCm and XPU tensors run Triton; CPU tensors run the op's reference, or Triton's
interpreter when ``TRITON_INTERPRET=1`` was set before this module was imported. float64 always runs the reference,
because every kernel computes in float32.

Triton is optional: without it the decorators below leave functions that cannot be launched, and every op runs its
reference.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from liger_kernels.ops.runtime import ahead, launcher
from liger_kernels.ops.runtime.compiling import traces_reference
from liger_kernels.ops.runtime.device import most_warps, obstacle
from liger_kernels.ops.runtime.launcher import start_kept

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:  # a machine without Triton still imports, and runs the references

    class _NoTriton:
        """Accepts what a kernel file does at import time: decorators and annotations."""

        def __getattr__(self, name: str) -> _NoTriton:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    triton = tl = libdevice = _NoTriton()
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ACCELERATORS = {"cuda": torch.cuda, "xpu": torch.xpu}
_launches: Counter[str] = Counter()

_KEEP_PROGRAMS = launcher.state(INTERPRET) == "on"
# Launch shapes have up to 32 warps, of 32 threads each. AMD's data center GPUs have warps of 64.
_MOST_WARPS = most_warps(32 if torch.version.hip is None else 64)


def use_triton(x: torch.Tensor, *, opaque: bool = False, eager_only: bool = False) -> bool:
    """Whether an op over ``x`` runs its Triton kernel (else its reference).

    Dynamo would trace into the interpreter's NumPy, so while it traces a CPU program only an ``opaque`` op, one that is
    registered with ``torch.library``, keeps its interpreted kernels. No program holds kernels of an ``eager_only`` op.
    """
    if eager_only and traces_reference():
        return False
    device = x.device
    if not HAS_TRITON or (device.type == "cpu" and not INTERPRET) or x.dtype not in _KERNEL_DTYPES:
        return False
    if device.type == "cpu":
        return opaque or not torch.compiler.is_compiling()
    if device.type == "meta":
        return ahead.foresees()
    return device.type in _ACCELERATORS and not obstacle(device)


def keeps_programs() -> bool:
    """Whether compiled programs are kept for the next launch."""
    return _KEEP_PROGRAMS


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Launch ``kernel`` over ``grid`` on ``device`` and count it. An empty grid launches nothing.

    Triton launches on the *current* device, whatever the tensors say, so the tensor's own device is made current.
    """
    if 0 in grid:
        return
    if kwargs.get("num_warps", 0) > _MOST_WARPS:
        kwargs["num_warps"] = _MOST_WARPS
    if torch.compiler.is_compiling():  # Dynamo records the launch itself; there is nothing to count or guard
        kernel[grid](*args, **kwargs)
        return
    kind = device.type
    if kind == "meta":
        ahead.note(kernel, grid, args, kwargs)
        return
    _launches[kernel.__name__] += 1
    accelerator = _ACCELERATORS.get(kind)
    if accelerator is None:
        _start(kernel, grid, 0, args, kwargs)
        return
    start = start_kept if _KEEP_PROGRAMS and kind == "cuda" else _start
    index, current = device.index, accelerator.current_device()
    if index is None or index == current:
        start(kernel, grid, current, args, kwargs)
    else:
        with accelerator.device(device):
            start(kernel, grid, index, args, kwargs)


def _start(kernel: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kernel[grid](*args, **kwargs)


def as_values(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """``tensors``, and instead of one whose memory does not hold its values a copy that does, with gradient.

    A negated view, such as the imaginary part of a conjugated tensor, has its sign in a bit of its own. torch's
    operations look at the bit; a kernel reads the memory."""
    return tuple([t if t is None else t.resolve_neg() for t in tensors])


def in_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``t.to(dtype)``, which takes the host ten times as long to find that there is nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)


def backward_once(backward: Callable[..., Any], *, is_linear: bool = False) -> Callable[..., Any]:
    """``once_differentiable``, at no cost to the host where it has nothing to guard: without ``create_graph``, autograd
    runs a backward with gradients off. The gradients come :func:`as_values`; how those of a program of
    ``torch.compile`` lie in memory is Inductor's.

    Args:
        is_linear: the result depends on the gradients that come in, and on nothing else that trains. torch refuses a
            second derivative only where one of those has a derivative itself, which is enough then. Of any other
            backward, every second derivative is refused: the gradient 1 of a loss has none.
    """
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def either(ctx: Any, *grads: Any) -> Any:
        again = torch.is_grad_enabled()
        if not is_dynamo_compiling():
            for grad in grads:
                if grad is not None and grad.is_neg():
                    grads = as_values(*grads)
            if again and not is_linear:
                grads = tuple([_with_derivative(grad) for grad in grads])
        return guarded(ctx, *grads) if again else backward(ctx, *grads)

    return either


def _with_derivative(grad: Any) -> Any:
    return grad if grad is None or not grad.is_floating_point() else grad.detach().requires_grad_()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What ``F.linear`` casts to on ``device``; None where autocast is off."""
    kind = ahead.real_device(device).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def as_autocast(t: Any, device: torch.device) -> Any:
    """``t`` (or None) as ``F.linear`` casts it on ``device`` under autocast: differentiably, and float64 not at all."""
    if t is None or t.dtype == torch.float64 or (dtype := autocast_dtype(device)) is None:
        return t
    return t if t.dtype is dtype else t.to(dtype)


def launcher_state() -> str:
    """Whether compiled programs are kept for the next launch: "on", or "off" and why."""
    return launcher.state(INTERPRET)


def launches() -> dict[str, int]:
    """How often each Triton kernel has been launched in this process, by kernel name (``_rms_norm_fwd_kernel``)."""
    return dict(_launches)


def reset_launches() -> None:
    """Set every count of :func:`launches` back to zero."""
    _launches.clear()
