"""A head that multiplies only the rows whose target counts: the same losses, extras and gradients as of all rows."""

from __future__ import annotations

import pytest
import torch

import liger_kernels
from convergence.tolerance import three_way
from liger_kernels.ops import (
    CountedTargets,
    launches,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    linear_log_probs,
    linear_log_probs_ref,
    observe_logits_grad,
    reset_launches,
)
from liger_kernels.ops._tiling import tiled
from liger_kernels.ops.linear_cross_entropy import MEMORY
from tests import patching_checks

TOKENS, HIDDEN, VOCAB = 61, 32, 72
CASES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weights": {"class_weight": True, "row_weight": True},
    "denominator": {"denominator": True},
    "smoothing": {"label_smoothing": 0.1},
    "all else": {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 1e-3, "ignore_index": 3},
}


@pytest.fixture(autouse=True)
def every_row_pays():
    """As if rows were taken one by one, so that a few tokens show it."""
    with tiled(counted_rows=lambda choose, tokens, counted: counted):
        yield


def tensors(device, counted, dtype=torch.float32, ignore_index=-100):
    generator = torch.Generator().manual_seed(counted)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[targets == ignore_index] = 0
    targets[torch.randperm(TOKENS, generator=generator)[counted:]] = ignore_index
    leaves = [randn(TOKENS, HIDDEN), randn(VOCAB, HIDDEN) * 0.2, randn(VOCAB)]
    return [leaf.requires_grad_() for leaf in leaves], targets.to(device)


def options_of(device, **options):
    shapes = {"class_weight": (VOCAB,), "row_weight": (TOKENS,), "denominator": ()}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(shapes[name], generator=generator).to(device) + 0.5 if name in shapes else value
        for name, value in options.items()
    }


def run(op, leaves, targets, dtype=None, **options):
    """Whatever ``op`` returns, and the gradients."""
    leaves = [(leaf.detach() if dtype is None else leaf.detach().to(dtype)).requires_grad_() for leaf in leaves]
    hidden, weight, bias = leaves
    output = op(hidden, weight, targets, bias, **options)
    found = [output] if isinstance(output, torch.Tensor) else [t for t in output if t is not None]
    generator = torch.Generator().manual_seed(1)
    loss = sum((t * torch.rand(t.shape, generator=generator).to(t)).sum() for t in found if t.requires_grad)
    return found, torch.autograd.grad(loss, leaves)


def assert_right(op, ref, leaves, targets, counted, options, **how):
    ours, grads = run(op, leaves, targets, counted=counted, **options, **how)
    torchs, torch_grads = run(ref, leaves, targets, **options)
    double = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    truth, true_grads = run(ref, leaves, targets, torch.float64, **double)
    for three in zip((*ours, *grads), (*torchs, *torch_grads), (*truth, *true_grads), strict=True):
        if three[0].is_floating_point():
            three_way(*three, three[0].dtype, "output or gradient", chain=3)
        else:
            assert torch.equal(three[0], three[2])
    return grads[0]


@pytest.mark.parametrize("number", [0, 1, 20, TOKENS])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_loss_of_counted_rows(options, memory, number, device):
    options = options_of(device, **options)
    ignore_index = options.get("ignore_index", -100)
    leaves, targets = tensors(device, number, ignore_index=ignore_index)
    reset_launches()
    counted = CountedTargets(targets, ignore_index)
    grad_hidden = assert_right(
        linear_cross_entropy, linear_cross_entropy_ref, leaves, targets, counted, options, memory=memory
    )
    assert launches().get("_order_kernel", 0) == (number < TOKENS)
    assert not grad_hidden[targets == ignore_index].any()


@pytest.mark.parametrize("number", [0, 1, 20, TOKENS])
@pytest.mark.parametrize("memory", MEMORY)
def test_log_probs_of_counted_rows(memory, number, device):
    leaves, targets = tensors(device, number)
    options = {"outputs": ("log_probs", "entropy", "is_top1", "mean_logits"), "temperature": 0.7}
    counted = CountedTargets(targets)
    grad_hidden = assert_right(linear_log_probs, linear_log_probs_ref, leaves, targets, counted, options, memory=memory)
    assert not grad_hidden[targets == -100].any()


@pytest.mark.parametrize("at_most", [20, 21, 50])
def test_more_rows_than_count(at_most, device):
    """They are filled up with ignored ones."""
    leaves, targets = tensors(device, 20)
    assert_right(linear_cross_entropy, linear_cross_entropy_ref, leaves, targets, at_most, {})


