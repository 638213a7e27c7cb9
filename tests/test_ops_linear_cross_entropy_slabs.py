"""The schedules of ``linear_cross_entropy`` that slice the vocabulary: where a slab's logits lie and for how long, by
which products they are computed, and what sums over slabs round."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from convergence.judge.tolerance import unit_roundoff
from liger_kernels.ops import observe_logits_grad
from liger_kernels.ops._split_sum import SplitSum
from liger_kernels.ops.loss.cross_entropy import EXTRAS
from liger_kernels.ops.loss.linear_cross_entropy import linear_cross_entropy_ref
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.schedules import vocabulary_slabs
from liger_kernels.ops.loss.schedules.schedule import Call, Needs
from liger_kernels.ops.loss.schedules.slab_plan import SlabPart, SlabPlace, SlabPlan
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs, _logits_of_parts
from liger_kernels.ops.runtime.tiling import tiled
from tests.linear_cross_entropy_checks import (
    HELD_SLABS,
    REDUCTIONS,
    SLAB,
    SLABS,
    TWO,
    TWO_SLABS,
    VOCAB,
    Case,
    Spy,
    assert_equal,
    in_held_slabs,
    in_two_slabs,
)

pytestmark = pytest.mark.usefixtures("small_slabs")


HEAD = 8192, 4096, 128256
ALL_BUT_BIAS = Needs(True, True, False)


def plan_of(make, *shape, itemsize=2, needs=ALL_BUT_BIAS):
    """What ``make`` of :class:`VocabularySlabs` plans with the slabs of a GPU, not those of the tests."""
    with tiled(slabs=lambda choose, *shape: choose(*shape)):
        sizes = shape if make == "small" else (*shape, itemsize)
        return getattr(VocabularySlabs, make)(*sizes, needs.weight).plan(*shape, itemsize, needs)


BEHIND, FIRST_ROWS, LAST, SHARED = SlabPlace
KEPT = SlabPart(0, 41984, 41984, BEHIND, BEHIND, stays=True)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        ("fast", SlabPlan((KEPT, SlabPart(41984, 128256, 86272, LAST, LAST, stays=True)), grad_weight_last=True)),
        (
            "balanced",
            SlabPlan(
                (
                    KEPT,
                    SlabPart(41984, 52480, 11264, LAST, LAST, stays=False),
                    SlabPart(52480, 128256, 75776, LAST, LAST, stays=True),
                ),
                grad_weight_last=False,
            ),
        ),
        (
            "small",
            SlabPlan(
                (
                    KEPT,
                    SlabPart(41984, 62464, 20480, FIRST_ROWS, BEHIND, stays=False),
                    SlabPart(62464, 82944, 20480, FIRST_ROWS, BEHIND, stays=False),
                    SlabPart(82944, 97280, 14336, FIRST_ROWS, BEHIND, stays=False),
                    SlabPart(97280, 107520, 10240, FIRST_ROWS, BEHIND, stays=False),
                    SlabPart(107520, 113664, 6144, FIRST_ROWS, BEHIND, stays=False),
                    SlabPart(113664, 117760, 4096, FIRST_ROWS, SHARED, stays=False),
                    SlabPart(117760, 121856, 4096, FIRST_ROWS, SHARED, stays=False),
                    SlabPart(121856, 125952, 4096, FIRST_ROWS, SHARED, stays=False),
                    SlabPart(125952, 128256, 4096, FIRST_ROWS, SHARED, stays=False),
                ),
                grad_weight_last=False,
            ),
        ),
    ],
)
def test_the_plan_of_a_head(make, expected):
    assert plan_of(make, *HEAD) == expected


def test_a_plan_says_what_it_does():
    assert str(plan_of("balanced", *HEAD)).splitlines() == [
        "each part writes its rows of grad_weight",
        "classes 0 to 41984, stride 41984: behind its rows of grad_weight, stays",
        "classes 41984 to 52480, stride 11264: in the buffer of the last part, "
        "computed again in the buffer of the last part",
        "classes 52480 to 128256, stride 75776: in the buffer of the last part, stays",
    ]


@pytest.mark.parametrize("needs", [(1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("make", ["fast", "balanced", "small"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_every_plan_holds(make, itemsize, needs):
    """The parts are the vocabulary, and what lies in grad_weight lies where nothing else does."""
    for tokens, hidden, vocab in (HEAD, (32768, 4096, 128256), (100, 768, 50257), (0, 64, 999), (9, 8, 0), (1, 3, 7)):
        parts, last = plan_of(make, tokens, hidden, vocab, itemsize=itemsize, needs=Needs(*map(bool, needs)))
        assert [part.first for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].first, parts[-1].stop) == (0, vocab) if parts else vocab == 0
        assert all(part.stays for part in parts) or not last
        for part in parts:
            assert part.stop - part.first <= part.stride
            assert part.stride % 8 == 0
            if tokens and BEHIND in (part.forward, part.backward):
                assert needs[1]
                assert part.stop * hidden + 7 + tokens * part.stride <= vocab * hidden
            if tokens and part.forward is FIRST_ROWS:
                assert tokens * part.stride <= parts[0].stop * hidden


@pytest.fixture
def products(monkeypatch):
    """Of which classes logits were computed: the weight's offset, how many, their strides, and how they are aligned."""
    found, compute = [], vocabulary_slabs.logits_of

    def recorded(states, weight, bias, buffer, *options):
        logits = compute(states, weight, bias, buffer, *options)
        found.append((weight.storage_offset(), len(weight), logits.stride(), logits.data_ptr() % 16))
        return logits

    monkeypatch.setattr(vocabulary_slabs, "logits_of", recorded)
    return found


