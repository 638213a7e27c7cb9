"""``cross_entropy`` against float64 by the three-way rule, and at the edges where such kernels have been wrong."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from convergence.judge.tolerance import three_way, unit_roundoff
from liger_kernels.ops.loss import formulas
from liger_kernels.ops.loss.cross_entropy import EXTRAS, cross_entropy, cross_entropy_ref
from liger_kernels.ops.loss.options import LossOptions
from liger_kernels.ops.loss.rows import Rows, backward_rows, forward_rows
from liger_kernels.ops.runtime.dispatch import INTERPRET, tl
from liger_kernels.ops.runtime.tiling import tiled
from tests.cross_entropy_checks import every_dtype, every_option, every_reduction, make_inputs, plain_and_all, run
from tests.linear_cross_entropy_checks import ALL, DTYPES, REDUCTIONS, assert_equal

BLOCK = 8192  # the largest tile of the kernels below 65537 columns: a longer row takes several


def settled(ours, truth):
    """``ours``, or the truth where it cannot tell: its float64 formulas take lse - z and p - 1, which cancel; ours do
    not. Logits here stay below 100, so that costs it fewer than 128 units of roundoff."""
    close = (ours.double() - truth).abs() <= 128 * unit_roundoff(torch.float64)
    return torch.where(close, truth, ours.double())


def assert_right(logits, targets, **options):
    """Ours against float64, with PyTorch's formula in the logits' dtype as the measure; every extra too."""
    options["extras"] = EXTRAS
    ours, grad = run(cross_entropy, logits, targets, **options)
    torchs, torch_grad = run(cross_entropy_ref, logits, targets, **options)
    truth, true_grad = run(cross_entropy_ref, logits.double(), targets, **options)
    assert ours.loss.dtype == torch.float32
    assert grad.dtype == logits.dtype
    assert ours.loss.isfinite().all()
    three_way(settled(ours.loss, truth.loss), torchs.loss, truth.loss, torch.float32, "loss")
    # exp, total, quotient, log, and the factors 2 z_loss, lse, p, slope, upstream: each rounds the last one's result to
    # float32. Logits of 16 bits round but once, at the end.
    chain = 9 if logits.dtype == torch.float32 else 1
    three_way(settled(grad, true_grad), torch_grad, true_grad, logits.dtype, "gradient", chain)
    z = logits.detach().double() * options.get("logit_scale", 1.0)
    if options.get("softcap") is not None:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    finite = ~truth.mean_logits.isinf()
    # What roundoff is relative to: 1 for differences of numbers of that order (an entropy and the log of p's 2-norm,
    # neither of them negative), and for a mean that of what is added up.
    sizes = {"entropy": 1.0, "log_sum_sq_probs": 1.0, "max_logits": 1.0, "mean_logits": z.abs().mean(1)[finite] + 1}
    for name, size in sizes.items():
        three = [getattr(o, name) * (-0.5 if name == "log_sum_sq_probs" else 1.0) for o in (ours, torchs, truth)]
        if name == "mean_logits":
            assert torch.equal(three[0][~finite].double(), three[2][~finite])
            three = [t[finite] for t in three]
        three_way(*(t + size for t in three), torch.float32, f"{name} and its size")
    log_probs = settled(ours.log_probs, truth.log_probs)
    three_way(log_probs, torchs.log_probs, truth.log_probs, torch.float32, "log_probs")
    # In float32 a soft cap makes logits equal that are not in float64, and each formula others: then any of them will
    # do.
    short = z.amax(1, keepdim=True) - z.gather(1, ours.predicted_tokens[:, None]) if z.numel() else z
    assert not z.numel() or (short <= 8 * unit_roundoff(torch.float32) * z.abs().amax(1, keepdim=True)).all()
    counted = targets != options.get("ignore_index", -100)
    hits = ((ours.predicted_tokens == targets) & counted).sum() / counted.sum().clamp(min=1)
    assert ours.token_accuracy == hits.float()
    assert torch.equal(ours.is_top1, (ours.predicted_tokens == targets) & counted)


def assert_right_on(tokens, vocab, dtype, device, options, reduction, **how):
    logits, targets, options = make_inputs(tokens, vocab, dtype, device, options, **how)
    assert_right(logits, targets, reduction=reduction, **options)


@every_option
@every_dtype
def test_every_option(dtype, options, device):
    assert_right_on(11, 67, dtype, device, options, "mean")


@plain_and_all
@pytest.mark.parametrize("reduction", ["sum", "none"])
@every_dtype
def test_every_reduction(dtype, reduction, options, device):
    assert_right_on(11, 67, dtype, device, options, reduction)


@pytest.fixture
def a_row_a_program():
    """As rows of a large vocabulary run: blocks of one row each, most of them whole and without the row's target."""
    with tiled(cross_entropy=lambda choose, logits, passes: {"ROWS": 1, "BLOCK": 64, "num_warps": 1}):
        yield


