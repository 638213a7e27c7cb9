"""Models of the classes of ``classes.py``: toys that train on a CPU in milliseconds, and models on the meta device.

No model family is named here. The configuration of a toy is shrunk by what the attributes are *called* (hidden size,
heads, experts, ranks, periods ...) and by one rule for lists: one entry per layer, such that every kind of layer of
the full-size model occurs. What cannot be built or trained that way raises :class:`CannotShrink` with the reason.
``python -m matrix.checks.zoo`` prints which classes cannot.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from matrix.checks.classes import ModelClass, causal

BATCH, TOKENS = 2, 12
VOCABULARY = 128
SPECIAL_TOKENS = 32  # ids below are padding, begin, end, image and the like: the batches never contain them
MAX_PARAMETERS = (
    1_000_000  # the language model itself has a tenth of it; a vision tower that text never enters, the rest
)


class CannotShrink(Exception):
    """No tiny configuration of this class builds and trains; the message says why."""


# What an integer attribute is called -> its tiny value; the first match wins, and no value ever grows. One consistent
# set of sizes: 4 heads of 16 make the hidden size 64, and 8 state-space heads of 16 make 128, which is expand = 2 times
# that. A window, chunk or block is shorter than the batch's rows, so that it matters. Layers are counted separately.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size", 2),
    (r".*vocab.*", VOCABULARY),
    (r"num_kv_shared_layers", 0),
    (r".*(period|interval|every_n_layers|layer_group_size|window_pattern|layers_per.*)", 2),
    (r".*offset|first_k_dense_replace|num_dense_layers|.*shared_experts", 1),
    (r".*(kv|key_value)_heads", 2),
    (r"num_heads|.*mamba_.*heads|.*linear.*_heads", 8),
    (r".*heads?", 4),
    (r".*(head|v|qk_nope|qk_rope)_(dim|size|channels)|kv_channels|d_head", 16),
    (r"rotary_dim", 8),
    (r".*groups?", 2),
    (r".*(experts_per_tok|top_?k.*|moe_k)", 2),
    (r".*(experts|expert_num)", 4),
    (r".*rank", 16),
    (r".*(intermediate|ffn|feed_forward|dff|dim_ff|inner|expert_dim|mlp_dim).*", 96),
    (r".*(hidden_size|d_model|n_embd|emb(ed|edding)?_?(dim|size)|hidden_dim|width|channels)", 64),
    (r".*(state_size|d_state|kernel.*)", 4),
    (
        r".*(max_.*(position|len|distance).*|n_positions|n_ctx|max_seq_len|context_length|rel_extent|num_.*embeddings)",
        64,
    ),
    (r".*(window|chunk_(size|length)|block_size|local_attention).*", 8),
    (r".*image_size|.*image_seq_length", 32),
    (r"patch_size", 8),
)
_LAYER_COUNT = re.compile(r"(num|n)_(hidden_|encoder_|decoder_)?(layers?|blocks)|(en|de)coder_layers|layers|depth")
_SPECIAL_TOKEN = re.compile(r".*(_token_id|_token_index|_token|_index)s?")
_RANDOM = re.compile(r".*(drop|jitter|noise).*")
# What a configuration leaves at None although its model cannot be built, or not run, without it.
_NEEDED: dict[str, Any] = {
    "attention_types": [[["global", "local"], 1]],
    "default_language": "en_XX",
    "layer_types": ["full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "vocabulary_map": {"<image>": 3},
}


@dataclass(frozen=True)
class _Attempt:
    """How to shrink: how many layers, whether every kind of layer shall occur, whether to fill in needed values."""

    layers: int
    every_kind: bool
    fill: bool


_ATTEMPTS = (_Attempt(2, True, False), _Attempt(2, False, False), _Attempt(2, True, True), _Attempt(4, False, True))


_untrained: dict[Any, PreTrainedModel] = {}  # of seed 0: who asks first need not build another one


@functools.cache
def tiny_config(cls: Any) -> PretrainedConfig:
    """A configuration with which ``cls`` is small and trains: finite loss, gradients finite and not all zero.

    Raises:
        CannotShrink: where no such configuration was found, with the reason.
    """
    parameters = inspect.signature(cls.forward).parameters
    missing = {"input_ids", "labels"} - set(parameters)
    if missing:
        raise CannotShrink(f"its forward takes no {' or '.join(sorted(missing))}")
    reasons = []
    for attempt in _ATTEMPTS:
        try:
            config = _shrunk(cls.config_class(), attempt)
            if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
                config.is_decoder = True
            _check_size(cls, config)
            _train_once(copy.deepcopy(model := _build(cls, config, seed=0)))
            _untrained[cls] = model
            return config
        except Exception as error:  # whatever a foreign model raises is the reason
            message = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            reasons.append(message if isinstance(error, CannotShrink) else f"{type(error).__name__}: {message}")
    raise CannotShrink(" / ".join(dict.fromkeys(reasons)))


def tiny_model(cls: Any, seed: int = 0) -> PreTrainedModel:
    """A tiny ``cls`` in float32 and training mode whose random weights follow from ``seed``.

    Raises:
        CannotShrink: see :func:`tiny_config`.
    """
    config = tiny_config(cls)
    built = _untrained.pop(cls, None) if seed == 0 else None
    return built or _build(cls, config, seed)


def build(found: ModelClass, device: torch.device) -> Any:
    """The tiny model of a class of the census.

    Raises:
        CannotShrink: see :func:`tiny_config`; also where its module needs a package that is not installed.
    """
    try:
        cls = found.load()
    except ImportError as error:
        raise CannotShrink(f"its module cannot be imported: {error}") from error
    model: Any = tiny_model(cls)
    return model.to(device)


def tiny_batch(model: PreTrainedModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``labels`` [2, 12] for ``model``: ordinary tokens only, and three labels of -100.

    Token types, where the model knows them, say that everything is text.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(SPECIAL_TOKENS, VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels = input_ids.clone()
    labels[0, 5:7] = labels[1, -1] = -100
    batch = {"input_ids": input_ids, "labels": labels}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inspect.signature(type(model).forward).parameters:
            batch[name] = torch.zeros_like(input_ids)
    return batch


def build_full(cls: Any) -> tuple[Any, bool]:
    """A model of ``cls`` on the meta device, and whether it has the size of the default configuration.

    Raises:
        Exception: what the last attempt raised; the default configurations of some classes build no model.
    """
    errors = []
    shrunk = (functools.partial(lambda attempt: _shrunk(cls.config_class(), attempt), attempt) for attempt in _ATTEMPTS)
    for full, config in ((True, cls.config_class), *((False, shrink) for shrink in shrunk)):
        try:
            # Older versions of transformers draw initial weights on that device, too, which takes minutes.
            drawn = mock.patch.object(PreTrainedModel, "initialize_weights", create=True, return_value=None)
            with _on_meta(), drawn:
                return cls(_with_default_experts(config())), full
        except Exception as error:  # whatever a foreign model raises
            errors.append(error)
    raise errors[0]


def _with_default_experts(config: Any) -> Any:
    """A toy asks for the loop over experts, which knows float64; this is what upstream runs by itself."""
    for part in (config, *vars(config).values()):
        if getattr(part, "_experts_implementation", None) is not None:
            part._experts_implementation = None
    return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, upstream does not warn about its own default configurations; that is none of our business."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def _shrunk(default: PretrainedConfig, attempt: _Attempt) -> PretrainedConfig:
    """A new configuration of ``default``'s class, built from tiny values so that it derives the others itself."""
    stored = vars(default)
    arguments = {name: p.default for name, p in inspect.signature(type(default)).parameters.items()}
    before = {name: stored.get(name, argument) for name, argument in arguments.items()}
    count = next((n for name, n in before.items() if _LAYER_COUNT.fullmatch(name) and isinstance(n, int)), 0)
    # Lists with one entry per layer, of named kinds. Other lists are kept, cut to the layers where they count them.
    kinds = {
        name: list(dict.fromkeys(value))
        for name, value in before.items()
        if isinstance(value, (list, tuple)) and len(value) == count and all(isinstance(item, str) for item in value)
    }
    layers = max([attempt.layers, *(len(kind) for kind in kinds.values() if attempt.every_kind)])
    special = iter(range(1, SPECIAL_TOKENS))
    values: dict[str, Any] = {}
    for name, argument in arguments.items():
        value = before[name]
        if isinstance(value, PretrainedConfig):
            tiny = _shrunk(value, attempt)
            values[name] = tiny.to_dict() if attempt.fill else tiny  # versions before 5 want a dict
        elif name in kinds:
            if attempt.every_kind or argument is not None:
                values[name] = (kinds[name] * layers)[:layers]
        elif _LAYER_COUNT.fullmatch(name):
            values[name] = layers if isinstance(value, int) else value
        elif attempt.fill and argument is None and (value is None or name in _NEEDED):
            values[name] = _NEEDED.get(name, next(_sizes(name), None))
        elif isinstance(value, (list, tuple)) and argument is not None:
            cut = value[:layers] if len(value) == count else value
            values[name] = [_small(name, item, special) for item in cut]
        elif type(value) is type(argument) or _SPECIAL_TOKEN.fullmatch(name):
            values[name] = _small(name, value, special)
    heads = {before.get(name) for name in ("num_attention_heads", "n_head", "n_heads")}
    for name, value in before.items():
        if name.endswith(("kv_heads", "key_value_heads")) and value in heads and name in values:
            values[name] = 4 if value is not None else values[name]  # as many as there are query heads
    config = type(default)(**{name: v for name, v in values.items() if v is not inspect.Parameter.empty})
    config.use_cache = False
    config._experts_implementation = "eager"  # grouped matrix products know no float64
    _set_sections(config, attempt.fill)
    return config


