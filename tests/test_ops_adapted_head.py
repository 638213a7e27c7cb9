"""The fused losses of a head with low-rank adapters, and of one whose weight is no matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from convergence.judge.tolerance import three_way
from liger_kernels.ops import (
    LoraAdapter,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    linear_log_probs,
    linear_log_probs_ref,
)
from liger_kernels.ops.lora.low_rank import LowRank, ThinProducts
from liger_kernels.ops.lora.products import MOST_RANKS
from tests.linear_cross_entropy_checks import in_held_slabs, in_two_slabs
from tests.ops_checks import DTYPES, randn
from tools.slabs import slabs_of

TOKENS, HIDDEN, VOCAB = 23, 64, 67
SCALES = (0.7, 1.3)
SCHEDULES: dict[str, Callable[..., Any]] = {
    "token chunks": partial(linear_cross_entropy, chunk_size=5),
    "one chunk": partial(linear_cross_entropy, memory="fast"),
    "vocabulary slabs": partial(linear_cross_entropy, memory="small"),
    "two kept slabs": in_two_slabs,
    "token chunks, of each row": partial(linear_cross_entropy, chunk_size=5, reduction="none"),
    "held slabs, of each row": partial(in_held_slabs, reduction="none"),
}
F64 = torch.float64
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def of_reference(name: str) -> dict[str, Any]:
    return {"reduction": "none"} if name.endswith("of each row") else {}


def targets_on(device: Any, tokens: int = TOKENS) -> torch.Tensor:
    targets = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(1))
    targets[tokens // 3 : tokens // 3 + 1] = -100
    return targets.to(device)


def tensors(
    device: Any,
    dtype: torch.dtype,
    adapter_dtype: torch.dtype,
    ranks: tuple[int, ...] = (3,),
    bias: bool = False,
    trained: bool = False,
) -> list[torch.Tensor]:
    """Hidden states, weight, and A, B and perhaps a bias of each adapter."""
    torch.manual_seed(0)
    found = [randn(TOKENS, HIDDEN, dtype=dtype, device=device)]
    found.append(randn(VOCAB, HIDDEN, dtype=dtype, device=device, scale=HIDDEN**-0.5, grad=trained))
    for rank in ranks:
        found.append(randn(rank, HIDDEN, dtype=adapter_dtype, device=device, scale=HIDDEN**-0.5))
        found.append(randn(VOCAB, rank, dtype=adapter_dtype, device=device, scale=0.3))
        found += [randn(VOCAB, dtype=adapter_dtype, device=device)] if bias else []
    return found


def called(op: Callable[..., Any], leaves: list[torch.Tensor], n: int = 1, bias: bool = False, **options: Any) -> Any:
    """``op`` of the tensors above, one after the other, of which the last ones are those of ``n`` adapters."""
    hidden, weight, *others = leaves
    size = 3 if bias else 2
    own = [others[i * size : i * size + size] for i in range(n)]
    adapters = [LoraAdapter(*one[:2], SCALES[i], one[2] if bias else None) for i, one in enumerate(own)]
    return op(hidden, weight, targets_on(hidden.device, len(hidden)), adapters=adapters, **options)


def differentiated(call: Callable[..., Any], leaves: list[torch.Tensor], dtype: Any = None) -> list[torch.Tensor]:
    """The result, or the results, and the gradients of the leaves that have one."""
    leaves = [leaf.detach().to(dtype or leaf.dtype).requires_grad_(leaf.requires_grad) for leaf in leaves]
    results = call(leaves)
    results = [result for result in (results if isinstance(results, tuple) else (results,)) if result is not None]
    upstream = [torch.linspace(0.4, 1.1, y.numel()).view(y.shape).to(y) for y in results]
    grads = torch.autograd.grad(results, [leaf for leaf in leaves if leaf.requires_grad], upstream)
    return [*[result.detach() for result in results], *grads]


def check(op: Any, ref: Any, leaves: list[torch.Tensor], n: int = 1, bias: bool = False, **options: Any) -> None:
    """Results and gradients are as near to float64 as those of the reference, which rounds logits to the same dtype."""
    before = [leaf.detach().clone() for leaf in leaves]
    ours = differentiated(partial(called, op, n=n, bias=bias), leaves)
    theirs, truth = (differentiated(partial(called, ref, n=n, bias=bias, **options), leaves, d) for d in (None, F64))
    assert all(map(torch.equal, leaves, before))
    for i, three in enumerate(zip(ours, theirs, truth, strict=True)):
        assert three[0].dtype == three[1].dtype
        three_way(*three, leaves[0].dtype, f"{i}", chain=4)  # a product, another one, the loss, a product


@every_schedule
@pytest.mark.parametrize("dtypes", [*[(d, torch.float32) for d in DTYPES], (torch.bfloat16,) * 2, (torch.float16,) * 2],
                         ids=str)  # fmt: skip
def test_every_schedule_and_dtype(name: str, dtypes: Any, device: Any) -> None:
    with slabs_of(24):
        check(SCHEDULES[name], linear_cross_entropy_ref, tensors(device, *dtypes), **of_reference(name))


@every_schedule
def test_two_adapters_with_biases_of_a_trained_head(name: str, device: Any) -> None:
    leaves = tensors(device, torch.float32, torch.float32, (3, 5), bias=True, trained=True)
    with slabs_of(24):
        check(SCHEDULES[name], linear_cross_entropy_ref, leaves, n=2, bias=True, **of_reference(name))


@pytest.mark.parametrize("memory", ["fast", "balanced", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probs_and_entropy(memory: str, dtype: torch.dtype, device: Any) -> None:
    outputs = ("log_probs", "entropy")
    with slabs_of(24):
        op = partial(linear_log_probs, memory=memory, outputs=outputs)
        check(op, partial(linear_log_probs_ref, outputs=outputs), tensors(device, dtype, torch.float32))


@pytest.mark.parametrize("needs", ["hidden", "weight", "a", "b", "nothing"])
@pytest.mark.parametrize("name", ["token chunks", "two kept slabs", "vocabulary slabs"])
def test_only_what_is_needed_has_a_gradient(needs: str, name: str, device: Any) -> None:
    leaves = tensors(device, torch.float32, torch.float32)
    every = ("hidden", "weight", "a", "b")
    for leaf in leaves:
        leaf.requires_grad_()
    with slabs_of(24):
        whole = dict(zip(every, differentiated(partial(called, SCHEDULES[name]), leaves)[1:], strict=True))
        for leaf, of in zip(leaves, every, strict=True):
            leaf.requires_grad_(of == needs)
        loss = called(SCHEDULES[name], leaves)
        assert loss.requires_grad == (needs != "nothing")
        if loss.requires_grad:
            (0.4 * loss).backward()
            torch.testing.assert_close(leaves[every.index(needs)].grad, whole[needs])


def test_what_was_dropped_and_rows_that_do_not_count(device: Any) -> None:
    """Of 48 rows 13 count, and they alone are multiplied."""
    torch.manual_seed(0)
    mask = (torch.rand(48, HIDDEN) > 0.5).to(device) * 2.0
    targets = torch.full((48,), -100)
    targets[5:18] = torch.arange(13)
    targets = targets.to(device)

    def call(leaves: list[torch.Tensor], op: Any, **options: Any) -> Any:
        hidden, weight, a, b = leaves
        adapters = [LoraAdapter(a, b, 0.5, dropped=hidden.to(a.dtype) * mask.to(a.dtype)), LoraAdapter(a, b, 0.2)]
        return op(hidden, weight, targets, adapters=adapters, **options)

    leaves = tensors(device, torch.float32, torch.float32)
    leaves[0] = randn(48, HIDDEN, dtype=torch.float32, device=device)
    ours = differentiated(partial(call, op=linear_cross_entropy, counted=13), leaves)
    theirs, truth = (differentiated(partial(call, op=linear_cross_entropy_ref), leaves, d) for d in (None, F64))
    for i, three in enumerate(zip(ours, theirs, truth, strict=True)):
        three_way(*three, torch.float32, f"{i}", chain=4)


@pytest.mark.parametrize("name", ["token chunks", "one chunk", "vocabulary slabs", "held slabs, of each row"])
def test_a_graph_that_is_kept_goes_backward_twice(name: str, device: Any) -> None:
    leaves = tensors(device, torch.float32, torch.float32, trained=True)
    with slabs_of(24):
        loss = called(SCHEDULES[name], leaves).sum()
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=again) for again in (True, False))
    torch.testing.assert_close(second, first)


def test_more_ranks_than_a_program_holds(device: Any) -> None:
    leaves = tensors(device, torch.float32, torch.float32, (MOST_RANKS + 5,))
    check(SCHEDULES["token chunks"], linear_cross_entropy_ref, leaves)


def test_other_strides_as_those_of_tied_adapters(device: Any) -> None:
    leaves = tensors(device, torch.float32, torch.float32)
    leaves[2:] = [leaf.detach().t().contiguous().t().requires_grad_() for leaf in leaves[2:]]
    check(SCHEDULES["token chunks"], linear_cross_entropy_ref, leaves)


def test_no_tokens(device: Any) -> None:
    _, *others = tensors(device, torch.float16, torch.float32)
    found = differentiated(partial(called, linear_cross_entropy, reduction="sum"),
                           [randn(0, HIDDEN, dtype=torch.float16, device=device), *others])  # fmt: skip
    assert all(not t.any() for t in found)


def test_gradients_of_float32_adapters_keep_their_digits(device: Any) -> None:
    """Those of a bfloat16 head are as if they were computed from the same logits' gradient in float32."""
    leaves = tensors(device, torch.bfloat16, torch.float32)
    *_, da, db = differentiated(partial(called, SCHEDULES["token chunks"]), leaves)
    for grad in (da, db):
        assert grad.dtype == torch.float32
        assert (grad != grad.bfloat16().float()).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_gradients_of_float32_adapters_are_sums_of_all_digits(dtype: torch.dtype, size: float, device: Any) -> None:
    """Given the logits' gradient in 16 bits, those of z and B are exact but for roundings of float32."""
    torch.manual_seed(0)
    z, b = size * torch.randn(50, 3, device=device), size * torch.randn(40, 3, device=device)
    d_logits = torch.rand(50, 40, device=device).to(dtype)
    thin = ThinProducts(LowRank(z, b), dtype, needs_z=True, needs_b=True)
    thin.add(d_logits, slice(None), slice(None))
    exact = d_logits.double() @ b.double(), d_logits.double().t() @ z.double()
    for found, true in zip(thin.gradients(), exact, strict=True):
        assert (found.double() - true).norm() <= 2e-6 * true.norm()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return result


