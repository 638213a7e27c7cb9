"""What a GGUF file holds, read before a model is made of it: the types of its weights, and whether it is whole."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convergence.files import Unusable
from convergence.models import gguf_walk
from convergence.models.folder import guarded

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Header:
    """What the table of tensors says.

    Attributes:
        types: of the tensors, as llama.cpp names them: "F32", "Q8_0".
        parts: of how many files this is one.
        layers, vocabulary, hidden: the sizes that the tensors have.
    """

    types: frozenset[str]
    parts: int
    layers: int
    vocabulary: int
    hidden: int

    @property
    def blocks(self) -> list[str]:
        """The types among them that are no floating-point numbers but blocks of quantized ones."""
        return sorted(self.types - {*_DTYPES, "F64"})

    @property
    def dtype(self) -> torch.dtype:
        """What a model is loaded in: float32 where blocks are dequantized, else the file's own. Norms are float32 in
        every file, so a 16-bit dtype next to them is the model's."""
        if self.blocks:
            return torch.float32
        return next((_DTYPES[name] for name in ("BF16", "F16") if name in self.types), torch.float32)


@functools.lru_cache(maxsize=1)
def read(path: str) -> Header:
    """The header of the file.

    Raises:
        Unusable: a package is missing, or the bytes are no whole GGUF file of a language model.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise Unusable(f"{path}: to read it needs the package {package}: pip install {package}")
    import gguf

    with guarded(path, UNREADABLE):
        gguf_walk.check(Path(path))
        return _header(gguf.GGUFReader(path))


UNREADABLE = (
    "is no GGUF file that can be read here; --checkpoint takes a whole file, as llama.cpp's convert_hf_to_gguf.py "
    "writes it, of an architecture that transformers can load"
)


def _header(reader: Any) -> Header:
    shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors}
    field = reader.get_field("split.count")
    hidden, vocabulary = shapes["token_embd.weight"]  # the fastest dimension first
    return Header(
        frozenset(tensor.tensor_type.name for tensor in reader.tensors),
        1 if field is None else int(field.parts[field.data[0]][0]),
        1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("blk.")), default=-1),
        vocabulary,
        hidden,
    )
