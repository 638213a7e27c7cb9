"""The Trainer of transformers with a patched model.

python examples/trainer.py MODEL TEXT_FILE
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import liger_kernels


def train(name: str, texts: list[str], **arguments: Any) -> Any:
    """The trainer, when it has trained; ``arguments`` are those of ``TrainingArguments``."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    liger_kernels.patch(model)  # before the trainer gets it
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(output, report_to="none", save_strategy="no", **arguments),
            train_dataset=[tokenizer(text) for text in texts],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    trained = train(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
    print(liger_kernels.status(trained.model))
