"""Log-probabilities and entropy of a linear head, their gradients, and what else is computed with them."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convergence.judge.tolerance import three_way
from liger_kernels.ops import linear_log_probs, linear_log_probs_ref
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.linear_log_probs import OUTPUTS
from liger_kernels.ops.loss.schedules.schedule import padded
from liger_kernels.ops.runtime.tiling import tiled
from tests.linear_cross_entropy_checks import (
    ALL,
    DTYPES,
    GRADIENTS,
    HIDDEN,
    TOKENS,
    VOCAB,
    LogProbs,
    Spy,
    assert_equal,
    chunks_of,
    in_held_slabs,
    slabs_of,
)

pytestmark = pytest.mark.usefixtures("small_slabs")


OPTIONS = {name: ALL[name] for name in ("temperature", "softcap", "logit_scale", "ignore_index")}


def in_token_chunks(*args, **options):
    """Five of them in float16, which never goes in slabs."""
    with chunks_of(5):
        return linear_log_probs(*args, **options)


WAYS = {
    **{memory: functools.partial(linear_log_probs, memory=memory) for memory in MEMORY},
    "held slabs": functools.partial(in_held_slabs, op=linear_log_probs),
    "token chunks": in_token_chunks,
}
every_memory = pytest.mark.parametrize("memory", MEMORY)
every_way = pytest.mark.parametrize(
    ("way", "dtype"),
    [
        pytest.param(way, dtype, id=f"{name}-{dtype}")
        for name, way in WAYS.items()
        for dtype in DTYPES
        if (dtype == torch.float16) == (name == "token chunks")
    ],
)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all"])
@every_way
def test_every_option(way, dtype, options, device):
    LogProbs(device, dtype, **options).assert_right(way)


@pytest.mark.parametrize("of", [("log_probs",), ("entropy",)], ids=str)
@every_memory
def test_gradient_of_one_alone(memory, of, device):
    """One upstream gradient is not there at all, which is not the same as zeros."""
    LogProbs(device, torch.bfloat16, of=of).assert_right(memory=memory)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)], ids=str)
@every_way
def test_frozen_parts(way, dtype, needs, device):
    LogProbs(device, dtype, needs=needs).assert_right(way)


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_in_two_kept_slabs(tokens, device):
    with slabs_of(24):
        LogProbs(device, torch.bfloat16, hidden=64, tokens=tokens).assert_right(memory="fast")


@settings(derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 30),
    hidden=st.integers(1, 80),
    vocab=st.integers(2, 150),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    memory=st.sampled_from([None, *MEMORY]),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    softcap=st.sampled_from([None, 5.0]),
    logit_scale=st.sampled_from([1.0, 1.7]),
    ignore_index=st.sampled_from([-100, 0]),
    seed=st.integers(0, 1000),
)
def test_any_shape(device, memory, **case):
    LogProbs(device, **case).assert_right(memory=memory)


def test_large_logits_and_sure_predictions(device):
    """Where one class has all the probability, the entropy and its gradient are 0, and nothing is NaN."""
    case = LogProbs(device)
    case.tensors[0] *= 1e3
    for memory in MEMORY:
        out, grads = case.run(linear_log_probs, memory=memory)
        assert all(bool(torch.isfinite(t).all()) for t in (out.log_probs, out.entropy, *grads))


@every_memory
def test_classes_that_are_masked(memory, device):
    """A bias of minus infinity leaves a class no probability and no gradient."""
    case = LogProbs(device)
    case.tensors[2][::7] = float("-inf")
    case.targets[case.targets % 7 == 0] = 1
    case.assert_right(memory=memory, outputs=GRADIENTS)  # a mean logit is infinite


@pytest.mark.parametrize("masked", [slice(0, 32), slice(16, 48)], ids=["first", "later"])
@every_memory
def test_blocks_that_the_smallest_number_masks(memory, masked, device):
    """Of a block that was masked so nothing is left once another one is known, and its distance is no NaN."""
    case = LogProbs(device)
    case.tensors[2][masked] = torch.finfo(torch.float32).min
    case.targets[(case.targets >= masked.start) & (case.targets < masked.stop)] = 49
    with tiled(cross_entropy=lambda *_, **__: {"ROWS": 4, "BLOCK": 16, "num_warps": 1}):
        case.assert_right(memory=memory, outputs=GRADIENTS)


@every_memory
def test_ties(memory, device):
    """Of equal largest logits the first one counts, in whatever block or slab the others are."""
    hidden, weight = torch.zeros(VOCAB, HIDDEN, device=device), torch.ones(VOCAB, HIDDEN, device=device)
    out = linear_log_probs(
        hidden.requires_grad_(), weight, torch.arange(VOCAB, device=device), outputs=("is_top1",), memory=memory
    )
    assert out.is_top1.tolist() == [True] + [False] * (VOCAB - 1)


NUMBERS = {
    (1.0, None, 1.0): (
        [-0.471242096898, 0.0, -0.081451723643],
        [0.922128662920, 0.0, 0.323212621096],
        [0.101850221153, -0.047213586404, 0.0, 0.0, 0.241896594737, -0.111315581179],
        [
            [-0.269226490622, 0.576156648464, -0.175379061549, 0.512726205377],
            [0.222045900431, -0.656249804525, 0.222559651740, -0.432633049315],
        ],
        [-0.193819156182, 0.148557103007, -0.202270106897, 0.247532160071],
    ),
    (0.7, 2.0, 1.5): (
        [-0.471817117906, 0.0, -0.118884927367],
        [0.795692720303, 0.0, 0.390829850172],
        [0.038336628594, 0.075775701476, 0.0, 0.0, 0.528171481899, 0.227351639929],
        [
            [-0.356302451193, 0.731412555006, -0.493205867186, 1.501284522630],
            [0.030350296673, -0.087202928440, 0.119623704459, -0.236981033793],
        ],
        [-0.318687145951, 0.536539709329, -0.022654373515, 0.124156454712],
    ),
}


@pytest.mark.parametrize("options", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_numbers(dtype, options, device):
    """Computed once in float64 from the formulas at the top of the op's file."""
    temperature, softcap, logit_scale = options
    data = [[1, -2], [0.5, 0.25], [-1, 3]], [[0.2, -0.4], [1, 0.5], [-0.3, 0.8], [0.7, -0.6]], [0.1, -0.2, 0.3, 0]
    hidden, weight, bias = (torch.tensor(d, dtype=dtype, device=device, requires_grad=True) for d in data)
    targets = torch.tensor([3, -100, 2], device=device)
    scaling = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    out = linear_log_probs(hidden, weight, targets, bias, outputs=GRADIENTS, **scaling)
    upstream = [torch.tensor(u, dtype=dtype, device=device) for u in ([1, 5, -2], [0.5, 7, 0.25])]
    grads = torch.autograd.grad([out.log_probs, out.entropy], (hidden, weight, bias), upstream)
    for got, expected in zip((out.log_probs, out.entropy, *grads), NUMBERS[options], strict=True):
        wanted = torch.tensor(expected, dtype=dtype, device=device).flatten()
        error = 1e-11 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(got.flatten(), wanted, rtol=error, atol=error)