@pytest.mark.parametrize("name", ["token chunks", "vocabulary slabs"])
def test_no_tensor_has_all_logits(name: str, device: Any) -> None:
    """None is much larger than those that come in: [tokens, vocab] would be."""
    torch.manual_seed(0)
    hidden, a = (randn(n, 16, dtype=torch.float32, device=device) for n in (256, 2))
    weight, b = (randn(512, n, dtype=torch.float32, device=device, grad=n == 2) for n in (16, 2))
    targets = torch.arange(256, device=device)
    with slabs_of(32), Largest() as largest:
        SCHEDULES[name](hidden, weight, targets, adapters=[LoraAdapter(a, b)]).backward()
    assert largest.elements <= 512 * 64 < 256 * 512


def test_under_autocast_the_head_is_cast_and_its_adapters_are_not(device: Any) -> None:
    leaves = tensors(device, torch.float32, torch.float32)

    def cast(op: Any, some: list[torch.Tensor]) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return called(op, some)

    ours, theirs = (
        differentiated(partial(cast, op), leaves) for op in (linear_cross_entropy, linear_cross_entropy_ref)
    )
    truth = differentiated(partial(called, linear_cross_entropy_ref), leaves, F64)
    for i, three in enumerate(zip(ours, theirs, truth, strict=True)):
        assert three[0].dtype == three[1].dtype == torch.float32
        three_way(*three, torch.bfloat16, f"{i}", chain=4)


