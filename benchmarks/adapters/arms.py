"""What is compared: PEFT's own forward, ours, and other packages', each as its documentation says.

An arm makes a model with adapters and checkpointing. A package is imported when its arm is built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.adapters.job import TRAINED, TRUTH, AdapterJob
from benchmarks.adapters.model import ADAPTER, ADAPTERS, configuration, dequantised, load, write_folder
from benchmarks.adapters.unsloth_loader import unsloth


@dataclass(frozen=True)
class AdapterArm:
    """How an arm is built.

    Attributes:
        build: the model, ready for a training step but for the values of its adapters.
        needs: modules that must be there.
        distributions: what they are installed as.
        own: whether it has checkpointing of its own, in addition to transformers'.
        trains: what it is measured with, in addition to LoRA.
    """

    build: Callable[[AdapterJob], Any]
    needs: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    own: bool = False
    trains: tuple[str, ...] = TRAINED

    def absent(self, job: AdapterJob) -> str:
        """Why the arm cannot be measured: a module is not installed, or it knows LoRA alone; empty where it can."""
        wanted = (*self.needs, "peft", *(["bitsandbytes"] if job.quantised else []))
        if job.trained not in ("lora", *self.trains):
            return f"it is not measured with {job.trained}"
        return next((f"{name} is not installed" for name in wanted if importlib.util.find_spec(name) is None), "")


def with_peft(base: Any, job: AdapterJob) -> Any:
    """``base`` with the job's adapters, if there are any, and with transformers' checkpointing unless the
    job has none."""
    model = base
    if not job.full:
        import peft

        base.requires_grad_(False)
        model = peft.get_peft_model(
            base, peft.LoraConfig(r=job.rank, task_type="CAUSAL_LM", **ADAPTER | ADAPTERS[job.trained])
        )
    if job.checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not job.full:
            model.enable_input_require_grads()
    model.config.use_cache = False
    return model


def eager(job: AdapterJob) -> Any:
    return with_peft(load(configuration(job), job), job)


def ours(job: AdapterJob) -> Any:
    return models.ARMS["ours"](eager(job))


def ours_small(job: AdapterJob) -> Any:
    return models.ARMS["ours-small"](eager(job))


def ours_with(job: AdapterJob, **options: Any) -> Any:
    return models.ours_with(eager(job), **options)


def liger(job: AdapterJob) -> Any:
    """As a Trainer with ``use_liger_kernel=True`` does it."""
    model = eager(job)
    models.ARMS["liger"](model if job.full else model.get_base_model())
    return model


def axolotl(job: AdapterJob) -> Any:
    from axolotl.monkeypatch.lora_kernels import apply_lora_kernel_patches, patch_self_attn_lora
    from axolotl.utils.dict import DictDefault

    config, folder = configuration(job), Path("model").absolute()
    write_folder(config, folder)
    kernels = dict.fromkeys(("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel"), True)
    options = DictDefault(base_model=str(folder), **kernels)
    patch_self_attn_lora(options)  # first: it writes the attention's forward anew from its source
    return apply_lora_kernel_patches(with_peft(load(config, job), job), options)


def truth(job: AdapterJob) -> Any:
    """PEFT's own forward in float64, of a quantised base with the dequantised weights."""
    if not job.quantised:
        return eager(job)
    narrow = job.but(arm="eager")
    state = dequantised(load(configuration(narrow), narrow))
    return with_peft(load(configuration(job), job, state), job)


ARMS = {
    "eager": AdapterArm(eager),
    "ours": AdapterArm(ours, distributions=("liger-kernels",)),
    "ours-small": AdapterArm(ours_small, distributions=("liger-kernels",)),
    **{
        name: AdapterArm(partial(ours_with, **options), distributions=("liger-kernels",))
        for name, options in models.OPTIONS.items()
    },
    "liger": AdapterArm(liger, ("liger_kernel",), ("liger-kernel",)),
    "axolotl": AdapterArm(axolotl, ("axolotl",), ("axolotl",), trains=()),
    "unsloth": AdapterArm(unsloth, ("unsloth",), ("unsloth", "unsloth_zoo"), own=True, trains=("full",)),
    TRUTH: AdapterArm(truth),
}
OWN = ("eager", "ours", "ours-small", *models.OPTIONS)  # a failure of the others does not change the exit code
DEFAULT = ("eager", "ours", "liger", "axolotl", "unsloth")
