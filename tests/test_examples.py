"""Every example runs on a tiny model, and the loops of one's own compute what plain torch computes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernels
from convergence.trainers import material
from liger_kernels.ops import launches
from tests.ranks import on_ranks
from tests.suite import suite

ROOT = Path(__file__).parents[1]
ARGUMENTS = {"use_cpu": not torch.cuda.is_available(), "max_steps": 2, "per_device_train_batch_size": 2, "bf16": False}
ARGUMENTS |= {"disable_tqdm": True, "optim": "sgd", "learning_rate": 0.05, "logging_steps": 1}


def example(name: str) -> Any:
    """The module, by its path: examples are no package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(material.save("llama", tmp_path_factory.mktemp("llama")))


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def plain_losses(folder: str, batches: list[list[list[str]]]) -> list[float]:
    """AdamW on an unpatched model; a step's loss is the mean over its batches."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in batches:
        loss = torch.zeros(())
        for texts in step:
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = loss + model(**batch, labels=labels).loss / len(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_plain_loop(folder: str) -> None:
    texts = material.sentences()[:6]
    expected = plain_losses(folder, [[texts[:2]], [texts[2:4]], [texts[4:]]])
    assert example("plain_loop").train(folder, texts) == pytest.approx(expected, rel=1e-5)


def test_trainer(folder: str) -> None:
    before = launches()
    trainer = example("trainer").train(folder, material.sentences()[:4], **ARGUMENTS)
    assert trainer.state.global_step == 2
    assert liger_kernels.status(trainer.model).fuses_head
    assert launches() != before


def test_packed_rows(folder: str) -> None:
    """The first loss is the mean over samples, unpacked, of each one's mean."""
    texts = material.sentences()[:4]
    trainer = example("packed_rows").train(folder, texts, **ARGUMENTS, seed=0)
    first = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    means = []
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            means.append(model(input_ids=ids, labels=ids).loss.item())
    pairs = [(means[i] + means[j]) / 2 for i in range(4) for j in range(i)]
    assert min(abs(first - pair) for pair in pairs) < 1e-3 * first


def fsdp2(rank: int, *arguments: str) -> str:
    """What the script prints on ``rank``."""
    torch.distributed.destroy_process_group()  # it makes its own, as torchrun's environment says
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fsdp2.py", *arguments])
        runpy.run_path(str(ROOT / "examples" / "fsdp2.py"), run_name="__main__")
    return shown.getvalue()


def test_fsdp2(folder: str, tmp_path: Path) -> None:
    texts = material.sentences()[:12]
    (tmp_path / "texts").write_text("\n".join(texts), encoding="utf-8")
    shown, _ = on_ranks(fsdp2, folder, str(tmp_path / "texts"))
    losses = [float(x) for x in re.findall(r"losses \[(.*)\]", shown)[0].split(",")]
    ranks = [texts[0::2], texts[1::2]]
    expected = plain_losses(folder, [[own[2 * i : 2 * i + 2] for own in ranks] for i in range(3)])
    assert losses == pytest.approx(expected, rel=1e-5)


