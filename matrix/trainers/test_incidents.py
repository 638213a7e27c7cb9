"""What went wrong in the field with patched models, each once: it must not again, in the version where it did and in
every other."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
import liger_kernels.patching.logits.product
from convergence.arms.float64 import InFloat64
from convergence.arms.quantities import LOGITS, LOSS
from convergence.arms.tasks.causal_lm import CausalLM
from convergence.arms.train import train
from convergence.arms.trajectory import Run
from convergence.judge import tolerance
from convergence.judge.compare import compare
from convergence.judge.tolerance import rms, three_way
from convergence.models.data import Batch, Step
from convergence.trainers import material
from convergence.trainers.cases import CASES, COMMON, DEVICE, InCase, find, takes
from convergence.trainers.material import plain
from convergence.trainers.observe import Arm, run
from convergence.trainers.prove import honest
from liger_kernels.ops import linear_cross_entropy
from matrix.trainers.judge import write_fact
from matrix.trainers.test_flags import by_flag_of_sft
from matrix.trainers.test_trainers import WAYS, by_instance

IGNORE = -100


def rounding_steps(model: nn.Module) -> int:
    """How many operations round one after another: each leaf at least once."""
    return sum(1 for module in model.modules() if not module._modules)


def fallbacks(model: nn.Module) -> dict[str, int]:
    """How often a patched ``model`` computed its logits after all, by reason."""
    report = liger_kernels.status(model)
    assert report is not None
    return dict(report.fallbacks)


# 1. DPOTrainer computes log-probabilities itself: it calls the model in training without labels. A patched forward that
# has no logits in training then fails (trl 0.12 to 0.14, and later).


@pytest.mark.parametrize("way", ["class", "instance"])
def test_dpo_without_labels(way: str, folders: dict[str, Path]) -> None:
    folder, calls = folders["llama"], list[dict[str, Any]]()

    def watched() -> Any:
        model = WAYS[way](folder)
        model.register_forward_pre_hook(lambda *call: calls.append(call[-1]), with_kwargs=True)
        return model

    how = InCase("dpo", folder)
    arms = [honest(how, torch.float32, nudge) for nudge in (None, *range(tolerance.REPLICAS))]
    ours = run(how, Arm(load=watched)).trajectory
    assert calls
    # From 1.15 trl has a head of its own, which takes labels; the model's forward is not asked for a loss.
    assert all(call.get("labels") is None or call.get("fused_lm_head") for call in calls)
    verdict = compare([(truth.trajectory, own.trajectory) for truth, own in arms], ours, torch.float32)
    assert verdict.passed, verdict.failures


@pytest.mark.parametrize("family", list(material.FAMILIES))
def test_log_probabilities_without_labels(family: str, folders: dict[str, Path]) -> None:
    """As trl up to 0.28 computes them in DPO: positionally, without labels, from the logits, with their gradient. Newer
    trl has a head of its own there, so the test above does not reach the model's in every version."""
    ids = collated()["input_ids"].to(DEVICE)
    mask = torch.ones_like(ids)

    def gradients(model: Any) -> tuple[list[str], list[torch.Tensor]]:
        logits = model.to(DEVICE).train()(ids, attention_mask=mask, use_cache=False).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum()
        F.logsigmoid(-0.01 * chosen).backward()
        return [name for name, _ in model.named_parameters()], [p.grad for p in model.parameters()]

    exact = plain(folders[family]).double()
    with InFloat64():
        names, truth = gradients(exact)
    (_, own), (_, ours) = gradients(plain(folders[family])), gradients(by_instance(folders[family]))
    chain = rounding_steps(plain(folders[family]))
    for name, a, b, expected in zip(names, ours, own, truth, strict=True):
        three_way(a, b, expected, torch.float32, name, chain)


# 2. trl 0.15 began to read the logits of every training step, for the token accuracy; 0.14 did not. A patched model
# whose logits are None then fails with "'NoneType' object is not subscriptable".