@pytest.mark.parametrize("name", ["token chunks", "one chunk", "vocabulary slabs", "held slabs, of each row"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_weight_that_is_no_matrix_is_made_one_in_each_direction_and_not_kept(name: str, adapted: bool,
                                                                             device: Any) -> None:  # fmt: skip
    hidden, weight, *others = tensors(device, torch.bfloat16, torch.float32)
    packed, calls, kept = weight.t().contiguous().view(torch.uint8), [0], []

    def dense(of: torch.Tensor) -> torch.Tensor:
        assert of is packed or of.data_ptr() == packed.data_ptr()
        calls[0] += 1
        return of.view(torch.bfloat16).t().float()

    def run(matrix: torch.Tensor, **how: Any) -> list[torch.Tensor]:
        adapters = [LoraAdapter(*some)] if adapted else []
        loss = SCHEDULES[name](hidden, matrix, targets_on(device), adapters=adapters, **how).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [hidden, *(some if adapted else [])])]

    some = others
    with slabs_of(24):
        expected = run(weight.t().contiguous().t())  # cuBLAS takes another program where it lies otherwise
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            found = run(packed, dense=dense)
    assert all(map(torch.equal, found, expected))
    assert calls[0] == (1 if name == "token chunks" else 2)  # which knows the gradients in the forward
    assert not any(t.shape == weight.shape for t in kept)


def refused(**changed: Any) -> str:
    leaves = [torch.randn(4, 8), torch.randn(5, 8), torch.arange(4)]
    with pytest.raises((TypeError, ValueError)) as error:
        linear_cross_entropy(*leaves, **changed)
    return str(error.value)


def test_adapters_of_another_head_are_refused() -> None:
    fits = {"a": torch.randn(2, 8), "b": torch.randn(5, 2)}
    assert "it must be [5, rank]" in refused(adapters=[LoraAdapter(fits["a"], torch.randn(6, 2))])
    assert "they must be [rank, in features]" in refused(adapters=[LoraAdapter(torch.randn(2, 7), fits["b"])])
    assert "must be a list of LoraAdapters" in refused(adapters=[fits])
    assert "dense" in refused(dense=len)
