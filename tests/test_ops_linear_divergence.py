"""The divergence of two heads, its gradient, and what else is computed with it."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convergence.judge.tolerance import three_way
from liger_kernels.ops import (
    CountedTargets,
    launches,
    linear_divergence,
    linear_divergence_ref,
    linear_log_probs_ref,
    observe_logits_grad,
    reset_launches,
)
from liger_kernels.ops.divergence.linear_divergence import OUTPUTS
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.schedules.slab_plan import SlabSizes
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs
from liger_kernels.ops.runtime.tiling import tiled
from tests.divergence_checks import BETAS, SCALING, TEACHER_HIDDEN, WAYS, Divergence, every_beta, every_memory
from tests.linear_cross_entropy_checks import HIDDEN, TOKENS, VOCAB, assert_equal
from tools.slabs import slabs_of

pytestmark = pytest.mark.usefixtures("small_slabs")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_held_slabs_are_of_all_kinds():
    with tiled(slabs=lambda *_: SlabSizes(8, 8, chunk=4)):
        slabs = VocabularySlabs.balanced(TOKENS, HIDDEN, VOCAB, 2, True, 2)
    assert all((slabs.kept_classes, slabs.held_classes, slabs.slab)), slabs


@pytest.mark.parametrize("options", [{}, SCALING, {"logit_scale": 1.7}], ids=["plain", "all", "scale"])
@pytest.mark.parametrize(
    ("way", "dtype"),
    [(way, dtype) for way in WAYS for dtype in (FP32, BF16, FP16) if (dtype == FP16) == (way == "token chunks")],
    ids=str,
)
@every_beta
def test_every_option(way, dtype, options, beta, device):
    Divergence(device, dtype, beta=beta, **options).assert_right(WAYS[way])


@pytest.mark.parametrize("outputs", [(name,) for name in OUTPUTS], ids=str)
@every_beta
def test_one_output_alone(beta, outputs, device):
    """And one upstream gradient that is not there at all, which is not the same as zeros."""
    of = outputs if outputs != ("max_abs_difference",) else ()
    case = Divergence(device, BF16, beta=beta, of=of, needs=(1, 1, 1) if of else (0, 0, 0))
    for memory in ("fast", "small"):
        case.assert_right(memory=memory, outputs=outputs)
        out, _ = case.run(memory=memory, outputs=outputs)
        assert [name for name in OUTPUTS if getattr(out, name) is not None] == [*outputs]


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)], ids=str)
@every_memory
def test_frozen_parts(memory, needs, device):
    Divergence(device, BF16, needs=needs).assert_right(memory=memory)


@pytest.mark.parametrize("tokens", [0, 1, 8])
@every_beta
def test_in_two_kept_slabs(tokens, beta, device):
    with slabs_of(24):
        Divergence(device, BF16, beta=beta, hidden=64, tokens=tokens).assert_right(memory="fast")


@pytest.mark.parametrize("teacher", [FP16, BF16, FP32], ids=str)
def test_a_teacher_of_another_dtype(teacher, device):
    for dtype in (FP32, BF16):
        for memory in ("fast", "small"):
            Divergence(device, dtype, teacher_dtype=teacher, bias=False).assert_right(memory=memory)


@settings(derandomize=True, deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 30),
    hidden=st.integers(1, 80),
    vocab=st.integers(2, 150),
    bias=st.booleans(),
    masked=st.booleans(),
    dtype=st.sampled_from([FP32, BF16]),
    memory=st.sampled_from([None, *MEMORY]),
    beta=st.sampled_from([0.0, 1e-6, 0.5, 0.9, 1.0]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape(device, memory, **case):
    Divergence(device, **case).assert_right(memory=memory)


def test_formulas(device):
    """The two divergences against torch's own, in float64, and the mixture where it is symmetric."""
    case = Divergence(device, torch.float64, masked=False, **SCALING)
    hidden, weight, bias = (t.double() for t in case.tensors)
    teacher_hidden, teacher_weight, teacher_bias = (t.double() for t in case.teacher)
    z = 5.0 * torch.tanh(1.7 * (hidden @ weight.t() + bias) / 5.0) / 0.7
    u = 4.0 * torch.tanh(0.8 * (teacher_hidden @ teacher_weight.t() + teacher_bias) / 4.0) / 0.7
    p, q = z.log_softmax(-1), u.log_softmax(-1)
    kl = functools.partial(torch.nn.functional.kl_div, reduction="none", log_target=True)
    m = ((p.exp() + q.exp()) / 2).log()
    wanted = {0.0: kl(p, q).sum(-1), 1.0: kl(q, p).sum(-1), 0.5: ((kl(m, p) + kl(m, q)) / 2).sum(-1)}
    # Sums of VOCAB terms, each of which has been rounded less than 16 times.
    close = dict.fromkeys(("rtol", "atol"), 16 * VOCAB * torch.finfo(torch.float64).eps)
    for case.beta, divergence in wanted.items():
        out, _ = case.run()
        torch.testing.assert_close(out.divergence, divergence, **close)
        torch.testing.assert_close(out.max_abs_difference, (p - q).abs().amax(-1), **close)
    no_target = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    options = {name: SCALING[name] for name in ("temperature", "softcap", "logit_scale")}
    entropy = linear_log_probs_ref(hidden, weight, no_target, bias, outputs=("entropy",), **options).entropy
    torch.testing.assert_close(out.entropy, entropy, **close)


