"""invariant=True: a row has the same bits alone, elsewhere, and among any others; and they are right.

Products of a CPU, too, are computed in another order for another number of rows, so bits are asked for on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from liger_kernels.ops import CountedTargets, LoraAdapter, linear_cross_entropy, linear_log_probs
from liger_kernels.ops._row_blocks import invariant_linear
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.schedules.schedule import NO_GRADIENTS, Needs
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs
from liger_kernels.ops.runtime.tiling import tiled
from tests.linear_cross_entropy_checks import ALL, Case, LogProbs, chunks_of
from tools.determinism import same_bits
from tools.slabs import slabs_of

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
ROWS, HIDDEN, VOCAB, BLOCK = 40, 200, 900, 16
OUTPUTS = ("log_probs", "entropy", "is_top1", "log_sum_sq_probs", "mean_logits", "max_logits")
SCALING = {name: ALL[name] for name in ("temperature", "softcap", "logit_scale")}
Results = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def blocks_of_few_rows(poisoned_empty: None) -> Any:
    """What no product writes is NaN, and the rows are two blocks and a half."""
    with tiled(rows_of_block=lambda choose: BLOCK), chunks_of(BLOCK), slabs_of(64):
        yield


def drawn(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    targets, ids = torch.randint(VOCAB, (ROWS,)), torch.randint(-1, VOCAB, (ROWS, 3))
    targets[::7] = -100
    shared = {"weight": 3 * HIDDEN**-0.5 * torch.randn(VOCAB, HIDDEN), "bias": torch.randn(VOCAB)}
    rows = {"hidden": torch.randn(ROWS, HIDDEN).to(dtype), "targets": targets, "ids": ids, "up": torch.randn(ROWS, 3)}
    given = {**rows, **{name: t.to(dtype) for name, t in shared.items()}}
    return {name: t.to(device) for name, t in given.items()}


def log_probs(given: dict[str, Any], rows: torch.Tensor, **options: Any) -> Results:
    """Everything that linear_log_probs says of some ``rows``, and the gradient of their hidden states."""
    hidden = given["hidden"][rows].detach().requires_grad_(options.pop("needs_hidden", True))
    weight, bias = (given[name].detach().requires_grad_(hidden.requires_grad) for name in ("weight", "bias"))
    options = {"outputs": OUTPUTS, "ids": given["ids"][rows], **options}
    out = linear_log_probs(hidden, weight, given["targets"][rows], bias, **options)
    found = {name: t for name, t in out._asdict().items() if t is not None}
    if hidden.requires_grad:
        up = given["up"][rows]
        results, incoming = (out.log_probs, out.entropy, out.id_log_probs), (up[:, 0], up[:, 1], up)
        found["grad_hidden"] = torch.autograd.grad(results, hidden, incoming, retain_graph=True)[0]
    return found


def some_rows(device: torch.device) -> list[torch.Tensor]:
    """A row alone, rows in a block, more than one block, and all of them elsewhere."""
    torch.manual_seed(1)
    return [
        torch.tensor(rows, device=device)
        for rows in ([8], [*range(5, 10)], [*range(2, ROWS)], torch.randperm(ROWS).tolist())
    ]


def not_the_same(compute: Any, device: torch.device, parts: list[torch.Tensor] | None = None) -> set[str]:
    """What has other bits in another batch."""
    every = torch.arange(ROWS, device=device)
    whole, differ = compute(every), set()
    for rows in parts or some_rows(device):
        part = compute(rows)
        differ |= {name for name in whole if not same_bits(whole[name][rows], part[name])}
    return differ


@pytest.mark.parametrize("options", [{}, SCALING], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("memory", [*MEMORY, None])
def test_in_any_batch(memory: str | None, dtype: torch.dtype, options: dict[str, Any], device: torch.device) -> None:
    given = drawn(dtype, device)
    call = partial(log_probs, given, memory=memory, invariant=True, **options)
    assert not not_the_same(call, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_without_the_option_bits_differ(dtype: torch.dtype) -> None:
    """So the test above can fail. On a CPU: which products a GPU computes alike is its library's. In bfloat16 few last
    bits of a sum show, so every row is asked alone, and one schedule in which bits differ is enough."""
    cpu = torch.device("cpu")
    alone = [torch.tensor([row]) for row in range(ROWS)] if dtype == BF16 else None

    def differing(invariant: bool) -> Iterator[str]:
        for memory in MEMORY:
            call = partial(log_probs, drawn(dtype, cpu), memory=memory, invariant=invariant)
            if "grad_hidden" in not_the_same(call, cpu, alone):
                yield memory

    assert not {*differing(invariant=True)}
    if dtype == FP32:
        assert {*differing(invariant=False)} == {*MEMORY}
    elif not any(differing(invariant=False)):
        cpu_kind = torch.backends.cpu.get_cpu_capability()
        pytest.skip(f"this CPU ({cpu_kind}) multiplies rows of bfloat16 alike in any batch")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_schedules_that_are_chosen_by_the_number_of_rows_have_the_same_bits(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Also without gradients: an old log-probability equals the new one as long as the weights do."""
    given, every = drawn(dtype, device), torch.arange(ROWS, device=device)
    fast, balanced = (log_probs(given, every, memory=memory, invariant=True) for memory in ("fast", "balanced"))
    assert all(same_bits(fast[name], balanced[name]) for name in fast)
    for memory, like in (("fast", fast), ("small", log_probs(given, every, memory="small", invariant=True))):
        scored = log_probs(given, every, memory=memory, invariant=True, needs_hidden=False)
        assert scored
        assert all(same_bits(scored[name], like[name]) for name in scored)


