"""Time and peak memory of whole training steps through transformers' Trainer and trl's trainers, on one GPU.

``python -m benchmarks.trainers [job ...] [--arms plain,ours,...] [--liger-path DIR] [--json FILE]``

A step is what lies between two beginnings of a step: data, forward, backward, clipping and the optimizer (SGD). The
model is a llama of 8 layers of 2048 with random bfloat16 weights, the batch 4 rows of 2048 random tokens (DPO: two
pairs, and a reference model). Each arm is a process of its own: what one patches cannot reach another. Times are
medians by CUDA events, and nobody waits for the device in between but the trainer itself. liger-kernel and
``liger_kernels.compat`` exclude each other, so the former lies in a folder of its own (``pip install --target DIR
--no-deps liger-kernel``).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import run_module
from convergence import files, tables
from convergence.trainers.material import tokenizer

ROWS, LENGTH, VOCAB = 4, 2048, 128256
WARM_UP, STEPS = 5, 15
ARMS = ("plain", "ours", "ours-small", "liger")


@dataclass(frozen=True)
class Job:
    """A trainer and its batch.

    Attributes:
        prompt: the share of each row whose labels are ignored.
    """

    make: Callable[..., Any]
    prompt: float = 0.0


def _rows(prompt: float) -> dict[str, list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, ((WARM_UP + STEPS + 1) * ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, : int(prompt * LENGTH)] = -100
    return {"input_ids": ids.tolist(), "labels": labels.tolist()}


def _trainer(model: Any, options: dict[str, Any], prompt: float) -> Any:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, default_data_collator

    data = Dataset.from_dict(_rows(prompt))
    return Trainer(model, TrainingArguments(**options), train_dataset=data, data_collator=default_data_collator)


def _sft(model: Any, options: dict[str, Any], prompt: float) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    prepared: dict[str, Any] = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    config = SFTConfig(**options, **prepared, bf16=False, gradient_checkpointing=False)
    return SFTTrainer(model, config, train_dataset=Dataset.from_dict(_rows(prompt)), processing_class=tokenizer())


def _dpo(model: Any, options: dict[str, Any], prompt: float) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Prepared(DPOTrainer):  # type: ignore[misc, unused-ignore]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset  # tokens already

    ids, first = _rows(0.0)["input_ids"], int(prompt * LENGTH)
    pairs = list(zip(ids[::2], ids[1::2], strict=True))
    columns = {
        "prompt_ids": [chosen[:first] for chosen, _ in pairs],
        "chosen_ids": [chosen[first:] for chosen, _ in pairs],
        "rejected_ids": [rejected[first:] for _, rejected in pairs],
    }
    options = {**options, "per_device_train_batch_size": ROWS // 2, "max_length": None}
    config = DPOConfig(**options, bf16=False, gradient_checkpointing=False)
    reference = copy.deepcopy(model)  # patched as the model is
    return Prepared(model, reference, config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer())


JOBS = {
    "trainer": Job(_trainer),
    "trainer-masked": Job(_trainer, prompt=0.7),
    "sft": Job(_sft),
    "sft-masked": Job(_sft, prompt=0.7),
    "dpo": Job(_dpo, prompt=0.03),
}


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCAB,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def run(job: Job, arm: str, folder: str) -> dict[str, Any]:
    """Train, in this process; milliseconds of each measured step and the peak of memory in GiB."""
    if arm.startswith("ours"):
        import liger_kernels.compat

        liger_kernels.compat.install()
    from transformers import TrainerCallback

    model = _model()
    if arm.startswith("ours"):
        liger_kernels.patch(model, memory="small" if arm == "ours-small" else None)
    options = {
        "output_dir": folder,
        "max_steps": WARM_UP + STEPS + 1,
        "per_device_train_batch_size": ROWS,
        "optim": "sgd",
        "learning_rate": 1e-6,
        "logging_steps": 10_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_liger_kernel": arm == "liger",
    }
    begun = []

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.append(torch.cuda.Event(enable_timing=True))
            begun[-1].record()
            if len(begun) == WARM_UP:
                torch.cuda.reset_peak_memory_stats()

    trainer = job.make(model, options, job.prompt)
    trainer.add_callback(Clock())
    loss = trainer.train().training_loss
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(begun[WARM_UP:], begun[WARM_UP + 1 :], strict=False)]
    return {
        "ms": statistics.median(times),
        "fastest": min(times),
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": loss,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers", description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="job", help=f"of {', '.join(JOBS)}; all by default")
    parser.add_argument("--arms", default=",".join(ARMS), help="default: %(default)s")
    parser.add_argument("--liger-path", metavar="DIR", help="the folder with liger-kernel; without it, no such arm")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE, too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arms, jobs = arguments.arms.split(","), arguments.jobs or list(JOBS)
    for kind, given, known in (("arms", arms, ARMS), ("jobs", jobs, JOBS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"unknown {kind} {unknown}; there are {list(known)}")
    if not torch.cuda.is_available():
        parser.error("benchmarks need a GPU; torch.cuda.is_available() is False")
    if arguments.here:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run(JOBS[jobs[0]], arms[0], folder)))
        return 0
    if arguments.liger_path is None and "liger" in arms:
        print("liger: skipped, --liger-path does not say where it is")
        arms.remove("liger")
    rows, failed = [], False
    for job in jobs:
        for arm in arms:
            paths = [arguments.liger_path] if arm == "liger" else []
            done = run_module("benchmarks.trainers", [job, "--arms", arm, "--here"], paths=paths)
            if done.problem:
                failed = True
                print(f"{job} {arm}: failed\n{done.problem}", flush=True)
                continue
            row = {"job": job, "arm": arm, **json.loads(done.output.splitlines()[-1])}
            rows.append(row)
            print(f"{job} {arm}: {row['ms']:.1f} ms, {row['gib']:.2f} GiB, loss {row['loss']:.4f}", flush=True)
    print("\n" + table(rows))
    if arguments.json:
        files.write_json({"device": torch.cuda.get_device_name(), "rows": rows}, arguments.json)
    return int(failed or not rows)


def table(rows: list[dict[str, Any]]) -> str:
    packages = ", ".join(
        f"{name} {version}" for name, version in files.versions(["torch", "transformers", "trl"]).items()
    )
    heading = f"{torch.cuda.get_device_name()}, {packages}, bfloat16, {datetime.date.today()}"
    columns = ("job", "arm", "step, ms", "fastest", "peak, GiB", "loss")
    cells = [
        (r["job"], r["arm"], f"{r['ms']:.1f}", f"{r['fastest']:.1f}", f"{r['gib']:.2f}", f"{r['loss']:.4f}")
        for r in rows
    ]
    return "\n".join([heading, "", *tables.markdown(columns, cells)])


if __name__ == "__main__":
    sys.exit(main())
