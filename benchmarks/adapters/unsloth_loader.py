"""The arm of unsloth: its own loader, adapters and checkpointing, with the weights of the other arms in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict

from benchmarks.adapters.job import AdapterJob
from benchmarks.adapters.model import ADAPTER, configuration, weights, write_folder
from benchmarks.models import release

CHECKPOINTING = {"none": False, "hf": True, "own": "unsloth"}  # the last moves what it keeps to the host


def unsloth(job: AdapterJob) -> Any:
    os.environ.setdefault("UNSLOTH_WARN_UNINITIALIZED", "0")
    from unsloth import FastLanguageModel  # before transformers, which it changes

    config, folder = configuration(job), Path("model").absolute()
    write_folder(config, folder)
    save_torch_state_dict(weights(config, job), folder)
    release()
    longest = max(job.lengths, default=config.max_position_embeddings)  # a search for the longest has no lengths yet
    checkpointing = CHECKPOINTING[job.checkpointing]
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=longest,
        dtype=job.dtype,
        load_in_4bit=job.quantised,
        full_finetuning=job.full,
        device_map={"": 0 if job.device.type == "cuda" else "cpu"},
        use_gradient_checkpointing=checkpointing,
        offload_embedding=False,
    )
    if not job.full:
        model = FastLanguageModel.get_peft_model(
            model,
            r=job.rank,
            **ADAPTER,
            use_gradient_checkpointing=checkpointing,
            random_state=3407,
            max_seq_length=longest,
        )
    model.for_training()
    return model