def test_slabs_do_not_follow_the_rows() -> None:
    """Nor what needs a gradient, nor the dtype."""
    slabs = VocabularySlabs.of_any_rows(HIDDEN, 9000, all_stay=False)
    plans = {
        slabs.plan(tokens, HIDDEN, 9000, itemsize, needs)
        for tokens in (1, 100, 50_000)
        for itemsize in (2, 4)
        for needs in (NO_GRADIENTS, Needs(hidden=True, weight=True, bias=False))
    }
    assert len(plans) == 1


def test_float16_results_are_the_same_in_any_batch(device: torch.device) -> None:
    """Its gradients are in units of the batch's largest one: they would be zero else."""
    call = partial(log_probs, drawn(FP16, device), invariant=True)
    assert not_the_same(call, device) <= {"grad_hidden"}


@pytest.mark.parametrize("memory", MEMORY)
def test_counted_rows(memory: str, device: torch.device) -> None:
    given = drawn(FP32, device)

    def call(rows: torch.Tensor, **options: Any) -> Results:
        return log_probs(given, rows, memory=memory, invariant=True, **options)

    every = torch.arange(ROWS, device=device)
    with tiled(counted_rows=lambda choose, tokens, counted: counted):
        some = call(every, counted=CountedTargets(given["targets"]))
    counts = given["targets"] != -100
    assert all(same_bits(some[name][counts], whole[counts]) for name, whole in call(every).items())


def row_by_row(a: Any, b: Any, dtype: Any) -> Any:
    """a @ b. NumPy's own, in which Triton's interpreter multiplies, adds in an order that the row's place decides."""
    return (a[:, :, None].astype(dtype) * b[None].astype(dtype)).sum(1)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("memory", MEMORY)