@pytest.mark.parametrize(("hidden", "bias"), [(63, True), (64, False)])
def test_logits_of_wide_slabs_lie_in_what_is_not_written_yet_of_the_weight_gradient(hidden, bias, device, monkeypatch):
    """A slab of 192 classes; the last two, of 24, have a buffer of their own. The forward computes those of both in
    rows of d weight that only the backward writes, and the backward finds the first slab's computed."""
    case = Case(device, torch.bfloat16, tokens=8, hidden=hidden, vocab=10 * SLAB, bias=bias)
    case.assert_right(memory="small")
    spy = Spy(monkeypatch)
    case.run(memory="small")
    assert spy.operations == 8 * hidden * (4 * 10 * SLAB - 192)
    assert spy.bytes < 2 * 10 * SLAB * hidden + 2 * 8 * SLAB + 4 * 8 * hidden + 128 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slabs_of_many_tokens_take_the_memory_of_a_sum_that_comes_later(dtype, device, monkeypatch, products):
    """That of d hidden. The first slab's rows of d weight have room for 72 classes."""
    case = Case(device, dtype, tokens=128, hidden=64, vocab=20 * SLAB, bias=False)
    case.assert_right(memory="small")
    products.clear()
    spy = Spy(monkeypatch)
    loss = case.call(case.leaves(), SLABS["function"])
    assert [classes for _, classes, *_ in products[:2]] == [144, 96 if dtype == torch.bfloat16 else 72]
    beside_d_weight = spy.bytes - case.tensors[1].nbytes
    spy.reset()
    loss.backward()
    assert beside_d_weight <= spy.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 8])
@pytest.mark.parametrize(
    ("schedule", "vocab"), [(SLABS, 10 * SLAB), (TWO_SLABS, 10 * SLAB - 3)], ids=["one slab", "two slabs"]
)
def test_a_slab_is_kept_for_the_first_backward_pass_alone(schedule, vocab, tokens, dtype, device, monkeypatch):
    """A second one computes it again, to the same bits and in little more memory than d weight."""
    case = Case(device, dtype, tokens=tokens, vocab=vocab, **{**schedule, **TWO})
    spy, leaves = Spy(monkeypatch), case.leaves()
    loss = case.call(leaves)
    held = spy.bytes
    assert held <= dtype.itemsize * 64 * (vocab + tokens) + 96 * max(tokens, 8), "d weight is held, and little more"
    spent, grads = [], []
    for _ in range(2):
        spy.reset()
        grads.append(torch.autograd.grad(loss, leaves, retain_graph=True))
        spent.append(spy.operations)
        assert spy.bytes <= held + 4 * 64 * tokens + 2 * vocab * dtype.itemsize
    assert spent[1] > spent[0] or not tokens
    assert_equal(*grads)
    case.assert_right()


