"""trl's GRPOTrainer with a patched model; the reward prefers short answers.

python examples/trl_grpo.py MODEL PROMPT_FILE
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import liger_kernels


def brevity(completions: list[str], **_: Any) -> list[float | None]:
    return [-float(len(completion)) for completion in completions]


def train(name: str, prompts: list[str], **arguments: Any) -> Any:
    """The trainer, when it has trained; ``arguments`` are those of ``GRPOConfig``."""
    model = AutoModelForCausalLM.from_pretrained(name)
    liger_kernels.patch(model)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=brevity,
            args=GRPOConfig(output, report_to="none", save_strategy="no", **arguments),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(name, padding_side="left"),
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    trained = train(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
    print(liger_kernels.status(trained.model))
