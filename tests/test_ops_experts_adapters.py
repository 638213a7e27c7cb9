"""Low-rank adapters of experts, against the reference, and the reference against weights that have them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from convergence.op.call import check_call, run
from liger_kernels.ops import ExpertsAdapter, experts, experts_ref, launches, reset_launches
from liger_kernels.ops.runtime.tiling import tiled
from tests.ops_checks import DTYPES, EXAMPLES, Products, randn
from tests.test_ops_experts import EXPERTS, HIDDEN, INNER, leaves, routed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UP, DOWN = (2 * INNER, HIDDEN), (HIDDEN, INNER)
LAST = EXPERTS - 2  # the expert that no token of ``routed`` has


def matrices(
    outputs: int, inputs: int, rank: int, dtype: torch.dtype, n_experts: int = EXPERTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of an adapter, as PEFT keeps them: A [experts x rank, in], B [out, rank x experts]."""
    a = randn(n_experts * rank, inputs, dtype=dtype, device=DEVICE, scale=0.3)
    return a, randn(outputs, rank * n_experts, dtype=dtype, device=DEVICE, scale=0.3)


def adapter(a: torch.Tensor, b: torch.Tensor, scale: float, n_experts: int = EXPERTS) -> ExpertsAdapter:
    return ExpertsAdapter(a.view(n_experts, -1, a.shape[1]), b.view(len(b), -1, n_experts).permute(2, 0, 1), scale)


def adapted(
    op: Callable[..., Any], ids: torch.Tensor, ups: int = 1, downs: int = 1, n_experts: int = EXPERTS
) -> Callable[..., torch.Tensor]:
    """A call whose leaves are those of :func:`tests.test_ops_experts.leaves` without or with biases, and behind them A
    and B of ``ups`` adapters of gate_up and ``downs`` of down."""

    def call(hidden, weights, gate_up, down, *others):
        biases, pairs = others[: len(others) - 2 * (ups + downs)], others[len(others) - 2 * (ups + downs) :]
        both = [adapter(*pairs[2 * i : 2 * i + 2], 0.5 + i, n_experts) for i in range(ups + downs)]
        of_each = {"gate_up_adapters": both[:ups], "down_adapters": both[ups:]}
        return op(hidden, ids, weights, gate_up, down, None, *biases, **of_each)

    return call


def check(ids: torch.Tensor, given: list[torch.Tensor], **counts: int) -> tuple[list, list]:
    return check_call(*(adapted(op, ids, **counts) for op in (experts, experts_ref)), given, terms=HIDDEN)


