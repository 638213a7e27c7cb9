"""A checkpoint's folder before anything is made of it: everything that is read lies in it, is whole, and is what its
name says. What is wrong is :class:`Unusable`, with a message that names the file.

A folder may not lead out of itself. Its links have to end in it, or in the ``blobs`` of the same repository where it is
a snapshot of the Hub's cache. No file of it may name another one, but for the index of the shards.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from convergence.checked import checked, cut, shown
from convergence.files import Unusable, read_json, reason

CONFIG, _ADAPTER, _TOKENIZER = "config.json", "adapter_config.json", "tokenizer_config.json"
_CODE = Path("custom_generate") / "generate.py"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TAKES = "--checkpoint takes a folder with config.json and *.safetensors, or a GGUF file"
# What transformers reads of a folder besides config.json and weights: JSON objects, all of them.
_OBJECTS = (
    *("generation_config.json", "tokenizer.json", _TOKENIZER, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "chat_template.json", "processor_config.json"),
)
_LARGEST_CONFIG = 16 * 2**20
# The dtypes of weights, as safetensors names them.
TRAINS = ("F64", "F32", "F16", "BF16")
_DISTRIBUTED = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


@contextlib.contextmanager
def guarded(where: object, advice: str) -> Iterator[None]:
    """Inside, whatever somebody else's parser raises of a file that may hold anything is :class:`Unusable`.

    Args:
        where: the file.
        advice: what is wrong and what is allowed; what was raised follows.
    """
    try:
        yield
    except (Unusable, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust's is no Exception
        raise Unusable(f"{where}: {advice} ({reason(error)})") from error


@dataclass(frozen=True)
class Tensor:
    """What a file's header says of one tensor; the ``dtype`` as safetensors names it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class _Index(TypedDict):
    weight_map: dict[str, str]


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json of ``folder`` holds, after a look at everything else that is read before weights are.

    Raises:
        Unusable: something leads out of the folder, or is not what its name says.
    """
    if not (folder / CONFIG).exists() and not (folder / CONFIG).is_symlink():
        raise Unusable(f"{folder}: has no {CONFIG}; {TAKES}")
    _check_entries(folder)
    raw: dict[str, Any] = checked(read_json(folder / CONFIG, _LARGEST_CONFIG), dict[str, Any], str(folder / CONFIG))
    for name in _OBJECTS:
        if (folder / name).exists():
            checked(read_json(folder / name), dict[str, Any], str(folder / name))
    check_around(folder)
    return raw


def check_around(folder: Path) -> None:
    """See that nothing in ``folder`` leads transformers elsewhere, whatever it loads from there: a GGUF file, too.

    Raises:
        Unusable: there is an adapter, or code, or the tokenizer's configuration names a file elsewhere.
    """
    if (folder / _ADAPTER).exists():
        raise Unusable(
            f"{folder / _ADAPTER}: is an adapter's, on a model that may lie elsewhere; merge it into its model"
        )
    if (folder / _CODE).exists():  # transformers 4 runs it, even if told that no code is trusted
        raise Unusable(f"{folder / _CODE}: is code, which the proof does not run; remove it from the folder")
    path = folder / _TOKENIZER
    if not _is_inside(folder, path):
        raise Unusable(f"{path}: leads to {cut(os.path.realpath(path), 300)}; allowed is a file in the folder itself")
    given = checked(read_json(path), dict[str, Any], str(path)) if path.exists() else {}
    for field, value in given.items():
        for name in value if isinstance(value, list) else [value]:
            # Old versions wrote where a file was when it was saved, which nobody finds here.
            if field.endswith(("_file", "_files")) and isinstance(name, str) and _is_elsewhere(folder, name):
                raise Unusable(f"{path}: field {field!r} is {shown(name)}; allowed is a file of the folder")


def _is_elsewhere(folder: Path, name: str) -> bool:
    try:
        return (folder / name).exists() and not _is_inside(folder, folder / name)
    except (OSError, ValueError):  # no file is called so
        return False


def _check_entries(folder: Path) -> None:
    """See that every entry that is not hidden is a file or a folder, and lies in ``folder``."""
    for path in sorted([*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]):
        if path.name.startswith("."):
            continue
        if not _is_inside(folder, path):
            raise Unusable(
                f"{path}: leads to {cut(os.path.realpath(path), 300)}; allowed are files in the folder itself, "
                "and for a snapshot of the Hub's cache in the blobs of its repository"
            )
        if not path.exists():
            raise Unusable(f"{path}: is a link to a file that is not there; allowed are files in the folder itself")
        if not (path.is_file() or path.is_dir()):
            raise Unusable(f"{path}: is neither a file nor a folder")


def _is_inside(folder: Path, path: Path) -> bool:
    """Whether ``path``, with all links followed, lies in ``folder``, or for a snapshot of the Hub's cache
    (``models--NAME/snapshots/COMMIT``) in the ``blobs`` of the same repository."""
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        allowed.append(root.parent.parent / "blobs")
    found = Path(os.path.realpath(path))
    return any(found.is_relative_to(place) for place in allowed)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """What the weights' headers say, by name.

    Raises:
        Unusable: there are none, the index names files elsewhere or that are not there, or a file is damaged.
    """
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise Unusable(f"{folder}: has no *.safetensors; {TAKES}; save_pretrained writes them")
    if distributed := next(filter(_DISTRIBUTED.fullmatch, names), ""):
        raise Unusable(f"{folder / distributed}: is of a distributed checkpoint; allowed are {WEIGHTS} or {INDEX}")
    index = _read_index(folder) if (folder / INDEX).exists() else {}
    if WEIGHTS not in names and not index:
        raise Unusable(f"{folder}: has {', '.join(names[:5])}, but neither {WEIGHTS} nor {INDEX}; {TAKES}")
    found: dict[str, Tensor] = {}
    for name in [WEIGHTS] if WEIGHTS in names else sorted(set(index.values())):
        found.update(_header(folder / name))
    if WEIGHTS not in names:
        for tensor, file in index.items():
            if tensor not in found or found[tensor].file != file:
                raise Unusable(f"{folder / INDEX}: says that {shown(file)} holds {shown(tensor)}, and it does not")
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """In which file each tensor is."""
    path = folder / INDEX
    index: _Index = checked(read_json(path), _Index, f"{path}: index", more=True)
    checked(index.get("metadata", {}), dict[str, Any], f"{path}: index['metadata']")
    if not index["weight_map"]:
        raise Unusable(f"{path}: index['weight_map'] is empty; allowed is the file of every tensor")
    for tensor, name in index["weight_map"].items():
        where = f"{path}: index['weight_map'][{shown(tensor)}] is {shown(name)}"
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise Unusable(f"{where}; allowed is the name of a *.safetensors file in the same folder")
        if not (folder / name).is_file():
            raise Unusable(f"{where}, which is not there; allowed is the name of a file in the same folder")
    return index["weight_map"]


def _header(path: Path) -> dict[str, Tensor]:
    import safetensors

    with guarded(path, "is damaged: it is no whole safetensors file"), safetensors.safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
        return {name: Tensor(path.name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
