"""Models of real widths and few layers (``--profile scale``): faults that a mini model is too small to show.

More classes than 16 bits count, more logits than 32 bits count, rows of many blocks, and sizes that are no multiple of
anything next to round ones. One step at random initial weights is observed, with every statistic of the proof; what is
large is observed by its projections (``large.py``), on the GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convergence.judge import tolerance
from convergence.models import data, memory
from convergence.models.models import DTYPES, MiniModel, initialise

PROFILE = "scale"
_DIVIDED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "sliding_window",
    "num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok",
)  # fmt: skip
# Of one H200, for the estimate of the time: what float64 and float32 without TF32 reach in matrix products.
_FLOPS = 4e13


@dataclass(frozen=True)
class Shape(MiniModel):
    """A row of the table: an architecture, its real sizes, and the batch.

    ``divided`` divides all widths and counts, and the length: a dry run of the same code on a CPU. What ``whole`` names
    stays as it is. The row of that is called ``llama3-8b?divided=64&whole=vocab_size``.
    """

    rows: int = 1
    length: int = 4096
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    divided: int = 1
    whole: tuple[str, ...] = ()

    phases = ()
    is_long = True

    def config(self) -> Any:
        sizes = dict(self.overrides)
        for name in _DIVIDED:
            if name in sizes and name not in self.whole:
                sizes[name] = max(1, sizes[name] // self.divided)
        sizes["max_position_embeddings"] = self._tokens
        return self.model_class().config_class(
            **sizes, attn_implementation=self.attention, attention_dropout=0.0, pad_token_id=0
        )

    @property
    def _tokens(self) -> int:
        """In a row."""
        return self.length if "length" in self.whole else self.length // self.divided

    def build(self, seed: int) -> nn.Module:
        """The unpatched model in float32, where it will train: a CPU takes minutes to draw a billion weights."""
        config = self.config()
        with torch.device("cuda" if self.divided == 1 else "cpu"):
            torch.manual_seed(seed)
            model: nn.Module = self.model_class()(config)
        initialise(model, seed)
        return model.train()

    def empty(self) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = self.model_class()(self.config())
        return model

    def data(self, profile: str, seed: int, dtype: torch.dtype) -> tuple[list[data.Step], data.Batch]:
        """One step: every class may be a token or a target, the last one and those around 65,536 surely."""
        classes = self.config().vocab_size
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(classes, (self.rows, self._tokens), generator=generator)
        ids[0, 1:6] = torch.tensor([0, classes - 1, 65535, 65536, 65537]).clamp(max=classes - 1)
        batch = data.Batch(ids, ids.clone())
        batch.labels[0, self._tokens // 3 : self._tokens // 2] = data.IGNORE
        # As a gradient scaler has it: a token's share of a mean is far below what float16 holds.
        scale = 2.0 ** (batch.labels.numel().bit_length() - 1) if dtype is torch.float16 else 1.0
        return [data.Step(PROFILE, [batch], scale=scale, whole=True)], data.evaluation_batch(seed)

    def bystander(self, template: nn.Module) -> nn.Module:
        return dataclasses.replace(self, divided=64, whole=()).build(0)

    def truth(self, dtype: str, device: str) -> torch.dtype:
        return self.plan(dtype, device).truth

    @functools.lru_cache(maxsize=64)  # noqa: B019  (a row is a small value; what is free changes while arms train)
    def plan(self, dtype: str, device: str) -> memory.Plan:
        model, on_host = self.empty(), device != "cuda"
        return memory.plan(model, self.rows, self._tokens, DTYPES[dtype], device, torch.float32, on_host, 1.5)

    def absent(self, dtype: str, device: str) -> str:
        """Why it cannot be had here: it is not in this transformers, or too large for this device."""
        missing = super().absent(dtype, device)
        if not missing and not self.plan(dtype, device).fits:
            return f"{self.name} does not fit in {dtype}: {self.plan(dtype, device)}"
        return missing

    def describe(self, dtype: str, device: str) -> str:
        model, tokens = self.empty(), self.rows * self._tokens
        count = sum(parameter.numel() for parameter in model.parameters())
        classes = self.config().vocab_size
        seconds = (1 + tolerance.REPLICAS) * 6 * count * tokens / _FLOPS
        return (
            f"{self.name}: {count:,} parameters, {self.rows} x {self._tokens} tokens, {tokens * classes:,} logits, "
            f"{dtype}: {self.plan(dtype, device)}, about {seconds:.0f} s on an H200"
        )

    # A row is hashed by what names it: its overrides are a dict.
    def __hash__(self) -> int:
        return hash((self.name, self.divided, self.whole))


_GEMMA3 = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
_LLAMA = {"num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
_KERNELS = ("rms_norm", "rope", "geglu")
_ROWS = (
    # More than 2^31 logits.
    Shape(
        "llama3-8b",
        "LlamaForCausalLM",
        overrides={
            **_LLAMA, "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128,
        },
        rows=8,
        length=2100,
    ),
    Shape(
        "llama3-8b-odd",
        "LlamaForCausalLM",
        overrides={
            **_LLAMA, "vocab_size": 128_257, "hidden_size": 4131, "intermediate_size": 14_337,
            "head_dim": 96, "num_attention_heads": 27, "num_key_value_heads": 9,
        },
        rows=3,
        length=1023,
        dtypes=("float32", "bfloat16", "float16"),
    ),
    # The longest rows, and more tokens than a dimension of a grid may count. No heads share their keys: PyTorch's only
    # attention that knows of that in float32 holds all scores.
    Shape(
        "llama-long",
        "LlamaForCausalLM",
        overrides={
            **_LLAMA, "vocab_size": 16_000, "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64,
            "num_attention_heads": 9, "num_key_value_heads": 9,
        },
        rows=2,
        length=34_000,
    ),
    Shape(
        "gemma3-4b",
        "Gemma3ForCausalLM",
        _KERNELS,
        {**_GEMMA3, "vocab_size": 262_144, "hidden_size": 2560, "intermediate_size": 10_240},
        rows=2,
        length=2048,
    ),
    # A square, so that the embedding's scale is exact in bfloat16.
    Shape(
        "gemma3-4b-odd",
        "Gemma3ForCausalLM",
        _KERNELS,
        {
            **_GEMMA3, "vocab_size": 262_143, "hidden_size": 2601, "intermediate_size": 10_241,
            "num_attention_heads": 9, "num_key_value_heads": 3,
        },
        length=1025,
        dtypes=("float32", "bfloat16", "float16"),
    ),
    Shape(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        ("rms_norm", "rope", "experts"),
        {
            **_LLAMA, "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
            "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "experts_implementation": "eager",
        },
        rows=2,
        length=1024,
    ),
    Shape(
        "qwen2.5-7b",
        "Qwen2ForCausalLM",
        overrides={
            **_LLAMA, "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "head_dim": 128,
            "num_attention_heads": 28, "num_key_value_heads": 4,
        },
        rows=2,
        length=2048,
    ),
)  # fmt: skip
SHAPES = {row.name: row for row in _ROWS}


def find(name: str) -> Shape | None:
    """The row of that name, which may be divided; None where there is none."""
    given = _NAME.fullmatch(name)
    if given is None or given["shape"] not in SHAPES:
        return None
    row = SHAPES[given["shape"]]
    if given["divided"] is None:
        return row
    whole = tuple(given["whole"].split("+")) if given["whole"] else ()
    return dataclasses.replace(row, name=name, divided=int(given["divided"]), whole=whole)


_NAME = re.compile(r"(?P<shape>[^?]+)(\?divided=(?P<divided>[1-9]\d*)(&whole=(?P<whole>[a-z_+]+))?)?")


def select(names: str) -> list[Shape]:
    """The shapes that ``--models`` names; those of "core" are all.

    Raises:
        ValueError: for an unknown name, with the allowed ones.
    """
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in ("all", "core") and find(name) is None:
            raise ValueError(f"unknown model {name!r}; allowed with --profile scale are all, {', '.join(SHAPES)}")
    divided = [row for row in map(find, wanted) if row is not None and row.divided > 1]
    return [row for row in SHAPES.values() if {row.name, "all", "core"} & {*wanted}] + divided
