"""The schedules of ``linear_cross_entropy``: which one a call takes, what it allocates, multiplies, keeps and releases,
and what it rounds where."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from convergence.judge.tolerance import unit_roundoff
from liger_kernels.ops.loss.linear_cross_entropy import linear_cross_entropy
from liger_kernels.ops.loss.schedules import token_chunks, vocabulary_slabs
from liger_kernels.ops.loss.schedules.slab_plan import kept_by_fast
from liger_kernels.ops.loss.schedules.token_chunks import TokenChunks
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs
from liger_kernels.ops.runtime.tiling import tiled
from tests.linear_cross_entropy_checks import (
    ALL,
    CHUNK,
    HELD_SLABS,
    ONE_CHUNK,
    REDUCTIONS,
    SCHEDULES,
    SLAB,
    TOKENS,
    TWO,
    TWO_SLABS,
    VOCAB,
    Case,
    Spy,
    assert_equal,
    chunks_of,
    every_schedule,
    in_held_slabs,
    slabs_of,
)

pytestmark = pytest.mark.usefixtures("small_slabs")


def costs(name, needs, none):
    """What the head of the op's file says of a schedule, in bfloat16: the products of hidden states and weight, and
    bytes for each token of the logits, and for each element of d hidden and of d weight."""
    again = any(needs) and (name == "vocabulary slabs" or (name == "token chunks" and none))
    logits = {
        "token chunks": 2 * VOCAB * CHUNK / TOKENS * (1 + again),
        "one chunk": 2 * VOCAB,
        "vocabulary slabs": 2 * (2 * SLAB + SLAB * again),
        "two kept slabs": 2 * (VOCAB - 48 if needs[1] else VOCAB),  # 48 classes lie in d weight
    }[name]
    return 1 + again, logits, 4 if name == "vocabulary slabs" else 2, 4 if name == "token chunks" else 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("needs", "bias"),
    [((1, 1, 1), True), ((1, 0, 0), False), ((0, 1, 0), True), ((0, 0, 1), True), ((0, 0, 0), True)],
    ids=["all", "frozen weight, no bias", "frozen hidden and bias", "bias alone", "nothing"],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_frozen_costs_nothing(name, needs, bias, reduction, device):
    """And nothing costs more than the head of the op's file says."""
    case = Case(device, torch.bfloat16, needs=needs, bias=bias, reduction=reduction, **SCHEDULES[name] | TWO)
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        case.run()
    products, logits, of_hidden, of_weight = costs(name, needs, reduction == "none")
    (tokens, hidden), vocab = case.tensors[0].shape, VOCAB + 1  # in two halves
    assert spy.operations <= tokens * hidden * VOCAB * (products + needs[0] + needs[1])
    gradients = of_hidden * tokens * hidden * needs[0] + of_weight * vocab * hidden * needs[1]
    few = 96 * tokens  # what is known of each row, padding, and d bias: less than any gradient
    assert few < 2 * tokens * hidden
    assert spy.bytes <= logits * tokens + gradients + few
    case.assert_right()


