"""A checkpoint of somebody's own as a model of the proof: its weights, its tokenizer, and text of the user's choice.

:class:`Checkpoint` is a row like those in ``models.py``. Its name says all that it was made with, so that a record, and
a process of its own, can make it again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import torch
from torch import nn

from convergence import data, gguf_file, long_run, memory
from convergence.data import Batch
from convergence.models import DTYPES, Row
from convergence.observed import SGD

# Steps that are observed in full before a long run.
_FEW = 4
PROFILE = "text"


@dataclass(frozen=True)
class Checkpoint(Row):
    """What ``--checkpoint`` names.

    Args:
        path: a folder with config.json and safetensors, or a GGUF file.
        layers: how many of its layers are kept, from the first on; None for all.
        rows, length: of a batch; ``length`` in tokens.
        steps: how many batches. Many are a long run: all else is observed of a few, and of these the loss.
        text: a file; empty for the text that ships with Python.
    """

    path: str
    layers: int | None = None
    rows: int = 4
    length: int = 128
    steps: int = 4
    text: str = ""

    phases = (SGD,)
    is_long = True
    kernels = ()

    @property
    def name(self) -> str:  # type: ignore[override]
        given = {name: value for name, value in vars(self).items() if name != "path" and value}
        return f"{self.path}?{urlencode(given)}"

    @classmethod
    def parse(cls, name: str) -> Checkpoint:
        """The checkpoint of that name."""
        path, _, query = name.rpartition("?")
        given: dict[str, Any] = {key: value if key == "text" else int(value) for key, value in parse_qsl(query)}
        return cls(path, **given)

    @property
    def _is_gguf(self) -> bool:
        return Path(self.path).suffix == ".gguf"

    @property
    def _file(self) -> dict[str, Any]:
        """Where transformers finds it; nothing is ever downloaded, and no code of its folder runs."""
        path = Path(self.path)
        given: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        if self._is_gguf:
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **given}
        return {"pretrained_model_name_or_path": str(path), **given}

    def config(self) -> Any:
        """Its configuration, cut to the layers that are kept, without dropout."""
        config = copy.deepcopy(_config(self.path))
        inner = config.get_text_config()
        count = inner.num_hidden_layers
        if self.layers is not None:
            for name, value in vars(inner).items():  # lists with an entry per layer
                if isinstance(value, list) and len(value) == count:
                    setattr(inner, name, value[: self.layers])
            inner.num_hidden_layers = self.layers
        for part in (config, inner):
            for name, value in vars(part).items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        return config

    def model_class(self) -> Any:
        return _causal_lm(self.config())

    def build(self, seed: int) -> nn.Module:
        """The unpatched model on the CPU, with its weights in the dtype that they were saved in.

        Raises:
            ValueError: weights are missing.
        """
        import transformers

        loader: Any = transformers.AutoModelForCausalLM
        how: dict[str, Any] = {"use_safetensors": True, "torch_dtype": "auto"}
        if self._is_gguf:
            how = {"torch_dtype": self.saved_in()}
            if hasattr(transformers, "GgufConfig"):  # else, with the package kernels, blocks stay, which do not train
                how["quantization_config"] = transformers.GgufConfig(dequantize=True)
        with _quietly():  # it tells of every layer that is left out
            model, found = loader.from_pretrained(**self._file, **how, config=self.config(), output_loading_info=True)
        if found["missing_keys"]:
            missing = ", ".join(sorted(found["missing_keys"])[:5])
            raise ValueError(f"{self.path}: {len(found['missing_keys'])} weights are missing: {missing}")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.generation_config = transformers.GenerationConfig()  # without an end: generation always runs to its end
        return model.train()

    def empty(self) -> nn.Module:
        """The model without weights, on the meta device."""
        import transformers

        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(self.config())
        return model

    def data(self, profile: str, seed: int, dtype: torch.dtype) -> tuple[list[data.Step], data.Batch]:
        tokens = _tokens(self.path, self.text)
        count = _FEW if self.steps >= long_run.LONG else self.steps
        return data.text_steps(tokens, self.rows, self.length, count, seed), data.evaluation_batch(seed, tokens)

    def curve(self, seed: int) -> list[Batch]:
        if self.steps < long_run.LONG:
            return []
        tokens = _tokens(self.path, self.text)
        return data.text_batches(tokens, self.rows, self.length, self.steps, seed + 1)

    def truth(self, dtype: str, device: str) -> torch.dtype:
        return self.plan(dtype, device).truth

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a row is a small value; what is free changes while arms train)
    def plan(self, dtype: str, device: str) -> memory.Plan:
        """What it takes, and the truth that fits."""
        return memory.plan(self.empty(), self.rows, self.length, DTYPES[dtype], device, self.saved_in())

    def saved_in(self) -> torch.dtype:
        """The dtype that its weights are loaded in."""
        if self._is_gguf:
            return gguf_file.read(self.path).dtype
        dtype = getattr(self.config(), "dtype", None) or getattr(self.config(), "torch_dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def default_dtype(self) -> str:
        """The dtype that it is proven in where none is asked for: the one it is saved in, or bfloat16 for float16 and
        for blocks of quantized numbers, which hold no more."""
        return "float32" if self.saved_in() is torch.float32 and not self._blocks() else "bfloat16"

    def _blocks(self) -> list[str]:
        return gguf_file.read(self.path).blocks if self._is_gguf else []

    def notes(self) -> list[str]:
        blocks = ", ".join(self._blocks())
        return [f"weights of {blocks} were dequantized to float32, and train as such"] if blocks else []

    def bystander(self, template: nn.Module) -> nn.Module:
        """One layer of it: a whole one would hold as much memory again."""
        return dataclasses.replace(self, layers=1).build(0)

    def describe(self, dtype: str, device: str) -> str:
        count = sum(parameter.numel() for parameter in self.empty().parameters())
        layers = self.config().get_text_config().num_hidden_layers
        return (
            f"{self.path}: {count:,} parameters, {layers} layers, {self.steps} steps of {self.rows} "
            f"rows of {self.length} tokens in {dtype}: {'; '.join([str(self.plan(dtype, device)), *self.notes()])}"
        )

    def check(self, dtypes: list[str], device: str) -> None:
        """See, before anything is loaded, that it can be trained here.

        Raises:
            ValueError: it cannot; the message says why, and what would do.
        """
        config = self._checked_config()
        for option, value, least, most in (
            ("--layers", self.layers, 1, config.num_hidden_layers),
            ("--rows", self.rows, 1, None),
            ("--length", self.length, data.SHORTEST, getattr(config, "max_position_embeddings", None)),
            ("--steps", self.steps, 1, None),
        ):
            if value is not None and (value < least or (most is not None and value > most)):
                allowed = f"from {least} on" if most is None else f"{least} to {most}"
                raise ValueError(f"{option} {value}: allowed for {self.path} is {allowed}")
        self._check_text()
        for dtype in dtypes:
            if not self.plan(dtype, device).fits:
                raise ValueError(f"{self.describe(dtype, device)} does not fit. {self._what_fits(dtype, device)}")

    def _checked_config(self) -> Any:
        """The text model's configuration, which options are checked against."""
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        path, takes = Path(self.path), "--checkpoint takes a folder with config.json and *.safetensors, or a GGUF file"
        if self._is_gguf and path.is_file():
            self._check_gguf()
        elif not (path / "config.json").is_file():
            raise ValueError(f"{path}: has no config.json; {takes}")
        else:
            raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
            kind, known = raw.get("model_type"), transformers.__version__
            if kind not in CONFIG_MAPPING and "auto_map" in raw:
                raise ValueError(
                    f"{path}: needs remote code (auto_map in its config.json), which the proof does not run; it takes "
                    "a checkpoint of an architecture that transformers itself has"
                )
            if kind not in CONFIG_MAPPING:
                raise ValueError(
                    f"{path}: its model_type is {kind!r}, which transformers {known} does not know; a later one may"
                )
            if "quantization_config" in raw:
                raise ValueError(f"{path}: is quantized; the proof trains every weight and takes one that is not")
            if not any(path.glob("*.safetensors")):
                raise ValueError(f"{path}: has no *.safetensors; {takes}; save_pretrained writes them")
        config = _config(self.path)
        model_class, saved = _causal_lm(config), config.architectures or []
        if model_class is None or (saved and model_class.__name__ not in saved):
            raise ValueError(
                f"{path}: has no causal language model: it is {', '.join(saved) or config.model_type}; --checkpoint "
                "takes what AutoModelForCausalLM loads"
            )
        return config.get_text_config()

    def _check_gguf(self) -> None:
        header = gguf_file.read(self.path)
        if header.parts > 1:
            raise ValueError(
                f"{self.path}: is one of {header.parts} files; llama.cpp's llama-gguf-split --merge makes one of them"
            )
        try:
            config = _config(self.path).get_text_config()
        except Exception as error:  # of metadata that may be anything
            raise ValueError(f"{self.path}: {gguf_file.unreadable(error)}") from error
        for name, says, has in (  # what metadata do not say, transformers takes from its defaults
            ("num_hidden_layers", config.num_hidden_layers, header.layers),
            ("vocab_size", config.vocab_size, header.vocabulary),
            ("hidden_size", config.hidden_size, header.hidden),
        ):
            if says > has if name == "num_hidden_layers" else says != has:  # it may hold layers that only predict ahead
                raise ValueError(f"{self.path}: its metadata make {name} {says}, and its tensors have {has}")

    def _check_text(self) -> None:
        if self.text and not Path(self.text).is_file():
            raise ValueError(f"--text {self.text!r}: there is no such file; it takes a text file in UTF-8")
        # Of a file that may hold anything, a parser may raise anything.
        unusable = (Exception,) if self._is_gguf else (OSError, ValueError, ImportError)
        try:
            tokens = _tokens(self.path, self.text)
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {self.text!r}: is not UTF-8 ({error.reason}); it takes a text file") from error
        except unusable as error:
            reason = str(error).strip().splitlines()[0]
            writer = f"tokenizer.save_pretrained({self.path!r}) puts it there"
            if self._is_gguf:
                writer = "llama.cpp's convert_hf_to_gguf.py puts it into the file"
            raise ValueError(f"{self.path}: has no tokenizer that can be loaded here ({reason}); {writer}") from error
        classes = self.config().get_text_config().vocab_size
        if len(tokens) and int(tokens.max()) >= classes:
            raise ValueError(
                f"{self.path}: its tokenizer makes token {int(tokens.max())}, its model has {classes} classes: the two "
                "do not belong together"
            )
        needed = self.rows * self.length
        if len(tokens) <= needed:
            raise ValueError(
                f"--text {self.text!r}: has {len(tokens)} tokens, and a batch takes more than {needed} ({self.rows} "
                f"rows of {self.length}): give a longer text, or smaller --rows and --length"
            )

    def _what_fits(self, dtype: str, device: str) -> str:
        count = self.config().get_text_config().num_hidden_layers
        while count > 1:
            count //= 2
            if dataclasses.replace(self, layers=count).plan(dtype, device).fits:
                return f"--layers {count} fits."
        other = " --dtypes bfloat16," if dtype == "float32" else ""
        return f"One layer does not fit either: try{other} smaller --rows and --length, or a larger device."


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Inside, transformers reports nothing but errors."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


@functools.lru_cache(maxsize=1)
def _config(path: str) -> Any:
    """The configuration as it is saved: of a GGUF file, which holds its vocabulary in front, that takes seconds."""
    import transformers

    return transformers.AutoConfig.from_pretrained(**Checkpoint(path)._file)


def _causal_lm(config: Any) -> Any:
    """The class that AutoModelForCausalLM makes of ``config``; None where there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


@functools.lru_cache(maxsize=1)
def _tokens(path: str, text: str) -> torch.Tensor:
    """The text in tokens of the checkpoint: int64 [tokens].

    Raises:
        OSError, ValueError, ImportError: transformers finds no tokenizer, or lacks what reads it.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(**Checkpoint(path)._file)
    read = Path(text).read_text(encoding="utf-8") if text else data.default_text()
    return torch.tensor(tokenizer(read, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