def test_token_accuracy_reads_logits_in_training(folders: dict[str, Path], tmp_path: Path) -> None:
    """As trl 0.15 computes it, on top of ``transformers.Trainer``, so in every version."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    accuracies: dict[bool, list[float]] = {False: [], True: []}

    class WithTokenAccuracy(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
            labels = inputs["labels"]
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            predictions = outputs.logits[..., :-1, :].contiguous().argmax(dim=-1)
            shifted = labels[..., 1:].contiguous()
            mask = shifted != IGNORE
            accuracies[patched].append(float(((predictions == shifted) & mask).sum() / mask.sum()))
            return (loss, outputs) if return_outputs else loss

    case = CASES["trainer"]
    for patched in accuracies:
        model = by_instance(folders["llama"]) if patched else plain(folders["llama"])
        options = {**COMMON, "output_dir": str(tmp_path), "max_steps": 6, "learning_rate": 0.1}
        config = TrainingArguments(**{k: v for k, v in options.items() if takes(TrainingArguments, k)})
        collator = case.arguments()["data_collator"]
        WithTokenAccuracy(model, config, collator, train_dataset=Dataset.from_dict(case.data())).train()
    assert accuracies[True] == accuracies[False]
    assert any(accuracies[True])
    assert fallbacks(model)["outputs.logits was read"] == len(accuracies[True])


@pytest.mark.parametrize("flag", [False, True])
def test_token_accuracy_that_sft_logs(flag: bool, folders: dict[str, Path]) -> None:
    """Without and with trl's flag, in whatever way the installed trl computes it."""
    folder = folders["llama"]
    how = InCase("sft-nll" if takes(find("SFTConfig"), "loss_type") else "sft", folder)
    ours = run(how, by_flag_of_sft(folder) if flag else Arm(load=functools.partial(by_instance, folder)))
    own = run(how, Arm())
    logged = [[row["mean_token_accuracy"] for row in arm.logged if "mean_token_accuracy" in row] for arm in (ours, own)]
    if logged[0] or not flag:  # under its flag, trl 0.15 to 0.25 does not log it
        assert logged[0] == logged[1]
    assert len(ours.trajectory.values[LOSS]) == len(own.trajectory.values[LOSS])


# 3. Collators pass cu_seq_lens_q and friends; Llama hands them on to its loss (transformers 4.49, 4.50), and a patched
# loss that hands them on to a kernel fails with an unexpected keyword.