@every_option
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 192), (torch.bfloat16, 200)], ids=str)
def test_every_option_with_a_row_a_program(a_row_a_program, dtype, vocab, options, device):
    """Whole blocks alone, and a partial one behind them."""
    assert_right_on(4, vocab, dtype, device, options, "mean")


@pytest.mark.parametrize("target", [3, 70, 195])
def test_prediction_is_the_first_of_equals_in_whatever_order_blocks_are_read(a_row_a_program, target, device):
    logits = torch.zeros(2, 200, device=device)
    logits[0, [70, 71, 130, 195]] = logits[1, [2, 3, 195]] = 5.0
    out = cross_entropy(logits, torch.full((2,), target, device=device), extras=("predicted_tokens",))
    assert out.predicted_tokens.tolist() == [70, 2]


@pytest.fixture
def compiled_exponential(monkeypatch):
    """The exponential of compiled kernels for 16-bit logits, in the interpreter, too. On a GPU they have it anyway."""
    if INTERPRET:
        monkeypatch.setattr(formulas, "_COMPILED", tl.constexpr(True))
        monkeypatch.setattr(formulas, "libdevice", SimpleNamespace(exp2=lambda x: tl.exp2(x)))


@plain_and_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_option_with_the_compiled_exponential(compiled_exponential, dtype, options, device):
    assert_right_on(7, 200, dtype, device, options, "mean")


