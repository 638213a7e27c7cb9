"""The census of the model classes of the installed transformers, which every check and count of them asks.

No model family is named here. A class is a causal language model when transformers lists it for
``AutoModelForCausalLM``, or when it is a language model whose own source calls ``self.loss_function``. The others are
those that transformers lists for a multimodal or a sequence-to-sequence task.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto import modeling_auto

_LANGUAGE_MODEL = re.compile(r".*(ForCausalLM|LMHeadModel|LMHead|ForConditionalGeneration)")
_OTHERS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISION_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")


class ModelClass(NamedTuple):
    """A class by its name. Nothing is imported before :meth:`load`."""

    module: str
    name: str

    def load(self) -> Any:
        """The class.

        Raises:
            ImportError: its module needs a package that is not installed.
        """
        return getattr(importlib.import_module(self.module), self.name)


def causal() -> list[ModelClass]:
    """Every causal language model, sorted."""
    listed = set(_listed("CAUSAL_LM"))
    found = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if path.stem.startswith(("modeling_tf_", "modeling_flax_")):
            continue
        blocks = re.split(r"^class (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name, body in zip(blocks[1::2], blocks[2::2], strict=True):
            if name in listed or ("self.loss_function(" in body and _LANGUAGE_MODEL.fullmatch(name)):
                found.add(ModelClass(f"transformers.models.{path.parent.name}.{path.stem}", name))
    return sorted(found)


def populations() -> dict[str, list[ModelClass]]:
    """Causal language models, and multimodal or sequence-to-sequence models besides."""
    found = causal()
    others = {name for task in _OTHERS for name in _listed(task)} - {name for _, name in found}
    return {"causal": found, "other": sorted(ModelClass("transformers", name) for name in others)}


def _listed(task: str) -> Iterator[str]:
    for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values():
        yield from (names,) if isinstance(names, str) else names
