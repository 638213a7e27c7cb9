"""The arm of unsloth: its own loader, adapters and checkpointing, with the weights of the other arms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.adapters.job import AdapterJob
from benchmarks.adapters.model import ADAPTER, configuration, load, write_folder

CHECKPOINTING = {"none": False, "hf": True, "own": "unsloth"}  # the last moves what it keeps to the host


def unsloth(job: AdapterJob) -> Any:
    os.environ.setdefault("UNSLOTH_WARN_UNINITIALIZED", "0")
    from unsloth import FastLanguageModel  # before transformers, which it changes

    config, folder = configuration(job), Path("model").absolute()
    write_folder(config, folder)
    longest = max(job.lengths, default=config.max_position_embeddings)  # a search for the longest has no lengths yet
    checkpointing = CHECKPOINTING[job.checkpointing]
    with weights_of_the_others(job):
        model, _ = FastLanguageModel.from_pretrained(
            model_name=str(folder),
            max_seq_length=longest,
            dtype=job.dtype,
            load_in_4bit=job.quantised,
            device_map={"": 0 if job.device.type == "cuda" else "cpu"},
            use_gradient_checkpointing=checkpointing,
            offload_embedding=False,
        )
    model = FastLanguageModel.get_peft_model(
        model,
        r=job.rank,
        **ADAPTER,
        use_gradient_checkpointing=checkpointing,
        random_state=3407,
        max_seq_length=longest,
    )
    FastLanguageModel.for_training(model)
    return model


@contextmanager
def weights_of_the_others(job: AdapterJob) -> Iterator[None]:
    """unsloth's loader runs as it is, but for the one call that would read the weights from files."""
    import unsloth.models.llama as module
    from transformers import AutoConfig

    theirs = module.AutoModelForCausalLM

    class WithoutFiles:
        from_config = theirs.from_config

        @staticmethod
        def from_pretrained(name: str, *_: Any, **options: Any) -> Any:
            config = options.get("config") or AutoConfig.from_pretrained(name)
            if longest := options.get("max_position_embeddings"):
                config.max_position_embeddings = longest
            kept = {key: options[key] for key in ("quantization_config", "attn_implementation") if options.get(key)}
            model = load(config, job, **kept)
            model.config.name_or_path = model.name_or_path = name
            return model

    module.AutoModelForCausalLM = WithoutFiles
    try:
        yield
    finally:
        module.AutoModelForCausalLM = theirs
