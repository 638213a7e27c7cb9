"""Several samples in one row, each of which counts alike in the loss.

    python examples/packed_rows.py MODEL TEXT_FILE

``loss_reduction="sample"`` gives every sample the weight that it has unpacked; without it every token counts alike.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import liger_kernels


class PackedTrainer(liger_kernels.PackingLossMixin, Trainer):
    """Counts samples instead of tokens, over all micro batches and ranks."""


def train(name: str, texts: list[str], **arguments: Any) -> Any:
    """The trainer, when it has trained; ``arguments`` are those of ``TrainingArguments``."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    liger_kernels.patch(model, loss_reduction="sample")
    with tempfile.TemporaryDirectory() as output:
        trainer = PackedTrainer(
            model=model,
            args=TrainingArguments(output, report_to="none", save_strategy="no", **arguments),
            train_dataset=[{"input_ids": tokenizer(text)["input_ids"]} for text in texts],
            data_collator=DataCollatorWithFlattening(),  # makes position_ids, which say where a sample begins
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    trained = train(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
    print(trained.state.log_history)
