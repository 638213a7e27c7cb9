"""A head that multiplies only the rows whose target counts: the same losses, extras and gradients as of all rows."""

from __future__ import annotations

import pytest
import torch

import liger_kernels
from liger_kernels.ops import (
    CountedTargets,
    launches,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    linear_log_probs,
    observe_logits_grad,
    reset_launches,
)
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.runtime.tiling import tiled
from tests import patching_checks
from tests.linear_cross_entropy_checks import MOST, TOKENS, Case, LogProbs, assert_equal

CASES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "all but smoothing": {**MOST, "denominator": True},
}
# Results that describe ignored rows, as the entropy does, take all rows.
OF_COUNTED = ("token_accuracy", "log_probs", "is_top1")
COUNTED = 15


@pytest.fixture(autouse=True)
def every_row_pays():
    """As if rows were taken one by one, so that a few tokens show it."""
    with tiled(counted_rows=lambda choose, tokens, counted: counted):
        yield


def counting(device, number, kind=Case, **options):
    """A case of which the targets of ``number`` rows count, in no order."""
    case = kind(device, tokens=TOKENS, **options)
    case.targets[case.targets == case.ignored] = 1
    case.targets[torch.randperm(TOKENS)[number:]] = case.ignored
    return case


@pytest.mark.parametrize("number", [0, 1, COUNTED, TOKENS])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_loss_of_counted_rows(options, memory, number, device):
    case = counting(device, number, **options)
    counted = CountedTargets(case.targets, case.ignored)
    reset_launches()
    case.assert_right(memory=memory, counted=counted, extras=OF_COUNTED)
    assert launches().get("_order_kernel", 0) == (number < TOKENS)
    out, (grad_hidden, *_) = case.run(memory=memory, counted=counted, extras=OF_COUNTED)
    expected, _ = case.run(linear_cross_entropy_ref, extras=OF_COUNTED)
    assert_equal((out.token_accuracy, out.is_top1), (expected.token_accuracy, expected.is_top1))
    assert not grad_hidden[case.targets == case.ignored].any()


@pytest.mark.parametrize("number", [0, COUNTED, TOKENS])
@pytest.mark.parametrize("memory", MEMORY)
def test_log_probs_of_counted_rows(memory, number, device):
    case = counting(device, number, LogProbs, temperature=0.7)
    counted = CountedTargets(case.targets)
    case.assert_right(memory=memory, counted=counted)
    _, (grad_hidden, *_) = case.run(memory=memory, counted=counted)
    assert not grad_hidden[case.targets == case.ignored].any()


@pytest.mark.parametrize("at_most", [COUNTED, COUNTED + 1, TOKENS - 1])
def test_more_rows_than_count(at_most, device):
    """They are filled up with ignored ones."""
    counting(device, COUNTED).assert_right(counted=at_most, extras=OF_COUNTED)


def test_extras_that_describe_ignored_rows_take_all(device):
    case = counting(device, COUNTED)
    reset_launches()
    case.assert_right(counted=COUNTED, extras=("log_probs", "entropy"))
    assert not launches().get("_order_kernel", 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("schedule", [{"memory": m} for m in MEMORY] + [{"chunk_size": 7}], ids=str)
def test_an_observer_sees_all_rows(schedule, reduction, device):
    case = counting(device, COUNTED, reduction=reduction)

    def observed(**options):
        seen = {}
        with observe_logits_grad(lambda start, grad: seen.update({start: seen.get(start, 0) + grad})):
            case.run(**schedule, **options)
        return torch.cat([seen[start] for start in sorted(seen)])

    torch.testing.assert_close(observed(counted=COUNTED), observed())


def test_bit_for_bit_where_all_rows_count(device):
    case = counting(device, TOKENS, dtype=torch.bfloat16)
    assert_equal(case.run(counted=CountedTargets(case.targets)), case.run())


def test_too_few(device):
    """Never a loss without rows that count: an error where it costs nothing to look, else NaN."""
    case = counting(device, 20)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="counted is 19, but 20 targets are not ignore_index"):
            case.run(counted=19)
    else:
        assert case.run(counted=19)[0].isnan()


@pytest.mark.parametrize("op", [linear_cross_entropy, linear_log_probs])
@pytest.mark.parametrize(
    ("counted", "error", "match"),
    [
        (2.0, TypeError, "counted is a float"),
        (True, TypeError, "counted is a bool"),
        (-1, ValueError, "counted is -1"),
        (CountedTargets(torch.tensor([7]), 7), ValueError, "not 7, and ignore_index is -100"),
    ],
    ids=["a float", "a bool", "negative", "another ignore_index"],
)
def test_bad_input(op, counted, error, match, device):
    case = counting(device, COUNTED)
    with pytest.raises(error, match=match):
        op(*case.tensors[:2], case.targets, counted=counted)


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
    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(hidden, weight, targets, bias):
        return linear_cross_entropy(hidden, weight, targets, bias, counted=CountedTargets(targets))

    case = counting(device, COUNTED)
    torch.testing.assert_close(case.run(loss), case.run(linear_cross_entropy_ref))


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
