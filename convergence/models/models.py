"""The mini models: real ``transformers`` architectures, shrunk to about two hundred thousand parameters.

Sizes are odd on purpose (a vocabulary of 263, a hidden size of 100), because powers of two hide a missing mask; the
hidden size is a square, so that the embedding scale ``sqrt(hidden)`` of the Gemma family is exact in bfloat16 and the
float64 truth computes the same function.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from convergence.arms.quantities import ADAMW, SGD
from convergence.arms.tasks.causal_lm import CausalLM
from convergence.arms.tasks.task import Task
from convergence.models import data
from convergence.models.data import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COMMON: dict[str, Any] = {
    "vocab_size": data.VOCABULARY,
    "hidden_size": 100,
    "intermediate_size": 150,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # A tenth of the mean square of the first norm's input: of the usual 1e-6, bfloat16 shows nothing.
    "rms_norm_eps": 1e-3,
}
# One layer with a sliding window, one without. Old configurations know the pattern, new ones the list.
_ALTERNATING = {
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Where every head is normalised, the norm's weight has few elements for noise to average over: few, long heads.
_NORMED_HEADS = {"head_dim": 60, "num_attention_heads": 4, "num_key_value_heads": 2}
# Grouped matrix products want aligned strides and know no float64: the loop over experts knows everything.
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}


class Row:
    """What a case trains: a mini model, or a model of real size.

    Attributes:
        name: what finds it again (:func:`convergence.models.rows.find`).
        kernels: those it must be given; empty for what the patch itself says.
        dtypes: those that it is proven in where none is asked for.
        phases: the optimizers that train it, after the observation at the initial weights.
        is_long: whether a bar shows how far it is.
        task: how an arm runs it.
    """

    name: str
    architecture: str = ""
    kernels: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    phases: tuple[str, ...] = (SGD, ADAMW)
    is_long = False
    task: ClassVar[Task] = CausalLM()

    def is_available(self) -> bool:
        """Whether the installed transformers has its architecture."""
        return True

    def absent(self, dtype: str, device: str) -> str:
        """Why arms of ``dtype`` cannot be had here; empty where they can."""
        return "" if self.is_available() else f"this transformers has no {self.architecture}"

    def model_class(self) -> Any:
        raise NotImplementedError

    def classes(self) -> list[type]:
        """The classes whose code, with everything else in their modules, must stay as it is."""
        return [self.model_class()]

    def build(self, seed: int) -> nn.Module:
        """The unpatched model."""
        raise NotImplementedError

    def data(self, profile: str, seed: int, dtype: torch.dtype) -> tuple[list[data.Step], data.Batch]:
        """What arms of ``dtype`` are trained on, and the batch that is evaluated."""
        return data.steps(profile, seed, dtype), data.evaluation_batch(seed)

    def prompted(self, seed: int) -> Batch:
        """The text whose log-probabilities are compared."""
        return data.prompted(seed)

    def curve(self, seed: int) -> list[Batch]:
        """What arms train on in a long run after all else; nothing where there is none."""
        return []

    def truth(self, dtype: str, device: str) -> torch.dtype:
        """What the truth trains in. Without float64 it is float32, with TF32 off."""
        return torch.float64

    def describe(self, dtype: str, device: str) -> str:
        """Of one that is long: what will be trained, and about what it takes, in a line."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What a record says of how its weights were made."""
        return []

    def bystander(self, template: nn.Module) -> nn.Module:
        """A model on the CPU that nobody patches, and that runs the same code."""
        return copy.deepcopy(template)  # running it may change buffers, and arms are copies of the template


@dataclass(frozen=True)
class MiniModel(Row):
    """One row of the table: an architecture, what its configuration overrides, and which kernels it must be given."""

    name: str
    architecture: str
    kernels: tuple[str, ...] = ("rms_norm", "rope", "swiglu")
    overrides: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    head_bias: bool = False
    images: bool = False

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]

    def is_available(self) -> bool:
        import transformers

        return hasattr(transformers, self.architecture)

    def model_class(self) -> Any:
        import transformers

        return getattr(transformers, self.architecture)

    def build(self, seed: int) -> nn.Module:
        """The unpatched model in float32 on the CPU, with the weights of ``seed``."""
        model_class = self.model_class()
        config = model_class.config_class(**{**_COMMON, **self.overrides}, attn_implementation=self.attention)
        torch.manual_seed(seed)
        model = model_class(config)
        if self.head_bias:
            model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        initialise(model, seed)
        model.generation_config.eos_token_id = None  # generation always runs to its end
        return model.train()

    def data(self, profile: str, seed: int, dtype: torch.dtype) -> tuple[list[data.Step], data.Batch]:
        steps, evaluation = super().data(profile, seed, dtype)
        if self.images:
            told = "mm_token_type_ids" in inspect.signature(self.model_class().forward).parameters
            steps = data.illustrated(steps, seed, told)
        return steps, evaluation


