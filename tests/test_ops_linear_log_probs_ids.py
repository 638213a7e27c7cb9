"""Log-probabilities of chosen classes of each row (``ids`` of linear_log_probs), and their gradient."""

from __future__ import annotations

import functools

import pytest
import torch

from convergence.judge.tolerance import three_way
from liger_kernels.ops import CountedTargets, LossOptions, linear_log_probs, linear_log_probs_ref
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.linear_log_probs import MOST_IDS
from liger_kernels.ops.loss.rows import Rows, finish_ids, id_grads
from liger_kernels.ops.runtime.tiling import tiled
from tests.linear_cross_entropy_checks import (
    ALL,
    HIDDEN,
    TOKENS,
    VOCAB,
    LogProbs,
    assert_equal,
    chunks_of,
    in_held_slabs,
)

pytestmark = pytest.mark.usefixtures("small_slabs")

OPTIONS = {name: ALL[name] for name in ("temperature", "softcap", "logit_scale", "ignore_index")}
IDS = 5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def in_token_chunks(*args, **options):
    with chunks_of(5):
        return linear_log_probs(*args, **options)


WAYS = {
    **{memory: functools.partial(linear_log_probs, memory=memory) for memory in MEMORY},
    "held slabs": functools.partial(in_held_slabs, op=linear_log_probs),
    "token chunks": in_token_chunks,
}
every_memory = pytest.mark.parametrize("memory", MEMORY)


@pytest.mark.parametrize(
    "options", [{}, OPTIONS, {"logit_scale": 1.7, "temperature": 0.7}], ids=["plain", "all", "scale"]
)
@pytest.mark.parametrize(
    ("way", "dtype"),
    [(way, dtype) for way in WAYS for dtype in (FP32, BF16, FP16) if (dtype == FP16) == (way == "token chunks")],
    ids=str,
)
def test_every_schedule(way, dtype, options, device):
    LogProbs(device, dtype, ids=IDS, **options).assert_right(WAYS[way])


@pytest.mark.parametrize("of", [(), ("log_probs",), ("entropy",)], ids=str)
@every_memory
def test_alone_and_with_another_gradient(memory, of, device):
    LogProbs(device, BF16, of=of, ids=IDS).assert_right(memory=memory, outputs=of)


@pytest.mark.parametrize("ids", [1, 2, MOST_IDS])
@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_how_many_there_are(tokens, ids, device):
    for memory in ("fast", "small"):
        LogProbs(device, tokens=tokens, ids=ids).assert_right(memory=memory)


def test_one_id_that_is_the_target_is_the_label(device):
    """The log-probability and, to roundoff of the same sums, the gradient, also of a prediction that is nearly sure."""
    case = LogProbs(device, of=("log_probs",))
    case.tensors[0] *= 8
    case.targets[:] = (case.tensors[0] @ case.tensors[1].t() + case.tensors[2]).argmax(-1)
    case.targets[::5] = -100
    leaves = case.leaves()
    ids = case.targets.clamp(min=-1)[:, None]
    out = case.call(leaves, outputs=("log_probs",), ids=ids)
    wanted = torch.autograd.grad(out.log_probs, leaves, case.upstream[0], retain_graph=True)
    got = torch.autograd.grad(out.id_log_probs, leaves, case.upstream[0][:, None])
    assert float(out.log_probs.detach().max()) > -1e-3
    truth, true_grads = case.run(linear_log_probs_ref, torch.float64, outputs=("log_probs",))
    three_way(out.id_log_probs[:, 0], out.log_probs, truth.log_probs, FP32, "log_probs")
    for *three, name in zip(got, wanted, true_grads, ("hidden", "weight", "bias"), strict=True):
        three_way(*three, FP32, f"gradient of {name}", chain=3)


@every_memory
def test_equal_ids_and_no_class(memory, device):
    """An id that stands three times has the sum of what comes in for it. -1 has neither a probability nor a gradient,
    not even if a NaN comes in for it."""
    case = LogProbs(device, bias=False)
    hidden, weight = (t.requires_grad_() for t in case.leaves()[:2])
    call = functools.partial(linear_log_probs, hidden, weight, case.targets, outputs=(), memory=memory)
    one = torch.arange(TOKENS, device=device)[:, None] % VOCAB
    none = torch.full_like(one, -1)
    out = call(ids=torch.cat([one, none, one, one], 1)).id_log_probs
    assert not out[:, 1].any()
    upstream = torch.tensor([[0.5, float("nan"), -2.0, 4.0]], device=device).expand(TOKENS, 4)
    got = torch.autograd.grad(out, (hidden, weight), upstream)
    wanted = torch.autograd.grad(call(ids=one).id_log_probs, (hidden, weight), torch.full_like(out[:, :1], 2.5))
    assert_equal(got, wanted)


@every_memory
def test_classes_that_are_masked(memory, device):
    """A chosen class of bias minus infinity has a log-probability of minus infinity and takes no gradient."""
    case = LogProbs(device, ids=IDS)
    case.tensors[2][::7] = float("-inf")
    case.targets[case.targets % 7 == 0] = 1
    out, _ = case.run(linear_log_probs, memory=memory)
    masked = (case.ids % 7 == 0) & (case.ids >= 0) & (case.targets != -100)[:, None]
    assert bool(masked.any())
    assert bool((out.id_log_probs[masked] == float("-inf")).all())
    case.ids[case.ids % 7 == 0] = -1
    case.assert_right(memory=memory, outputs=("log_probs", "entropy"))


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)], ids=str)
@every_memory
def test_frozen_parts(memory, needs, device):
    LogProbs(device, BF16, needs=needs, ids=IDS).assert_right(memory=memory)