def test_no_slab_is_kept_in_a_compiled_program(device):
    """Which would copy d weight with it."""
    case = Case(device, torch.bfloat16, tokens=8, hidden=64, vocab=10 * SLAB)
    compiled = torch.compile(SLABS["function"], fullgraph=True, backend="aot_eager")
    leaves, spent = case.leaves(), []
    for function in (SLABS["function"], compiled):
        loss = case.call(leaves, function)
        with pytest.MonkeyPatch.context() as patch:
            spy = Spy(patch)
            torch.autograd.grad(loss, leaves)
        spent.append(spy.operations)
    assert spent[1] > spent[0]
    # Its forward's slabs are others, and a GPU's product of other shapes rounds a few logits otherwise.
    case.assert_right(function=compiled)


@pytest.mark.parametrize("hidden", [63, 65])
@pytest.mark.parametrize("tokens", [5, 21])
def test_kept_slabs_begin_at_aligned_addresses(tokens, hidden, device):
    """Also where the rows of d weight do not end at one."""
    case = Case(device, torch.bfloat16, tokens=tokens, hidden=hidden)
    case.assert_right(function=in_two_slabs)
    call = Call(*case.tensors[:2], None, case.targets, *[None] * 3, LossOptions(), Needs(True, True, False))
    schedule = VocabularySlabs(40, len(case.tensors[1]) - 40)
    buffers = schedule.allocate(call).buffers
    d_weight, parts = buffers[0], schedule.plan_of(call).parts
    (_, first, _), (_, second, _) = _logits_of_parts(call, parts, buffers, known=True)
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


def test_a_slab_is_released_before_the_sum_is_rounded(device, monkeypatch):
    """Rounding copies the front of the sum, which would come on top of the slab's logits."""
    made, alive = [], []

    make, finish = vocabulary_slabs.logits_buffer, SplitSum.rounded

    def buffer(*args):
        new = make(*args)
        made.append(StorageWeakRef(new.untyped_storage()))
        return new

    def rounded(*args, **how):
        gc.collect()  # the interpreter leaves cycles behind that hold what a kernel was given
        alive.extend(not storage.expired() for storage in made)
        return finish(*args, **how)

    monkeypatch.setattr(vocabulary_slabs, "logits_buffer", buffer)
    monkeypatch.setattr(SplitSum, "rounded", rounded)
    Case(device, torch.bfloat16).run(memory="small")
    assert alive == [False, False]  # of the forward and of the backward


@pytest.mark.parametrize(
    "schedule", [SLABS, TWO_SLABS, HELD_SLABS], ids=["vocabulary slabs", "two kept slabs", "held slabs"]
)
def test_argmax_and_target_in_any_slab(schedule, device):
    """The largest logit, and the target's, in every class once: equal logits count for the first of them."""
    hidden, weight = (F.pad(torch.eye(VOCAB, device=device), (0, 256 - VOCAB)) for _ in range(2))
    targets = (torch.arange(VOCAB, device=device) * 29) % VOCAB
    for rows in torch.arange(VOCAB, device=device).split(34):
        for scaled in (7 * weight, 0 * weight):
            inputs = hidden[rows], scaled.requires_grad_(), targets[rows]
            ours, theirs = (
                function(*inputs, extras=EXTRAS, reduction="none")
                for function in (schedule["function"], linear_cross_entropy_ref)
            )
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("needs", [(True, True, False), (True, False, False)], ids=["both gradients", "frozen weight"])
@pytest.mark.parametrize(("tokens", "hidden"), [(8, 64), (40, 17), (3, 200)])
@pytest.mark.parametrize(
    "function",
    [SLABS["function"], functools.partial(in_held_slabs, chunk=2, reduction="none")],
    ids=["small", "balanced"],
)
def test_logits_are_computed_again_by_the_same_products(function, tokens, hidden, needs, device, products):
    """Another shape or stride would let them round another way than those of the loss, which a peaked softmax makes a
    wrong gradient: on a GPU, 262,143 classes of 2,601 gave one 56 times as far off as PyTorch's."""
    case = Case(device, torch.bfloat16, tokens=tokens, hidden=hidden, vocab=20 * SLAB + 5, needs=needs)
    loss = case.call(case.leaves(), function)
    forward = list(products)
    products.clear()
    loss.sum().backward()
    assert products or (tokens < hidden and len(forward) <= 2)  # all are held
    assert set(products) <= set(forward)
