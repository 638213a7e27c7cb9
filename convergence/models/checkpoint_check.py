"""Can a checkpoint of somebody's own be proven here? Asked before anything is built.

What it is made of comes from elsewhere and may be anything: first the folder is read (``folder.py``), then the values
(``config_file.py``), then transformers makes a model of it on the meta device, where nothing takes memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch

from convergence.checked import shown
from convergence.files import Unusable, read_text
from convergence.models import data, gguf_file, memory
from convergence.models.checkpoint import Checkpoint, causal_lm, quietly, saved_config, tokens_of
from convergence.models.config_file import check_sense, check_values
from convergence.models.folder import CONFIG, TAKES, TRAINS, Tensor, check_around, guarded, read_config, read_tensors


def check(row: Checkpoint, dtypes: list[str], device: str) -> None:
    """See, before anything is loaded, that ``row`` can be trained here.

    Raises:
        Unusable: it cannot; the message says why, and what would do.
    """
    path = Path(row.path)
    tensors: dict[str, Tensor] | None = None
    if row.is_gguf and path.is_file():
        source, found = row.path, _check_gguf(row)
    else:
        source, (found, tensors) = str(path / CONFIG), _check_folder(row)
    with guarded(source, "transformers makes no model of text of it"), quietly():
        config = found.get_text_config()
        check_sense(config, source, None if tensors is None else len(tensors))
    for option, value, least, most in (
        ("--layers", row.layers, 1, config.num_hidden_layers),
        ("--rows", row.rows, 1, None),
        ("--length", row.length, data.SHORTEST, getattr(config, "max_position_embeddings", None)),
        ("--steps", row.steps, 1, None),
    ):
        if value is not None and (value < least or (most is not None and value > most)):
            allowed = f"from {least} on" if most is None else f"{least} to {most}"
            raise Unusable(f"{option} {value}: allowed for {row.path} is {allowed}")
    with guarded(source, "transformers makes no model of it"), quietly():
        model = row.empty()
        plans = {dtype: row.plan(dtype, device) for dtype in dtypes}
    if (buffers := sum(buffer.nbytes for buffer in model.buffers())) > (free := memory.available(device)[1]):
        sizes = f"{buffers / memory.GIB:.1f} GiB of tables, and {free / memory.GIB:.1f} GiB are free"
        raise Unusable(f"{source}: makes a model with {sizes}")
    _check_text(row)
    if row.rollout and row.layers is not None:
        raise Unusable(f"--rollout {row.rollout}: runs the whole checkpoint; leave --layers out")
    if row.rollout and row.is_gguf:
        raise Unusable(f"--rollout {row.rollout}: takes a folder with config.json and safetensors, and no GGUF file")
    if tensors is not None:
        _check_weights(row, model, tensors)
    for dtype, plan in plans.items():
        if not plan.fits:
            raise Unusable(f"{row.describe(dtype, device)} does not fit. {_what_fits(row, dtype, device)}")


def _check_folder(row: Checkpoint) -> tuple[Any, dict[str, Tensor]]:
    """The configuration of a folder, as transformers reads it, and the tensors in its files."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = Path(row.path)
    raw, source = read_config(path), path / CONFIG
    kind, known = raw.get("model_type"), transformers.__version__
    if not isinstance(kind, str):
        raise Unusable(f"{source}: field 'model_type' is {shown(kind)}; allowed is the name of an architecture")
    if kind not in CONFIG_MAPPING and "auto_map" in raw:
        raise Unusable(
            f"{path}: needs remote code (auto_map in its config.json), which the proof does not run; it takes "
            "a checkpoint of an architecture that transformers itself has"
        )
    if kind not in CONFIG_MAPPING:
        raise Unusable(f"{path}: its model_type is {kind!r}, which transformers {known} does not know; a later one may")
    tensors = read_tensors(path)
    shapes = [tensor.shape for tensor in tensors.values()]
    widest = max((size for shape in shapes for size in shape), default=0)
    parts = max((shape[0] for shape in shapes if len(shape) > 2), default=0)
    check_values(raw, _usual(CONFIG_MAPPING[kind]), str(source), len(tensors), widest, parts)
    with guarded(source, "transformers cannot read it"), quietly():
        config = saved_config(row.path)
        if (path / "generation_config.json").exists():
            with guarded(path / "generation_config.json", "transformers cannot read it"):
                transformers.GenerationConfig.from_pretrained(row.path, local_files_only=True)
    model_class, saved = causal_lm(config), config.architectures or []
    if model_class is None or (saved and model_class.__name__ not in saved):
        raise Unusable(
            f"{path}: has no causal language model: it is {', '.join(saved) or config.model_type}; --checkpoint "
            "takes what AutoModelForCausalLM loads"
        )
    return config, tensors