def with_adapters(dtype: torch.dtype, of_adapter: torch.dtype | None = None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    of_adapter = of_adapter or dtype
    return [*leaves(DEVICE, dtype, **options), *matrices(*UP, 3, of_adapter), *matrices(*DOWN, 5, of_adapter)]


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("of_adapter", [torch.float32, None], ids=["float32 adapters", "adapters alike"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(dtype, of_adapter, biases) -> None:
    check(routed(40, 3), with_adapters(dtype, of_adapter, tokens=40, choices=3, biases=biases))


def merged(hidden, ids, weights, gate_up, down, *pairs):
    """Experts whose weights have the adapters in, as PEFT computes them."""

    def delta(a, b, scale):
        a, b = a.view(EXPERTS, -1, a.shape[1]), b.view(len(b), -1, EXPERTS)
        return scale * torch.einsum("ore,eri->eoi", b, a)

    return experts_ref(hidden, ids, weights, gate_up + delta(*pairs[:2], 0.5), down + delta(*pairs[2:], 1.5))


def test_the_reference_is_that_of_merged_weights() -> None:
    given, ids = [t.detach().cpu().double().requires_grad_() for t in with_adapters(torch.float32)], routed().cpu()
    upstream = [torch.randn(9, HIDDEN, dtype=torch.float64)]
    ours = run(adapted(experts_ref, ids), given, upstream)
    theirs = run(lambda h, *others: merged(h, ids, *others), given, upstream)
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(adapted(experts_ref, ids), given, fast_mode=True)


@pytest.mark.slow
@EXAMPLES
@given(
    tokens=st.integers(6, 40),
    choices=st.integers(1, 4),
    n_experts=st.integers(2, 9),
    dtype=st.sampled_from(DTYPES),
    ranks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    ups=st.integers(0, 4),
    biases=st.booleans(),
    frozen=st.sets(st.integers(0, 12), max_size=9),
    seed=st.integers(0, 2**32),
)
def test_any_number_of_adapters(tokens, choices, n_experts, dtype, ranks, ups, biases, frozen, seed) -> None:
    torch.manual_seed(seed)
    ups = min(ups, len(ranks))
    given = leaves(DEVICE, dtype, tokens, choices, n_experts, biases=biases)
    for i, rank in enumerate(ranks):
        given += matrices(*(UP if i < ups else DOWN), rank, dtype, n_experts)
    given = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(given)]
    counts = {"ups": ups, "downs": len(ranks) - ups, "n_experts": n_experts}
    check(routed(tokens, choices, n_experts), given, **counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_that_several_experts_share_and_experts_of_many_tiles(dtype) -> None:
    """Some experts have hundreds of rows, some few, one has none. Matrices are wider than a block of columns."""
    tokens = 300
    ids = torch.randint(EXPERTS, (tokens, 2)).clamp(max=LAST - 1)
    ids[:200] = 1
    ids[:3, 1] = EXPERTS - 1
    given = with_adapters(dtype, torch.float32, tokens=tokens)

    def small(choose, *args):
        return {**choose(*args), "ROWS": 16, "BLOCK": 16}

    names = ("lora_experts_rows", "lora_experts_add", "lora_experts_columns")
    with tiled(**dict.fromkeys(names, small)):
        check(ids.to(DEVICE), given)


def test_float32_adapters_of_16_bit_experts_lose_next_to_nothing() -> None:
    """With a result that is the adapters' alone, the error is that of the rounding of what is bfloat16."""
    hidden, weights, gate_up, down, *pairs = (t.detach() for t in with_adapters(torch.bfloat16, torch.float32))
    ids = routed()
    exact = [t.double() for t in (hidden, weights, gate_up, down)]
    given = [t.clone().requires_grad_() for t in pairs]
    truths = [t.double().requires_grad_() for t in pairs]
    upstream = torch.randn(9, HIDDEN, device=DEVICE).to(torch.bfloat16)
    adapted(experts, ids)(hidden, weights, gate_up, down, *given).backward(upstream)
    adapted(experts_ref, ids)(*exact, *truths).backward(upstream.double())
    for ours, truth in zip(given, truths, strict=True):
        assert ours.grad.dtype == torch.float32
        error = (ours.grad - truth.grad).norm() / truth.grad.norm()
        assert error < 4e-3  # a rounding of gate and up, of the unit and of its gradient: each 2^-9 at most


def test_gradients_of_16_bit_rows_are_sums_in_float32() -> None:
    """Of exact rows, dA and dB have the error of the two numbers that a float32 one is split into."""
    torch.manual_seed(0)
    tokens, n = 64, 256
    ids = torch.zeros(tokens, 1, dtype=torch.int64, device=DEVICE)
    hidden = torch.randn(tokens, HIDDEN, device=DEVICE).to(torch.bfloat16)
    ones = torch.ones(tokens, 1, device=DEVICE)
    zero_up = torch.zeros(1, 2 * n, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    zero_up[0, :n, 0] = 0  # a gate of zero passes nothing: dA and dB of down are those of a unit that is known
    down = torch.zeros(1, HIDDEN, n, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.ones(1, 2 * n, device=DEVICE, dtype=torch.bfloat16)
    a, b = matrices(HIDDEN, n, 8, torch.float32, n_experts=1)
    upstream = torch.randn(tokens, HIDDEN, device=DEVICE).to(torch.bfloat16)

    def step(op, dtype):
        pair = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (a, b)]
        rest = [t.to(dtype or t.dtype) for t in (hidden, ones, zero_up, down, bias)]
        y = op(rest[0], ids, rest[1], *rest[2:4], None, rest[4], None, (), [adapter(*pair, 2.0, 1)])
        y.backward(upstream.to(y.dtype))
        return [t.grad.double() for t in pair]

    unit = torch.nn.functional.silu(torch.ones((), dtype=torch.bfloat16))  # rounded, in the truth, too
    factor = float(unit) / float(torch.nn.functional.silu(torch.ones((), dtype=torch.float64)))
    for ours, truth in zip(step(experts, None), step(experts_ref, torch.float64), strict=True):
        assert (ours - factor * truth).norm() / truth.norm() < 2**-15


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    _, gradients = run(adapted(experts, routed()), with_adapters(torch.float32))
    for grad in gradients[4::2]:  # A
        of_expert = grad.view(EXPERTS, -1)
        assert of_expert[LAST].abs().max() == 0 < of_expert[0].abs().max()
    for grad in gradients[5::2]:  # B
        of_expert = grad.view(len(grad), -1, EXPERTS)
        assert of_expert[..., LAST].abs().max() == 0 < of_expert[..., 0].abs().max()


def test_a_token_is_of_the_experts_that_it_chose_alone() -> None:
    """Each token's result is that of a call of its own, and no other expert's matrices have a part in it."""
    hidden, weights, gate_up, down, *pairs = (t.detach() for t in with_adapters(torch.float32, tokens=6, choices=1))
    ids = torch.arange(6, device=DEVICE)[:, None]
    every = adapted(experts, ids)(hidden, weights, gate_up, down, *pairs)
    for token in range(6):
        one = slice(token, token + 1)
        alone = adapted(experts, ids[one])(hidden[one], weights[one], gate_up, down, *pairs)
        torch.testing.assert_close(alone, every[one])


class Sizes(TorchDispatchMode):
    """The largest number of elements that an operation made."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_nothing_has_the_size_of_a_weight(checkpointed) -> None:
    given = [t.detach() for t in with_adapters(torch.bfloat16, torch.float32, tokens=12)]
    given = [t.requires_grad_(i in (0, 1) or i > 3) for i, t in enumerate(given)]
    call = adapted(experts, routed(12))
    smallest = min(given[2].numel(), given[3].numel())
    assert smallest > max(t.numel() for t in (*given[:2], *given[4:]))
    with Sizes(given) as sizes:
        y = checkpoint(call, *given, use_reentrant=False) if checkpointed else call(*given)
        y.sum().backward()
    assert 0 < sizes.largest < smallest


def test_under_a_checkpoint_the_same_numbers() -> None:
    given, call = with_adapters(torch.float32), adapted(experts, routed())
    plain = run(call, given)
    again = run(lambda *leaves: checkpoint(call, *leaves, use_reentrant=False), given)
    for ours, theirs in zip([*plain[0], *plain[1]], [*again[0], *again[1]], strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_saved() -> None:
    """The first product and z for all rows, and the parameters themselves, which a sharding package may free."""
    saved: list[torch.Tensor] = []
    given = with_adapters(torch.bfloat16, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        adapted(experts, routed())(*given)
    own = {t.untyped_storage().data_ptr() for t in given}
    assert own <= {t.untyped_storage().data_ptr() for t in saved}
    others = [t.shape for t in saved if t.untyped_storage().data_ptr() not in own]
    assert others == [(18, 2 * INNER), (18, 3)]


def test_many_ranks_run_the_reference() -> None:
    given = [*leaves(DEVICE, torch.float32), *matrices(*UP, 260, torch.float32), *matrices(*DOWN, 2, torch.float32)]
    ids = routed()
    for ours, theirs in zip(*(run(adapted(op, ids), given)[1] for op in (experts, experts_ref)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a, b: {"a": a.int()}, TypeError, "a is torch.int32; it must be floating point"),
        (lambda a, b: {"b": b.to("meta")}, ValueError, "b is on meta, a on"),
        (lambda a, b: {"a": a[0]}, ValueError, r"they must be \[experts, rank, in features\]"),
        (lambda a, b: {"b": b[..., 1:]}, ValueError, r"a has shape \(6, 3, 24\), b \(6, 32, 2\)"),
        (lambda a, b: {"scale": float("nan")}, ValueError, "scale"),
    ],
)
def test_a_bad_adapter(change, error, message) -> None:
    one = adapter(*matrices(*UP, 3, torch.float32), 1.0)
    with pytest.raises(error, match=message):
        ExpertsAdapter(**{"a": one.a, "b": one.b, **change(one.a, one.b)})


@pytest.mark.parametrize("op", [experts, experts_ref])
def test_an_adapter_of_another_weight(op) -> None:
    given = [t.detach() for t in leaves(DEVICE)]
    one = adapter(*matrices(*DOWN, 3, torch.float32), 1.0)
    with pytest.raises(ValueError, match=r"one of gate_up_adapters has a of shape \(6, 3, 16\), b \(6, 24, 3\)"):
        op(given[0], routed(), *given[1:], gate_up_adapters=[one])
    with pytest.raises(TypeError, match="down_adapters has a tuple in it; it must be a list of ExpertsAdapters"):
        op(given[0], routed(), *given[1:], down_adapters=[(one.a, one.b)])


@pytest.mark.parametrize("trained", [False, True], ids=["frozen weights", "trained weights"])
def test_recomputation_ends_before_the_last_products(trained) -> None:
    """Neither the product of down is computed again, nor what its adapters add, nor a token's sum. A GPU multiplies by
    all experts in one product."""
    given = [t.detach() for t in with_adapters(torch.float32, tokens=12)]
    given = [t.requires_grad_(trained or i in (0, 1) or i > 3) for i, t in enumerate(given)]
    ids = routed(12)
    counts: list[int] = []
    launched: list[dict[str, int]] = []
    used, every = (1, 1) if DEVICE.type == "cuda" else (int((ids.unique() < EXPERTS).sum()), EXPERTS)
    reset_launches()
    with Products() as forward:
        y = checkpoint(adapted(experts, ids), *given, use_reentrant=False)
    counts.append(forward.count)
    launched.append(launches())
    reset_launches()
    with Products() as backward:
        y.sum().backward()
    counts.append(backward.count)
    launched.append(launches())
    assert counts == [2 * used, 3 * used + trained * 2 * every]
    names = ("_lora_experts_rows_kernel", "_lora_experts_add_kernel", "_lora_experts_columns_kernel")
    # z and its product for each weight; then z of gate and up again, and for each weight g, what it adds, dA and dB,
    # and z of down, from the unit.
    assert [[found.get(name, 0) for name in names] for found in launched] == [[2, 2, 0], [4, 3, 4]]
    assert launched[1]["_experts_sum_kernel"] == 1


def test_two_forwards_then_two_backwards_each_twice() -> None:
    call, given = adapted(experts, routed()), with_adapters(torch.float32)
    others = [t.detach().flip(0).requires_grad_() for t in given]
    expected = [run(call, leaves)[1] for leaves in (given, others)]
    results = [call(*leaves) for leaves in (given, others)]
    for y, own, theirs in zip(results, (given, others), expected, strict=True):
        for _ in range(2):
            ours = torch.autograd.grad(y, own, torch.ones_like(y), retain_graph=True)
            assert all(map(torch.equal, ours, theirs))