def initialise(model: Any, seed: int) -> None:
    """Random weights under which faults show, the same in every version of transformers.

    Norm weights and biases lie around what upstream starts them with (0 or 1), never on it, so that a norm's offset
    or weight gradient matters. Every sixteenth row of the head is four times as large: some predictions are confident
    (probability above 0.99), others are not. The router of a mixture sees the token through a few strong embedding
    dimensions, so that which experts it chooses does not hang on rounding.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    device = head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            if parameter.ndim == 1:
                parameter.add_(0.25 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        head.weight.mul_(1.5)
        head.weight[::16].mul_(4)
        for name, parameter in model.named_parameters():
            if name.endswith(("block_sparse_moe.gate.weight", "mlp.gate.weight", "mlp.router.weight")):
                experts = parameter.shape[0]
                levels = torch.linspace(-8.0, 8.0, experts, device=device)
                tokens = torch.arange(embedding.weight.shape[0], device=device).unsqueeze(1)
                embedding.weight[:, :experts] = levels[(torch.arange(experts, device=device) - tokens) % experts]
                parameter.mul_(0.1)
                parameter[:, :experts] += torch.eye(experts, device=device)


_GEMMA = ("rms_norm", "rope", "geglu")
_ROWS = (
    # Those that take longest come first, so that workers which share them out finish together.
    MiniModel(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA,
        {
            **_ALTERNATING,
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 12.0,
        },
        attention="eager",
    ),
    MiniModel(
        "gemma3",
        "Gemma3ForCausalLM",
        _GEMMA,
        {**_ALTERNATING, **_NORMED_HEADS, "query_pre_attn_scalar": 60, "tie_word_embeddings": True},
    ),
    MiniModel(
        "mixtral",
        "MixtralForCausalLM",
        ("rms_norm", "rope", "experts"),
        {**_EXPERTS, "num_local_experts": 4},
    ),
    MiniModel(
        "gpt_oss",
        "GptOssForCausalLM",
        ("rms_norm", "rope", "experts"),
        {**_ALTERNATING, **_EXPERTS, "num_local_experts": 5, "head_dim": 10, "swiglu_limit": 1.0},
        attention="eager",  # which has its sinks
    ),
    MiniModel(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        ("rms_norm", "rope", "experts"),
        {**_NORMED_HEADS, **_EXPERTS, "num_experts": 5, "moe_intermediate_size": 70, "norm_topk_prob": True},
    ),
    MiniModel(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        ("rms_norm", "gated_rms_norm", "rope", "swiglu"),
        # One layer of each kind. Without the package of its linear attention, upstream's own torch code runs.
        {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 12,
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 40,
        },
    ),
    MiniModel("llama-untied", "LlamaForCausalLM"),
    MiniModel("llama-tied", "LlamaForCausalLM", overrides={"tie_word_embeddings": True}),
    MiniModel("llama-bias", "LlamaForCausalLM", head_bias=True),
    MiniModel("gemma", "GemmaForCausalLM", _GEMMA, {"head_dim": 12, "tie_word_embeddings": True}),
    MiniModel("mistral", "MistralForCausalLM"),
    MiniModel("qwen2", "Qwen2ForCausalLM"),
    MiniModel("qwen3", "Qwen3ForCausalLM", overrides=_NORMED_HEADS),
    MiniModel("phi3", "Phi3ForCausalLM"),
    MiniModel("gpt_neox", "GPTNeoXForCausalLM", ("layer_norm", "rope"), {"layer_norm_eps": 1e-3}),
    MiniModel(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        overrides={
            **{"num_key_value_heads": 10, "q_lora_rank": 60, "kv_lora_rank": 60},
            **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10},
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 50, "n_routed_experts": 4, "n_group": 1},
            **{"topk_group": 1, **_EXPERTS},
        },
    ),
    MiniModel(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        overrides={
            "text_config": {
                **_COMMON,
                "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 2, 2]},
            },
            "vision_config": {
                **{"depth": 2, "hidden_size": 60, "intermediate_size": 90, "num_heads": 5, "out_hidden_size": 100},
                **{"patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1]},
            },
            "image_token_id": data.IMAGE,
            "vision_start_token_id": data.IMAGE_START,
            "video_token_id": data.IMAGE_START - 1,
        },
        images=True,
    ),
)
MODELS = {row.name: row for row in _ROWS}
CORE = ("llama", "gemma", "gemma2", "gemma3")


def select(names: str) -> list[MiniModel]:
    """The models that ``--models`` names: ``all``, ``core``, or a comma-separated list of models and families.

    Raises:
        ValueError: for an unknown name, with the allowed ones.
    """
    families = list(dict.fromkeys(row.family for row in _ROWS))
    wanted: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        wanted += {"all": families, "core": CORE}.get(name, [name])
    for name in wanted:
        if name not in MODELS and name not in families:
            allowed = ", ".join(dict.fromkeys(["all", "core", *families, *MODELS]))
            raise ValueError(f"unknown model {name!r}; allowed are {allowed}")
    return [row for row in _ROWS if row.name in wanted or row.family in wanted]