def test_own_kernel_is_proven(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    case = ("--models", "llama-tied", "--dtypes", "float32", "--profile", "plain", "--device", "cpu")
    status = suite(*case, "--patch", "own_kernel:patch", "--no-blame")
    shown = capfd.readouterr().out
    assert status == 0, shown
    assert "llama-tied/float32/patch: equal" in shown


# The loops of one's own against plain torch.
IDS = torch.arange(40).remainder(13).reshape(4, 10) * 7 + torch.arange(4)[:, None]
COUNTED = torch.tensor([[False] * 3 + [True] * n + [False] * (7 - n) for n in (7, 5, 6, 2)])


def plain(model: Any, counted: torch.Tensor = COUNTED) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every next token and entropy, from logits; 0 where not counted."""
    log_p = F.log_softmax(model(input_ids=IDS).logits[:, :-1].float(), -1)
    log_probs = log_p.gather(-1, IDS[:, 1:, None])[..., 0]
    counted = counted[:, 1:]
    return log_probs * counted, -(log_p.exp() * log_p).sum(-1) * counted


def same(folder: str, ours: Any, expected: Any) -> None:
    """Loss and every gradient; ``ours`` gets a patched model, ``expected`` an unpatched one of the same weights."""
    patched, unpatched = load(folder), load(folder)
    liger_kernels.patch(patched)
    before = launches()
    losses = ours(patched), expected(unpatched)
    # Losses that are sums of both signs: the worst one was 4.5e-6 of itself off float64, an unpatched one 1.3e-6.
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    assert launches() != before
    for (name, left), (_, right) in zip(patched.named_parameters(), unpatched.named_parameters(), strict=True):
        assert right.grad is not None
        # Single elements may be sums that cancel; rounding is small beside the whole gradient.
        off = (left.grad - right.grad).norm() / right.grad.norm()
        assert off < 1e-5, (name, off)


@pytest.fixture
def other(folder: str) -> Any:
    """The same model with other weights: a reference, a teacher."""
    model = load(folder).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


TOKENS = torch.arange(10) < torch.tensor([10, 8, 9, 5])[:, None]  # all but padding
PAIRS = [{"prompt": f"A {word} ", "chosen": "is bound.", "rejected": "of the the."} for word in ("name", "value")]


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_preference_losses(name: str, folder: str, other: Any) -> None:
    module = example("preference_losses")
    batch, mismatched = module.Batch(IDS, TOKENS, COUNTED), module.Batch(IDS, TOKENS, COUNTED.roll(1, 1))
    arguments = {"dpo": (other, batch), "ipo": (other, batch), "kto": (other, batch, mismatched)}.get(name, (batch,))

    def expected(model: Any) -> torch.Tensor:
        """Pair by pair."""
        count, losses = COUNTED.sum(-1), []
        answers, references = plain(model)[0].sum(-1), plain(other)[0].sum(-1)
        ratios, means = answers - references, answers / count
        each = plain(model, TOKENS)[0]
        kl = (plain(model, mismatched.answers)[0] - plain(other, mismatched.answers)[0]).sum(-1).mean().detach()
        assert kl > 0
        for good, bad in ((0, 2), (1, 3)):
            odds = means.exp() / (1 - means.exp())
            losses.append(
                {
                    "dpo": -(0.1 * (ratios[good] - ratios[bad])).sigmoid().log(),
                    "ipo": (ratios[good] / count[good] - ratios[bad] / count[bad] - 5) ** 2,
                    "orpo": -each[:2].sum() / 16 - 0.1 * (odds[good] / odds[bad]).log().sigmoid().log(),
                    "simpo": -(2.0 * (means[good] - means[bad]) - 1.0).sigmoid().log(),
                    "kto": 1 - ((0.1 * (ratios[good] - kl)).sigmoid() + (0.1 * (kl - ratios[bad])).sigmoid()) / 2,
                }[name]
            )
        return torch.stack(losses).mean()

    same(folder, lambda model: getattr(module, name)(model, *arguments), expected)
    losses = module.train(folder, name, PAIRS, steps=2)
    assert losses[1] < losses[0]
    if name == "dpo":
        assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the model is its reference


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "cispo"])
def test_policy_losses(name: str, folder: str) -> None:
    """Some ratios are clipped, on both sides, and the entropy has a gradient."""
    module, advantages, counted = example("policy_losses"), torch.tensor([1.5, -0.5, -1.2, 0.2]), COUNTED[:, 1:]
    waves = torch.sin(torch.arange(36.0)).reshape(4, 9)
    options: dict[str, Any] = {"gspo": {"low": 0.03, "high": 0.04}, "cispo": {"most": 1.2}}.get(name, {})
    with torch.no_grad():
        old = (plain(load(folder))[0] + 0.3 * waves) * counted
        if name == "grpo":
            options["reference"] = (old - waves.cos()) * counted

    def ours(model: Any) -> torch.Tensor:
        log_probs, entropy = module.token_log_probs(model, IDS, counted)
        loss = module.LOSSES[name](log_probs, old, advantages, counted, **options)
        return loss - 0.01 * module.mean_of_tokens(entropy, counted)

    def expected(model: Any) -> torch.Tensor:
        """Answer by answer."""
        log_probs, entropy = plain(model)
        losses = []
        for one, before, a, some in zip(log_probs, old, advantages, counted, strict=True):
            p, q = one[some], before[some]
            ratio = (p - q).mean().exp() if name == "gspo" else (p - q).exp()
            low, high = {"gspo": (0.97, 1.04), "dapo": (0.8, 1.28)}.get(name, (0.8, 1.2))
            assert name == "gspo" or (ratio > high).any()
            gain = torch.stack([ratio * a, ratio.clip(low, high) * a]).amin(0)
            if name == "cispo":
                gain = ratio.clip(max=1.2).detach() * a * p
            if name == "grpo":
                u = options["reference"][len(losses)][some] - p
                gain = gain - 0.04 * (u.exp() - u - 1)
            losses.append(-gain)
        by_answer = name in ("grpo", "gspo")
        loss = torch.stack([x.mean() for x in losses]).mean() if by_answer else torch.cat(losses).mean()
        return loss - 0.01 * entropy.sum() / counted.sum()

    same(folder, ours, expected)
    losses = module.train(folder, name, material.sentences()[0], steps=1, tokens=4)
    assert torch.tensor(losses).isfinite().all()


def test_distillation_loop(folder: str, other: Any) -> None:
    module = example("distillation_loop")

    def expected(model: Any) -> torch.Tensor:
        log_probs, teacher = plain(model)[0], plain(other)[0]
        return ((log_probs - teacher).detach() * log_probs).sum() / COUNTED[:, 1:].sum()

    same(folder, lambda model: module.student_loss(model, other, IDS, COUNTED), expected)
    assert module.train(folder, folder, material.sentences()[0], steps=1, tokens=4) == [0.0]  # it is its own teacher


def test_perplexity(folder: str) -> None:
    texts = material.sentences()[:3]
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss += F.cross_entropy(logits, ids[1:], reduction="sum").item()
            right += int((logits.argmax(-1) == ids[1:]).sum())
            count += len(ids) - 1
    expected = torch.tensor(loss / count).exp().item(), right / count
    assert example("perplexity").run(folder, texts) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["trl_sft", "trl_grpo"])
def test_trl(name: str, folder: str) -> None:
    for package in ("trl", "datasets"):
        pytest.importorskip(
            package, reason=f"{package} is not installed here; matrix/trainers runs {name} in every cell of trl 1"
        )
    from matrix.trainers.test_examples import run

    run(name, folder)


def test_every_example_is_run_and_listed() -> None:
    text, listed = Path(__file__).read_text(encoding="utf-8"), (ROOT / "examples" / "README.md").read_text("utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert path.stem in text, path
        assert f"({path.name})" in listed, path
        assert not re.search(r"^(from|import) (tests|matrix)", path.read_text("utf-8"), re.MULTILINE), path