@pytest.mark.parametrize("tokens", [1, 22, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_take_the_memory_of_their_own_sums(dtype, tokens, device):
    """Of which they overwrite, a few numbers at a time, what has been read."""
    case = Case(device, dtype, tokens=tokens)
    schedules = {"memory": "small"}, {"chunk_size": 5}
    whole = [case.run(**schedule)[1] for schedule in schedules]
    for schedule, expected in zip(schedules, whole, strict=True):
        with tiled(copied_before_rounding=lambda choose: 7):
            _, grads = case.run(**schedule)
        assert_equal(grads, expected)
        for grad in grads:
            rows = -(-len(grad) // 2) * 2  # two halves
            assert grad.untyped_storage().nbytes() <= max(rows, 1) * grad[0].numel() * dtype.itemsize


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
            monkeypatch.setattr(vocabulary_slabs, name, self._cleared(getattr(vocabulary_slabs, name)))
        monkeypatch.setattr(vocabulary_slabs, "rounded", self._cleared(vocabulary_slabs.rounded))

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


@pytest.mark.parametrize(
    ("schedule", "slabs", "how"),
    [
        (ONE_CHUNK | {"reduction": "none"}, 1, "backward"),
        (ONE_CHUNK | {"reduction": "sum"}, 1, "dropped"),
        (TWO_SLABS | {"reduction": "mean"}, 2, "backward, retained"),
        (HELD_SLABS, 2, "backward, retained"),
    ],
    ids=["one chunk", "one chunk, dropped", "two slabs, retained", "held slabs, retained"],
)
def test_logits_are_released(schedule, slabs, how, device, monkeypatch):
    """By the backward pass or with the loss, at once: not when the garbage collector finds a cycle. d weight goes to
    whoever asked for it."""
    case = Case(device, torch.bfloat16, **schedule)
    kept = Kept(monkeypatch)
    case.run()  # torch imports parts of itself at a first call, and an import's error keeps frames
    leaves = case.leaves()
    gc.collect()
    assert kept.alive() == [False] * slabs
    kept.storages.clear()
    gc.disable()
    try:
        loss = case.call(leaves)
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


@pytest.mark.parametrize(("mode", "reduction"), [(torch.no_grad, "mean"), (torch.inference_mode, "none")])
@every_schedule
def test_without_gradients_only_the_loss_is_computed(schedule, mode, reduction, device, monkeypatch):
    """One product, and of the logits no gradient, which would be written over them."""
    case = Case(device, torch.bfloat16, reduction=reduction, **ALL, **schedule)
    expected, _ = case.run()
    leaves, seen = case.leaves(), []
    spy = Spy(monkeypatch)
    for module in (vocabulary_slabs, token_chunks):

        def watched(*args, launch=module.forward_rows, **options):
            before = args[0].clone()
            launch(*args, **options)
            seen.append(torch.equal(args[0], before))

        monkeypatch.setattr(module, "forward_rows", watched)
    with mode():
        loss = case.call(leaves)
    assert_equal(loss, expected.detach())
    assert not loss.requires_grad
    assert seen
    assert all(seen)
    hidden, weight, _ = leaves
    assert spy.operations == TOKENS * VOCAB * hidden.shape[1]
    assert not [shape for shape, _ in spy.allocated if shape in (hidden.shape, weight.shape)]


@pytest.fixture
def schedules(monkeypatch):
    """The schedules in slabs of the vocabulary that calls have taken."""
    taken, forward = [], VocabularySlabs.forward
    monkeypatch.setattr(
        VocabularySlabs, "forward", lambda schedule, call: (taken.append(schedule), forward(schedule, call))[1]
    )
    return taken


BALANCED, WHOLE, SMALL = "token chunks", "one chunk", "vocabulary slabs"


class Schedule:
    """Which schedule a call takes, in chunks of how many tokens or slabs of how many classes; nothing is computed."""

    def __init__(self, monkeypatch):
        self.taken = None
        monkeypatch.setitem(linear_cross_entropy.__globals__, "run_schedule", self._take)

    def _take(self, schedule, call, entropy=False):
        if isinstance(schedule, TokenChunks):
            self.taken = BALANCED, schedule.chunk_size
        else:
            assert not schedule.kept_classes
            assert schedule.held_classes in (0, len(call.weight))
            self.taken = (SMALL, schedule.slab) if schedule.slab else (WHOLE,)
        return torch.zeros(()), {}

    def of(self, tokens, hidden, dtype=torch.bfloat16, grad=True, frozen=False, **options):
        zeros = functools.partial(torch.zeros, dtype=dtype, requires_grad=grad)
        weight = zeros(3, hidden, requires_grad=grad and not frozen)
        linear_cross_entropy(zeros(tokens, hidden), weight, torch.zeros(tokens, dtype=torch.long), **options)
        return self.taken


def test_default_schedule_depends_on_shape_and_dtype_only(monkeypatch):
    monkeypatch.setattr("liger_kernels.ops.loss.head.use_triton", lambda x, **how: True)
    of = Schedule(monkeypatch).of
    for hidden, chunk in ((5, 1024), (2047, 1024), (2048, 2048), (3000, 2048)):
        assert of(2 * hidden + chunk, hidden) == (WHOLE,)
        assert of(2 * hidden + chunk + 1, hidden) == (BALANCED, chunk)
        assert of(chunk, hidden, torch.float32) == (WHOLE,)
        assert of(chunk + 1, hidden, torch.float32) == (BALANCED, chunk)
        assert of(7, hidden, torch.float16) == (BALANCED, chunk)
        assert of(chunk, hidden, frozen=True) == (WHOLE,)  # chunks then hold no sum of grad_weight
        assert of(chunk + 1, hidden, frozen=True) == (BALANCED, chunk)
    # A chunk of a wide head is larger where it reads and writes the sum of grad_weight.
    assert of(10241, 4096) == of(7, 4096, memory="balanced") == of(2049, 4096, torch.float32) == (BALANCED, 4096)
    for without in ({"frozen": True}, {"grad": False}):
        assert of(10241, 4096, **without) == of(7, 4096, **without, memory="balanced") == (BALANCED, 2048)
    for tokens, expected in ((11, WHOLE), (8192, SMALL)):  # gradients of single rows, of few classes
        assert of(tokens, 5, reduction="none")[0] == expected
        assert of(tokens, 5, reduction="none", chunk_size=7)[0] == BALANCED
        assert of(tokens, 5, reduction="none", label_smoothing=0.1, memory="balanced")[0] == BALANCED
        assert of(tokens, 5, torch.float16, reduction="none")[0] == BALANCED
        assert of(tokens, 5, grad=False, reduction="none")[0] == BALANCED
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for hidden, few in ((1500, 1500), (3000, 3000)):
        assert of(few, hidden) == (WHOLE,)
        assert of(few + 1, hidden) == (BALANCED, 1024 if hidden < 2048 else 2048)
        assert of(few + 1, hidden, reduction="none") == of(few + 1, hidden)
    assert of(1024, 1500, torch.float32) == of(2048, 3000, torch.float32) == of(1000, 1000, torch.float32) == (WHOLE,)
    assert of(1025, 1500, torch.float32) == of(1001, 1000, torch.float32) == (BALANCED, 1024)


def test_schedule_is_what_the_call_says(monkeypatch):
    monkeypatch.setattr("liger_kernels.ops.loss.head.use_triton", lambda x, **how: True)
    of = Schedule(monkeypatch).of
    assert of(8192, 5, memory="fast") == of(7, 5, memory="fast") == (WHOLE,)
    assert of(8193, 5, memory="fast") == (BALANCED, 8192)
    assert of(8193, 5, memory="fast", reduction="none") == of(8193, 5, chunk_size=8193) == (WHOLE,)
    assert of(8193, 4096) == (BALANCED, 8192)  # what "fast" is there
    assert of(7, 5, grad=False) == of(7, 5, grad=False, memory="fast") == (BALANCED, 1024)  # nothing to keep logits for
    assert of(5000, 5, memory="balanced") == of(7, 5, memory="balanced") == (BALANCED, 1024)
    assert of(5000, 5, torch.float16, memory="fast") == (BALANCED, 1024)
    assert of(7, 5, memory="small") == (SMALL, SLAB)
    assert of(7, 5, memory="small", label_smoothing=0.1) == of(7, 5, torch.float16, memory="small") == (BALANCED, 1024)
    assert of(7, 5, chunk_size=6) == (BALANCED, 6)
    assert of(7, 5, chunk_size=7) == of(7, 5, chunk_size=8) == (WHOLE,)
    assert of(7, 5, torch.float16, chunk_size=8) == (BALANCED, 8)
    with chunks_of(6):
        assert of(7, 5) == (BALANCED, 6)
        assert of(7, 5, memory="fast") == (WHOLE,)
        assert of(8193, 5, memory="fast") == (BALANCED, 8192)
        assert of(7, 5, memory="balanced") == (BALANCED, 1024)
        assert of(7, 5, chunk_size=3) == (BALANCED, 3)
    with slabs_of(6):
        assert of(7, 5, memory="small") == (SMALL, 6)
        assert of(7, 5) == (WHOLE,)
    assert of(7, 5, memory="small") == (SMALL, SLAB)


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
def test_when_fast_keeps_logits_in_d_weight(how, kept, device, schedules):
    how = dict(how)
    slab, function = how.pop("slab", SLAB), linear_cross_entropy
    if how.pop("compiled", False):
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    case = Case(device, torch.bfloat16, **TWO, **how)
    with slabs_of(slab) if slab else contextlib.nullcontext():
        case.run(function, memory="fast")
    assert schedules == [VocabularySlabs(kept, VOCAB - kept)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("weight", [True, False], ids=["", "frozen"])
@pytest.mark.parametrize(
    "shape", [(8192, 4096, 128256), (32768, 4096, 128256), (8192, 768, 50257), (100, 4096, 32000), (0, 8, 8)]
)
def test_balanced_of_each_row_takes_no_more_than_token_chunks(shape, weight, itemsize):
    """And computes as few logits twice as that allows."""
    (tokens, hidden, vocab), chunk = shape, 1024
    with tiled(slabs=lambda choose, *shape: choose(*shape)):  # not those of the tests
        found = VocabularySlabs.balanced(*shape, itemsize, weight)
        assert found.held_classes or found == VocabularySlabs.small(*shape, weight)
    chunks = (4 * weight * vocab + itemsize * tokens) * hidden + itemsize * vocab * chunk
    logits = itemsize * tokens * found.held_classes
    taken = (itemsize * weight * vocab + max(4, itemsize) * tokens) * hidden + logits
    if found.held_classes and found.slab:
        assert taken <= chunks < taken + itemsize * tokens * 1024
        assert found.slab <= found.held_classes
    elif found.held_classes:  # all
        assert taken - chunks <= 2 * tokens * hidden or tokens <= chunk


@pytest.mark.parametrize(
    ("needs", "chunk", "between"), [((1, 1), 4, 1), ((0, 1), 3, 2), ((1, 0), 18, 1), ((1, 0), 12, 4)], ids=str
)
def test_what_held_slabs_cost(between, chunk, needs, device, schedules):
    function = functools.partial(in_held_slabs, chunk=chunk)
    case = Case(device, torch.bfloat16, needs=(*needs, False), bias=False, reduction="none")
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        case.run(function)
    (schedule,) = schedules
    kept = schedule.kept_classes + schedule.held_classes
    assert -(-(VOCAB - kept) // schedule.slab) == between
    (tokens, hidden), held = case.tensors[0].shape, schedule.held_classes
    assert bool(schedule.kept_classes) == needs[1]
    assert spy.operations == tokens * hidden * (VOCAB * (2 + sum(needs)) - kept)
    gradients = 4 * tokens * hidden * needs[0] + 2 * VOCAB * hidden * needs[1]
    assert spy.bytes <= 2 * tokens * held + gradients + 96 * tokens
    case.assert_right(function=function)


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