def test_adapters(memory: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the sum of a row is cut into parts follows from the block."""
    if device.type == "cpu":
        monkeypatch.setattr(numpy, "matmul", row_by_row)
    torch.manual_seed(2)
    adapter = LoraAdapter(torch.randn(8, HIDDEN).to(device), torch.randn(VOCAB, 8).to(device), 0.1)
    call = partial(log_probs, drawn(dtype, device), memory=memory, adapters=[adapter], invariant=True)
    chosen_for = set()

    def noted(choose: Any, n_rows: int, *rest: Any) -> Any:
        chosen_for.add(n_rows)
        return choose(n_rows, *rest)

    with tiled(lora_rows=noted, lora_add=noted):
        assert not not_the_same(call, device)
    assert chosen_for == {BLOCK}


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("memory", [*MEMORY, None])
def test_cross_entropy(memory: str | None, reduction: str, device: torch.device) -> None:
    """With row weights; a mean by a given denominator."""
    given = drawn(FP32, device)

    def call(rows: torch.Tensor) -> Results:
        hidden, weight = given["hidden"][rows].requires_grad_(), given["weight"].detach().requires_grad_()
        options = {"reduction": reduction, "extras": ("log_probs", "entropy"), "memory": memory, "invariant": True}
        options |= {"row_weight": given["up"][rows, 1].abs(), "denominator": given["up"].new_tensor(31.0)}
        out = linear_cross_entropy(hidden, weight, given["targets"][rows], **options)
        upstream = given["up"][rows, 0] if reduction == "none" else given["up"].new_tensor(0.7)
        (grad,) = torch.autograd.grad(out.loss, hidden, upstream)
        found = {"log_probs": out.log_probs, "entropy": out.entropy, "grad_hidden": grad}
        return {**found, "loss": out.loss} if reduction == "none" else found

    assert not not_the_same(call, device)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
def test_linear(dtype: torch.dtype, device: torch.device) -> None:
    """As exact as torch's own, whatever the leading dimensions and strides, with each gradient alone."""
    given = drawn(dtype, device)

    def call(rows: torch.Tensor) -> Results:
        x = given["hidden"][rows].requires_grad_()
        y = invariant_linear(x, given["weight"], given["bias"])
        return {"y": y, "dx": torch.autograd.grad(y, x, given["hidden"][rows][:, :1].expand_as(y))[0]}

    assert not not_the_same(call, device)
    x = given["hidden"].t().contiguous().t().view(2, ROWS // 2, HIDDEN) if dtype == FP64 else given["hidden"][None]
    leaves = [x, given["weight"], given["bias"]]
    for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        found = []
        for linear, wide in ((invariant_linear, dtype), (torch.nn.functional.linear, FP64)):
            tensors = [t.detach().to(wide).requires_grad_(need) for t, need in zip(leaves, needs, strict=True)]
            y = linear(*tensors)
            wanted = [t for t in tensors if t.requires_grad]
            found.append([y, *torch.autograd.grad(y, wanted, (y.detach() * 0 + 0.5).to(wide))])
        for ours, truth in zip(*found, strict=True):
            scale = float(truth.detach().abs().max())
            assert (
                float((ours.double() - truth).detach().abs().max()) <= 8 * HIDDEN**0.5 * torch.finfo(dtype).eps * scale
            )
    assert invariant_linear(given["hidden"][:0], given["weight"]).shape == (0, VOCAB)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("tokens", [0, 1, BLOCK, 37], ids=["no row", "one row", "one block", "blocks and a part"])
def test_right(tokens: int, memory: str, device: torch.device) -> None:
    with slabs_of(16):
        for dtype in (FP32, BF16):
            LogProbs(device, dtype, tokens=tokens, ids=3, **SCALING).assert_right(memory=memory, invariant=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_right_losses(reduction: str, device: torch.device) -> None:
    for memory in MEMORY:
        Case(device, BF16, tokens=37, reduction=reduction).assert_right(memory=memory, invariant=True)


def test_reference_of_float64_is_the_same(device: torch.device) -> None:
    given, every = drawn(FP64, device), torch.arange(ROWS, device=device)
    ours, plain = (log_probs(given, every, invariant=invariant) for invariant in (True, False))
    assert all(torch.allclose(ours[name].double(), plain[name].double(), rtol=1e-12, atol=1e-12) for name in ours)


def test_a_compiled_call_is_the_same(device: torch.device) -> None:
    given, every = drawn(FP32, device), torch.arange(ROWS, device=device)
    hidden, targets = given["hidden"][every], given["targets"]

    def call(hidden: torch.Tensor) -> torch.Tensor:
        return linear_log_probs(hidden, given["weight"], targets, invariant=True).log_probs

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(hidden), call(hidden))


def test_bad_input() -> None:
    given = drawn(FP32, torch.device("cpu"))
    for op in (linear_log_probs, linear_cross_entropy):
        with pytest.raises(TypeError, match=r"invariant is an int \(1\); it must be True or False"):
            op(given["hidden"], given["weight"], given["targets"], invariant=1)
