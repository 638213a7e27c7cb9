"""The trainers: one row each, made as the installed trl has it. What it lacks is looked up, never read from a table."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convergence.arms.quantities import LOGGED, LOSS, Quantity
from convergence.trainers import material
from convergence.trainers.observe import InTrainer

STEPS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMMON: dict[str, Any] = {
    "use_cpu": DEVICE.type == "cpu",
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": STEPS,
    "logging_steps": 1,
    # SGD shows a gradient's scale, which AdamW hides; nothing is clipped, for the same reason.
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "gradient_checkpointing": False,
    "seed": 0,
    "dataset_num_proc": None,
}


def find(name: str) -> Any:
    """``trl.<name>``, or where the installed trl keeps it; None where it has none.

    Where it has moved, the old place may hold a shell that takes ``*args, **kwargs`` and warns: that is passed over.
    """
    family = name.removesuffix("Config").removesuffix("Trainer").lower()
    for module in ("trl", f"trl.experimental.{family}"):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if found is not None and (takes(found, "train_dataset") or takes(found, "output_dir")):
            return found
    return None


def takes(callable_: Any, name: str) -> bool:
    return name in inspect.signature(callable_).parameters


def chosen(callable_: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` under the names that ``callable_`` takes: of ``a|b`` the one it has; what it has none of goes."""
    found = {}
    for names, value in options.items():
        name = next((name for name in names.split("|") if takes(callable_, name)), None)
        if name is not None:
            found[name] = value
    return found


