"""How ``patch`` finds the modules of a kernel. docs/how-to/write-a-recogniser.md has a worked example."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from liger_kernels.ops.runtime.arguments import checked_fields
from liger_kernels.patching.swap import Recipe

_SCALARS = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def fingerprint(module: nn.Module, replaced: Mapping[str, Hashable] | None = None) -> Hashable:
    """Equal for two modules only if they compute the same. In doubt it differs.

    Settings count by value, submodules by their own fingerprint, and any other object by identity: parameters, buffers,
    functions. Hooks and the training mode do not count, because a probe has its own.

    Args:
        module: any module.
        replaced: what a probe puts its own in place of, parameters or submodules by name. Of these only the value given
            here counts: their size, for example.
    """
    replaced = replaced or {}
    settings = ((name, _value(value)) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    tensors = (
        (name, id(tensor)) for tensors in (module._parameters, module._buffers) for name, tensor in tensors.items()
    )
    children = (
        (name, None if child is None or name in replaced else fingerprint(child))
        for name, child in module._modules.items()
    )
    counted = ((name, replaced.get(name, value)) for part in (settings, tensors, children) for name, value in part)
    return type(module), tuple(counted)


def _value(value: Any) -> Hashable:
    if type(value) in _SCALARS:
        return repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    if type(value) in (tuple, list):
        return type(value), tuple(map(_value, value))
    if type(value) is dict:
        return dict, tuple((_value(key), _value(item)) for key, item in value.items())
    if type(value) is partial:
        return partial, _value(value.func), _value(value.args), _value(value.keywords)
    return id(value)


Verdict = Recipe | tuple[str, ...]  # what a module is replaced by, or why it is left


@checked_fields
@dataclass(frozen=True)
class Recogniser:
    """How the modules that a kernel replaces are found.

    Attributes:
        kernels: the names that ``patch(model, kernels=...)`` takes: each ``kernel`` that a recipe of this one may have.
        candidate: whether a module may be of this kind, by its structure. Nothing is run.
        recognise: the recipe for a candidate, or the reasons why it is left, one line of the report each. No reasons,
            ``()``, where it turns out to be something else, which the report need not mention.
        key: what ``recognise`` depends on: of candidates with equal keys only the first is looked at.
    """

    kernels: tuple[str, ...]
    candidate: Callable[[nn.Module], bool]
    recognise: Callable[[nn.Module], Verdict]
    key: Callable[[nn.Module], Hashable] = fingerprint