def _usual(kind: Any) -> dict[str, Any]:
    """The values that a configuration of this class has by default; none where it has no default."""
    with quietly():
        try:
            found: dict[str, Any] = kind().to_dict()
        except Exception:  # a class may need to be told something
            return {}
    return found


def _check_weights(row: Checkpoint, model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    """See that the files hold every weight of ``model``, which is on the meta device, with its shape, and in a dtype
    that trains."""
    path = Path(row.path)
    trained = dict(model.named_parameters())
    for name, its in tensors.items():  # what is no weight may be a table of whole numbers
        if its.dtype not in TRAINS and (name in trained or its.dtype.startswith("F")):
            where = f"{path / its.file}: {shown(name)} is of dtype {its.dtype}"
            raise Unusable(f"{where}, which does not train; allowed are {', '.join(TRAINS)}")
    wanted = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if importlib.util.find_spec("accelerate"):  # without, nothing is loaded onto the meta device
        with guarded(path, "transformers cannot load it"), quietly():
            found = row.load(device_map="meta", ignore_mismatched_sizes=True)[1]
        missing = sorted(found["missing_keys"])
        names = [key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]]
    else:
        missing = []
        names = [name for name, shape in wanted.items() if name in tensors and tensors[name].shape != shape]
    if names:
        first = min(names)
        has = f", and its file has {list(tensors[first].shape)}" if first in tensors else ""
        raise Unusable(
            f"{path / CONFIG}: makes {first} {list(wanted.get(first, ()))}{has}; allowed is what the files hold "
            f"({len(names)} tensors differ)"
        )
    row.check_missing(missing)


def _check_gguf(row: Checkpoint) -> Any:
    """The configuration of a GGUF file."""
    header, folder = gguf_file.read(row.path), Path(row.path).parent
    if header.parts > 1:
        raise Unusable(
            f"{row.path}: is one of {header.parts} files; llama.cpp's llama-gguf-split --merge makes one of them"
        )
    check_around(folder)
    with guarded(row.path, gguf_file.UNREADABLE), quietly():
        config = saved_config(row.path)
        inner = config.get_text_config()
    for name, says, has in (  # what metadata do not say, transformers takes from its defaults
        ("num_hidden_layers", inner.num_hidden_layers, header.layers),
        ("vocab_size", inner.vocab_size, header.vocabulary),
        ("hidden_size", inner.hidden_size, header.hidden),
    ):
        if says > has if name == "num_hidden_layers" else says != has:  # it may hold layers that only predict ahead
            raise Unusable(f"{row.path}: its metadata make {name} {says}, and its tensors have {has}")
    if causal_lm(config) is None:
        raise Unusable(f"{row.path}: has no causal language model: it is {config.model_type}; {TAKES}")
    return config


def _check_text(row: Checkpoint) -> None:
    if row.text:
        if not Path(row.text).is_file():
            raise Unusable(f"--text {row.text!r}: there is no such file; it takes a text file in UTF-8")
        try:
            read_text(Path(row.text))
        except Unusable as error:
            raise Unusable(
                f"--text {row.text!r}: is not UTF-8, or too large; it takes a text file ({error})"
            ) from error
    writer = f"tokenizer.save_pretrained({row.path!r}) puts it there"
    if row.is_gguf:
        writer = "llama.cpp's convert_hf_to_gguf.py puts it into the file"
    with guarded(row.path, f"has no tokenizer that can be loaded here; {writer}"), quietly():
        found = tokens_of(row.path, row.text)
        classes = row.config().get_text_config().vocab_size
        most, least = (int(found.max()), int(found.min())) if len(found) else (0, 0)
    if most >= classes or least < 0:
        raise Unusable(
            f"{row.path}: its tokenizer makes token {most if least >= 0 else least}, its model has {classes} classes: "
            "the two do not belong together"
        )
    needed = row.rows * row.length
    if len(found) <= needed:
        raise Unusable(
            f"--text {row.text!r}: has {len(found)} tokens, and a batch takes more than {needed} ({row.rows} "
            f"rows of {row.length}): give a longer text, or smaller --rows and --length"
        )


def _what_fits(row: Checkpoint, dtype: str, device: str) -> str:
    count = row.config().get_text_config().num_hidden_layers
    while count > 1:
        count //= 2
        if dataclasses.replace(row, layers=count).plan(dtype, device).fits:
            return f"--layers {count} fits."
    other = " --dtypes bfloat16," if dtype == "float32" else ""
    return f"One layer does not fit either: try{other} smaller --rows and --length, or a larger device."