@dataclass(frozen=True)
class TrainerCase:
    """A trainer with its data and options.

    Args:
        trainer: the name of its class.
        data: the columns of its data set.
        options: of its configuration; ``a|b`` is whichever name the installed version has.
        needs: names that the configuration must have; without them this version has no such case.
        arguments: of the trainer itself, made anew for each arm.
        evaluates: whether it evaluates after training.
        zero: quantities that are 0 by construction, and the size of the numbers that cancel in them.
        teacher: whether the trainer takes a teacher, of the same family and with other weights.
        launches: parts of names of kernels that a patched arm must launch.
        expects: parts of warnings that a patched arm may give.
    """

    trainer: str
    data: Callable[[], dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    arguments: Callable[[], dict[str, Any]] = dict
    evaluates: bool = False
    zero: Mapping[Quantity, float] = field(default_factory=dict)
    teacher: bool = False
    launches: tuple[str, ...] = ()
    expects: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What the installed version lacks for this case."""
        for name in () if self.trainer == "Trainer" else (self.trainer, self.config_name):
            if find(name) is None:
                return f"no {name}"
        for names in self.needs:
            if not any(takes(find(self.config_name), name) for name in names.split("|")):
                return f"no {names} in {self.config_name}"
        try:
            self.arguments()
        except ImportError as error:
            return str(error)
        return None

    @property
    def config_name(self) -> str:
        return self.trainer.replace("Trainer", "Config")

    def make(self, folder: Path, output: Path, model: Any, options: dict[str, Any]) -> Any:
        """The trainer of ``model``, ready to train."""
        from datasets import Dataset

        if self.trainer == "Trainer":
            import transformers

            trainer, config = transformers.Trainer, transformers.TrainingArguments
        else:
            trainer, config = find(self.trainer), find(self.config_name)
        wanted = {**COMMON, **self.options, **options, "output_dir": str(output)}
        data = Dataset.from_dict(self.data())
        arguments = {"args": config(**chosen(config, wanted)), "train_dataset": data, **self.arguments()}
        if self.evaluates:
            arguments["eval_dataset"] = data.select(range(6))
        if self.teacher:
            arguments["teacher_model"] = material.teacher(folder, model.dtype)
        arguments["processing_class|tokenizer"] = material.tokenizer()
        return trainer(model, **chosen(trainer, arguments))


@dataclass(frozen=True)
class InCase(InTrainer):
    """The trainer of the case called ``case``, of the model in ``folder``."""

    case: str
    folder: Path

    @property
    def zero(self) -> Mapping[Quantity, float]:
        return CASES[self.case].zero

    @property
    def launches(self) -> tuple[str, ...]:
        return CASES[self.case].launches

    @property
    def options_of_truth(self) -> Mapping[str, Any]:
        # The truth keeps its activations: what is computed again in the backward pass is out of float64's reach.
        return {"gradient_checkpointing": False}

    def model(self) -> Any:
        return material.plain(self.folder)

    def trainer(self, model: Any, options: dict[str, Any]) -> Any:
        return CASES[self.case].make(self.folder, self.folder / "output", model, options)


def _tokenized() -> dict[str, Any]:
    return {"input_ids": [material.tokenizer()(text)["input_ids"] for text in material.texts()["text"]]}


def _trainer_arguments() -> dict[str, Any]:
    from transformers import DataCollatorForLanguageModeling

    return {
        "data_collator": DataCollatorForLanguageModeling(material.tokenizer(), mlm=False),
        "compute_metrics": _metrics_of_logits,
    }


def _flattening() -> dict[str, Any]:
    """Rows without padding, with ``position_ids`` and, where the collator has them, ``cu_seq_lens_q`` and friends."""
    from transformers import DataCollatorWithFlattening

    options = chosen(DataCollatorWithFlattening, {"return_flash_attn_kwargs": True})
    return {"data_collator": DataCollatorWithFlattening(**options)}


def _metrics_of_logits(prediction: Any) -> dict[str, float]:
    """What a user computes from the logits of an evaluation."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    hits = (logits.argmax(-1) == labels)[counted]
    return {
        "accuracy": float(hits.mean()),
        "size_of_logits": float(np.square(logits[counted], dtype=np.float64).mean()),
    }


def _completion_only(**options: bool) -> dict[str, Any]:
    """With trl's collator, up to 0.19.

    Raises:
        ImportError: this trl has none, or none with these options.
    """
    collator = getattr(importlib.import_module("trl"), "DataCollatorForCompletionOnlyLM", None)
    if collator is None:
        raise ImportError("no DataCollatorForCompletionOnlyLM")
    for name in options:
        if not takes(collator, name):
            raise ImportError(f"no {name} in DataCollatorForCompletionOnlyLM")
    ids = material.tokenizer()(material.ANSWER)["input_ids"]
    return {"data_collator": collator(ids, tokenizer=material.tokenizer(), **options)}


def _divergence_of_two_heads() -> dict[str, Any]:
    """No argument.

    Raises:
        ImportError: this trl has none. A distillation trainer of before compares logits, and with another teacher.
    """
    importlib.import_module("trl.kernels.chunked_divergence")
    return {}


def _length_reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards variety of characters: it differs between any two completions that are not alike."""
    return [len(set(text)) + len(text) / 64 for text in completions]


_SFT = {"max_length|max_seq_length": 48, "dataset_text_field": "text"}
_PAIRS = {"learning_rate": 0.002, "max_length": 64, "max_prompt_length": 32, "max_completion_length": 32}
_ONLINE = {
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_prompt_length": 16,
    "max_completion_length": 8,
    "beta": 0.0,
}
CASES: dict[str, TrainerCase] = {
    "trainer": TrainerCase(
        "Trainer",
        _tokenized,
        {"gradient_accumulation_steps": 2},
        arguments=_trainer_arguments,
        evaluates=True,
    ),
    "trainer-flattened": TrainerCase("Trainer", _tokenized, arguments=_flattening),
    "sft": TrainerCase("SFTTrainer", material.texts, {**_SFT, "gradient_accumulation_steps": 2}, evaluates=True),
    "sft-nll": TrainerCase(
        "SFTTrainer", material.texts, {**_SFT, "loss_type": "nll"}, needs=("loss_type",), evaluates=True
    ),
    "sft-checkpointed": TrainerCase("SFTTrainer", material.texts, {**_SFT, "gradient_checkpointing": True}),
    "sft-packing": TrainerCase("SFTTrainer", material.texts, {**_SFT, "packing": True}),
    "sft-padding-free": TrainerCase(
        "SFTTrainer",
        material.texts,
        {**_SFT, "max_length|max_seq_length": None, "padding_free": True},
        needs=("padding_free",),
    ),
    "sft-completion-flag": TrainerCase(
        "SFTTrainer", material.questions, {**_SFT, "completion_only_loss": True}, needs=("completion_only_loss",)
    ),
    "sft-completion-collator": TrainerCase("SFTTrainer", material.answered, _SFT, arguments=_completion_only),
    "sft-completion-collator-padding-free": TrainerCase(
        "SFTTrainer", material.answered, _SFT, arguments=functools.partial(_completion_only, padding_free=True)
    ),
    "dpo": TrainerCase("DPOTrainer", material.preferences, _PAIRS),
    "dpo-padding-free": TrainerCase(
        "DPOTrainer", material.preferences, {**_PAIRS, "padding_free": True}, needs=("padding_free",)
    ),
    "kto": TrainerCase("KTOTrainer", material.judged, _PAIRS),
    "orpo": TrainerCase("ORPOTrainer", material.preferences, _PAIRS, launches=("cross_entropy",)),
    "cpo": TrainerCase("CPOTrainer", material.preferences, _PAIRS, launches=("cross_entropy",)),
    **{
        f"distillation-{name}": TrainerCase(
            "DistillationTrainer",
            lambda: {"prompt": material.questions()["prompt"]},
            {**_ONLINE, "beta": beta, "temperature": 0.9},
            arguments=_divergence_of_two_heads,
            teacher=True,
            launches=("divergence",),
            # NumPy's, in Triton's interpreter: minus infinity minus itself, where the kernel then selects 0.
            expects=("invalid value encountered in subtract",),
        )
        for name, beta in (("forward", 0.0), ("jsd", 0.5), ("reverse", 1.0))
    },
    # On policy every ratio is 1, and advantages add up to 0. RLOO's ratio is e to the difference of two
    # log-probabilities. Those of random tokens are -12 in the mean; 8 is what is asked for here.
    **{
        name: TrainerCase(
            trainer,
            lambda: {"prompt": material.questions()["prompt"]},
            {**_ONLINE, **options},
            needs=("num_generations",),
            arguments=lambda: {"reward_funcs": _length_reward},
            zero=dict.fromkeys((LOSS, Quantity(LOGGED, "train_loss")), size),
        )
        for name, trainer, options, size in (
            ("grpo", "GRPOTrainer", {}, 1.0),
            ("rloo", "RLOOTrainer", {"temperature": 0.9}, 8.0),
        )
    },
}