def _small(name: str, value: Any, special: Iterator[int]) -> Any:
    """The tiny value of one attribute, or ``value`` itself."""
    if isinstance(value, float) and _RANDOM.fullmatch(name):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return value
    if _SPECIAL_TOKEN.fullmatch(name):
        return 0 if name == "pad_token_id" else next(special)
    return min(value, next(_sizes(name), value))


def _sizes(name: str) -> Iterator[int]:
    return (size for pattern, size in _SIZES if re.fullmatch(pattern, name))


def _set_sections(config: PretrainedConfig, fill: bool) -> None:
    """Make sections of the rotary frequencies (time, height, width) add up to those of a tiny head."""
    rope = vars(config).get("rope_parameters") or vars(config).get("rope_scaling")
    if isinstance(rope, dict) and ("mrope_section" in rope or (fill and "rope_theta" in rope)):
        frequencies = int(8 * (rope.get("partial_rotary_factor") or 1))
        height = frequencies * 3 // 8
        rope["mrope_section"] = [frequencies - 2 * height, height, height]


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Inside, modules are built on the meta device. Torch would draw weights there, too, in as much time again."""
    drawing = [name for name in vars(nn.init) if re.fullmatch(r"[a-z].*_", name)]
    with torch.device("meta"), mock.patch.dict(vars(nn.init), dict.fromkeys(drawing, lambda tensor, *_, **__: tensor)):
        yield


def _check_size(cls: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise before memory is allocated for a model that is not tiny."""
    try:
        with _on_meta():
            size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    except NotImplementedError:  # its constructor reads values: too special to be large
        return
    if size > MAX_PARAMETERS:
        raise CannotShrink(f"still has {size} parameters")