@every_memory
@every_beta
def test_nothing_diverges_from_itself(beta, memory, device):
    case = Divergence(device, beta=beta, of=("divergence",), masked=False)
    hidden, weight, bias = leaves = case.leaves()
    case.teacher = [hidden, weight, bias]
    out = case.call(leaves, memory=memory)
    grads = torch.autograd.grad(out.divergence.sum(), leaves)
    # A compiler may fuse operations of one head and not of the other, and a mixture rounds once more.
    few = 8 * torch.finfo(FP32).eps
    assert float(out.divergence.abs().max()) < few
    assert float(out.max_abs_difference.max()) < few
    assert all(float(grad.abs().max()) < few for grad in grads)


@every_memory
@every_beta
def test_the_teacher_has_no_gradient(beta, memory, device):
    case = Divergence(device, beta=beta)
    case.teacher = [t.requires_grad_() for t in case.teacher]
    out = case.call(case.leaves(), memory=memory)
    out.divergence.sum().backward()
    assert all(t.grad is None for t in case.teacher)


@every_beta
def test_the_reference_teacher_has_no_gradient(beta):
    case = Divergence(torch.device("cpu"), beta=beta)
    case.teacher = [t.requires_grad_() for t in case.teacher]
    case.call(case.leaves(), linear_divergence_ref).divergence.sum().backward()
    assert all(t.grad is None for t in case.teacher)


@every_memory
@every_beta
def test_confident_heads(beta, memory, device):
    """Logits of hundreds, where most probabilities are 0 in float32: nothing is NaN, and the mixture of heads that are
    far apart is as near to float64 as the reference's."""
    case = Divergence(device, beta=beta)
    case.tensors[0] *= 100
    case.teacher[0] *= 100
    out, grads = case.run(memory=memory)
    assert all(bool(torch.isfinite(t).all()) for t in (*out, *grads))
    if 0 < beta < 1:
        case.assert_right(memory=memory, outputs=("divergence", "entropy"))


@every_memory
@every_beta
def test_classes_that_both_heads_mask(beta, memory, device):
    """A bias of minus infinity in both: no probability, no term, no gradient."""
    case = Divergence(device, beta=beta)
    for bias in (case.tensors[2], case.teacher[2]):
        bias[::7] = float("-inf")
    case.reference = lambda *args, **options: linear_divergence_ref(*without_masked(*args), **options)
    case.assert_right(memory=memory)


def without_masked(hidden, weight, teacher_hidden, teacher_weight, beta, bias, teacher_bias):
    kept = torch.arange(len(weight)) % 7 != 0
    return hidden, weight[kept], teacher_hidden, teacher_weight[kept], beta, bias[kept], teacher_bias[kept]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("masked", [slice(0, 32), slice(16, 48)], ids=["first", "later"])
