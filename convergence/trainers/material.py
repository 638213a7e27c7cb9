"""What the trainers train: tiny models with a real tokenizer, saved to disk, and real text that ships with Python."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import torch

from convergence.models.models import MODELS

FAMILIES = {"llama": "llama-untied", "gemma": "gemma"}
# A square, so that Gemma's embedding scale is exact; small, because kernels run in an interpreter.
_SIZES = {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6, "num_key_value_heads": 3}
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
VOCABULARY = 311
ANSWER = "\nAnswer:"
_CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


@functools.cache
def sentences() -> list[str]:
    """Sentences of the Python language reference, 30 to 90 characters each, always in the same order."""
    from pydoc_data import topics

    text = " ".join("\n".join(topics.topics[name] for name in sorted(topics.topics)).split())
    found = re.findall(r"[A-Z][A-Za-z ,;()'-]{28,88}\.", text)
    return list(dict.fromkeys(found))


@functools.cache
def tokenizer() -> Any:
    """A byte-level BPE tokenizer trained on those sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],  # GRPO's generate rejects token_type_ids
        chat_template=_CHAT,
        model_max_length=128,
    )


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """A tiny model of ``family`` with its tokenizer, saved to ``folder``."""
    row = MODELS[FAMILIES[family]]
    sizes = {**row.overrides, **_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    if "head_dim" in sizes:
        sizes["head_dim"] = 6
    model: Any = dataclasses.replace(row, overrides=sizes).build(seed)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def plain(folder: Path) -> Any:
    """The model in ``folder`` as anybody loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def teacher(folder: Path, dtype: torch.dtype) -> Any:
    """The model in ``folder``, with other weights."""
    model = plain(folder)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.data = (parameter.data * (1 + 0.3 * noise)).to(dtype)
    return model


def texts(count: int = 16) -> dict[str, list[str]]:
    """Plain text, of uneven lengths."""
    return {"text": sentences()[:count]}


def questions(count: int = 16) -> dict[str, list[str]]:
    """Prompts that end where the answer begins, and their answers."""
    halves = [sentence.split(" ", 3) for sentence in sentences()[:count]]
    return {
        "prompt": [" ".join(words[:3]) + ANSWER for words in halves],
        "completion": [" " + words[3] for words in halves],
    }


def answered(count: int = 16) -> dict[str, list[str]]:
    """Prompt and answer in one text, for a collator that looks for the answer itself."""
    pairs = questions(count)
    return {"text": [prompt + answer for prompt, answer in zip(pairs["prompt"], pairs["completion"], strict=True)]}


def preferences(count: int = 16) -> dict[str, list[str]]:
    """The true answer, preferred to that of another question."""
    pairs = questions(count)
    answers = pairs["completion"]
    return {"prompt": pairs["prompt"], "chosen": answers, "rejected": answers[1:] + answers[:1]}


def judged(count: int = 16) -> dict[str, list[Any]]:
    """Answers with a thumb up or down."""
    pairs = preferences(count)
    up = [i % 2 == 0 for i in range(count)]
    completions = [pairs["chosen"][i] if good else pairs["rejected"][i] for i, good in enumerate(up)]
    return {"prompt": pairs["prompt"], "completion": completions, "label": up}
