"""Finds the configuration of a model in a folder, a file or a class. Nothing is downloaded."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liger_kernels.ops.runtime.arguments import describe


def find_config(model: Any, sizes: Mapping[str, Any]) -> Any:
    """The configuration that ``model`` names, with its attributes changed to ``sizes``.

    Args:
        model: a configuration of transformers, the path of its file or folder, or the name of its class.
        sizes: attributes of the configuration, by name.

    Raises:
        TypeError: ``model`` is something else, or the name of a size is no string.
        ValueError: the path or class does not exist, the file is no configuration, or the configuration lacks an
            attribute or rejects its value.
    """
    from transformers import PretrainedConfig

    for name in sizes:
        if not isinstance(name, str):
            raise TypeError(f"sizes has the name {describe(name)}; names must be strings")
    if isinstance(model, PretrainedConfig):
        config = copy.deepcopy(model)
        unknown = [name for name in sizes if not hasattr(config, name)]
        try:
            for name in set(sizes).difference(unknown):
                setattr(config, name, sizes[name])
        except Exception as error:  # each class has different checks
            raise ValueError(f"{type(config).__name__} does not take these sizes: {error}") from error
    elif isinstance(model, str | os.PathLike):
        config, unknown = _of_path(Path(model), sizes) if _exists(Path(model)) else _of_class(str(model), sizes)
    else:
        raise TypeError(
            f"model is {describe(model)}; it must be a configuration of transformers, the path of a folder or file of "
            'one, or the name of its class, such as "LlamaConfig"'
        )
    if unknown:
        raise ValueError(f"{type(config).__name__} has no {sorted(unknown)}; give sizes by the names that it has")
    return config


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise ValueError(f"{path} cannot be read: {error}") from error


def _of_path(path: Path, sizes: Mapping[str, Any]) -> tuple[Any, list[str]]:
    from transformers import AutoConfig

    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"the folder {path} has no config.json; give the folder of a model, or a configuration's file")
    try:
        config, unused = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **sizes
        )
    except Exception as error:  # each class has different checks
        changed = " with these sizes" if sizes else ""
        raise ValueError(f"{path} is no configuration that transformers can read{changed}: {error}") from error
    return config, [name for name in sizes if name in unused]


def _of_class(name: str, sizes: Mapping[str, Any]) -> tuple[Any, list[str]]:
    import transformers

    cls = getattr(transformers, name, None) if name.endswith("Config") else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PretrainedConfig)):
        raise ValueError(
            f"model is {name!r}, which is no folder, no file and no configuration class of transformers; nothing is "
            'downloaded: give the folder of a downloaded model, or a class with its sizes, such as "LlamaConfig"'
        )
    known = cls()
    unknown = [size for size in sizes if not hasattr(known, size)]
    try:
        return cls(**{size: value for size, value in sizes.items() if size not in unknown}), unknown
    except Exception as error:  # each class has different checks
        raise ValueError(f"{name} does not take these sizes: {error}") from error
