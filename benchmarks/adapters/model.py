"""The model of every arm: the Llama-3 8B shape with the same random weights, adapters and tokens, drawn by name."""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters.job import AdapterJob
from benchmarks.models import MODELS, Batch, cut, decoder, release
from benchmarks.sharded import SHAPE

TINY = decoder(hidden=64, inner=128, layers=2, heads=4, keys=2, classes=512)
TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER: dict[str, Any] = {"lora_alpha": 16, "lora_dropout": 0.0, "bias": "none", "target_modules": TARGETS}
# What peft's LoraConfig gets in addition.
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "experts": {
        "target_modules": TARGETS[:4],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def configuration(job: AdapterJob) -> Any:
    import transformers

    if job.trained == "experts":
        name, shape = "Qwen3Moe", {**TINY, **TINY_EXPERTS} if job.tiny else MODELS["qwen3_moe"][1]
    else:
        name, shape = "Llama", TINY if job.tiny else SHAPE
    config = getattr(transformers, f"{name}Config")(
        **(cut(shape, job.layers) if job.layers else shape) | {"tie_word_embeddings": False},
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype=job.dtype,
        architectures=[f"{name}ForCausalLM"],
    )
    config._attn_implementation = "sdpa"
    return config


def generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Those of a Llama's parameters. No model is built to see them: packages change what building one does."""
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    attention = {
        "q_proj": (hidden, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, hidden),
    }
    gated = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    vocabulary = (config.vocab_size, hidden)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": vocabulary,
        "lm_head": vocabulary,
        "model.norm": (hidden,),
    }
    for n in range(config.num_hidden_layers):
        layer = f"model.layers.{n}"
        found |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"{layer}.mlp.{name}": shape for name, shape in gated.items()}
        found |= dict.fromkeys((f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"), (hidden,))
    return {f"{name}.weight": shape for name, shape in found.items()}


def weights(config: Any, job: AdapterJob) -> dict[str, torch.Tensor]:
    """Each parameter of the base, drawn in bfloat16, so that a base of another dtype has the same values."""
    found = {}
    for name, shape in shapes(config).items():
        drawn, source = torch.empty(shape, dtype=torch.bfloat16, device=job.device), generator(name, job.device)
        if len(shape) == 1:
            drawn.uniform_(0.8, 1.2, generator=source)
        else:
            drawn.normal_(0.0, 0.02, generator=source)
        found[name] = drawn.to(job.dtype)
    return found


def quantisation(job: AdapterJob) -> Any:
    """NF4, double quantised; None for a dense base. A head is never quantised."""
    if not job.quantised or job.dtype is torch.float64:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=job.dtype,
        llm_int8_skip_modules=["lm_head"],
    )


def load(config: Any, job: AdapterJob, state: dict[str, torch.Tensor] | None = None, **options: Any) -> Any:
    """The base by transformers' own loading path, with weights that are on the device: no file is read."""
    from transformers import LlamaForCausalLM

    if job.trained == "experts":
        return with_experts(config, job)
    quantised = quantisation(job)
    options = {"quantization_config": quantised, **options} if quantised else options
    state = weights(config, job) if state is None else state
    kind, index = job.device.type, 0
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=job.dtype,
        device_map={"": index if kind == "cuda" else kind},
        **{"attn_implementation": "sdpa", **options},
    )
    del state
    release()
    return model


def with_experts(config: Any, job: AdapterJob) -> Any:
    """A mixture of experts with transformers' own random weights, the same for each arm."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with job.device:
        return AutoModelForCausalLM.from_config(config, dtype=job.dtype)


def dequantised(model: Any) -> dict[str, torch.Tensor]:
    """The parameters of a base, 4-bit ones as bitsandbytes dequantises them, in float64."""
    found = {}
    for name, p in model.named_parameters():
        if hasattr(p, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            p = dequantize_4bit(p.data, p.quant_state)
        found[name] = p.detach().double()
    return found


def write_folder(config: Any, folder: Path) -> None:
    """config.json and a tokenizer of as many tokens as the model has, for a loader that wants a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<s>", "</s>", "<unk>", "<pad>")
    names = [*special, *(f"t{n}" for n in range(len(special), config.vocab_size))]
    raw = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    named = dict(zip(("bos_token", "eos_token", "unk_token", "pad_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=raw, **named).save_pretrained(folder)
    config.save_pretrained(folder)


def set_adapters(model: Any, job: AdapterJob) -> None:
    """Gives each adapter its values, which bfloat16 holds, and its dtype; B is not zero, as it is after training."""
    for path, module in model.named_modules():
        for kind in ("lora_A", "lora_B"):
            for linear in getattr(module, kind, {}).values():
                p, source = linear.weight, generator(f"{path[path.index('layers.') :]}.{kind}", job.device)
                size = p.shape[1] ** -0.5 if kind == "lora_A" else 0.01
                drawn = torch.empty(p.shape, device=job.device).normal_(0.0, size, generator=source)
                p.data = drawn.to(torch.bfloat16).to(job.adapter_dtype)
                p.requires_grad_(True)


def batch(config: Any, length: int, job: AdapterJob) -> Batch:
    """Sequences of random tokens; every position is a target."""
    ids = torch.randint(
        4, config.vocab_size, (job.batch, length), generator=generator(f"{length}", torch.device("cpu"))
    )
    return {"input_ids": ids.to(job.device), "labels": ids.to(job.device)}


def autocast(job: AdapterJob) -> AbstractContextManager[Any]:
    return torch.autocast(job.device.type, torch.bfloat16) if job.autocast else nullcontext()
