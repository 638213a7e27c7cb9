"""Are the values of a config.json possible? Asked before transformers makes anything of them, which may take for ever.

Fields are known by how transformers names them in every family, not family by family: what counts, what is a size, an
epsilon, a dtype. What else is wrong, transformers itself says when it reads the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from convergence.checked import LARGEST, shown
from convergence.files import Unusable

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Fields that lead a loader to other files or to the Hub, and what is wrong with each.
_ELSEWHERE = {
    "configuration_files": "its values may be in another file",
    "transformers_weights": "its weights may be in another file",
    "quantization_config": "is quantized; the proof trains every weight and takes one that is not",
    "compression_config": "is quantized; the proof trains every weight and takes one that is not",
    "fusion_config": "transformers would change its classes for every model",
}


class _FieldKind(NamedTuple):
    """What a field may hold: ``allowed`` in words, and whether a value ``fits``."""

    allowed: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def _or_list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Nothing, one of what ``fits``, or a list of them: for each layer, or each part."""
    return lambda value: value is None or (all(map(_or_list(fits), value)) if isinstance(value, list) else fits(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_activation(value: Any) -> bool:
    from transformers.activations import ACT2FN

    return isinstance(value, str) and value in ACT2FN


def _is_dtype(value: Any) -> bool:
    of = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(name, str) and name.removeprefix("torch.") in DTYPES for name in of)


def _is_here(value: Any) -> bool:
    """Whether no part of it is the name of a repository, from which code would come."""
    names = value.values() if isinstance(value, dict) else [value]
    return all(name is None or (isinstance(name, str) and not re.search("[/:@]", name)) for name in names)


_LAYERS = r"(num|n)_(\w+_)?(layers?|blocks)|\w+_layers|n_layers?"
_EXPERTS = r"(num|n)_(\w+_)?experts|moe_num_\w*experts"
_COUNTS = r"(num|n)_(\w+_)?(heads?|kv_heads|groups|labels)|multi_query_group_num|pretraining_tp"
_SIZES = r"(?!\w*(window|mscale))(\w+_)?(size|dim|rank)|n_(embd|inner|positions|ctx)"
_ACTIVATIONS = "hidden_act|hidden_activation|activation_function"
_WHOLE = _FieldKind("whole numbers from 0 on", _or_list(_is_whole))
_POSITIVE = _FieldKind("a number that is not negative", _or_list(lambda v: _is_number(v, 0)))
# By what a field is called.
_RULES = {
    f"{_LAYERS}|{_EXPERTS}|{_COUNTS}|{_SIZES}": _WHOLE,
    r"sliding_window|\w*window_size": _FieldKind("whole numbers", _or_list(lambda v: _is_whole(v, -1))),
    "max_position_embeddings": _FieldKind("a whole number above 0", lambda v: v is None or _is_whole(v, 1)),
    r"(\w+_)?(eps|epsilon)": _FieldKind("a number from 0 to 1", lambda v: _is_number(v, 0, 1)),
    r"(\w+_)?(dropout|pdrop|dropout_prob)": _FieldKind("a number from 0 to 1", _or_list(lambda v: _is_number(v, 0, 1))),
    r"\w+_range|\w+_std|rope_theta|rotary_emb_base|rope_local_base_freq": _POSITIVE,
    r"\w+_token_id": _FieldKind("the number of a token, or several", _or_list(lambda v: _is_whole(v, -(2**31), 2**31))),
    _ACTIVATIONS: _FieldKind("an activation of transformers", _or_list(_is_activation)),
    "(torch_)?dtype": _FieldKind(", ".join(DTYPES), lambda v: v is None or _is_dtype(v)),
    "rope_scaling|rope_parameters": _FieldKind("an object, or null", lambda v: v is None or isinstance(v, dict)),
    "architectures": _FieldKind(
        "a list of names", lambda v: v is None or (isinstance(v, list) and all(map(_is_text, v)))
    ),
    "model_type|transformers_version": _FieldKind("text", lambda v: v is None or _is_text(v)),
    r"_?(attn|experts)_implementation\w*": _FieldKind("the name of one of transformers' own", _is_here),
}
# What a model of text cannot be without, by the names that every configuration of transformers answers to.
_AT_LEAST_ONE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def check_values(
    raw: Mapping[str, Any], usual: Mapping[str, Any], path: str, tensors: int, widest: int, parts: int
) -> None:
    """See that what a config.json holds is possible.

    Args:
        raw: what it holds.
        usual: what it holds by default. A rule that this breaks is none for that field.
        path: of the file, for messages.
        tensors: how many there are in the files. A model has at least one for each layer.
        widest: their largest dimension.
        parts: the largest number of experts that a tensor may hold: its first dimension of three.

    Raises:
        Unusable: a value is not; the message names the field, what came and what is allowed.
    """
    most = {_LAYERS: tensors, _EXPERTS: max(tensors, parts), _COUNTS: max(widest, 2**12)}
    defaults = {field: value for field, _, value in _fields(usual)}
    for field, name, value in _fields(raw):
        if name in _ELSEWHERE and value:
            raise Unusable(f"{path}: field {field!r} is {shown(value)}: {_ELSEWHERE[name]}; allowed is none")
        if isinstance(value, float) and math.isnan(value):
            raise Unusable(f"{path}: field {field!r} is NaN; allowed is a number")
        if type(value) is int and abs(value) > LARGEST:
            raise Unusable(f"{path}: field {field!r} is {shown(value)}; allowed is a number below 2^63")
        for counted, largest in most.items():
            if re.fullmatch(counted, name) and _is_whole(value, largest + 1):
                raise Unusable(f"{path}: field {field!r} is {shown(value)}; allowed by its files is at most {largest}")
        if isinstance(defaults.get(field), bool) and not (value is None or isinstance(value, bool)):
            raise Unusable(f"{path}: field {field!r} is {shown(value)}; allowed is true or false")
        for called, kind in _RULES.items():
            if not re.fullmatch(called, name) or kind.fits(value):
                continue
            if field not in defaults or kind.fits(defaults[field]):
                raise Unusable(f"{path}: field {field!r} is {shown(value)}; allowed: {kind.allowed}")


def _fields(value: Any, field: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every field of every object in ``value``: where it is, its name, and its value."""
    items = value.items() if isinstance(value, dict) else ()
    for name, item in items:
        where = f"{field}.{name}" if field else name
        yield where, name, item
        yield from _fields(item, where)
    for i, item in enumerate(value if isinstance(value, list) else ()):
        yield from _fields(item, f"{field}[{i}]")


def check_sense(config: Any, path: str, tensors: int | None) -> None:
    """See that ``config``, as transformers has read it, is of a model of text; with no more layers than there are
    ``tensors`` in its files, where that is known.

    Raises:
        Unusable: it is not; as :func:`check_values`.
    """
    for name in _AT_LEAST_ONE:
        value = getattr(config, name, None)
        each = value if isinstance(value, list) and value else [value]
        if not all(_is_whole(one, 1) for one in each):
            own = config.attribute_map.get(name, name)
            raise Unusable(f"{path}: field {own!r} is {shown(value)}; allowed is a whole number above 0")
    layers = config.num_hidden_layers
    if tensors is not None and _is_whole(layers, tensors + 1):
        raise Unusable(f"{path}: makes {layers} layers; allowed by its files is at most {tensors}, one a tensor")
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if _is_whole(heads) and _is_whole(shared) and (shared == 0 or heads % shared):
        raise Unusable(f"{path}: field 'num_key_value_heads' is {shared}; allowed is a divisor of the {heads} heads")