@every_memory
def test_counted_rows(memory, device):
    case = LogProbs(device, of=("log_probs",), ids=IDS)
    case.targets[::2] = -100
    with tiled(counted_rows=lambda choose, tokens, counted: counted):
        case.assert_right(memory=memory, counted=CountedTargets(case.targets), outputs=("log_probs",))


@every_memory
def test_backward_twice_and_nothing_overwritten(memory, device):
    case = LogProbs(device, BF16, ids=IDS)
    leaves, ids = case.leaves(), case.ids.clone()
    out = case.call(leaves, memory=memory)
    results, upstream = case.differentiated(out)
    before = out.id_log_probs.clone()
    first = [g.clone() for g in torch.autograd.grad(results, leaves, list(upstream), retain_graph=True)]
    assert_equal(list(torch.autograd.grad(results, leaves, list(upstream))), first)
    assert_equal([out.id_log_probs, leaves, case.ids], [before, case.tensors, ids])


@every_memory
def test_ids_of_any_strides_and_type(memory, device):
    case = LogProbs(device, ids=4)
    expected, gradients = case.run(memory=memory)
    upstream, ids = case.upstream[-1], case.ids
    case.upstream[-1] = upstream.t().contiguous().t()
    for given in (ids.t().contiguous().t(), ids.repeat(1, 2)[:, :4], ids.to(torch.int32)):
        case.ids = given
        out, grads = case.run(memory=memory)
        assert_equal([out.id_log_probs, grads], [expected.id_log_probs, gradients])


@every_memory
def test_compiles_without_a_graph_break(memory, device):
    torch.compiler.reset()
    compiled = torch.compile(linear_log_probs, fullgraph=True, backend="aot_eager")
    for tokens in (TOKENS, TOKENS + 4):
        LogProbs(device, tokens=tokens, ids=3).assert_right(compiled, memory=memory)


def test_autocast_of_float32_masters(device):
    case = LogProbs(device, of=(), ids=IDS)
    with torch.autocast(device.type, BF16):
        ours, grads = case.run()
        torchs, torch_grads = case.run(linear_log_probs_ref)
    truth, true_grads = case.run(linear_log_probs_ref, torch.float64)
    assert ours.id_log_probs.dtype == FP32
    three_way(ours.id_log_probs, torchs.id_log_probs, truth.id_log_probs, BF16, "id_log_probs")
    for grad, theirs, true in zip(grads, torch_grads, true_grads, strict=True):
        assert grad.dtype == FP32
        three_way(grad, theirs, true, BF16, "gradient", chain=3)


def test_reference_gradient():
    case = LogProbs(torch.device("cpu"), torch.float64, tokens=4, hidden=3, vocab=5, ids=3, **OPTIONS)

    def every(*leaves):
        return tuple(case.differentiated(case.call(leaves, linear_log_probs_ref, outputs=("log_probs", "entropy")))[0])

    assert torch.autograd.gradcheck(every, case.leaves())


def test_an_id_out_of_range_makes_its_row_nan(device):
    """Where nobody waits to look. The other rows, and the other ids' log-probabilities, are what they are without."""
    ids = torch.tensor([[1, 2], [7, 0], [-2, 0], [0, 9], [3, 3]], device=device)
    targets = torch.tensor([0, 1, 1, -100, 7], device=device)
    rows = Rows.empty(5, device, LossOptions(), stats=True, n_ids=2)
    rows.stats.fill_(2.0)
    finish_ids(rows, ids, targets, -100, 7)
    nan = rows.ids.isnan().tolist()
    assert nan == [[False, False], [True, False], [True, False], [False, False], [True, True]]
    assert not rows.ids[3].any()
    found = id_grads(ids, targets, torch.ones(5, 2, device=device), -100, 7)
    assert found.totals[0].isnan().tolist() == [False, True, True, False, False]
    assert not found.totals[:, 3].any()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(TOKENS, 0, dtype=torch.int64), ValueError, rf"shape \({TOKENS}, 0\).*K from 1 to 256"),
        (torch.zeros(TOKENS, 257, dtype=torch.int64), ValueError, "K from 1 to 256"),
        (torch.zeros(TOKENS, dtype=torch.int64), ValueError, rf"must be \[{TOKENS}, K\]"),
        (torch.zeros(TOKENS + 1, 2, dtype=torch.int64), ValueError, rf"must be \[{TOKENS}, K\]"),
        (torch.zeros(TOKENS, 2), TypeError, "ids are torch.float32"),
        (torch.full((TOKENS, 2), VOCAB), ValueError, f"ids have {VOCAB}; there are {VOCAB} classes"),
        (torch.full((TOKENS, 2), -2), ValueError, "ids have -2"),
        ([[1]], TypeError, "ids is a list"),
    ],
)
@pytest.mark.parametrize("op", [linear_log_probs, linear_log_probs_ref])
def test_bad_input(op, ids, error, message):
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    with pytest.raises(error, match=message):
        op(hidden, weight, torch.zeros(TOKENS, dtype=torch.int64), ids=ids)