COLLATED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def collated() -> dict[str, Any]:
    """One row of two sentences without padding, as collators make it."""
    rows = [material.tokenizer()(text)["input_ids"][:20] for text in material.sentences()[:2]]
    ids = torch.tensor([[token for row in rows for token in row]])
    labels = ids.clone()
    labels[0, 0] = labels[0, len(rows[0])] = IGNORE
    ends = torch.tensor([0, len(rows[0]), ids.shape[1]], dtype=torch.int32)
    longest = max(map(len, rows))
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def to_device(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize("family", list(material.FAMILIES))
def test_collator_arguments_reach_the_loss_and_no_kernel(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[set[str]] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        passed.append(set(kwargs))
        return linear_cross_entropy(*args, **kwargs)

    monkeypatch.setattr(liger_kernels.patching.logits.product, "linear_cross_entropy", watched)
    inputs = to_device(collated())
    own, ours = (load(folders[family]).to(DEVICE).train() for load in (plain, by_instance))
    for extra in ({}, {"num_items_in_batch": 7}):
        loss, loss_own = (model(**inputs, **extra).loss for model in (ours, own))
        exact = plain(folders[family]).to(DEVICE).train().double()
        with InFloat64():
            truth = exact(**inputs, **extra).loss
        three_way(loss, loss_own, truth, torch.float32, str(extra), rounding_steps(own))
    assert len(passed) == 2
    assert passed[0] <= {*inspect.signature(linear_cross_entropy).parameters}
    assert not fallbacks(ours)


def test_a_loss_function_of_the_user_stays_and_gets_real_logits(folders: dict[str, Path]) -> None:
    seen: dict[str, Any] = {}

    def my_loss(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.update(kwargs, logits=logits)
        return logits.float()[..., :-1, :].logsumexp(-1).mean()

    losses = []
    for load in (by_instance, plain):
        model = load(folders["llama"]).to(DEVICE).train()
        # The class decides in every version; assigning to the instance works from 4.50.
        model.__class__ = type("Mine", (type(model),), {"loss_function": property(lambda self: my_loss)})
        losses.append(model(**to_device(collated())).loss)
        assert type(seen["logits"]) is torch.Tensor
        assert seen.keys() >= COLLATED
    torch.testing.assert_close(*losses)
    assert losses[0].requires_grad


# 4. What the proof calls the gradient of the logits is what autograd delivers, where the loss of transformers copies
# the logits first (up to 4.48) and where it does not, so that a loss that writes gradients over its logits writes over
# those that the model returns.


class _WritesOverItsInput(torch.autograd.Function):
    """Cross entropy that leaves its gradient where the logits were, as kernels of this kind do."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        counted = target != ignore_index
        loss = F.nll_loss(torch.log_softmax(logits, -1), target, ignore_index=ignore_index)
        gradient = torch.softmax(logits, -1)
        gradient[counted, target[counted]] -= 1
        logits.data.copy_(gradient * counted[:, None] / counted.sum())
        ctx.logits = logits.data
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        return ctx.logits.mul_(grad_output), None, None


def observed(
    template: nn.Module,
    step: Step,
    dtype: torch.dtype,
    patch: Callable[[Any], Any] | None,
    rounded_to: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What the proof records as the gradient of the logits of ``step``, micro batches after one another."""
    run = Run(template, [step], step.batches[0], dtype, DEVICE, CausalLM(), patch, only=frozenset({step.name}))
    run.rounded_to = rounded_to
    return torch.cat(list(train(run).values[LOGITS].values()), dim=1)


def test_gradients_of_the_logits_are_what_autograd_delivers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    template, inputs = plain(folders["llama"]).train(), collated()
    # Two rows: of a single one, what up to 4.48 cuts off the end for the loss needs no copy.
    batch = Batch(*(inputs[name].repeat(2, 1) for name in ("input_ids", "labels", "position_ids")))
    exact_model = plain(folders["llama"]).to(DEVICE).double()
    asked = {name: inputs[name].repeat(2, 1).to(DEVICE) for name in ("input_ids", "position_ids")}
    with InFloat64():
        # With a cache, upstream does not look for documents in the position ids.
        logits = exact_model(**asked, use_cache=False).logits.cpu()
    targets = F.pad(batch.labels, (0, 1), value=IGNORE)[:, 1:]
    logits = logits.detach().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    (expected,) = torch.autograd.grad(loss, logits)

    def in_place(model: nn.Module) -> None:
        def cross_entropy(logits: Any, target: Any, *args: Any, ignore_index: int = IGNORE, **kwargs: Any) -> Any:
            return _WritesOverItsInput.apply(logits, target, ignore_index)

        monkeypatch.setattr(F, "cross_entropy", cross_entropy)

    step = Step("step", [batch])
    exact = observed(template, step, torch.float64, None, rounded_to=torch.float64)
    three_way(exact, expected, expected, torch.float64, "the truth itself", rounding_steps(template))
    own = observed(template, step, torch.float32, None)
    for patch in (liger_kernels.patch, in_place):  # the last one stays in place
        ours = observed(template, step, torch.float32, patch)
        three_way(ours, own, expected, torch.float32, patch.__name__, rounding_steps(template))
    asked = {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}
    returned = template(**asked, use_cache=False).logits
    overwritten = rms(returned.double() - expected) < rms(returned.double() - logits)  # nearer to what was written
    assert overwritten == (_release("transformers") >= (4, 49))


# 5. Packed documents must train as they do in rows of their own, where upstream keeps them from seeing one another.


@pytest.mark.parametrize("family", list(material.FAMILIES))
def test_packed_rows_give_the_gradients_of_rows_of_their_own(
    family: str, folders: dict[str, Path], records: str | None
) -> None:
    template, inputs = plain(folders[family]).train(), collated()
    cut = int(inputs["cu_seq_lens_q"][1])
    packed = Batch(inputs["input_ids"], inputs["labels"], inputs["position_ids"])
    rows = [Batch(*(t[:, part] for t in (packed.input_ids, packed.labels))) for part in (slice(cut), slice(cut, None))]

    steps = {"packed": Step("step", [packed], num_items=True), "rows": Step("step", rows, num_items=True)}
    arms = ((torch.float64, None), (torch.float32, None), (torch.float32, liger_kernels.patch))
    truth, own, ours = ({name: observed(template, step, *arm) for name, step in steps.items()} for arm in arms)
    apart = float((truth["packed"] - truth["rows"]).norm() / truth["rows"].norm())
    isolates = apart < 1e-9
    chain = rounding_steps(template)
    for name in truth:
        three_way(ours[name], own[name], truth[name], torch.float32, f"{family}, {name}", chain)
    if isolates:
        three_way(ours["packed"], own["rows"], truth["rows"], torch.float32, f"{family}, packed against rows", chain)
    reason = "" if isolates else f"upstream does not keep packed documents apart here: off by {apart:.2g} of the size"
    verdict = "equal" if isolates else "upstream leaks"
    write_fact(f"packing/{family}/instance", verdict, reason, records)
    assert isolates == (_release("transformers") >= (4, 53)), reason


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