def test_reference_gradient():
    case = LogProbs(torch.device("cpu"), torch.float64, tokens=4, hidden=3, vocab=5, **OPTIONS)

    def both(*leaves):
        return tuple(case.differentiated(case.call(leaves, linear_log_probs_ref, outputs=GRADIENTS))[0])

    assert torch.autograd.gradcheck(both, case.leaves())


@every_memory
def test_backward_twice_and_nothing_overwritten(memory, device):
    case = LogProbs(device, torch.bfloat16)
    leaves, targets = case.leaves(), case.targets.clone()
    out = case.call(leaves, memory=memory)
    results, upstream = case.differentiated(out)
    before = [None if t is None else t.clone() for t in out]
    first = torch.autograd.grad(results, leaves, list(upstream), retain_graph=True)
    copies = [grad.clone() for grad in first]
    assert_equal(torch.autograd.grad(results, leaves, list(upstream)), copies)
    assert_equal([first, out, leaves, case.targets], [tuple(copies), tuple(before), case.tensors, targets])


def test_the_first_chunk_of_tokens_is_multiplied_once(device, monkeypatch):
    """Its logits stay until the first backward, which overwrites them. The next backward computes them again. All
    chunks share a buffer."""
    case, spy, products = LogProbs(device, torch.float16), Spy(monkeypatch), []
    buffer = ((5, padded(VOCAB)), torch.float16)
    leaves = case.leaves()
    results, upstream = case.differentiated(case.call(leaves, in_token_chunks))
    assert spy.allocated.count(buffer) == 1
    for again in (True, False):
        spy.reset()
        products.append([torch.autograd.grad(results, leaves, list(upstream), retain_graph=again), spy.operations])
        assert spy.allocated.count(buffer) == (not again)
    (first, few), (second, more) = products
    assert_equal(second, first)
    assert [few, more] == [(3 * TOKENS - 5) * HIDDEN * VOCAB, 3 * TOKENS * HIDDEN * VOCAB]


@every_memory
def test_compiles_without_a_graph_break(memory, device):
    torch.compiler.reset()
    compiled = torch.compile(linear_log_probs, fullgraph=True, backend="aot_eager")
    for tokens in (TOKENS, TOKENS + 4):
        LogProbs(device, tokens=tokens).assert_right(compiled, memory=memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_of_float32_masters(dtype, device):
    case = LogProbs(device)
    with torch.autocast(device.type, dtype):
        ours, grads = case.run()
        torchs, torch_grads = case.run(linear_log_probs_ref)
    truth, true_grads = case.run(linear_log_probs_ref, torch.float64)
    three_way(ours.log_probs, torchs.log_probs, truth.log_probs, dtype, "log_probs")
    for grad, theirs, true in zip(grads, torch_grads, true_grads, strict=True):
        assert grad.dtype == torch.float32
        three_way(grad, theirs, true, dtype, "gradient", chain=3)


def test_only_what_is_asked_for(device):
    case = LogProbs(device)
    for name in OUTPUTS:
        out = linear_log_probs(*case.tensors[:2], case.targets, case.tensors[2], outputs=(name,))
        assert [field for field in OUTPUTS if getattr(out, field) is not None] == [name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be positive"),
        ({"outputs": ("logprobs",)}, "outputs is .*logprobs.* from 'log_probs', 'entropy'"),
        ({"outputs": "entropy"}, "must be a tuple"),
        ({"outputs": ()}, "at least one name"),
        ({"memory": "less"}, "memory is 'less'"),
        ({"targets": torch.full((TOKENS,), VOCAB)}, "target 67 is out of range"),
    ],
    ids=str,
)
def test_bad_input(change, message):
    case = LogProbs(torch.device("cpu"), torch.float32)
    arguments = {"targets": case.targets, "bias": case.tensors[2], **change}
    with pytest.raises((TypeError, ValueError), match=message):
        linear_log_probs(*case.tensors[:2], **arguments)