@every_beta
def test_blocks_that_the_smallest_number_masks(beta, masked, dtype, device):
    """Of a block that was masked so nothing is left once another one is known. The move of its sums is no NaN."""
    case = Divergence(device, dtype, beta=beta)
    for bias in (case.tensors[2], case.teacher[2]):
        bias[masked] = torch.finfo(dtype).min
    with tiled(divergence=lambda *_: {"ROWS": 4, "BLOCK": 16, "num_warps": 1}):
        for memory in ("fast", "small"):
            case.assert_right(memory=memory, outputs=OUTPUTS[:2])


@every_beta
def test_a_class_that_the_student_alone_masks(beta, device):
    """KL(teacher || student) is infinite; the other divergences are not."""
    case = Divergence(device, beta=beta, of=("divergence",), masked=False)
    case.tensors[2][3] = float("-inf")
    for memory in ("fast", "small"):
        out, _ = case.run(memory=memory)
        assert bool(torch.isinf(out.divergence).all() if beta == 0.0 else torch.isfinite(out.divergence).all())
        assert bool(torch.isinf(out.max_abs_difference).all())


@pytest.mark.parametrize("memory", ["fast", "small"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_what_is_infinite_may_vanish(dtype, memory, device):
    """The teacher masks classes whose probability underflows as soon as a later block is known."""
    case = Divergence(device, dtype, beta=1.0)
    case.tensors[2][48:] += 150
    case.teacher[2][:32] = float("-inf")
    with tiled(divergence=lambda *_: {"ROWS": 4, "BLOCK": 16, "num_warps": 1}):
        out, grads = case.run(memory=memory)
    assert all(bool(torch.isfinite(t).all()) for t in (out.divergence, *grads))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_reference_gradient(reduction):
    for beta in BETAS:
        how = {"beta": beta, "reduction": reduction, **SCALING}
        case = Divergence(torch.device("cpu"), torch.float64, tokens=4, hidden=3, vocab=5, **how)

        def both(*leaves, case=case):
            return tuple(case.differentiated(case.call(leaves, linear_divergence_ref))[0])

        assert torch.autograd.gradcheck(both, case.leaves())


@every_memory
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_backward_twice_and_nothing_overwritten(beta, reduction, memory, device):
    case = Divergence(device, BF16, beta=beta, reduction=reduction)
    leaves, teacher = case.leaves(), [t.clone() for t in case.teacher]
    out = case.call(leaves, memory=memory)
    results, upstream = case.differentiated(out)
    before = [t.clone() for t in out]
    first = [g.clone() for g in torch.autograd.grad(results, leaves, list(upstream), retain_graph=True)]
    assert_equal(list(torch.autograd.grad(results, leaves, list(upstream))), first)
    assert_equal([list(out), leaves, case.teacher], [before, case.tensors, teacher])


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(("memory", "beta"), [*zip(MEMORY, BETAS, strict=True)])
def test_compiles_without_a_graph_break(beta, memory, reduction, device):
    torch.compiler.reset()
    compiled = torch.compile(linear_divergence, fullgraph=True, backend="aot_eager")
    for tokens in (TOKENS, TOKENS + 4):
        case = Divergence(device, tokens=tokens, beta=beta, reduction=reduction, **SCALING)
        case.assert_right(compiled, memory=memory)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_of_float32_masters(reduction, device):
    """Both heads are cast, and the gradients are float32."""
    for beta in BETAS:
        case = Divergence(device, beta=beta, masked=False, reduction=reduction)
        with torch.autocast(device.type, BF16):
            ours, grads = case.run()
        cast = Divergence(device, BF16, beta=beta, masked=False, reduction=reduction)
        cast.tensors = [t.to(BF16) for t in case.tensors]
        cast.teacher = [t.to(BF16) for t in case.teacher]
        theirs, their_grads = cast.run()
        assert_equal(list(ours), list(theirs))
        assert all(grad.dtype == FP32 for grad in grads)
        assert_equal([grad.to(BF16) for grad in grads], their_grads)


@every_memory
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("number", [0, 1, 15])
def test_counted_rows(number, reduction, memory, device):
    """Only the rows that count are multiplied, in both heads."""
    case = Divergence(device, reduction=reduction)
    case.mask[:] = False
    case.mask[torch.randperm(TOKENS)[:number]] = True
    labels = torch.where(case.mask, 1, -100)
    with tiled(counted_rows=lambda choose, tokens, counted: counted):
        for counted in (CountedTargets(labels), number):
            reset_launches()
            case.assert_right(memory=memory, counted=counted)
            assert launches()["_order_kernel"] == 1


def test_strides(device):
    for memory in ("fast", "small"):
        wide = Divergence(device, BF16)
        wide.teacher[0] = wide.teacher[0].t().contiguous().t()
        wide.teacher[1] = torch.cat([wide.teacher[1], wide.teacher[1]], 1)[:, :TEACHER_HIDDEN]
        wide.mask = torch.stack([wide.mask, wide.mask], 1)[:, 0]
        wide.assert_right(memory=memory)


@every_memory
@pytest.mark.parametrize("reduction", ["none", "summed", "mean"])
def test_the_logits_gradient_is_observed(reduction, memory, device):
    how = {"reduction": reduction} if reduction != "summed" else {}
    case = Divergence(device, of=("divergence",), **how)
    if reduction == "summed":
        case.function = functools.partial(linear_divergence, summed=True)
        case.upstream = [case.upstream[0][0].expand(TOKENS)]
    found, leaves = torch.zeros(TOKENS, VOCAB, device=device), case.leaves()
    with observe_logits_grad(lambda start, grad: found[start : start + len(grad)].add_(grad)):
        torch.autograd.grad(case.call(leaves, memory=memory).divergence, leaves, case.upstream[0])
    wanted = []
    for dtype in (FP32, torch.float64):
        hidden, weight, bias = case.leaves(dtype)
        logits = (hidden @ weight.t() + bias).detach().requires_grad_()
        eye = torch.eye(VOCAB, device=device, dtype=dtype)
        out = case.call([logits, eye, torch.zeros(VOCAB, device=device, dtype=dtype)], linear_divergence_ref)
        wanted += torch.autograd.grad(out.divergence, logits, case.upstream[0].to(out.divergence.dtype))
    three_way(found, *wanted, FP32, "gradient of the logits", chain=2)  # a matrix product and the divergence


def new(*shape):
    return torch.randn(shape)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"beta": -0.1}, ValueError, "beta is -0.1; it must be between 0 and 1"),
        ({"beta": 1.5}, ValueError, "beta is 1.5"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0; it must be positive"),
        ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap is -1.0"),
        ({"teacher_weight": new(6, 3), "teacher_bias": None}, ValueError, "weight has 5 classes and teacher_weight 6"),
        ({"teacher_hidden": new(3, 3)}, ValueError, "for 4 rows they must be"),
        ({"teacher_hidden": new(4, 2)}, ValueError, r"teacher_hidden has shape \(4, 2\)"),
        ({"teacher_bias": new(4)}, ValueError, r"teacher_bias has shape \(4,\)"),
        ({"teacher_weight": new(5, 3).half()}, ValueError, "must have one dtype"),
        ({"teacher_weight": torch.ones(5, 3, dtype=torch.int64)}, TypeError, "teacher_weight is torch.int64"),
        ({"mask": torch.ones(4)}, TypeError, "mask is torch.float32; it must be torch.bool"),
        ({"mask": torch.ones(5, dtype=torch.bool)}, ValueError, r"mask has shape \[5\]"),
        ({"outputs": ()}, ValueError, "outputs is empty"),
        ({"outputs": ("kl",)}, ValueError, "outputs is"),
        ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean'"),
        ({"denominator": torch.ones(2)}, ValueError, "denominator"),
    ],
)
@pytest.mark.parametrize("op", [linear_divergence, linear_divergence_ref])
def test_bad_input(op, change, error, message):
    head = {"hidden": new(4, 2), "weight": new(5, 2), "bias": new(5)}
    teacher = {"teacher_hidden": new(4, 3), "teacher_weight": new(5, 3), "teacher_bias": new(5)}
    with pytest.raises(error, match=message):
        op(**{**head, **teacher, "beta": 0.5, **change})


@pytest.mark.parametrize("name", ["counted", "memory"])
def test_bad_input_of_the_op(name):
    with pytest.raises(ValueError, match=name):
        linear_divergence(new(4, 2), new(5, 2), new(4, 3), new(5, 3), 0.5, **{name: 5 if name == "counted" else "less"})
