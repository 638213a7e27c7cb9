"""``linear_cross_entropy`` against float64 by the three-way rule, in every schedule: options, frozen parts, autocast,
observers, compile."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convergence.judge.tolerance import three_way
from liger_kernels.ops import observe_logits_grad
from liger_kernels.ops.loss.cross_entropy import EXTRAS, cross_entropy_ref
from liger_kernels.ops.loss.linear_cross_entropy import (
    MEMORY,
    linear_cross_entropy,
    linear_cross_entropy_ref,
)
from liger_kernels.ops.loss.operators import _as_arguments, backward_op, forward_op
from liger_kernels.ops.loss.options import WRITTEN, LossOptions
from liger_kernels.ops.loss.schedules.schedule import Call, Needs
from liger_kernels.ops.loss.schedules.token_chunks import TokenChunks
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs
from liger_kernels.ops.runtime.dispatch import launches, reset_launches
from tests.linear_cross_entropy_checks import (
    ALL,
    ALONE,
    CHUNK,
    CHUNKS,
    DTYPES,
    HELD_SLABS,
    HIDDEN,
    MOST,
    ONE_CHUNK,
    REDUCTIONS,
    SCHEDULES,
    SLAB,
    SLABS,
    TOKENS,
    TWO,
    VOCAB,
    Case,
    assert_equal,
    chunks_of,
    every_schedule,
    in_two_slabs,
    many_and_one,
    slabs_of,
)

pytestmark = pytest.mark.usefixtures("small_slabs")


def cases():
    """All options together in every schedule and dtype and with every reduction; each alone in every schedule."""
    for (name, schedule), dtype, option, reduction in itertools.product(SCHEDULES.items(), DTYPES, ALONE, REDUCTIONS):
        if dtype == torch.float16 and schedule is not CHUNKS:
            continue  # it always goes in token chunks
        if option.startswith("all") or (dtype == torch.float32 and reduction == "mean"):
            values = {"reduction": reduction, **ALONE[option], **schedule}
            yield pytest.param(dtype, values, id=f"{name}-{dtype}-{option}-{reduction}")


@pytest.mark.parametrize(("dtype", "options"), [*cases()])
def test_every_option(dtype, options, device):
    Case(device, dtype, **options).assert_right()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [ALONE["no_bias"], MOST], ids=["no_bias", "all but smoothing"])
def test_in_held_slabs(options, dtype, device):
    Case(device, dtype, **options, **HELD_SLABS).assert_right()


@settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 40),
    hidden=st.integers(1, 80),
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
    row_weight=st.booleans(),
    ignore_index=st.sampled_from([-100, 0, 5]),
    seed=st.integers(0, 1000),
)
def test_options_together(device, chunk_size, **case):
    Case(device, **case).assert_right(chunk_size=chunk_size)
    if not case["label_smoothing"] and case["dtype"] != torch.float16:  # which do not go in slabs
        for memory, slab in (("small", 3 * chunk_size), ("fast", 7)):
            with slabs_of(slab):
                Case(device, **case).assert_right(memory=memory)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_whole_chunks_ignored(reduction, device):
    case = Case(device, reduction=reduction)
    for ignored in (slice(0, CHUNK), slice(TOKENS - TOKENS % CHUNK, TOKENS), slice(CHUNK, 3 * CHUNK)):
        case.targets[ignored] = -100
        case.assert_right(chunk_size=CHUNK)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("tokens", [0, TOKENS])
@pytest.mark.parametrize(
    "schedule", [*SCHEDULES.values(), {"function": linear_cross_entropy_ref}], ids=[*SCHEDULES, "reference"]
)
def test_nothing_to_learn_from_is_zero_with_zero_gradients(schedule, tokens, reduction, device):
    case = Case(device, tokens=tokens, reduction=reduction, **schedule)
    case.targets.fill_(-100)
    loss, grads = case.run()
    assert_equal([loss, *grads], [torch.zeros_like(t) for t in (loss, *case.tensors)])


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


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [ALL, MOST], ids=["all", "all but smoothing"])
@every_schedule
def test_backward_twice_and_nothing_overwritten(schedule, options, reduction, device):
    """The same bits in both passes and in another run; a pass that does not retain the graph is the last one."""
    case = Case(device, torch.bfloat16, reduction=reduction, **options, **schedule)
    leaves, targets = case.leaves(), case.targets.clone()
    loss = case.call(leaves)
    kept = loss.detach().clone()
    first = torch.autograd.grad(loss, leaves, case.upstream, retain_graph=True)
    copies = [grad.clone() for grad in first]
    assert_equal(torch.autograd.grad(loss, leaves, case.upstream), copies)
    assert_equal((first, loss, case.targets, leaves), (tuple(copies), kept, targets, case.tensors))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward(case.upstream)
    assert_equal(case.run(), (kept, copies))


@every_schedule
def test_denominator_filled_anew_before_the_backward(schedule, device):
    """As a trainer does that keeps one tensor for the count of every batch."""
    case = Case(device, denominator=torch.tensor(31.0, device=device), **schedule)
    expected, leaves = case.run(), case.leaves()
    loss = case.call(leaves)
    case.options["denominator"].fill_(7.0)
    loss.backward(case.upstream)
    assert_equal((loss, [leaf.grad for leaf in leaves]), expected)


@every_schedule
def test_non_contiguous_inputs(schedule, device):
    case = Case(device, **schedule)
    hidden, weight, bias = case.tensors
    expected = case.run()
    case.tensors = [
        torch.stack([hidden, hidden.neg()], 1)[:, 0],
        weight.t().contiguous().t(),
        torch.stack([bias, bias], 1)[:, 1],
    ]
    case.leaves = lambda dtype=None: [t.detach().requires_grad_() for t in case.tensors]
    case.targets = torch.stack([case.targets, case.targets], 1)[:, 1]
    assert not any(t.is_contiguous() for t in (*case.tensors, case.targets))
    torch.testing.assert_close(case.run(), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@many_and_one
def test_autocast_of_float32_masters(chunk_size, dtype, reduction, device):
    case = Case(device, reduction=reduction)

    def under_autocast(function):
        leaves = case.leaves()
        with torch.autocast(device.type, dtype):
            loss = case.call(leaves, function)
            assert loss.dtype == torch.float32
            loss.backward(case.upstream)  # inside, which must not turn float32 sums into 16 bits
        return loss, *(leaf.grad for leaf in leaves)

    with chunks_of(chunk_size):
        ours = under_autocast(linear_cross_entropy)
    truth, true_grads = case.run(linear_cross_entropy_ref, torch.float64)
    for our, torchs, true in zip(ours, under_autocast(linear_cross_entropy_ref), (truth, *true_grads), strict=True):
        assert our.dtype == torch.float32
        three_way(our, torchs, true, dtype, "the loss or a gradient")


def test_autocast_leaves_float64_alone_as_linear_does(device):
    case = Case(device, torch.float64)
    with torch.autocast(device.type, torch.bfloat16):
        assert F.linear(*case.tensors).dtype == torch.float64
        assert case.call(case.tensors).dtype == torch.float64


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
    with observe_logits_grad(lambda start, grad: seen.append((start, grad))):
        observed = case.run(chunk_size=chunk_size)
    assert_equal(observed, expected)
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
    for function in (SLABS["function"], ONE_CHUNK["function"], in_two_slabs):
        with observe_logits_grad(lambda start, grad: seen.append((start, grad))):
            watched = case.run(function)
        assert_equal(watched, case.run(function))
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
        loss = case.call(leaves, chunk_size=chunk_size)
        assert calls == []
        grads = torch.autograd.grad(loss, leaves, case.upstream, retain_graph=True)
        torch.autograd.grad(loss, leaves, case.upstream, retain_graph=True)
    torch.autograd.grad(loss, leaves, case.upstream)
    assert calls == 2 * list(range(0, TOKENS, chunk_size))
    assert_equal(list(grads), expected[1])


def test_observers_and_chunk_sizes_nest_and_end(device):
    case = Case(device)
    outer, inner, last = [], [], []
    with observe_logits_grad(lambda start, grad: outer.append(start)), chunks_of(12):
        with observe_logits_grad(lambda start, grad: inner.append(start)), chunks_of(8):
            case.run()
            case.run(chunk_size=20)  # what the call says counts
        case.run()
    assert inner == [0, 8, 16, 0, 20]
    assert outer == [0, 12]
    with pytest.raises(ZeroDivisionError), observe_logits_grad(print), chunks_of(8):
        raise ZeroDivisionError
    case.run()
    with observe_logits_grad(lambda start, grad: last.append(start)):
        case.run()
    assert (inner, outer, last) == ([0, 8, 16, 0, 20], [0, 12], [0])


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
        ({"chunk_size": 2.0}, TypeError, "chunk_size is a float"),
        ({"chunk_size": 0}, ValueError, "must be at least 1 token"),
        ({"chunk_size": -1}, ValueError, "must be at least 1 token"),
        ({"memory": "tiny"}, ValueError, "memory is 'tiny'; it must be one of 'fast', 'balanced'.*, or None"),
        ({"memory": "fast", "chunk_size": 5}, ValueError, "memory is 'fast' and chunk_size is 5; give one of them"),
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
    case = Case(device, **schedule)
    leaves = case.leaves()
    assert isinstance(case.call(leaves), torch.Tensor)
    for extra in EXTRAS:
        out = case.call(leaves, extras=(extra,))
        assert [name for name in EXTRAS if getattr(out, name) is not None] == [extra]
        assert not getattr(out, extra).requires_grad
    out = case.call(leaves, extras=EXTRAS)
    logits = F.linear(*leaves)
    counted = case.targets != -100
    assert torch.equal(out.predicted_tokens, logits.argmax(-1))
    assert out.token_accuracy == (logits.argmax(-1) == case.targets)[counted].float().mean()
    assert torch.equal(out.log_probs != 0, counted)


@every_schedule
def test_float64_and_the_reference_path_agree(schedule, device, monkeypatch):
    """What a CPU without the interpreter runs: the same public function, without one launch."""
    case = Case(device, **ALL, **schedule)
    reset_launches()
    assert_equal(case.run(dtype=torch.float64), case.run(linear_cross_entropy_ref, torch.float64))
    monkeypatch.setattr("liger_kernels.ops.loss.head.use_triton", lambda x, **how: False)
    assert_equal(case.run(), case.run(linear_cross_entropy_ref))
    assert launches() == {}


@pytest.mark.parametrize(("chunk_size", "reduction"), [(CHUNK, "none"), *((TOKENS, r) for r in REDUCTIONS)])
def test_weight_changed_before_the_backward_that_needs_it_is_refused(chunk_size, reduction, device):
    """It would multiply by the wrong weight."""
    case = Case(device, reduction=reduction)
    leaves = case.leaves()
    loss = case.call(leaves, chunk_size=chunk_size)
    with torch.no_grad():
        leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


class Heads(torch.nn.Module):
    """A head for each of ``ways``, the options of its loss, in one program: a compilation takes long."""

    def __init__(self, ways, **options):
        super().__init__()
        torch.manual_seed(0)
        self.linears = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, VOCAB) for _ in ways)
        self.ways = [{**options, **way, "extras": ("log_probs", "token_accuracy")} for way in ways]

    def forward(self, hidden, targets):
        found = []
        for linear, options in zip(self.linears, self.ways, strict=True):
            out = linear_cross_entropy(hidden * 2, linear.weight, targets, linear.bias, **options)
            found += [out.loss * 0.25, out.log_probs, out.token_accuracy]
        return found

    def step(self, forward, case):
        """What ``forward`` returns, and the gradients of hidden and of every head."""
        self.zero_grad()
        hidden = case.tensors[0].clone().requires_grad_()
        found = forward(hidden, case.targets)
        torch.autograd.backward([loss.sum() for loss in found[::3]])
        return found, hidden.grad, [p.grad for p in self.parameters()]


WAYS = [{"chunk_size": size, "reduction": reduction} for size in (CHUNK, 99) for reduction in ("mean", "none")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ways", "dynamic"),
    # Inductor takes long for each head: one, where the number of tokens is a symbol.
    [("aot_eager", WAYS, None), ("inductor", WAYS[:1], True)],
    ids=["aot_eager", "inductor"],
)
def test_compiles_without_a_graph_break(backend, ways, dynamic, device, monkeypatch):
    torch._dynamo.reset()
    # What is cached on disk goes by the op's name and schema: another backward would not be seen.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    # Inductor would compile six programs to see what vectors the processor has.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    heads = Heads(ways, softcap=5.0, label_smoothing=0.1).to(device)
    compiled = torch.compile(heads, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (TOKENS, TOKENS + 4):  # where torch decides, the second makes the number of tokens symbolic
        case = Case(device, tokens=tokens)
        torch.testing.assert_close(heads.step(compiled, case), heads.step(heads, case))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", ["no_bias", "all"])
def test_what_a_compiled_program_sees_of_fast(options, reduction, device, monkeypatch):
    """Two products and the loss of logits: not compiled here, where no launch would be traced."""
    monkeypatch.setitem(linear_cross_entropy.__globals__, "_is_traced_whole", lambda hidden, vocab: True)
    monkeypatch.setattr(VocabularySlabs, "forward", None)
    Case(device, reduction=reduction, **ALONE[options]).assert_right(memory="fast")


def test_compiles_under_autocast_and_without_gradients(device):
    torch._dynamo.reset()
    reductions = itertools.cycle(("mean", "none"))  # each schedule with one of them
    heads = Heads([{"memory": memory, "reduction": next(reductions)} for memory in (None, *MEMORY)])
    compiled = torch.compile(heads.to(device), fullgraph=True, backend="aot_eager")
    case = Case(device)
    inputs = case.tensors[0], case.targets
    with torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(compiled(*inputs), heads(*inputs))
    torch.testing.assert_close(heads.step(compiled, case), heads.step(heads, case))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), heads(*inputs))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "schedule",
    [
        TokenChunks(CHUNK, observed=True),
        VocabularySlabs(0, VOCAB),
        VocabularySlabs(0, 0, SLAB, SLAB),
        VocabularySlabs(16, 0, 8, 8),
        VocabularySlabs(0, 40, 16),
    ],
    ids=str,
)
def test_ops_are_registered_as_torch_wants_them(schedule, reduction, device):
    """Schema, autograd registration, and fake outputs equal to the real ones in shape, dtype and stride."""
    case = Case(device, torch.bfloat16, **ALL)
    options = LossOptions(0, 0.2, 5.0, 1.7, 0.02, 0.5, reduction, EXTRAS)
    class_weight, row_weight = case.options["class_weight"], case.options["row_weight"]
    ids = case.targets.clamp(min=0)[:, None].expand(-1, 3).contiguous() if reduction == "none" else None
    tensors = *case.leaves(), case.targets, class_weight, row_weight, row_weight.sum(), ids

    def check(operator, arguments):
        wanted = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operator, arguments, test_utils=wanted)

    for needs in (Needs(True, True, True), Needs(False, True, False)):
        check(forward_op, _as_arguments(Call.of(tensors, options, needs), schedule))
        detached = [None if t is None else t.detach() for t in tensors]
        arguments = _as_arguments(Call.of(detached, options, needs), schedule)
        loss, *results = forward_op(*arguments)
        entropy = results[list(WRITTEN).index("entropy")]
        of_ids, *state = results[len(WRITTEN) :]
        check(backward_op, (torch.ones_like(loss), None, None, None, state, *arguments))
        if reduction == "none":
            upstream = torch.ones_like(loss), entropy, torch.ones_like(entropy), torch.ones_like(of_ids)
            check(backward_op, (*upstream, state, *arguments))


@pytest.mark.parametrize("memory", MEMORY)
def test_eager_calls_go_through_no_operator(memory, device, monkeypatch):
    """Whose ways through ``torch.library`` take the host longer than the launches."""
    monkeypatch.setitem(linear_cross_entropy.__globals__, "linear_cross_entropy_op", None)
    _, grads = Case(device, torch.bfloat16).run(memory=memory)
    assert None not in grads


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_reference_gradient(options, reduction):
    case = Case(torch.device("cpu"), torch.float64, tokens=4, hidden=3, vocab=5, reduction=reduction, **options)
    assert torch.autograd.gradcheck(lambda *leaves: case.call(leaves, linear_cross_entropy_ref), case.leaves())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference_is_torchs_linear_and_cross_entropy(reduction):
    case = Case(torch.device("cpu"), torch.float64)
    expected = F.cross_entropy(F.linear(*case.tensors), case.targets, reduction=reduction)
    torch.testing.assert_close(case.call(case.tensors, linear_cross_entropy_ref, reduction=reduction), expected)
