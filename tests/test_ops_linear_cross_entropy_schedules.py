"""The schedules of ``linear_cross_entropy``: which one a call takes, what it allocates, multiplies, keeps and releases,
and what it rounds where."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from convergence.tolerance import unit_roundoff
from liger_kernels.ops import (
    _linear_token_chunks,
    _linear_vocabulary_slabs,
    observe_logits_grad,
)
from liger_kernels.ops._linear import Call, Needs
from liger_kernels.ops._linear_token_chunks import TokenChunks
from liger_kernels.ops._linear_vocabulary_slabs import VocabularySlabs, kept_by_fast
from liger_kernels.ops._loss_options import LossOptions
from liger_kernels.ops._runtime import launches, reset_launches
from liger_kernels.ops._split_sum import SplitSum
from liger_kernels.ops._tiling import tiled
from liger_kernels.ops.cross_entropy import EXTRAS
from liger_kernels.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from tests.linear_cross_entropy_checks import (
    ALL,
    ALONE,
    CHUNK,
    HIDDEN,
    REDUCTIONS,
    SLAB,
    TOKENS,
    TWO,
    VOCAB,
    Case,
    Spy,
    chunks_of,
    in_two_slabs,
    many_and_one,
    slabs_of,
)

pytestmark = pytest.mark.usefixtures("small_slabs")


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
    with slabs_of(7):
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
    call = Call(*case.tensors[:2], None, case.targets, *[None] * 3, LossOptions(), Needs(True, True, False))
    d_weight, rest = VocabularySlabs(40).allocate(call).buffers
    (_, _, first), (_, _, second) = VocabularySlabs(40)._kept_slabs(call, d_weight, rest)
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
def test_gradients_take_the_memory_of_their_own_sums(dtype, tokens, device):
    """Of which they overwrite, a few numbers at a time, what has been read."""
    case = Case(device, dtype, tokens=tokens)
    schedules = {"memory": "small"}, {"chunk_size": 5}
    whole = [case.run(**schedule)[1] for schedule in schedules]
    for schedule, expected in zip(schedules, whole, strict=True):
        with tiled(copied_before_rounding=lambda choose: 7):
            _, grads = case.run(**schedule)
        for grad, other in zip(grads, expected, strict=True):
            assert torch.equal(grad, other)
            rows = -(-len(grad) // 2) * 2  # two halves
            assert grad.untyped_storage().nbytes() <= max(rows, 1) * grad[0].numel() * dtype.itemsize


def test_a_slab_is_released_before_the_sum_is_rounded(device, monkeypatch):
    """Rounding copies the front of the sum, which would come on top of the slab's logits."""
    made, alive = [], []

    make, finish = _linear_vocabulary_slabs.logits_buffer, SplitSum.rounded

    def buffer(*args):
        new = make(*args)
        made.append(StorageWeakRef(new.untyped_storage()))
        return new

    def rounded(*args, **how):
        gc.collect()  # the interpreter leaves cycles behind that hold what a kernel was given
        alive.extend(not storage.expired() for storage in made)
        return finish(*args, **how)

    monkeypatch.setattr(_linear_vocabulary_slabs, "logits_buffer", buffer)
    monkeypatch.setattr(SplitSum, "rounded", rounded)
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
        make = VocabularySlabs.allocate
        monkeypatch.setattr(VocabularySlabs, "allocate", lambda *args: self._seen(make(*args)))
        for name in ("forward_rows", "backward_rows"):  # Triton's interpreter leaves cycles that hold its arguments
            monkeypatch.setattr(_linear_vocabulary_slabs, name, self._cleared(getattr(_linear_vocabulary_slabs, name)))
        monkeypatch.setattr(_linear_vocabulary_slabs, "rounded", self._cleared(_linear_vocabulary_slabs.rounded))

    def _cleared(self, launch):
        def launched(*args, **kwargs):
            launch(*args, **kwargs)
            gc.collect()

        return launched

    def _seen(self, output):
        self.storages += [StorageWeakRef(t.untyped_storage()) for t in output.buffers if t.numel()]
        return output

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
        used = linear_cross_entropy.__globals__
        monkeypatch.setitem(used, "LinearCrossEntropyFunction", types.SimpleNamespace(apply=self._take))
        monkeypatch.setitem(used, "linear_cross_entropy_op", self._take)

    def _take(self, *arguments):
        schedule = arguments[-1]
        if isinstance(schedule, TokenChunks):
            self.taken = BALANCED, schedule.chunk_size
        else:
            assert not schedule.kept_classes
            self.taken = (SLABS, schedule.slab) if schedule.slab else (ONE_CHUNK,)
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
    for hidden, few in ((1500, 1500), (3000, 3000)):
        assert of(few, hidden) == (ONE_CHUNK,)
        assert of(few + 1, hidden) == (BALANCED, 1024 if hidden < 2048 else 2048)
    assert (
        of(1024, 1500, torch.float32) == of(2048, 3000, torch.float32) == of(1000, 1000, torch.float32) == (ONE_CHUNK,)
    )
    assert of(1025, 1500, torch.float32) == of(1001, 1000, torch.float32) == (BALANCED, 1024)


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
    with chunks_of(6):
        assert of(7, 5) == (BALANCED, 6)
        assert of(7, 5, memory="fast") == (ONE_CHUNK,)
        assert of(8193, 5, memory="fast") == (BALANCED, 8192)
        assert of(7, 5, memory="balanced") == (BALANCED, 1024)
        assert of(7, 5, chunk_size=3) == (BALANCED, 3)
    with slabs_of(6):
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
    with tiled(slabs=lambda choose, *shape: choose(*shape)):  # not those of the tests
        assert kept_by_fast(*shape, 2) == kept
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
    schedules, forward = [], VocabularySlabs.forward
    monkeypatch.setattr(
        VocabularySlabs, "forward", lambda schedule, call: (schedules.append(schedule), forward(schedule, call))[1]
    )
    how = dict(how)
    slab, function = how.pop("slab", SLAB), linear_cross_entropy
    if how.pop("compiled", False):
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    case = Case(device, torch.bfloat16, **TWO, **how)
    with slabs_of(slab) if slab else contextlib.nullcontext():
        case.run(function, memory="fast")
    assert schedules == [VocabularySlabs(kept)]


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