@pytest.mark.parametrize("vocab", [300, 20000])
@pytest.mark.parametrize(
    ("dtype", "exponential"),
    [*((dtype, None) for dtype in DTYPES), *((dtype, "compiled_exponential") for dtype in DTYPES[1:])],
    ids=str,
)
def test_padding_columns_hold_the_lowest_number(request, dtype, exponential, vocab, device):
    """As models mask the classes that only pad the vocabulary; whole lanes and whole blocks see nothing else."""
    if exponential:
        request.getfixturevalue(exponential)
    logits, targets, _ = make_inputs(9, vocab, dtype, device, {})
    lowest = torch.finfo(dtype).min
    logits.data[:, vocab // 3 :] = lowest
    logits.data[2] = lowest  # a row of them alone is uniform
    targets = targets.where(targets < 0, targets % (vocab // 3))
    ours, grad = run(cross_entropy, logits, targets, reduction="none")
    torchs, torch_grad = run(cross_entropy_ref, logits, targets, reduction="none")
    truth, true_grad = run(cross_entropy_ref, logits.double(), targets, reduction="none")
    three_way(ours, torchs, truth, torch.float32, "loss")
    three_way(grad, torch_grad, true_grad, dtype, "gradient", 9)


@pytest.mark.parametrize(("reduction", "extras"), [("mean", ()), ("none", EXTRAS)], ids=["mean", "none, extras"])
def test_compiled(reduction, extras, device):
    """Without a graph break. On a CPU the reference is compiled; tests/test_ops_traced.py traces the kernels."""
    logits, targets, _ = make_inputs(11, 67, torch.bfloat16, device, {})
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    out, grad = run(compiled, logits, targets, reduction=reduction, extras=extras)
    torchs, torch_grad = run(cross_entropy_ref, logits, targets, reduction=reduction, extras=extras)
    truth, true_grad = run(cross_entropy_ref, logits.double(), targets, reduction=reduction, extras=extras)
    three_way(grad, torch_grad, true_grad, torch.bfloat16, "gradient")
    for name in ("loss", *(set(extras) & {"entropy", "log_probs"})):
        results = [getattr(o, name, o) for o in (out, torchs, truth)]
        three_way(*results, torch.float32, name)


@settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 40),
    vocab=st.integers(2, 300),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(REDUCTIONS),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    softcap=st.sampled_from([None, 3.0, 30.0]),
    logit_scale=st.sampled_from([1.0, 0.1, 2.5]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    class_weight=st.booleans(),
    ignore_index=st.sampled_from([-100, 0, 5]),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
@example(  # on a GPU, a cap whose divisions were off by 2 ulp
    tokens=1,
    vocab=24,
    dtype=torch.float32,
    reduction="mean",
    label_smoothing=0.0,
    softcap=30.0,
    logit_scale=2.5,
    z_loss=0.0,
    class_weight=False,
    ignore_index=-100,
    spread=10.0,
    seed=0,
)
def test_options_together(device, tokens, vocab, dtype, reduction, spread, seed, **options):
    assert_right_on(tokens, vocab, dtype, device, options, reduction, spread=spread, seed=seed)


@every_option
def test_one_class_alone(options, device):
    """Loss and gradient are differences of equal numbers then, so their roundoff is that of the largest logit."""
    options = {name: value for name, value in options.items() if name not in ("z_loss", "ignore_index")}
    logits, targets, options = make_inputs(6, 1, torch.float32, device, options, spread=10.0)
    loss, grad = run(cross_entropy, logits, targets, torch.ones(6), reduction="none", **options)
    roundoff = unit_roundoff(torch.float32) * max(float(logits.abs().max()), 1.0) * abs(options.get("logit_scale", 1.0))
    roundoff /= options.get("temperature", 1.0)
    assert loss.abs().max() <= 4 * roundoff
    assert grad.abs().max() <= 4 * roundoff


@pytest.mark.parametrize("vocab", [BLOCK, BLOCK + 1, 12 * BLOCK, 12 * BLOCK + 3])
@plain_and_all
def test_vocabulary_of_several_blocks(vocab, options, device):
    logits, targets, options = make_inputs(4, vocab, torch.bfloat16, device, options)
    targets[0], targets[2] = vocab - 1, vocab // 2
    logits.data[0, vocab - 1] = 12.0  # the prediction is in the last block
    assert_right(logits, targets, reduction="none", **options)


@pytest.mark.parametrize("tokens", [1, 128, 129, 300])
def test_several_programs_of_several_rows(tokens, device):
    assert_right_on(tokens, 300, torch.float32, device, ALL, "none")


def test_running_maximum_may_rise_and_fall_between_blocks(device):
    logits = torch.zeros(3, 3 * BLOCK, device=device)
    for row, block in enumerate((0, 1, 2)):
        logits[row, block * BLOCK + 7] = 30.0 + row
    logits += torch.arange(3 * BLOCK, device=device) % 13 / 8
    assert_right(logits, torch.tensor([7, 5, 2 * BLOCK + 7], device=device), reduction="none", label_smoothing=0.1)


@every_dtype
@pytest.mark.parametrize("gap", [4.0, 9.0, 13.0])
def test_true_class_gradient_and_loss_are_exact_when_p_goes_to_1(dtype, gap, device):
    """Formed by subtraction, p_y - 1 has no correct bit left here in 16 bits, and few in float32."""
    logits = torch.zeros(5, 9, dtype=dtype, device=device)
    targets = torch.arange(5, device=device) + 1
    logits[torch.arange(5), targets] = gap + torch.arange(5, dtype=dtype, device=device)
    # Upstream 256 keeps 1 - p above float16's subnormals, whose spacing would be the error.
    loss, grad = run(cross_entropy, logits, targets, torch.full((5,), 256.0), reduction="none")
    truth, true_grad = run(cross_entropy_ref, logits.double(), targets, torch.full((5,), 256.0), reduction="none")
    at_target = grad.double().gather(1, targets[:, None]) / true_grad.gather(1, targets[:, None])
    # A handful of float32 operations; for 16-bit logits an exponential that loses one unit per unit of its argument.
    float32 = (8 + (gap + 4 if dtype != torch.float32 else 0)) * unit_roundoff(torch.float32)
    assert (at_target - 1).abs().max() <= unit_roundoff(dtype) + float32
    assert (loss.double() / truth - 1).abs().max() <= float32


def test_saturated_softcap_keeps_its_slope(device):
    """1 - tanh^2 by subtraction is 0 in float32 from tanh's argument 9 on; the true slope is 4 exp(-2 * 9)."""
    logits = torch.tensor([[11.0, -9.5, 0.5, 10.0]], device=device)
    _, grad = run(cross_entropy, logits, torch.tensor([2], device=device), torch.tensor(1.0), softcap=1.0)
    _, truth = run(cross_entropy_ref, logits.double(), torch.tensor([2], device=device), torch.tensor(1.0), softcap=1.0)
    assert (grad.double() / truth - 1).abs().max() <= 64 * unit_roundoff(torch.float32)


def test_wide_softcap_keeps_small_logits(device):
    """Far below the cap the exponential form of tanh cancels, and the cap multiplies what it lost."""
    logits, targets, _ = make_inputs(64, 3, torch.float32, device, {}, spread=1.0)
    assert_right(logits, targets, reduction="none", softcap=50.0)


@every_reduction
@plain_and_all
@pytest.mark.parametrize("tokens", [0, 6])
@pytest.mark.parametrize("function", [cross_entropy, cross_entropy_ref])
def test_nothing_to_learn_from_is_zero_with_zero_gradients(function, tokens, options, reduction, device):
    logits, targets, options = make_inputs(tokens, 20, torch.float32, device, options)
    targets.fill_(options.get("ignore_index", -100))
    rows, zero = torch.zeros(tokens, device=device), torch.zeros((), device=device)
    nothing = (rows if reduction == "none" else zero, torch.zeros_like(logits))
    out, grad = run(function, logits, targets, reduction=reduction, extras=EXTRAS, **options)
    assert_equal((out.loss, grad), nothing)
    assert_equal((out.token_accuracy, out.log_probs), (zero, rows))
    assert out.predicted_tokens.shape == out.entropy.shape == rows.shape
    if function is cross_entropy:
        logits.data[2:3] = math.nan  # nothing of an ignored row may reach anything
        assert_equal(run(function, logits, targets, reduction=reduction, **options), nothing)


def test_mean_of_zero_class_weight_is_zero(device):
    logits = torch.randn(3, 4, device=device)
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0], device=device)
    loss, grad = run(cross_entropy, logits, torch.zeros(3, dtype=torch.long, device=device), class_weight=weight)
    assert loss == 0
    assert torch.equal(grad, torch.zeros_like(grad))


def test_masked_classes_and_huge_logits(device):
    logits = torch.randn(4, 50, device=device) * 2e4
    logits[:, ::3] = -math.inf
    logits[3] = -math.inf
    logits[3, 7] = 2.0
    assert_right(logits, torch.tensor([1, 2, 4, 7], device=device), reduction="none")


def test_impossible_target_costs_infinity_and_nan_spreads(device):
    logits = torch.zeros(3, 5, device=device)
    logits[0, 2] = -math.inf
    logits[1, 4] = math.nan
    loss, grad = run(cross_entropy, logits, torch.tensor([2, 2, 2], device=device), torch.ones(3), reduction="none")
    assert loss[0] == math.inf
    assert grad[0, 2] == -1.0
    assert loss[1].isnan()
    assert grad[1].isnan().all()
    assert loss[2].isfinite()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.split(30, dim=1)[1],
        lambda x: x[::2],
        lambda x: x[:1].expand(12, -1),
        lambda x: x.t(),
        lambda x: x[:, ::2],
    ],
    ids=["columns", "every_other_row", "expanded_row", "transposed", "every_other_column"],
)
def test_non_contiguous_logits_and_targets(view, device):
    base = torch.randn(12, 60, device=device, requires_grad=True)
    reference = base.detach().clone().requires_grad_()
    logits = view(base)
    targets = torch.randint(0, logits.shape[1], (2 * len(logits),), device=device)[::2]
    loss = cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    truth = cross_entropy_ref(view(reference), targets, reduction="sum")
    truth.backward()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(base.grad, reference.grad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_target_dtypes(dtype, device):
    logits, targets, _ = make_inputs(9, 40, torch.float32, device, {})
    assert torch.equal(cross_entropy(logits, targets.to(dtype)), cross_entropy(logits, targets))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sparse memory this needs is the CPU's")
def test_rows_beyond_two_to_the_31_elements():
    stride = 2**30 + 8  # row 2 begins past 2^31, though neither factor does; untouched pages cost nothing
    memory = torch.from_numpy(np.zeros(2 * stride + 16, dtype=np.float16))
    logits = memory.as_strided((3, 16), (stride, 1))
    logits.copy_(torch.randn(3, 16))
    targets = torch.tensor([1, 2, 3])
    options = LossOptions()
    rows = Rows.empty(3, logits.device, options, stats=True)
    torchs, truth = (F.cross_entropy(z, targets, reduction="none") for z in (logits.float(), logits.double()))
    true_grad = torch.softmax(logits.double(), -1) - F.one_hot(targets, 16)
    forward_rows(logits, targets, None, None, options, rows)
    three_way(rows.loss, torchs, truth, torch.float32, "loss")
    assert rows.stats is not None
    backward_rows(logits, targets, None, options, rows.stats, torch.ones(3), logits)
    three_way(logits, true_grad.half(), true_grad, torch.float16, "gradient")


@pytest.mark.parametrize("target", [-1, 5, 2**32 + 1])
def test_target_out_of_range(target, device):
    """Raises on a CPU. The kernels themselves read nothing there and make the row NaN, and only that row."""
    targets = torch.tensor([1, target, 2], device=device)
    logits = torch.randn(3, 5, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"target {target} is out of range: there are 5 classes"):
            cross_entropy(logits, targets)
    options = LossOptions(label_smoothing=0.1, extras=EXTRAS)
    rows = Rows.empty(3, logits.device, options, stats=True)
    grad = torch.empty_like(logits)
    forward_rows(logits, targets, torch.ones(5, device=device), None, options, rows)
    upstream = torch.ones(3, device=device)
    backward_rows(logits, targets, torch.ones(5, device=device), options, rows.stats, upstream, grad)
    for rowwise in (rows.loss, rows.extras["log_probs"], grad):
        assert rowwise[1].isnan().all()
        assert rowwise[[0, 2]].isfinite().all()


def test_the_first_of_equal_logits_is_predicted(device):
    logits = torch.zeros(2, 2 * BLOCK, device=device)
    logits[1, [5, 9, BLOCK + 1]] = 1.0
    out = cross_entropy(logits, torch.tensor([0, 9], device=device), extras=("predicted_tokens", "token_accuracy"))
    assert out.predicted_tokens.tolist() == [0, 5]
    assert out.token_accuracy == 0.5