def _build(cls: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model with every parameter moved off its initial value: no norm weight is 1, no bias 0, no head degenerate."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).float().train()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.5 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.1
                parameter.add_(scale * torch.randn(parameter.shape))
    return model


def _train_once(model: PreTrainedModel) -> None:
    loss = model(**tiny_batch(model)).loss
    if not torch.isfinite(loss):
        raise CannotShrink(f"the loss is {loss.item()}")
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise CannotShrink("a gradient is not finite")
    if not any(bool(gradient.any()) for gradient in gradients):
        raise CannotShrink("every gradient is zero")
    with torch.no_grad():
        first, second = (model(**tiny_batch(model)).loss for _ in range(2))
    if not torch.equal(first, second):
        raise CannotShrink("two forwards differ")


def _census() -> None:
    warnings.simplefilter("ignore")
    built, slowest = 0, []
    every = causal()
    for found in every:
        start = time.perf_counter()
        try:
            build(found, torch.device("cpu"))
            built += 1
        except CannotShrink as error:
            print(f"{found.name:45s} {error}")
        slowest.append((time.perf_counter() - start, found.name))
    print(f"transformers {transformers.__version__}: {built} of {len(every)} classes build and train")
    print("slowest:", ", ".join(f"{name} {seconds:.2f} s" for seconds, name in sorted(slowest, reverse=True)[:8]))


if __name__ == "__main__":
    with quiet():
        _census()
