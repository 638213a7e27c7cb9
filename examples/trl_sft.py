"""trl's SFTTrainer with a patched model.

python examples/trl_sft.py MODEL TEXT_FILE
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import liger_kernels


def train(name: str, texts: list[str], **arguments: Any) -> Any:
    """The trainer, when it has trained; ``arguments`` are those of ``SFTConfig``."""
    model = AutoModelForCausalLM.from_pretrained(name)
    liger_kernels.patch(model)
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(output, report_to="none", save_strategy="no", **arguments),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=AutoTokenizer.from_pretrained(name),
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    trained = train(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
    print(liger_kernels.status(trained.model))