def test_extras_that_describe_ignored_rows_take_all(device):
    leaves, targets = tensors(device, 20)
    for extras, order in ((("token_accuracy", "log_probs", "is_top1"), 1), (("log_probs", "entropy"), 0)):
        reset_launches()
        options = {"extras": extras}
        assert_right(linear_cross_entropy, linear_cross_entropy_ref, leaves, targets, 20, options)
        assert launches().get("_order_kernel", 0) == order


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("schedule", [{"memory": m} for m in MEMORY] + [{"chunk_size": 7}], ids=str)
def test_an_observer_sees_all_rows(schedule, reduction, device):
    leaves, targets = tensors(device, 20)

    def observed(**options):
        seen = {}
        with observe_logits_grad(lambda start, grad: seen.update({start: seen.get(start, 0) + grad})):
            run(linear_cross_entropy, leaves, targets, reduction=reduction, **schedule, **options)
        return torch.cat([seen[start] for start in sorted(seen)])

    torch.testing.assert_close(observed(counted=20), observed())


def test_bit_for_bit_where_all_rows_count(device):
    leaves, targets = tensors(device, TOKENS, torch.bfloat16)
    for plain, counted in zip(
        run(linear_cross_entropy, leaves, targets),
        run(linear_cross_entropy, leaves, targets, counted=CountedTargets(targets)),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))


def test_too_few(device):
    """Never a loss without rows that count: an error where it costs nothing to look, else NaN."""
    leaves, targets = tensors(device, 20)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="counted is 19, but 20 targets are not ignore_index"):
            run(linear_cross_entropy, leaves, targets, counted=19)
    else:
        assert run(linear_cross_entropy, leaves, targets, counted=19)[0][0].isnan()


def test_bad_input(device):
    leaves, targets = tensors(device, 20)
    for counted, error, match in (
        (2.0, TypeError, "counted is a float"),
        (True, TypeError, "counted is a bool"),
        (-1, ValueError, "counted is -1"),
        (CountedTargets(targets, 7), ValueError, "not 7, and ignore_index is -100"),
    ):
        for op in (linear_cross_entropy, linear_log_probs):
            with pytest.raises(error, match=match):
                op(*leaves[:2], targets, counted=counted)


def test_large_gaps_between_rows(device):
    """Rows over several blocks of the kernel that orders them."""
    targets = torch.full((10_000,), -100, device=device)
    targets[::7] = 3
    hidden = torch.randn(10_000, 8, device=device, requires_grad=True)
    weight = torch.randn(16, 8, device=device)
    loss = linear_cross_entropy(hidden, weight, targets, counted=CountedTargets(targets), reduction="none")
    expected = linear_cross_entropy_ref(hidden, weight, targets, reduction="none")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), hidden), torch.autograd.grad(expected.sum(), hidden))


def test_a_compiled_program_takes_all_rows(device):
    leaves, targets = tensors(device, 20)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, counted=CountedTargets(targets))

    torch.testing.assert_close(loss(*leaves[:2], targets), linear_cross_entropy_ref(*leaves[:2], targets))


def masked_batch():
    batch = patching_checks.batch()
    batch["labels"][:, :6] = -100
    return batch


@pytest.mark.parametrize("change", [None, "shift_labels", "ignore_index"])
def test_a_patched_model_takes_them(change):
    """Where the labels came with the call, and the loss ignores what was counted as ignored."""
    plain, ours = patching_checks.tiny("llama"), patching_checks.tiny("llama")
    liger_kernels.patch(ours)
    batch = masked_batch()
    if change == "shift_labels":
        batch["shift_labels"] = batch["labels"]
    elif change == "ignore_index":
        batch["ignore_index"] = 0
        batch["shift_labels"] = batch["labels"].clamp(min=0)
    expected, reference = plain(**batch).loss, [*plain.parameters()]
    expected.backward()
    reset_launches()
    loss = ours(**batch).loss
    loss.backward()
    assert launches().get("_order_kernel", 0) == (change != "ignore_index")
    torch.testing.assert_close(loss, expected)
    for ours_p, p in zip(ours.parameters(), reference, strict=True):
        torch.testing.assert_close(ours_p.grad, p.grad, rtol=1e-4, atol=1e-5)


def test_a_model_with_more_targets_than_labels():
    """As one that predicts several tokens ahead: how many of the labels count says nothing of its targets."""
    from transformers import LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def forward(self, input_ids=None, labels=None):
        hidden = self.model(input_ids=input_ids).last_hidden_state.repeat(3, 1, 1)
        logits = self.lm_head(hidden)
        targets = torch.cat([labels, labels.roll(-1), labels.roll(-2)])
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    model = patching_checks.tiny("llama")
    model.__class__ = type("SeveralAhead", (LlamaForCausalLM,), {"forward": forward})
    batch = masked_batch()
    expected = model(batch["input_ids"], batch["labels"]).loss
    report = liger_kernels.patch(model)
    torch.testing.assert_close(model(batch["input_ids"], batch["labels"]).loss, expected)
    assert not report.fallbacks
