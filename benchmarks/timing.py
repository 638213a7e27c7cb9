"""Times and memory on a GPU, and what it reaches at best.

Times are medians of CUDA-event times. Before each measured call the L2 cache is flushed, and the launches are queued
behind a device-side sleep, so that neither warm caches nor gaps between launches are measured; the time that the host
needs to issue one forward and backward is a number of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.case import Tensors

SLEEP_CYCLES = 8_000_000  # about 4 ms: longer than the host needs to queue one op's launches
FLUSH_BYTES = 256 << 20  # several times the L2 of any current GPU
WARM_UP = 3
ENOUGH_MS = 1000.0  # slow arms are measured until their times add up to this, but FEWEST times at least
FEWEST = 5


@dataclass(frozen=True)
class Measured:
    """Milliseconds of forward plus backward on the device and half their quartiles' distance, peak MiB beyond the
    inputs, and the host's milliseconds."""

    ms: float
    spread_ms: float
    mib: float
    host_ms: float


def as_tuple(outputs: Any) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def copies(inputs: Tensors) -> Tensors:
    """Leaves with the same values, strides and need of a gradient, for a function that overwrites what it is given."""
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)


def backward(outputs: Tensors, wanted: list[torch.Tensor], upstream: Sequence[torch.Tensor]) -> Tensors:
    """The gradients of the inputs ``wanted``; none where none has any."""
    return torch.autograd.grad(outputs, wanted, upstream) if wanted else ()


def spread(times: Sequence[float]) -> float:
    """Half the distance of the quartiles."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 2


def seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    """What ``call`` returns, and how long host and device took for it."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return result, time.perf_counter() - start


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Gpu:
    """The current CUDA device, as a stopwatch. Tests run the benchmark on a CPU with another one."""

    device = "cuda"

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()
        self._flush = torch.empty(FLUSH_BYTES // 4, device="cuda")

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What ``call`` returns, and its milliseconds on the device."""
        self._flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end)

    def measure(self, function: Callable[..., Any], given: Tensors, repeats: int) -> Measured:
        """Forward plus backward of ``function``, whose inputs are restored outside the timing before every call.

        Time is measured under an upstream gradient of 1, memory under a random one.
        """
        inputs = copies(given)
        wanted = [x for x in inputs if x.requires_grad]

        def restore() -> None:
            with torch.no_grad():
                for x, original in zip(inputs, given, strict=True):
                    x.copy_(original)

        def step() -> float:
            restore()
            outputs, forward = self._timed(lambda: as_tuple(function(*inputs)))
            upstream = [torch.ones_like(y) for y in outputs]
            _, back = self._timed(lambda: backward(outputs, wanted, upstream))
            return forward + (back if wanted else 0.0)

        for _ in range(WARM_UP):
            last = step()
        repeats = min(repeats, max(FEWEST, int(ENOUGH_MS / last)))
        times = [step() for _ in range(repeats)]

        restore()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = as_tuple(function(*inputs))
        gradients = backward(outputs, wanted, [torch.randn_like(y) for y in outputs])
        torch.cuda.synchronize()
        mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        del outputs, gradients

        restore()
        upstream = [torch.ones_like(y) for y in as_tuple(function(*inputs))]
        host = []
        for _ in range(repeats):
            restore()
            torch.cuda.synchronize()
            start = time.perf_counter()
            backward(as_tuple(function(*inputs)), wanted, upstream)
            host.append((time.perf_counter() - start) * 1e3)
        return Measured(statistics.median(times), spread(times), mib, statistics.median(host))

    def _median_ms(self, call: Callable[[], Any]) -> float:
        for _ in range(WARM_UP):
            call()
        return statistics.median(self._timed(call)[1] for _ in range(12))

    def copy_gb_per_s(self, n_bytes: int = 2 << 30) -> float:
        """What a device-to-device copy reaches that reads one half of ``n_bytes`` and writes the other."""
        source = torch.empty(max(n_bytes // 2, 1), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.numel() / self._median_ms(lambda: target.copy_(source)) / 1e6

    def matmul_tflop_per_s(self, dtype: torch.dtype, size: int = 8192) -> float:
        """What one product of two square matrices reaches."""
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * size**3 / self._median_ms(lambda: torch.mm(a, b, out=out)) / 1e9

    def release(self) -> None:
        """Gives back what one arm left in the allocator's cache, so that the next one finds it."""
        torch.cuda.empty_cache()
