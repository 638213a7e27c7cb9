"""What one process measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

CHECKPOINTING = ("none", "hf", "own")
PRECISIONS = ("trainer", "bfloat16", "float32")
TRAINED = ("lora", "dora", "experts", "full")
TRUTH = "truth"  # the arm that is PEFT's own forward in float64


@dataclass(frozen=True)
class AdapterJob:
    """One arm of one model.

    Attributes:
        arm: of :data:`benchmarks.adapters.arms.ARMS`, or :data:`TRUTH`.
        quantised: whether the base is bitsandbytes' NF4, double quantised.
        checkpointing: "none", "hf" (transformers', which is not reentrant; unsloth's without its offload), or "own".
        precision: "trainer" is a bfloat16 base and float32 adapters under bfloat16 autocast, as a Trainer with
            ``bf16=True`` runs what ``get_peft_model`` returns; "bfloat16" and "float32" are of one dtype, and
            without autocast.
        lengths: tokens of a sequence of a step, in the order in which they are measured.
        layers: of the decoder; None means all.
        tiny: a decoder of 64 features, which a CPU runs.
        repeats: measured steps of a length, fewer where they take long.
        rank: of each adapter.
        trained: "lora" and "dora" are adapters on every linear layer of the Llama-3 8B shape, "experts" LoRA on
            attention and packed experts of the Qwen3-MoE shape, "full" every weight of the Llama-3 8B shape.
        batch: sequences of a step.
        truth: the folder of the gradients that errors are relative to, in a check.
    """

    arm: str
    quantised: bool = False
    checkpointing: str = "hf"
    precision: str = "trainer"
    lengths: Sequence[int] = ()
    layers: int | None = None
    tiny: bool = False
    repeats: int = 4
    rank: int = 16
    trained: str = "lora"
    batch: int = 1
    truth: str = ""

    @property
    def full(self) -> bool:
        """Whether there are no adapters."""
        return self.trained == "full"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The base's."""
        if self.arm == TRUTH:
            return torch.float64
        return torch.float32 if self.precision == "float32" else torch.bfloat16

    @property
    def adapter_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "trainer" and self.arm != TRUTH else self.dtype

    @property
    def autocast(self) -> bool:
        return self.precision == "trainer" and self.arm != TRUTH

    def but(self, **changes: Any) -> AdapterJob:
        return replace(self, **changes)
