"""A user's checkpoint as a model of the proof, with its weights, its tokenizer, and a text of the user's choice.

:class:`Checkpoint` is a row like those in ``models.py``. Its name contains all its options, so that a record or a
separate process can make it again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import torch
from torch import nn

from convergence.arms.quantities import SGD
from convergence.files import Unusable
from convergence.judge import long_run
from convergence.models import data, gguf_file, memory
from convergence.models.data import Batch
from convergence.models.folder import guarded
from convergence.models.models import DTYPES, Row

# The number of fully observed steps before a long run.
_FEW = 4
PROFILE = "text"


@dataclass(frozen=True)
class Checkpoint(Row):
    """The model that ``--checkpoint`` names.

    Args:
        path: a folder with config.json and safetensors, or a GGUF file.
        layers: keep this many layers, from the first on; None keeps all.
        rows, length: the size of a batch; ``length`` in tokens.
        steps: the number of batches. Many steps are a long run, of which only the loss is observed. Everything else is
            then observed in a few steps.
        text: a file; empty for a text that ships with Python.
        rollout: an engine whose log-probabilities are also compared; empty for none.
    """

    path: str
    layers: int | None = None
    rows: int = 4
    length: int = 128
    steps: int = 4
    text: str = ""
    rollout: str = ""

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
        given: dict[str, Any] = {
            key: value if key in ("text", "rollout") else int(value) for key, value in parse_qsl(query)
        }
        return cls(path, **given)

    @property
    def is_gguf(self) -> bool:
        return Path(self.path).suffix == ".gguf"

    @property
    def _file(self) -> dict[str, Any]:
        """The arguments with which transformers finds the checkpoint. Nothing is downloaded, and no code in the folder
        runs."""
        path = Path(self.path)
        given: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        if self.is_gguf:
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **given}
        return {"pretrained_model_name_or_path": str(path), **given}

    def config(self) -> Any:
        """The checkpoint's configuration, cut to ``layers``, without dropout."""
        config = copy.deepcopy(saved_config(self.path))
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
        return causal_lm(self.config())

    def build(self, seed: int) -> nn.Module:
        """The unpatched model on the CPU, with weights in their saved dtype.

        Raises:
            Unusable: weights are missing, or the file is damaged.
        """
        import transformers

        with guarded(self.path, "transformers cannot load it"), quietly():
            model, found = self.load()
        self.check_missing(sorted(found["missing_keys"]))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.generation_config = transformers.GenerationConfig()  # no end token: always the full length
        return model.train()

    def load(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        """The model as transformers loads it, and transformers' lists of missing and mismatched weights. ``how`` goes
        to ``from_pretrained``."""
        import transformers

        loader: Any = transformers.AutoModelForCausalLM
        own: dict[str, Any] = {"use_safetensors": True, "torch_dtype": "auto"}
        if self.is_gguf:
            own = {"torch_dtype": self.saved_in()}
            if hasattr(transformers, "GgufConfig"):  # else kernels keeps blocks, which do not train
                own["quantization_config"] = transformers.GgufConfig(dequantize=True)
        loaded: tuple[Any, dict[str, Any]] = loader.from_pretrained(
            **self._file, **own, **how, config=self.config(), output_loading_info=True
        )
        return loaded

    def check_missing(self, names: list[str]) -> None:
        """
        Raises:
            Unusable: there are ``names`` of missing weights.
        """
        if names:
            raise Unusable(f"{self.path}: {len(names)} weights are missing: {', '.join(names[:5])}")

    def empty(self) -> nn.Module:
        """The model without weights, on the meta device."""
        import transformers

        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(self.config())
        return model

    def data(self, profile: str, seed: int, dtype: torch.dtype) -> tuple[list[data.Step], data.Batch]:
        tokens = tokens_of(self.path, self.text)
        count = _FEW if self.steps >= long_run.LONG else self.steps
        return data.text_steps(tokens, self.rows, self.length, count, seed), data.evaluation_batch(seed, tokens)

    def prompted(self, seed: int) -> Batch:
        return data.prompted(seed, tokens_of(self.path, self.text), self.rows, self.length)

    def curve(self, seed: int) -> list[Batch]:
        if self.steps < long_run.LONG:
            return []
        tokens = tokens_of(self.path, self.text)
        return data.text_batches(tokens, self.rows, self.length, self.steps, seed + 1)

    def truth(self, dtype: str, device: str) -> torch.dtype:
        return self.plan(dtype, device).truth

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a row is a small value; what is free changes while arms train)
    def plan(self, dtype: str, device: str) -> memory.Plan:
        """The memory plan: the memory of the arms, and the dtype of the truth that fits."""
        return memory.plan(self.empty(), self.rows, self.length, DTYPES[dtype], device, self.saved_in())

    def saved_in(self) -> torch.dtype:
        """The dtype of the loaded weights."""
        if self.is_gguf:
            return gguf_file.read(self.path).dtype
        dtype = getattr(self.config(), "dtype", None) or getattr(self.config(), "torch_dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def default_dtype(self) -> str:
        """The default dtype of a proof: float32 for weights saved in float32, otherwise bfloat16. Blocks of quantized
        numbers count as bfloat16."""
        return "float32" if self.saved_in() is torch.float32 and not self._blocks() else "bfloat16"

    def _blocks(self) -> list[str]:
        return gguf_file.read(self.path).blocks if self.is_gguf else []

    def notes(self) -> list[str]:
        blocks = ", ".join(self._blocks())
        return [f"weights of {blocks} were dequantized to float32, and train as such"] if blocks else []

    def bystander(self, template: nn.Module) -> nn.Module:
        """The checkpoint with one layer, because a whole model would need as much memory again."""
        return dataclasses.replace(self, layers=1).build(0)

    def describe(self, dtype: str, device: str) -> str:
        count = sum(parameter.numel() for parameter in self.empty().parameters())
        layers = self.config().get_text_config().num_hidden_layers
        return (
            f"{self.path}: {count:,} parameters, {layers} layers, {self.steps} steps of {self.rows} "
            f"rows of {self.length} tokens in {dtype}: {'; '.join([str(self.plan(dtype, device)), *self.notes()])}"
        )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
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
def saved_config(path: str) -> Any:
    """The saved configuration. Reading a GGUF file takes seconds, because its vocabulary comes first, so the result is
    cached."""
    import transformers

    return transformers.AutoConfig.from_pretrained(**Checkpoint(path)._file)


def causal_lm(config: Any) -> Any:
    """The class that AutoModelForCausalLM makes of ``config``; None if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


@functools.lru_cache(maxsize=1)
def tokens_of(path: str, text: str) -> torch.Tensor:
    """The text in tokens of the checkpoint: int64 [tokens].

    Raises:
        OSError, ValueError, ImportError: transformers finds no tokenizer, or a package that reads the tokenizer is
            missing.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(**Checkpoint(path)._file)
    read = Path(text).read_text(encoding="utf-8") if text else data.default_text()
    return torch.tensor(tokenizer(read, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
