"""``linear_cross_entropy`` against float64 by the three-way rule: options, schedules, frozen parts, compile."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from convergence.tolerance import three_way, unit_roundoff
from liger_kernels.ops import (
    _linear,
    _linear_token_chunks,
    _linear_vocabulary_slabs,
    observe_logits_grad,
)
from liger_kernels.ops import linear_cross_entropy as linear_cross_entropy_of_package
from liger_kernels.ops._linear import TENSORS, Call
from liger_kernels.ops._linear_vocabulary_slabs import Cut, kept_by_fast
from liger_kernels.ops._runtime import launches, reset_launches
from liger_kernels.ops.cross_entropy import EXTRAS, CrossEntropyOutput, cross_entropy_ref
from liger_kernels.ops.linear_cross_entropy import (
    MEMORY,
    linear_cross_entropy,
    linear_cross_entropy_chunk_size,
    linear_cross_entropy_ref,
    linear_cross_entropy_slab_size,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = ("mean", "sum", "none")
TOKENS, HIDDEN, VOCAB, CHUNK = 23, 12, 67, 5  # five chunks, the last one partial
SLAB = 24  # three slabs of the vocabulary, the last one partial
# What "fast" takes in two slabs, of 48 and 19 classes, if it may: the first one's rows of d weight hold d hidden.
TWO: dict[str, Any] = {"hidden": 64}
many_and_one = pytest.mark.parametrize("chunk_size", [CHUNK, TOKENS], ids=["token chunks", "one chunk"])
every_schedule = pytest.mark.parametrize(
    "schedule",
    [{"chunk_size": CHUNK}, {"chunk_size": TOKENS}, {"memory": "small"}],
    ids=["token chunks", "one chunk", "vocabulary slabs"],
)

ALL: dict[str, Any] = {
    "label_smoothing": 0.2,
    "softcap": 5.0,
    "logit_scale": 1.7,
    "z_loss": 0.02,
    "class_weight": True,
    "ignore_index": 0,
}
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    **{name: {name: value} for name, value in ALL.items()},
    "all": ALL,
}


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setitem(linear_cross_entropy.__globals__, "_slab_sizes", lambda tokens, hidden_size: (SLAB, SLAB))


def in_two_slabs(*args, **options):
    """The fused head with all logits kept, those of the first classes in d weight."""
    with linear_cross_entropy_slab_size(SLAB):
        return linear_cross_entropy(*args, **options, memory="fast")


class Case:
    """Inputs of one call, and its results in any dtype under an upstream gradient that is not 1."""

    def __init__(self, device, dtype=torch.float32, *, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, bias=True, seed=0,
                 needs=(True, True, True), **options):  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=rng).to(dtype).to(device)  # noqa: E731
        self.tensors = [draw(tokens, hidden), draw(vocab, hidden), draw(vocab) if bias else None]
        self.needs = needs
        targets = torch.randint(0, vocab, (tokens,), generator=rng)
        ignored = options.get("ignore_index", -100)
        targets[tokens // 3 : tokens // 3 + 1] = targets[tokens - 1 :] = ignored
        self.targets = targets.to(device)
        if options.pop("class_weight", False):
            options["class_weight"] = (torch.rand(vocab, generator=rng) + 0.25).to(device)
        self.options = options
        rows = (tokens,) if options.get("reduction") == "none" else ()
        self.upstream = (torch.randn(rows, generator=rng) - 0.3).to(device)

    def leaves(self, dtype=None):
        return [
            None if t is None else t.detach().clone().to(dtype or t.dtype).requires_grad_(needed)
            for t, needed in zip(self.tensors, self.needs, strict=True)
        ]

    def run(self, function=linear_cross_entropy, dtype=None, **options):
        """The loss or named tuple, and the gradients of hidden, weight and bias."""
        leaves = self.leaves(dtype)
        out = function(leaves[0], leaves[1], self.targets, leaves[2], **self.options, **options)
        loss = out.loss if isinstance(out, CrossEntropyOutput) else out
        if any(leaf is not None and leaf.requires_grad for leaf in leaves):
            loss.backward(self.upstream.to(loss.dtype))
        return out, [None if leaf is None else leaf.grad for leaf in leaves]

    def assert_right(self, **options):
        ours, grads = self.run(extras=EXTRAS, **options)
        torchs, torch_grads = self.run(linear_cross_entropy_ref, extras=EXTRAS)
        truth, true_grads = self.run(linear_cross_entropy_ref, torch.float64, extras=EXTRAS)
        dtype = self.tensors[0].dtype
        assert ours.loss.dtype == torch.float32
        # The logits are rounded to the dtype in both, so that is where the loss's digits end.
        for name in ("loss", "log_probs"):
            three_way(getattr(ours, name), getattr(torchs, name), getattr(truth, name), dtype, name)
        # A difference of numbers of order 1 (lse and a mean logit), so 1 is what its roundoff is relative to.
        three_way(ours.entropy + 1, torchs.entropy + 1, truth.entropy + 1, dtype, "1 + entropy")
        for name, *three in zip(("hidden", "weight", "bias"), grads, torch_grads, true_grads, strict=True):
            if three[2] is None:
                assert three[0] is None, f"a gradient of {name} that nobody asked for"
                continue
            assert three[0].dtype == dtype
            three_way(*three, dtype, f"gradient of {name}", chain=3)  # a matrix product, the loss, a matrix product


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_schedule
def test_every_option(schedule, dtype, options, reduction, device):
    Case(device, dtype, reduction=reduction, **options).assert_right(**schedule)


@settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 40),
    hidden=st.integers(1, 20),
    vocab=st.integers(2, 150),
    chunk_size=st.integers(1, 50),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(REDUCTIONS),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    softcap=st.sampled_from([None, 3.0, 30.0]),
    logit_scale=st.sampled_from([1.0, 0.1, 2.5]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    class_weight=st.booleans(),
    ignore_index=st.sampled_from([-100, 0, 5]),
    seed=st.integers(0, 1000),
)
def test_options_together(device, chunk_size, **case):
    Case(device, **case).assert_right(chunk_size=chunk_size)
    if not case["label_smoothing"] and case["dtype"] != torch.float16:  # which do not go in slabs
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                linear_cross_entropy.__globals__, "_slab_sizes", lambda *shape: (3 * chunk_size, 3 * chunk_size)
            )
            Case(device, **case).assert_right(memory="small")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
@every_schedule
def test_frozen_parts(schedule, needs, bias, reduction, device):
    Case(device, torch.bfloat16, bias=bias, needs=needs, reduction=reduction).assert_right(**schedule)


class Spy:
    """Counts the GEMMs and records the shapes allocated while a function of torch is called by the op."""

    def __init__(self, monkeypatch):
        self.gemms, self.allocated = 0, []
        for name in ("mm", "addmm"):
            monkeypatch.setattr(torch, name, self._counting(getattr(torch, name)))
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, self._recording(getattr(torch, name)))

    def _counting(self, function):
        def counted(*args, **kwargs):
            self.gemms += 1
            return function(*args, **kwargs)

        return counted

    def _recording(self, function):
        def recorded(*args, **kwargs):
            out = function(*args, **kwargs)
            self.allocated.append((tuple(out.shape), out.dtype))
            return out

        return recorded

    def allocated_like(self, *shape):
        return [dtype for seen, dtype in self.allocated if seen == shape]


def over_logits():
    """How often the two kernels that read logits were launched."""
    return tuple(launches().get(f"_cross_entropy_{phase}_kernel", 0) for phase in ("fwd", "bwd"))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_what_is_frozen_costs_no_gemm_and_no_buffer(needs, reduction, device, monkeypatch):
    case = Case(device, torch.bfloat16, needs=needs, reduction=reduction, vocab=64)
    spy = Spy(monkeypatch)
    reset_launches()
    case.run(chunk_size=CHUNK)
    chunks = math.ceil(TOKENS / CHUNK)
    recomputed = chunks if reduction == "none" and any(needs) else 0
    assert spy.gemms == chunks + recomputed + chunks * (needs[0] + 2 * needs[1])
    assert over_logits() == (chunks, recomputed)
    # Of each gradient its sum over the chunks, d weight's in two halves; and d bias, which is small, once more.
    assert spy.allocated_like(TOKENS, HIDDEN) == [torch.bfloat16] * needs[0]
    assert spy.allocated_like(32, HIDDEN) == [torch.float32, torch.float32] * needs[1]
    assert not spy.allocated_like(64, HIDDEN)
    assert spy.allocated_like(64) == [torch.float32, torch.bfloat16] * needs[2]
    assert spy.allocated_like(CHUNK, 64) == [torch.bfloat16] * (2 if recomputed else 1)
    assert max(math.prod(shape) for shape, _ in spy.allocated) < TOKENS * 64, "tokens x vocab was held"


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_what_is_frozen_costs_nothing_in_one_chunk(needs, reduction, device, monkeypatch):
    """Three GEMMs in all, one buffer of logits, and each gradient written once, in its own dtype."""
    case = Case(device, torch.bfloat16, needs=needs, reduction=reduction, vocab=64)
    spy = Spy(monkeypatch)
    reset_launches()
    case.run(chunk_size=TOKENS)
    assert spy.gemms == 1 + needs[0] + needs[1]
    assert over_logits() == (1, 1 if any(needs) else 0)
    assert spy.allocated_like(TOKENS, 64) == [torch.bfloat16]
    assert spy.allocated_like(TOKENS, HIDDEN) == [torch.bfloat16] * needs[0]
    assert spy.allocated_like(64, HIDDEN) == [torch.bfloat16] * needs[1]
    assert spy.allocated_like(64) == [torch.bfloat16] * needs[2]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_what_is_frozen_costs_nothing_in_slabs(needs, reduction, device, monkeypatch):
    """Each slab's logits twice, in one buffer a pass; d weight written once, in its own dtype; d hidden in float32, two
    halves of the tokens, and never again in its own dtype."""
    case = Case(device, torch.bfloat16, needs=needs, reduction=reduction, vocab=64)
    spy = Spy(monkeypatch)
    reset_launches()
    case.run(memory="small")
    slabs, wider = math.ceil(64 / SLAB), math.ceil(64 / (2 * SLAB))
    assert spy.gemms == wider + slabs * (any(needs) + 2 * needs[0] + needs[1])
    assert over_logits() == (wider, slabs if any(needs) else 0)
    assert spy.allocated_like(TOKENS, 2 * SLAB) == [torch.bfloat16]
    assert spy.allocated_like(TOKENS, SLAB) == [torch.bfloat16] * any(needs)
    for half in (TOKENS // 2, TOKENS - TOKENS // 2):
        assert spy.allocated_like(half, HIDDEN) == [torch.float32] * needs[0]
    assert not spy.allocated_like(TOKENS, HIDDEN)
    assert spy.allocated_like(64, HIDDEN) == [torch.bfloat16] * needs[1]
    assert spy.allocated_like(64) == [torch.bfloat16] * needs[2]
    assert max(math.prod(shape) for shape, _ in spy.allocated) < TOKENS * 64, "tokens x vocab was held"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [63, 64])
def test_logits_of_wide_slabs_lie_in_what_is_not_written_yet_of_the_weight_gradient(hidden, bias, device, monkeypatch):
    """A slab of 192 classes; the last two, of 24, have a buffer of their own. The forward computes those of both in
    rows of d weight that only the backward writes, and the backward finds the first slab's computed."""
    case = Case(device, torch.bfloat16, tokens=8, hidden=hidden, vocab=10 * SLAB, bias=bias)
    case.assert_right(memory="small")
    spy = Spy(monkeypatch)
    reset_launches()
    case.run(memory="small")
    assert over_logits() == (2, 3)
    assert spy.gemms == 2 + 2 + 3 * (2 + 1)  # forward; logits, two halves of d hidden and d weight again
    assert spy.allocated_like(8, SLAB) == spy.allocated_like(10 * SLAB, hidden) == [torch.bfloat16]
    assert not spy.allocated_like(8, 2 * SLAB)
    assert not spy.allocated_like(8, 8 * SLAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_a_slab_is_kept_for_the_first_backward_pass_alone(tokens, dtype, device):
    """A second one computes it again, to the same bits, and so does every one of what is compiled."""
    case = Case(device, dtype, tokens=tokens, hidden=64, vocab=10 * SLAB)
    leaves = hidden, weight, bias = case.leaves()
    torch.compiler.reset()  # every case is another program of one function
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss, never = (
        head(hidden, weight, case.targets, bias, memory="small") for head in (linear_cross_entropy, compiled)
    )
    with pytest.MonkeyPatch.context() as patch:
        spy, gemms, grads = Spy(patch), [], []
        for which in (loss, loss, never):
            spy.gemms = 0
            grads.append(torch.autograd.grad(which, leaves, retain_graph=True))
            gemms.append(spy.gemms)
    assert gemms == [gemms[0], gemms[0] + 1, gemms[0] + 1]
    for first, second in zip(*grads[:2], strict=True):
        assert torch.equal(first, second)
    # Its forward's slabs are others, and a GPU's product of other shapes rounds a few logits otherwise.
    case.assert_right(function=compiled, memory="small")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_what_is_frozen_costs_nothing_in_two_kept_slabs(needs, reduction, device, monkeypatch):
    """Nothing is computed twice, and beside the gradients, each in its own dtype, nothing is held but the logits of the
    classes that d weight has no room for, padded."""
    case = Case(device, torch.bfloat16, needs=needs, reduction=reduction, **TWO)
    spy = Spy(monkeypatch)
    reset_launches()
    case.run(in_two_slabs)
    slabs = 2 if needs[1] else 1  # without a d weight there is nothing to lie in
    assert spy.gemms == slabs * (1 + needs[0] + needs[1])
    assert over_logits() == (slabs, slabs if any(needs) else 0)
    logits = (TOKENS, 24 if needs[1] else 72)
    large = [logits, *[(VOCAB, 64)] * needs[1], *[(TOKENS, 64)] * needs[0]]
    rows = max(TOKENS * 4, VOCAB)  # what is known of each row, and d bias
    seen = [(shape, dtype) for shape, dtype in spy.allocated if math.prod(shape) > rows]
    assert sorted(seen, key=str) == sorted([(shape, torch.bfloat16) for shape in large], key=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_two_slabs_are_kept_for_the_first_backward_pass_alone(tokens, dtype, device):
    """A second one computes both again, to the same bits and in no more memory."""
    case = Case(device, dtype, tokens=tokens, hidden=64, vocab=10 * SLAB - 3)
    leaves = hidden, weight, bias = case.leaves()
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        loss = in_two_slabs(hidden, weight, case.targets, bias)
        assert spy.gemms == 2
        assert [shape for shape, _ in spy.allocated].count(tuple(weight.shape)) == 1
        first, second = [], []
        for grads, gemms, weights in ((first, 4, 0), (second, 6, 1)):
            spy.gemms, spy.allocated = 0, []
            grads.extend(torch.autograd.grad(loss, leaves, retain_graph=True))
            assert spy.gemms == gemms
            assert [shape for shape, _ in spy.allocated].count(tuple(weight.shape)) == weights
            assert not spy.allocated_like(tokens, len(weight))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    case.assert_right(function=in_two_slabs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options",
    [
        *[options for name, options in ALONE.items() if name not in ("label_smoothing", "all")],
        {name: value for name, value in ALL.items() if name != "label_smoothing"},
    ],
    ids=[name for name in ALONE if name != "label_smoothing"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_option_in_two_kept_slabs(dtype, options, reduction, device):
    case = Case(device, dtype, reduction=reduction, **TWO, **options)
    reset_launches()
    case.run(in_two_slabs)
    assert over_logits() == (2, 2)
    case.assert_right(function=in_two_slabs)
    rows = Case(device, dtype, reduction=reduction, row_weight=torch.rand(TOKENS, device=device), **TWO, **options)
    rows.assert_right(function=in_two_slabs)


@settings(derandomize=True, deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 20),
    hidden=st.integers(1, 80),
    vocab=st.integers(20, 150),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    reduction=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 1000),
)
def test_shapes_in_two_kept_slabs(device, **case):
    """Or in one, where d weight has no room for two."""
    with linear_cross_entropy_slab_size(7):
        Case(device, **case).assert_right(memory="fast")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_frozen_parts_in_two_kept_slabs(needs, bias, reduction, device):
    case = Case(device, torch.bfloat16, bias=bias, needs=needs, reduction=reduction, **TWO)
    case.assert_right(function=in_two_slabs)


@pytest.mark.parametrize("hidden", [63, 65])
@pytest.mark.parametrize("tokens", [5, 21])
def test_kept_slabs_begin_at_aligned_addresses(tokens, hidden, device):
    """Also where the rows of d weight do not end at one."""
    case = Case(device, torch.bfloat16, tokens=tokens, hidden=hidden)
    case.assert_right(function=in_two_slabs)
    call = Call(*case.tensors[:2], None, case.targets, *[None] * 3, *[None] * 5, "mean", "", True, True, False)
    d_weight, rest = _linear_vocabulary_slabs._kept_memory(call, Cut(40))
    (_, _, first), (_, _, second) = _linear_vocabulary_slabs._kept_slabs(call, Cut(40), d_weight, rest)
    assert first.data_ptr() >= d_weight[40:].data_ptr()
    assert first.data_ptr() + first.nbytes <= d_weight.data_ptr() + d_weight.nbytes
    for logits in (first, second):
        assert logits.shape[0] == tokens
        assert logits.storage_offset() * logits.element_size() % 16 == 0
        assert logits.stride(0) * logits.element_size() % 16 == 0


def test_hidden_gradient_is_summed_in_float32_over_two_kept_slabs(device):
    """Of rows of weight that are nearly alike, the slabs' parts nearly cancel: rounded before they are added, they
    would leave their roundoff."""
    case = Case(device, torch.bfloat16, bias=False, **TWO)
    case.targets.clamp_(max=47)  # all in the first slab
    case.tensors[0] *= 2.0**-6
    case.tensors[1] = (8 + case.tensors[1].float() / 64).to(torch.bfloat16)
    seen = []
    with observe_logits_grad(lambda start, grad: seen.append(grad)):
        _, (d_hidden, *_) = case.run(in_two_slabs)
    parts = [
        seen[0][:, classes].double() @ case.tensors[1][classes].double() for classes in (slice(0, 48), slice(48, None))
    ]
    truth = sum(parts)
    error = unit_roundoff(torch.bfloat16) * truth.abs() + 67 * unit_roundoff(torch.float32) * parts[0].abs()
    assert (parts[0].abs() * unit_roundoff(torch.bfloat16) > 4 * error).float().mean() > 0.5, "nothing cancels"
    assert ((d_hidden.double() - truth).abs() <= error).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_kept_slabs_overwrite_nothing_and_are_gone_with_their_graph(reduction, device):
    """Two backward passes, the same bits in every run, inputs of any strides."""
    options = {name: value for name, value in ALL.items() if name != "label_smoothing"}
    case = Case(device, torch.bfloat16, reduction=reduction, **TWO, **options)
    _, expected = case.run(in_two_slabs)
    leaves = case.leaves()
    loss = in_two_slabs(*leaves[:2], case.targets, leaves[2], **case.options)
    kept = loss.detach().clone()
    first = torch.autograd.grad(loss, leaves, case.upstream, retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, leaves, case.upstream)
    for one, copy, two, other in zip(first, copies, second, expected, strict=True):
        assert torch.equal(one, copy)
        assert torch.equal(one, two)
        assert torch.equal(one, other)
    assert torch.equal(loss, kept)
    for leaf, tensor in zip(leaves, case.tensors, strict=True):
        assert torch.equal(leaf, tensor)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward(case.upstream)
    hidden, weight, bias = case.tensors
    case.tensors = [
        torch.stack([hidden, hidden], 1)[:, 0],
        weight.t().contiguous().t(),
        torch.stack([bias, bias], 1)[:, 1],
    ]
    case.leaves = lambda dtype=None: [t.detach().requires_grad_() for t in case.tensors]
    for one, other in zip(case.run(in_two_slabs)[1], expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_option_together_in_slabs(dtype, reduction, device):
    """Label smoothing alone goes in token chunks instead."""
    options = {name: value for name, value in ALL.items() if name != "label_smoothing"}
    Case(device, dtype, reduction=reduction, **options).assert_right(memory="small")
    rows = Case(device, dtype, reduction=reduction, row_weight=torch.rand(TOKENS, device=device), **options)
    rows.assert_right(memory="small")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_hidden_gradient_is_summed_in_float32_over_slabs(reduction, device):
    """The first slab's part is so large that in bfloat16 none of the later ones, 7% together, would change it. d weight
    would hold the logits of wider slabs, so it is not needed."""
    shape = {"tokens": 4, "hidden": 2, "vocab": 40 * SLAB, "bias": False}
    case = Case(device, torch.bfloat16, **shape, needs=(True, False, False), reduction=reduction)
    case.targets.fill_(0)
    case.upstream.fill_(0.7)
    case.tensors[1].fill_(15.0)
    case.tensors[1][0] = -200.0
    case.tensors[0].zero_()
    case.assert_right(memory="small")


@pytest.mark.parametrize("tokens", [1, 2, 22, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_take_the_memory_of_their_own_sums(dtype, tokens, device, monkeypatch):
    """Of which they overwrite, a few numbers at a time, what has been read."""
    case = Case(device, dtype, tokens=tokens)
    schedules = {"memory": "small"}, {"chunk_size": 5}
    whole = [case.run(**schedule)[1] for schedule in schedules]
    monkeypatch.setattr(_linear, "APART", 7)
    for schedule, expected in zip(schedules, whole, strict=True):
        _, grads = case.run(**schedule)
        for grad, other in zip(grads, expected, strict=True):
            assert torch.equal(grad, other)
            rows = -(-len(grad) // 2) * 2  # two halves
            assert grad.untyped_storage().nbytes() <= max(rows, 1) * grad[0].numel() * dtype.itemsize


def test_a_slab_is_released_before_the_sum_is_rounded(device, monkeypatch):
    """Rounding copies the front of the sum, which would come on top of the slab's logits."""
    made, alive = [], []

    def buffer(*args):
        new = _linear.logits_buffer(*args)
        made.append(StorageWeakRef(new.untyped_storage()))
        return new

    def rounded(*args):
        gc.collect()  # the interpreter leaves cycles behind that hold what a kernel was given
        alive.extend(not storage.expired() for storage in made)
        return _linear.round_halves(*args)

    monkeypatch.setattr(_linear_vocabulary_slabs, "logits_buffer", buffer)
    monkeypatch.setattr(_linear_vocabulary_slabs, "round_halves", rounded)
    Case(device, torch.bfloat16).run(memory="small")
    assert alive == [False, False]  # of the forward and of the backward


def test_argmax_and_target_in_any_slab(device):
    """The largest logit, and the target's, in every class once: equal logits count for the first of them."""
    hidden = torch.eye(VOCAB, device=device)
    targets = (torch.arange(VOCAB, device=device) * 29) % VOCAB
    call = functools.partial(linear_cross_entropy, hidden, targets=targets, extras=EXTRAS, reduction="none")
    for weight in (7 * torch.eye(VOCAB, device=device), torch.zeros(VOCAB, VOCAB, device=device)):
        torch.testing.assert_close(call(weight, memory="small"), call(weight, memory="fast"))
    hidden, weight = (F.pad(torch.eye(VOCAB, device=device), (0, 256 - VOCAB)) for _ in range(2))
    for rows in torch.arange(VOCAB, device=device).split(34):
        for scaled in (7 * weight, 0 * weight):
            inputs = hidden[rows], scaled.requires_grad_(), targets[rows]
            reset_launches()
            ours = in_two_slabs(*inputs, extras=EXTRAS, reduction="none")
            assert over_logits() == (2, 0)
            torch.testing.assert_close(ours, linear_cross_entropy_ref(*inputs, extras=EXTRAS, reduction="none"))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float16_is_never_one_chunk(reduction, device):
    """Its gradient would underflow with 1 / denominator and the upstream gradient in it."""
    case = Case(device, torch.float16, tokens=TOKENS, reduction=reduction)
    case.upstream = torch.full_like(case.upstream, 2.0**-20)
    _, small = case.run(chunk_size=TOKENS)
    case.upstream = torch.full_like(case.upstream, 1.0)
    _, grads = case.run(chunk_size=TOKENS)
    for grad, other in zip(small, grads, strict=True):
        # Both were rounded once from numbers that differ by a power of two: elsewhere alike, where the small one is
        # subnormal, by half of such numbers' distance, 2^-24.
        error = {"rtol": unit_roundoff(torch.float16), "atol": 2.0**-25}
        torch.testing.assert_close(grad.float(), other.float() * 2.0**-20, **error)


class Kept:
    """Whether the memory of the logits is still held, wherever the tensors over it have gone: that of d weight, where
    it has some, and the buffer of the others'."""

    def __init__(self, monkeypatch):
        self.storages = []
        make = _linear_vocabulary_slabs._kept_memory
        monkeypatch.setattr(_linear_vocabulary_slabs, "_kept_memory", lambda *args: self._seen(make(*args)))
        for name in ("forward_rows", "backward_rows"):  # Triton's interpreter leaves cycles that hold its arguments
            monkeypatch.setattr(_linear_vocabulary_slabs, name, self._cleared(getattr(_linear_vocabulary_slabs, name)))
        monkeypatch.setattr(_linear_vocabulary_slabs, "rounded", self._cleared(_linear.rounded))

    def _cleared(self, launch):
        def launched(*args, **kwargs):
            launch(*args, **kwargs)
            gc.collect()

        return launched

    def _seen(self, memory):
        self.storages += [StorageWeakRef(t.untyped_storage()) for t in memory if t.numel()]
        return memory

    def alive(self):
        return [not storage.expired() for storage in self.storages]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("how", ["backward", "backward, retained", "dropped"])
@pytest.mark.parametrize("slabs", [1, 2])
def test_logits_are_released(slabs, how, reduction, device, monkeypatch):
    """By the backward pass or with the loss, at once: not when the garbage collector finds a cycle. d weight goes to
    whoever asked for it."""
    case = Case(device, torch.bfloat16, reduction=reduction, **(TWO if slabs == 2 else {}))
    head = (
        functools.partial(in_two_slabs, **case.options)
        if slabs == 2
        else functools.partial(linear_cross_entropy, chunk_size=TOKENS, **case.options)
    )
    kept = Kept(monkeypatch)
    case.run(head)  # torch imports parts of itself at a first call, and an import's error keeps frames
    leaves = case.leaves()
    gc.collect()
    assert kept.alive() == [False] * slabs
    kept.storages.clear()
    gc.disable()
    try:
        loss = head(*leaves[:2], case.targets, leaves[2])
        assert kept.alive() == [True] * slabs
        if how == "dropped":
            del loss
        else:
            loss.backward(case.upstream, retain_graph=how == "backward, retained")
        leaves[1].grad = None
        assert kept.alive() == [False] * slabs
        if how == "backward, retained":
            loss.backward(case.upstream)
            leaves[1].grad = None
            assert kept.alive() == [False] * (2 * slabs)
    finally:
        gc.enable()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@many_and_one
def test_without_gradients_only_the_loss_is_computed(chunk_size, mode, reduction, device, monkeypatch):
    case = Case(device, torch.bfloat16, reduction=reduction, vocab=64, **ALL)
    expected, _ = case.run(chunk_size=chunk_size)
    leaves = case.leaves()
    spy = Spy(monkeypatch)
    writes = []

    def forward_rows(*args, grad=None, **options):
        writes.append(grad)
        return launch_forward(*args, grad=grad, **options)

    launch_forward = _linear_token_chunks.forward_rows
    for schedule in (_linear_vocabulary_slabs, _linear_token_chunks):
        monkeypatch.setattr(schedule, "forward_rows", forward_rows)
    with mode():
        loss = linear_cross_entropy(*leaves[:2], case.targets, leaves[2], chunk_size=chunk_size, **case.options)
    assert torch.equal(loss, expected)
    assert not loss.requires_grad
    assert writes == [None] * math.ceil(TOKENS / chunk_size)
    assert spy.gemms == math.ceil(TOKENS / chunk_size)
    assert spy.allocated_like(64, HIDDEN) == spy.allocated_like(TOKENS, HIDDEN) == []


BALANCED, ONE_CHUNK, SLABS = "token chunks", "one chunk", "vocabulary slabs"


class Schedule:
    """Which schedule a call takes, in chunks of how many tokens or slabs of how many classes; nothing is computed."""

    def __init__(self, monkeypatch):
        self.taken = None
        for schedule in (_linear_token_chunks, _linear_vocabulary_slabs):
            monkeypatch.setattr(schedule, "forward_op", functools.partial(self._take, schedule))

    def _take(self, schedule, *arguments):
        sizes = arguments[TENSORS + 10 :]
        if schedule is _linear_token_chunks:
            self.taken = BALANCED, sizes[0]
        else:
            cut = Cut(*sizes)
            assert not cut.kept
            self.taken = (SLABS, cut.columns) if cut.columns else (ONE_CHUNK,)
        return (torch.zeros(()),) * 4

    def of(self, tokens, hidden, dtype=torch.bfloat16, grad=True, **options):
        zeros = functools.partial(torch.zeros, dtype=dtype, requires_grad=grad)
        linear_cross_entropy(zeros(tokens, hidden), zeros(3, hidden), torch.zeros(tokens, dtype=torch.long), **options)
        return self.taken


def test_default_schedule_depends_on_shape_and_dtype_only(monkeypatch):
    monkeypatch.setitem(linear_cross_entropy.__globals__, "use_triton", lambda x, **how: True)
    of = Schedule(monkeypatch).of
    for hidden, chunk in ((5, 1024), (2047, 1024), (2048, 2048), (3000, 2048)):
        assert of(2 * hidden + chunk, hidden) == (ONE_CHUNK,)
        assert of(2 * hidden + chunk + 1, hidden) == (BALANCED, chunk)
        assert of(chunk, hidden, torch.float32) == (ONE_CHUNK,)
        assert of(chunk + 1, hidden, torch.float32) == (BALANCED, chunk)
        assert of(7, hidden, torch.float16) == (BALANCED, chunk)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert of(7, 2048) == (BALANCED, 2048)


def test_schedule_is_what_the_call_says(monkeypatch):
    monkeypatch.setitem(linear_cross_entropy.__globals__, "use_triton", lambda x, **how: True)
    of = Schedule(monkeypatch).of
    assert of(8192, 5, memory="fast") == of(7, 5, memory="fast") == (ONE_CHUNK,)
    assert of(8193, 5, memory="fast") == (BALANCED, 8192)
    assert of(8193, 5, memory="fast", reduction="none") == of(8193, 5, chunk_size=8193) == (ONE_CHUNK,)
    assert of(8193, 4096) == (BALANCED, 8192)  # what "fast" is there
    assert of(7, 5, grad=False) == of(7, 5, grad=False, memory="fast") == (BALANCED, 1024)  # nothing to keep logits for
    assert of(5000, 5, memory="balanced") == of(7, 5, memory="balanced") == (BALANCED, 1024)
    assert of(5000, 5, torch.float16, memory="fast") == (BALANCED, 1024)
    assert of(7, 5, memory="small") == (SLABS, SLAB)
    assert of(7, 5, memory="small", label_smoothing=0.1) == of(7, 5, torch.float16, memory="small") == (BALANCED, 1024)
    assert of(7, 5, chunk_size=6) == (BALANCED, 6)
    assert of(7, 5, chunk_size=7) == of(7, 5, chunk_size=8) == (ONE_CHUNK,)
    assert of(7, 5, torch.float16, chunk_size=8) == (BALANCED, 8)
    with linear_cross_entropy_chunk_size(6):
        assert of(7, 5) == (BALANCED, 6)
        assert of(7, 5, memory="fast") == (ONE_CHUNK,)
        assert of(8193, 5, memory="fast") == (BALANCED, 8192)
        assert of(7, 5, memory="balanced") == (BALANCED, 1024)
        assert of(7, 5, chunk_size=3) == (BALANCED, 3)
    with linear_cross_entropy_slab_size(6):
        assert of(7, 5, memory="small") == (SLABS, 6)
        assert of(7, 5) == (ONE_CHUNK,)
    assert of(7, 5, memory="small") == (SLABS, SLAB)


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((8192, 4096, 128256), 41 * 1024),
        ((8192, 2048, 262144), 51 * 1024),
        ((8192, 4096, 98305), 32768),  # whose logits take 512 MiB
        ((8192, 4096, 98304), 0),
        ((2048, 4096, 128256), 0),
        ((16384, 4096, 163841), 32768),  # whose rows hold d hidden in float32, to the last byte
        ((16384, 4096, 163840), 0),
        ((0, 4096, 128256), 0),
        ((8192, 1, 8), 0),
    ],
)
def test_fast_keeps_logits_in_d_weight_where_that_is_worth_it(shape, kept):
    tokens, hidden, vocab = shape
    assert kept_by_fast(*shape, 2, None) == kept
    if kept:
        begin = kept * hidden + 7  # at the next aligned address
        assert begin + tokens * kept <= vocab * hidden
        assert 4 * tokens * hidden <= 2 * kept * hidden


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, 48),
        ({"label_smoothing": 0.1}, 0),
        ({"needs": (True, False, True)}, 0),
        ({"needs": (False, True, False)}, 48),
        ({"tokens": 25}, 0),  # for whose d hidden the rows of 48 classes have no room
        ({"slab": 48}, 0),
        ({"slab": None}, 0),
        ({"compiled": True}, 0),
    ],
    ids=str,
)
def test_when_fast_keeps_logits_in_d_weight(how, kept, device, monkeypatch):
    cuts = []
    make = _linear_vocabulary_slabs._kept_memory
    monkeypatch.setattr(
        _linear_vocabulary_slabs, "_kept_memory", lambda call, cut: (cuts.append(cut), make(call, cut))[1]
    )
    how = dict(how)
    slab, function = how.pop("slab", SLAB), linear_cross_entropy
    if how.pop("compiled", False):
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    case = Case(device, torch.bfloat16, **TWO, **how)
    with linear_cross_entropy_slab_size(slab) if slab else contextlib.nullcontext():
        case.run(function, memory="fast")
    assert cuts == [Cut(kept)]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory(dtype, reduction, memory, device):
    Case(device, dtype, reduction=reduction, **ALL).assert_right(memory=memory)


def test_memory_is_checked(device):
    with pytest.raises(ValueError, match=r"memory is 'tiny'; it must be one of 'fast', 'balanced'.*, or None"):
        Case(device).run(memory="tiny")
    with pytest.raises(ValueError, match="memory is 'fast' and chunk_size is 5; give one of them"):
        Case(device).run(memory="fast", chunk_size=5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_result_does_not_depend_on_the_chunks(reduction, device):
    """A sum of the chunks' means, or a denominator of one chunk, would be off by a factor."""
    case = Case(device, reduction=reduction, **ALL)
    whole, whole_grads = case.run(chunk_size=TOKENS)
    for how in ({"chunk_size": 1}, {"chunk_size": 7}, {"chunk_size": TOKENS + 1}, {"memory": "balanced"}):
        loss, grads = case.run(**how)
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(grads, whole_grads)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_weight_gradient_is_summed_in_float32(reduction, device):
    """The first chunk's part is so large that in bfloat16 none of the later ones, 6% together, would change it."""
    case = Case(device, torch.bfloat16, tokens=64, hidden=2, vocab=2, bias=False, reduction=reduction)
    case.targets.clamp_(max=0)
    hidden, weight, _ = case.tensors
    hidden.fill_(1.0)
    hidden[0] = 1024.0
    weight.zero_()
    case.upstream.fill_(0.7)
    case.assert_right(chunk_size=1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_whole_chunks_ignored(reduction, device):
    for ignored in (slice(0, CHUNK), slice(CHUNK, 3 * CHUNK), slice(TOKENS - TOKENS % CHUNK, TOKENS)):
        case = Case(device, reduction=reduction)
        case.targets[ignored] = -100
        case.assert_right(chunk_size=CHUNK)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("tokens", [0, TOKENS])
@pytest.mark.parametrize(
    "function",
    [linear_cross_entropy, functools.partial(linear_cross_entropy, chunk_size=CHUNK), linear_cross_entropy_ref],
    ids=["one chunk", "token chunks", "reference"],
)
def test_nothing_to_learn_from_is_zero_with_zero_gradients(function, tokens, reduction, device):
    case = Case(device, tokens=tokens, reduction=reduction, label_smoothing=0.1)
    case.targets.fill_(-100)
    loss, grads = case.run(function)
    assert torch.equal(loss, torch.zeros_like(loss))
    for grad, tensor in zip(grads, case.tensors, strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float16_keeps_small_gradients(reduction, device):
    """8192 tokens and a gradient scaler's 65536: with 1 / 8192 in the float16 logits' gradient, the classes that are
    never a target would lose theirs, about 3e-4 / 8192, to underflow; with 65536 in it, others would overflow."""
    case = Case(device, torch.float16, tokens=8192, vocab=64, hidden=16, reduction=reduction)
    case.tensors[0] *= 0.25
    case.tensors[2][32:] = -5.0
    case.targets %= 32
    case.upstream = torch.full_like(case.upstream, 65536.0 / (1 if reduction == "mean" else 8192))
    _, grads = case.run(chunk_size=2048)
    _, truth = case.run(linear_cross_entropy_ref, torch.float64)
    for grad, true in zip(grads[1:], truth[1:], strict=True):
        # No PyTorch arm: its own float16 gradient has underflowed. The measure is one rounding of the truth.
        three_way(grad[32:], true[32:].half(), true[32:], torch.float16, "gradient of the classes that are no target")
    three_way(grads[0], truth[0].half(), truth[0], torch.float16, "gradient of hidden")


def test_float16_keeps_small_gradients_of_a_mean_taken_outside(device):
    """The same for per-token losses whose mean the user takes: the upstream gradient is then 1 / 8192."""
    case = Case(device, torch.float16, tokens=8192, vocab=64, hidden=16, reduction="none")
    case.tensors[2][32:] = -5.0
    case.targets %= 32
    case.upstream = torch.full_like(case.upstream, 1.0 / 8192)
    unscaled = case.run(chunk_size=2048)[1][1]
    case.upstream *= 2.0**14  # a power of two changes no digit, unless something underflowed
    scaled = case.run(chunk_size=2048)[1][1]
    normal = unscaled.abs() >= torch.finfo(torch.float16).tiny
    assert normal.any()
    assert torch.equal(unscaled[normal].float() * 2.0**14, scaled[normal].float())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size", [3, 8], ids=["token chunks", "one chunk"])
def test_true_class_gradient_when_p_goes_to_1(chunk_size, dtype, reduction, device):
    """hidden is the identity and weight 12 times it: each row's target has p = 1 - 7 exp(-12)."""
    hidden = torch.eye(8, dtype=dtype, device=device).requires_grad_()
    weight = (12 * torch.eye(8, dtype=dtype, device=device)).requires_grad_()
    seen = []
    with observe_logits_grad(lambda start, grad: seen.append(grad)):
        targets = torch.arange(8, device=device)
        loss = linear_cross_entropy(hidden, weight, targets, chunk_size=chunk_size, reduction=reduction)
        loss.backward(torch.ones_like(loss))
    q = 7 * math.exp(-12) / (1 + 7 * math.exp(-12))
    grad = torch.cat(seen).diagonal().double() * (8 if reduction == "mean" else 1)
    assert (grad / -q - 1).abs().max() <= unit_roundoff(dtype) + 8 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_schedule
def test_backward_twice_and_nothing_overwritten(schedule, reduction, device):
    case = Case(device, torch.bfloat16, reduction=reduction, **ALL)
    leaves = case.leaves()
    targets = case.targets.clone()
    loss = linear_cross_entropy(*leaves[:2], case.targets, leaves[2], **schedule, **case.options)
    kept = loss.detach().clone()
    first = torch.autograd.grad(loss, leaves, case.upstream, retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, leaves, case.upstream)
    for one, copy, two in zip(first, copies, second, strict=True):
        assert torch.equal(one, copy)
        assert torch.equal(one, two)
    assert torch.equal(loss, kept)
    assert torch.equal(case.targets, targets)
    for leaf, tensor in zip(leaves, case.tensors, strict=True):
        assert torch.equal(leaf, tensor)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_schedule
def test_a_graph_that_was_not_retained_is_gone(schedule, reduction, device):
    case = Case(device, reduction=reduction)
    hidden, weight, bias = case.leaves()
    loss = linear_cross_entropy(hidden, weight, case.targets, bias, reduction=reduction, **schedule)
    loss.backward(case.upstream)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward(case.upstream)


@every_schedule
def test_the_same_bits_every_time(schedule, device):
    case = Case(device, torch.bfloat16, **ALL)
    (loss, grads), (again, grads_again) = (case.run(**schedule) for _ in range(2))
    assert torch.equal(loss, again)
    for one, other in zip(grads, grads_again, strict=True):
        assert torch.equal(one, other)


@every_schedule
def test_non_contiguous_inputs(schedule, device):
    case = Case(device)
    hidden, weight, bias = case.tensors
    expected = case.run(**schedule)
    case.tensors = [
        torch.stack([hidden, hidden.neg()], 1)[:, 0],
        weight.t().contiguous().t(),
        torch.stack([bias, bias], 1)[:, 1],
    ]
    case.leaves = lambda dtype=None: [t.detach().requires_grad_() for t in case.tensors]
    case.targets = torch.stack([case.targets, case.targets], 1)[:, 1]
    assert not any(t.is_contiguous() for t in (*case.tensors, case.targets))
    torch.testing.assert_close(case.run(**schedule), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@many_and_one
def test_autocast_of_float32_masters(chunk_size, dtype, reduction, device):
    case = Case(device, reduction=reduction)

    def under_autocast(function):
        leaves = case.leaves()
        with torch.autocast(device.type, dtype):
            loss = function(*leaves[:2], case.targets, leaves[2], **case.options)
            assert loss.dtype == torch.float32
            loss.backward(case.upstream)  # inside, which must not turn float32 sums into 16 bits
        return loss, [leaf.grad for leaf in leaves]

    with linear_cross_entropy_chunk_size(chunk_size):
        loss, grads = under_autocast(linear_cross_entropy)
    torchs, torch_grads = under_autocast(linear_cross_entropy_ref)
    truth, true_grads = case.run(linear_cross_entropy_ref, torch.float64)
    three_way(loss, torchs, truth, dtype, "loss")
    for grad, torch_grad, true_grad in zip(grads, torch_grads, true_grads, strict=True):
        assert grad.dtype == torch.float32
        three_way(grad, torch_grad, true_grad, dtype, "gradient")


def test_autocast_leaves_float64_alone_as_linear_does(device):
    case = Case(device, torch.float64)
    with torch.autocast(device.type, torch.bfloat16):
        assert F.linear(*case.tensors).dtype == torch.float64
        assert linear_cross_entropy(*case.tensors[:2], case.targets, case.tensors[2]).dtype == torch.float64


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@many_and_one
def test_observer_sees_the_gradient_of_the_raw_logits(chunk_size, dtype, reduction, device):
    """float64 goes through the reference, in one piece."""
    case = Case(device, dtype, reduction=reduction, **ALL)

    def logits_gradient(dtype):
        hidden, weight, bias = case.leaves(dtype)
        logits = F.linear(hidden, weight, bias)
        logits.retain_grad()
        loss = cross_entropy_ref(logits, case.targets, **case.options)
        loss.backward(case.upstream.to(loss.dtype))
        return logits.grad

    seen = []
    expected = case.run(chunk_size=chunk_size)
    reset_launches()
    case.run(chunk_size=chunk_size)
    schedule = launches()
    reset_launches()
    with observe_logits_grad(lambda start, grad: seen.append((start, grad))):
        observed = case.run(chunk_size=chunk_size)
    assert launches() == schedule
    assert torch.equal(observed[0], expected[0])
    for one, other in zip(observed[1], expected[1], strict=True):
        assert torch.equal(one, other)
    whole = dtype == torch.float64
    assert [start for start, _ in seen] == ([0] if whole else list(range(0, TOKENS, chunk_size)))
    assert {grad.dtype for _, grad in seen} == {torch.float64 if whole else torch.float32}
    three_way(
        torch.cat([grad for _, grad in seen]), logits_gradient(dtype), logits_gradient(torch.float64), dtype, "logits"
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_observer_of_slabs_sees_whole_rows(reduction, device):
    case = Case(device, reduction=reduction, softcap=5.0, **TWO)
    seen = []
    small, fast = (functools.partial(linear_cross_entropy, memory=memory) for memory in ("small", "fast"))
    for function in (small, fast, in_two_slabs):
        with observe_logits_grad(lambda start, grad: seen.append((start, grad))):
            watched, watched_grads = case.run(function)
        alone, grads = case.run(function)
        assert all(map(torch.equal, (watched, *watched_grads), (alone, *grads)))
    assert [(start, grad.dtype) for start, grad in seen] == [(0, torch.float32)] * 3
    for _, grad in seen[1:]:
        torch.testing.assert_close(grad, seen[0][1])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@many_and_one
def test_observer_is_called_by_every_backward_and_may_write(chunk_size, reduction, device):
    case = Case(device, reduction=reduction)
    expected = case.run(chunk_size=chunk_size)
    leaves = case.leaves()
    calls = []
    with observe_logits_grad(lambda start, grad: (calls.append(start), grad.zero_())):
        loss = linear_cross_entropy(*leaves[:2], case.targets, leaves[2], chunk_size=chunk_size, **case.options)
        assert calls == []
        grads = torch.autograd.grad(loss, leaves, case.upstream, retain_graph=True)
        torch.autograd.grad(loss, leaves, case.upstream, retain_graph=True)
    torch.autograd.grad(loss, leaves, case.upstream)
    assert calls == 2 * list(range(0, TOKENS, chunk_size))
    for one, other in zip(grads, expected[1], strict=True):
        assert torch.equal(one, other)


def test_observers_and_chunk_sizes_nest_and_end(device, monkeypatch):
    case = Case(device)
    spy = Spy(monkeypatch)
    outer, inner = [], []
    with observe_logits_grad(lambda start, grad: outer.append(start)), linear_cross_entropy_chunk_size(12):
        with observe_logits_grad(lambda start, grad: inner.append(start)), linear_cross_entropy_chunk_size(8):
            case.run()
            case.run(chunk_size=20)  # what the call says counts
        case.run()
    assert inner == [0, 8, 16, 0, 20]
    assert outer == [0, 12]
    with pytest.raises(ZeroDivisionError), observe_logits_grad(print), linear_cross_entropy_chunk_size(8):
        raise ZeroDivisionError
    spy.gemms = 0
    case.run()
    assert spy.gemms == 3
    assert (inner, outer) == ([0, 8, 16, 0, 20], [0, 12])


@pytest.mark.parametrize("size", [0, -1])
def test_chunk_size_must_be_positive(size, device):
    with pytest.raises(ValueError, match="must be at least 1 token"), linear_cross_entropy_chunk_size(size):
        pass
    with pytest.raises(ValueError, match="must be at least 1 token"):
        Case(device).run(chunk_size=size)
    with pytest.raises(ValueError, match="must be at least 1 class"), linear_cross_entropy_slab_size(size):
        pass


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(1, 3, 4)}, ValueError, "flatten hidden's leading dimensions"),
        ({"hidden": torch.zeros(3, 5)}, ValueError, r"hidden has shape \(3, 5\) and weight \(6, 4\)"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\); it must be \[6\]"),
        ({"weight": torch.zeros(6, 4).bfloat16()}, ValueError, "must have one dtype and device: cast or move"),
        ({"bias": torch.zeros(6).half()}, ValueError, "must have one dtype and device: cast or move"),
        ({"weight": torch.zeros(6, 4, device="meta")}, ValueError, "must have one dtype and device: cast or move"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, ValueError, r"targets have shape \(4,\)"),
        ({"targets": torch.tensor([0, 6, 1])}, ValueError, "target 6 is out of range: there are 6 classes"),
        ({"reduction": "avg"}, ValueError, "reduction is 'avg'"),
        ({"chunk_size": 2.0}, TypeError, "the chunk size is a float"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(6, 4),
        "targets": torch.zeros(3, dtype=torch.long),
        **change,
    }
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)


@every_schedule
def test_extras_only_on_request_and_without_gradient(schedule, device):
    case = Case(device)
    plain, _ = case.run()
    assert isinstance(plain, torch.Tensor)
    leaves = case.leaves()
    for extra in EXTRAS:
        out = linear_cross_entropy(*leaves[:2], case.targets, leaves[2], extras=(extra,), **schedule)
        assert [name for name in EXTRAS if getattr(out, name) is not None] == [extra]
        assert not getattr(out, extra).requires_grad
    out = linear_cross_entropy(*leaves[:2], case.targets, leaves[2], extras=EXTRAS, **schedule)
    logits = F.linear(*leaves)
    counted = case.targets != -100
    assert torch.equal(out.predicted_tokens, logits.argmax(-1))
    assert out.token_accuracy == (logits.argmax(-1) == case.targets)[counted].float().mean()
    assert torch.equal(out.log_probs != 0, counted)


@every_schedule
def test_float64_and_the_reference_path_agree(schedule, device, monkeypatch):
    """What a CPU without the interpreter runs: the same public function, without one launch."""
    case = Case(device, **ALL)
    truth = case.run(linear_cross_entropy_ref)
    reset_launches()
    case.run(dtype=torch.float64)
    monkeypatch.setitem(linear_cross_entropy.__globals__, "use_triton", lambda x, **how: False)
    loss, grads = case.run(**schedule)
    assert launches() == {}
    assert torch.equal(loss, truth[0])
    for one, other in zip(grads, truth[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("chunk_size", "reduction"), [(CHUNK, "none"), *((TOKENS, r) for r in REDUCTIONS)])
def test_weight_changed_before_the_backward_that_needs_it_is_refused(chunk_size, reduction, device):
    """It would multiply by the wrong weight."""
    case = Case(device, reduction=reduction)
    hidden, weight, bias = case.leaves()
    loss = linear_cross_entropy(hidden, weight, case.targets, bias, reduction=reduction, chunk_size=chunk_size)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


class Head(torch.nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(HIDDEN, VOCAB)
        self.function, self.options = function, options

    def forward(self, hidden, targets):
        out = self.function(
            hidden * 2, self.linear.weight, targets, self.linear.bias, extras=("log_probs", "token_accuracy"),
            **self.options,
        )  # fmt: skip
        return out.loss * 0.25, out.log_probs, out.token_accuracy


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@many_and_one
def test_compiles_without_a_graph_break(chunk_size, reduction, backend, device, monkeypatch):
    torch._dynamo.reset()
    # What is cached on disk goes by the op's name and schema: another backward would not be seen.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    head = Head(linear_cross_entropy, reduction=reduction, softcap=5.0, label_smoothing=0.1).to(device)
    compiled = torch.compile(head, fullgraph=True, backend=backend)
    for tokens in (TOKENS, TOKENS + 4):  # the second makes the number of tokens symbolic
        case = Case(device, tokens=tokens)
        results = []
        for module in (head, compiled):
            module.zero_grad()
            hidden = case.tensors[0].clone().requires_grad_()
            with linear_cross_entropy_chunk_size(chunk_size):
                loss, *extras = module(hidden, case.targets)
            loss.sum().backward()
            results.append([loss, *extras, hidden.grad, head.linear.weight.grad, head.linear.bias.grad])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("memory", [None, *MEMORY])
def test_compiles_under_autocast_and_without_gradients(memory, reduction, device):
    torch._dynamo.reset()
    head = Head(linear_cross_entropy, reduction=reduction, memory=memory).to(device)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    case = Case(device)
    with torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(compiled(case.tensors[0], case.targets), head(case.tensors[0], case.targets))
    gradients = []
    for module in (head, compiled):
        module.zero_grad()
        module(case.tensors[0], case.targets)[0].sum().backward()
        gradients.append([p.grad for p in head.parameters()])
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(compiled(case.tensors[0], case.targets), head(case.tensors[0], case.targets))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@many_and_one
def test_ops_are_registered_as_torch_wants_them(chunk_size, reduction, device):
    """Schema, autograd registration, and fake outputs equal to the real ones in shape, dtype and stride."""
    case = Case(device, torch.bfloat16, **ALL)
    hidden, weight, bias = case.leaves()
    options = (0, 0.2, 5.0, 1.7, 0.02)
    row_weight = torch.rand(len(hidden), device=device)
    weights = (case.options["class_weight"], row_weight, row_weight.sum())
    call = Call(hidden, weight, bias, case.targets, *weights, *options, reduction, " ".join(EXTRAS), True, True, True)
    detached = Call(*(t.detach() for t in call[:TENSORS]), *call[TENSORS:])
    check = functools.partial(
        torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    cuts = [Cut(0)] if chunk_size == TOKENS else [Cut(0, SLAB, SLAB), Cut(16, 8, 8)]
    for cut in cuts:
        check(_linear_vocabulary_slabs.forward_op, (*call, *cut))
        loss, *_, divisor, stats, d_weight, rest = _linear_vocabulary_slabs.forward_op(*detached, *cut)
        upstream = torch.ones_like(loss)
        check(_linear_vocabulary_slabs.backward_op, (upstream, divisor, stats, *detached, *cut))
        if cut.kept or not cut.columns:
            check(_linear_vocabulary_slabs.finish_op, (upstream, divisor, stats, d_weight, rest, *detached, *cut))
    if chunk_size == TOKENS:
        return
    observed = reduction != "none"
    check(_linear_token_chunks.forward_op, (*call, chunk_size, observed))
    loss, *_, divisor, stats, d_hidden, d_weight, more_d_weight, _, d_logits = _linear_token_chunks.forward_op(
        *detached, chunk_size, observed
    )
    upstream = torch.ones_like(loss)
    if reduction == "none":
        check(_linear_token_chunks.recompute_op, (upstream, stats, *detached, chunk_size))
    else:
        check(_linear_token_chunks.scale_op, (upstream, divisor, d_logits, chunk_size))
        for halves in ((d_hidden, d_hidden[:0]), (d_weight, more_d_weight)):
            check(_linear_token_chunks.scaled_op, (*halves, divisor, torch.bfloat16))
            check(_linear_token_chunks.scale_in_place_op, (*halves, divisor, torch.bfloat16))


def test_is_the_packages_own():
    assert linear_cross_entropy_of_package is linear_cross_entropy


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_reference_gradient(options, reduction):
    case = Case(torch.device("cpu"), torch.float64, tokens=4, hidden=3, vocab=5, reduction=reduction, **options)
    hidden, weight, bias = case.leaves()
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy_ref(h, w, case.targets, b, **case.options), (hidden, weight, bias)
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference_is_torchs_linear_and_cross_entropy(reduction):
    case = Case(torch.device("cpu"), torch.float64)
    expected = F.cross_entropy(F.linear(*case.tensors), case.targets, reduction=reduction)
    loss = linear_cross_entropy_ref(*case.tensors[:2], case.targets, case.tensors[2], reduction=reduction)
    torch.testing.assert_close(loss, expected)
