"""Every kernel once, for compute-sanitizer: ``compute-sanitizer --tool memcheck --kernel-name kernel_substring=_kernel
python -m tools.sanitized``, and the same with ``--tool racecheck`` and ``--without-gemm``.

``--without-gemm`` leaves out the calls with a linear layer in them, because racecheck cannot follow cuBLAS ("failed to
handle a hardware exception"); the kernels that they launch run by themselves, over what a layer would have made.
``--wrong`` ends with a kernel that writes out of bounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from liger_kernels.ops import launches
from liger_kernels.ops._glu import ACTIVATIONS, unit_gradients
from liger_kernels.ops._split_sum import SplitSum
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.rows import Rows, Slab, backward_rows, forward_rows
from liger_kernels.ops.runtime.dispatch import tl, triton
from liger_kernels.ops.runtime.tiling import tiled
from tools.op_table import SAMPLED
from tools.slabs import slabs_of

EXTRAS = ("token_accuracy", "predicted_tokens", "entropy", "log_probs")


def call_of(name: str) -> Callable[[], Any]:
    """A call of a row of the table, in bfloat16 on the GPU. Its inputs are there before it is called."""
    sizes = {"h": 4, "s": 16, "d": 64, "r": 64, "g": 2, "o": 64, "a": 8, "e": 6, "m": 32, "t": 64, "v": 1000}
    leaves = SAMPLED[name].leaves(96, torch.bfloat16, torch.device("cuda"), columns=256, sizes=sizes)
    return partial(SAMPLED[name].op, *leaves)


def head_in_two_slabs() -> Callable[[], Any]:
    call = call_of("linear_cross_entropy, fast")

    def in_slabs() -> Any:
        with slabs_of(128):
            return call()

    return in_slabs


# What makes a call of each.
CALLS: dict[str, Callable[[], Callable[[], Any]]] = {name: partial(call_of, name) for name in SAMPLED}
CALLS["linear_cross_entropy, fast, in two slabs"] = head_in_two_slabs


def targets(rows: int, vocab: int, device: str) -> torch.Tensor:
    return torch.randint(vocab, (rows,), device=device).masked_fill_(torch.rand(rows, device=device) < 0.3, -100)


def slabs(dtype: torch.dtype, device: str = "cuda", rows: int = 40, vocab: int = 3000, columns: int = 1024) -> None:
    """Forward and backward in slabs of ``columns`` classes, the gradient over the logits."""
    logits = torch.randn(rows, vocab, device=device).to(dtype)
    labels = targets(rows, vocab, device)
    weight = torch.rand(rows, device=device)
    for extras in ((), EXTRAS):
        options = LossOptions(z_loss=1e-4, extras=extras)
        found = Rows.empty(rows, logits.device, options, stats=True)
        assert found.stats is not None
        carry = Slab.no_class(rows, logits.device)
        for start in range(0, vocab, columns):
            slab = Slab(start, vocab, carry)
            forward_rows(logits[:, start : start + columns], labels, None, None, options, found, slab=slab)
        for start in range(0, vocab, columns):
            part = logits[:, start : start + columns]
            weighted: Any = {"denominator": weight.sum(), "row_weight": weight, "slab": Slab(start, vocab)}
            backward_rows(part, labels, None, options, found.stats, carry[0, 0] + 1, part, **weighted)


def whole_rows(dtype: torch.dtype, vocab: int, device: str = "cuda") -> None:
    """Rows of many blocks, the gradient over the logits in the forward's own launch."""
    logits = torch.randn(8, vocab, device=device).to(dtype)
    options = LossOptions()
    found = Rows.empty(8, logits.device, options, stats=True)
    forward_rows(logits, targets(8, vocab, device), None, None, options, found, grad=logits)


def unit_over_its_gradient(dtype: torch.dtype, device: str = "cuda", rows: int = 96, columns: int = 250) -> None:
    """The gated units' backward in which dy becomes the product."""
    for activation in ACTIVATIONS:
        dy, gate, up = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(3))
        unit_gradients(dy, gate, up, activation, (True, True), product=True)


def round_in_place(dtype: torch.dtype, device: str = "cuda", columns: int = 1023) -> None:
    """A float32 sum over its own memory, in more than one launch."""
    sums = SplitSum.empty(True, (4100, columns), dtype, torch.device(device))
    for part in sums:
        part.normal_()
    with tiled(copied_before_rounding=lambda choose: 2**20):
        sums.rounded(torch.rand((), device=device), dtype, overwrite=True)


@triton.jit
def _out_of_bounds_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + (1 << 28) + tl.arange(0, BLOCK), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitized", description=__doc__)
    parser.add_argument("--without-gemm", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    arguments = parser.parse_args()
    for name, make in CALLS.items():
        if arguments.without_gemm and ("linear" in name or name == "dora_norm"):
            continue
        results = make()()
        results = results if isinstance(results, tuple) else (results,)
        results = [y for y in results if y is not None and y.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        torch.cuda.synchronize()
        print(name, flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        slabs(dtype)
        unit_over_its_gradient(dtype)
        round_in_place(dtype)
        for vocab in (20000, 50257, 70000, 140000):
            whole_rows(dtype, vocab)
        torch.cuda.synchronize()
        print(f"by themselves, {dtype}", flush=True)
    if arguments.wrong:
        _out_of_bounds_kernel[(1,)](torch.empty(32, device="cuda"), 32)
        torch.cuda.synchronize()
    print(f"{sum(launches().values())} launches of {len(launches())} kernels")


if __name__ == "__main__":
    main()
