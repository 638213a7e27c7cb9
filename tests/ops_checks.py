"""How an op is compared with its reference: the same inputs, the same upstream gradient, float64 as the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import Phase, settings
from torch.utils._python_dispatch import TorchDispatchMode

from convergence.judge.tolerance import three_way, unit_roundoff

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The same examples every time; a failing one is shown as it is, since shrinking it would take minutes of interpreter.
EXAMPLES = settings(
    derandomize=True, deadline=None, max_examples=40, phases=[Phase.explicit, Phase.generate], database=None
)

Op = Callable[..., Any]


def randn(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = True, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, drawn on the CPU so that every device gets the same ones."""
    return (scale * torch.randn(shape)).to(device, dtype).requires_grad_(grad)


def eps_for(columns: int, eps: float, scale: float) -> float:
    """With few columns and a small eps a norm hardly depends on x: its gradient is the difference of almost equal
    numbers, and every formula's is rounding noise. An eps of the size of x^2 leaves something to compare."""
    return eps if columns >= 16 else scale**2


def run(op: Op, leaves: list[torch.Tensor], upstream: list[torch.Tensor] | None = None) -> tuple[list, list]:
    """The results of ``op(*leaves)`` and the gradients of the leaves that require one."""
    results = op(*leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted:
        return results, []
    if upstream is None:
        upstream = [torch.ones_like(result) for result in results]
    pairs = [(y, g.to(y.dtype)) for y, g in zip(results, upstream, strict=True) if y.requires_grad]
    return results, list(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs]))


def check_op(op: Op, ref: Op, leaves: list[torch.Tensor], name: str = "op", terms: int = 1) -> tuple[list, list]:
    """Assert that ``op`` is as near to the float64 truth as ``ref`` in the inputs' own dtypes, forward and backward.

    Also: the results and gradients have the reference's dtypes, and nothing that went in was changed. ``op`` and
    ``ref`` take the ``leaves``; views of them (halves, transposes) are made inside. An element of a result is a sum of
    ``terms``, one of a leaf's gradient a sum of as many as the results have terms for each of the leaf's elements.
    Returns the results and the gradients.
    """
    with torch.no_grad():
        shapes = ref(*leaves)
    upstream = [torch.randn(y.shape).to(y) for y in (shapes if isinstance(shapes, tuple) else (shapes,))]
    before = [t.detach().clone() for t in (*leaves, *upstream)]
    ours = run(op, leaves, upstream)
    for t, old in zip((*leaves, *upstream), before, strict=True):
        assert torch.equal(t, old), f"{name}: an input of shape {tuple(t.shape)} was overwritten"
    torchs = run(ref, leaves, upstream)
    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    truths = run(ref, doubles, [g.double() for g in upstream])
    all_terms = sum(y.numel() for y in ours[0]) * terms
    for part, *lists in zip(("result", "gradient"), ours, torchs, truths, strict=True):
        for i, (our, its, truth) in enumerate(zip(*lists, strict=True)):
            assert our.dtype == its.dtype, f"{name}: {part} {i} is {our.dtype} instead of {its.dtype}"
            # Accumulation is in float32: a 16-bit result is rounded once, however long the sum.
            chain = 1
            if our.dtype == torch.float32:
                chain = max(1, all_terms // max(1, our.numel())) if part == "gradient" else terms
            three_way(our, its, truth, our.dtype, f"{name}: {part} {i}", chain)
            if our.dtype != torch.float32:
                check_gain(our, its, truth, f"{name}: {part} {i}")
    return ours


def check_gain(our: torch.Tensor, its: torch.Tensor, truth: torch.Tensor, name: str) -> None:
    """Assert that a 16-bit result is not too large or too small as a whole, which errors of single elements hide: 1% of
    bfloat16, for one. It may be so by a unit of roundoff more than PyTorch's, which is what rounding every element once
    can do, and by another one if it is a single element; what a formula rounds on the way is averaged over more."""
    size = float(truth.square().sum())
    ours, torchs = (abs(float(((x.double() - truth) * truth).sum())) / size if size else 0.0 for x in (our, its))
    bound = torchs + unit_roundoff(our.dtype) * (1 + max(1, truth.numel()) ** -0.5)
    assert ours <= bound, f"{name} ({our.dtype}): off by {ours:.3e} as a whole, more than {bound:.3e}"


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
