"""Means and sums of divergences, whose gradients the forward computes."""

from __future__ import annotations

import pytest
import torch

from liger_kernels.ops import launches, linear_divergence, linear_divergence_ref, reset_launches
from liger_kernels.ops.divergence.linear_divergence import OUTPUTS
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.schedules.chosen import choose_schedule
from liger_kernels.ops.loss.schedules.schedule import Needs
from liger_kernels.ops.loss.schedules.token_chunks import TokenChunks
from liger_kernels.ops.runtime.tiling import tiled
from tests.divergence_checks import SCALING, WAYS, Divergence, every_beta, every_memory
from tests.linear_cross_entropy_checks import TOKENS, chunks_of

pytestmark = pytest.mark.usefixtures("small_slabs")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("options", [{}, SCALING, {"denominator": True}], ids=["plain", "all", "denominator"])
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, dtype) for way in (*MEMORY, "token chunks") for dtype in (FP32, BF16)),
        ("token chunks", FP16),
    ],
    ids=str,
)
@every_beta
def test_a_mean(way, dtype, options, beta, device):
    Divergence(device, dtype, beta=beta, reduction="mean", **options).assert_right(WAYS[way])


@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype", "frozen", "expected"),
    [
        (8192, 2048, BF16, False, TokenChunks(768, False)),
        (8192, 2304, BF16, False, TokenChunks(768, False)),
        (2816, 2048, BF16, False, None),  # "fast" takes no more memory
        (2817, 2048, BF16, False, TokenChunks(768, False)),
        (9999, 1024, BF16, False, TokenChunks(512, False)),
        (9999, 1024, BF16, True, TokenChunks(512, False)),
        (9999, 4096, BF16, True, TokenChunks(1024, False)),
        (1024, 4096, BF16, True, None),
        (769, 2048, FP32, False, TokenChunks(768, False)),
        (769, 2048, FP16, False, TokenChunks(768, False)),
    ],
)
def test_schedule_of_a_mean_and_of_a_sum_to_come(tokens, hidden, dtype, frozen, expected):
    rows = torch.empty(tokens, hidden, dtype=dtype, device="meta")
    needs = Needs(hidden=True, weight=not frozen, bias=False)
    for reduction in ("mean", "none"):
        how, summed = LossOptions(reduction=reduction), reduction == "none"
        memory, schedule = choose_schedule(rows, 128256, how, needs, None, None, heads=2, summed=summed)
        if expected:
            assert (memory, schedule) == ("balanced", expected._replace(summed=summed))
        else:
            assert memory == "fast"


@every_memory
@every_beta
def test_a_sum(beta, memory, device):
    Divergence(device, BF16, beta=beta, reduction="sum", masked=False).assert_right(memory=memory)


@every_memory
def test_a_mean_of_no_row(memory, device):
    case = Divergence(device, reduction="mean")
    case.mask[:] = False
    out, grads = case.run(memory=memory)
    assert not any(t.any() for t in (out.divergence, *grads))


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_forward_of_a_mean_computes_the_gradients(beta, device):
    """And computes no logits twice: those of a chunk of rows at a time are all that it holds, and none stay."""
    with chunks_of(5):
        case = Divergence(device, BF16, beta=beta, reduction="mean", bias=False)
        reset_launches()
        out = case.call(case.leaves(), outputs=("divergence",))
        after = launches()
        chunks = -(-TOKENS // 5)
        assert after["_divergence_scan_kernel"] == after["_divergence_bwd_kernel"] == chunks
        node = out.divergence.grad_fn
        hidden, weight, _ = case.tensors
        kept = sum(t.numel() * t.element_size() for t in (*node.buffers, *node.saved_tensors) if t is not None)
        assert kept == 2 * hidden.numel() + 4 * weight.numel() + 4  # both gradients, and the denominator
        out.divergence.backward()
        assert {name: n for name, n in launches().items() if "divergence" in name and n != after.get(name)} == {}


def summed(*args, **options):
    with chunks_of(5):
        return linear_divergence(*args, summed=True, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("options", [{}, SCALING], ids=["plain", "all"])
@every_beta
def test_rows_that_are_summed(beta, options, dtype, device):
    """The forward computes the gradients. The second backward computes the logits again."""
    case = Divergence(device, dtype, beta=beta, of=("divergence",), **options)
    case.upstream = [torch.tensor(-1.7, device=device).expand(TOKENS)]
    case.assert_right(summed)
    leaves = case.leaves()
    reset_launches()
    total = case.call(leaves, summed).divergence.sum()
    first = [g.clone() for g in torch.autograd.grad(total, leaves, case.upstream[0][0], retain_graph=True)]
    assert launches()["_divergence_bwd_kernel"] == 5
    second = torch.autograd.grad(total, leaves, case.upstream[0][0])
    assert launches()["_divergence_bwd_kernel"] == 10
    for once, again in zip(first, second, strict=True):
        torch.testing.assert_close(once, again)


@every_beta
def test_rows_that_are_not_summed_after_all(beta, device):
    """Their upstream gradients differ, or the entropy has one, too."""
    for of in (("divergence",), ("entropy",), OUTPUTS[:2]):
        for dtype in (FP32, BF16):
            Divergence(device, dtype, beta=beta, of=of).assert_right(summed)
    both = Divergence(device, beta=beta)
    both.upstream = [g.mean().expand(TOKENS) for g in both.upstream]
    both.assert_right(summed)
    for needs in ((1, 0, 0), (0, 1, 0)):
        Divergence(device, BF16, beta=beta, of=("divergence",), needs=needs).assert_right(summed)
    none = Divergence(device, beta=beta, tokens=0, of=("divergence",))
    none.upstream = [torch.tensor(1.0, device=device).expand(0)]
    none.assert_right(summed)


def test_the_gradients_of_the_forward_are_overwritten_where_they_are_not_taken(device):
    """A second sum of the weight's gradient would raise the peak."""
    case = Divergence(device, BF16, of=("divergence",))
    leaves = case.leaves()
    out = case.call(leaves, summed, outputs=("divergence",)).divergence
    places = {t.untyped_storage().data_ptr() for t in out.grad_fn.buffers if t.numel()}
    grads = torch.autograd.grad(out, leaves, case.upstream[0])
    assert grads[1].untyped_storage().data_ptr() in places


@pytest.mark.parametrize(
    ("outputs", "counted", "early"),
    [(("divergence",), None, 5), (("divergence",), 15, 0), (("entropy",), None, 0), (("max_abs_difference",), None, 0)],
)
def test_what_no_sum_is_taken_of_is_computed_in_the_backward(outputs, counted, early, device):
    case = Divergence(device, BF16)
    case.mask[:] = False
    case.mask[:15] = True
    with tiled(counted_rows=lambda choose, tokens, counted: counted):
        reset_launches()
        case.call(case.leaves(), summed, outputs=outputs, counted=counted)
    assert launches().get("_divergence_bwd_kernel", 0) == early


@pytest.mark.parametrize("outputs", [("entropy",), ("max_abs_difference",)], ids=str)
@every_memory
def test_of_a_mean_nothing_else_has_a_gradient(outputs, memory, device):
    """And none is computed."""
    case = Divergence(device, BF16, reduction="mean")
    reset_launches()
    out = case.call(case.leaves(), memory=memory, outputs=outputs)
    assert "_divergence_bwd_kernel" not in launches()
    assert not any(t.requires_grad for t in out if t is not None)
    wanted = case.call(case.leaves(), linear_divergence_ref, outputs=outputs)
    assert not any(t.requires_grad for t in wanted if t is not None)
