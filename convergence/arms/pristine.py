"""Proves that a baseline is unpatched: no symbol that an unpatched model runs has changed since before any patch, and
no bit of what it computes.

A fingerprint holds the very objects (functions with their code, classes, descriptors, registry entries) found in the
modeling modules, their classes and those classes' bases, ``torch.nn.functional``, and transformers' loss, activation
and attention registries. Data such as counters and caches is not compared; only what runs. A bystander is a model that
nobody patches: whatever else a patch of another model changed, it shows here.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from convergence.arms.tasks.task import Task
from convergence.models.models import MODELS, Row

_REGISTRIES = (
    ("transformers.loss.loss_utils", "LOSS_MAPPING"),
    ("transformers.activations", "ACT2CLS"),
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
)

# transformers 5 adds this to torch.nn.Module itself when it initialises its first model, and never replaces it.
_WRITTEN_BY_TRANSFORMERS = ("smart_apply",)
# torch.compile puts its programs among the globals of what it compiles.
_WRITTEN_BY_DYNAMO = ("__compiled_fn_", "__resume_at_", "__import_")
# And it wraps how a module is made, when it first compiles anything.
_GUARD = "torch._dynamo.mutation_guard"
_NONE = (None, None)  # no symbol


class Fingerprint:
    """What ``model_classes`` run, as it is now; :meth:`changes` names what is no longer the same object."""

    def __init__(self, model_classes: Iterable[type]) -> None:
        self._namespaces = dict(_namespaces(model_classes))
        self._before = {label: _symbols(namespace) for label, namespace in self._namespaces.items()}

    def __len__(self) -> int:
        return sum(len(symbols) for symbols in self._before.values())

    def changes(self) -> list[str]:
        """The dotted names of all symbols that were replaced, added or removed, sorted."""
        found = []
        for label, namespace in self._namespaces.items():
            before, now = self._before[label], _symbols(namespace)
            for name in before.keys() | now.keys():
                (old, old_code), (new, new_code) = before.get(name, _NONE), now.get(name, _NONE)
                if name.startswith(_WRITTEN_BY_DYNAMO) or getattr(new, "__module__", "") == _GUARD:
                    continue
                if old is not new or old_code is not new_code:
                    found.append(f"{label}.{name}")
        return sorted(found)


def remember_upstream(models: Iterable[Row] = MODELS.values()) -> Fingerprint:
    """The fingerprint of everything unpatched; it is taken once per process, before any patch is imported."""
    return _fingerprint(frozenset(cls for model in models if model.is_available() for cls in model.classes()))


@functools.cache
def _fingerprint(classes: frozenset[type]) -> Fingerprint:
    return Fingerprint(sorted(classes, key=lambda cls: cls.__qualname__))


class Bystander:
    """An unpatched ``model`` on the CPU: nothing that it computes on ``batch`` may change when another is patched."""

    def __init__(self, model: Any, batch: Any, task: Task) -> None:
        self._model, self._batch, self._task = model, batch, task
        self._before = self._computed()

    def _computed(self) -> list[torch.Tensor]:
        loss, others = self._task.computed(self._model, self._batch)
        gradients = torch.autograd.grad(loss, list(self._model.parameters()), allow_unused=True)
        return [value for value in (loss, *others, *gradients) if value is not None]

    def changes(self) -> list[str]:
        """What is no longer the same, in words."""
        try:
            now = self._computed()
        except Exception as error:
            return [f"an unpatched model, which raises {type(error).__name__}: {error}"]
        same = len(now) == len(self._before) and all(map(torch.equal, self._before, now))
        return [] if same else ["what an unpatched model computes"]


def _namespaces(model_classes: Iterable[type]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    model_classes = list(model_classes)
    modules = [sys.modules[cls.__module__] for cls in model_classes] + [torch.nn.functional]
    classes: set[type] = {torch.nn.CrossEntropyLoss, torch.nn.Linear, torch.nn.Embedding}
    for name, registry in _REGISTRIES:
        modules.append(module := importlib.import_module(name))
        if hasattr(module, registry):  # an old version has not all of them
            yield f"{name}.{registry}", getattr(module, registry)
    for module in modules:
        yield module.__name__, vars(module)
        classes.update(value for value in vars(module).values() if isinstance(value, type))
    for base in {base for cls in classes for base in cls.__mro__ if base is not object}:
        yield f"{base.__module__}.{base.__qualname__}", vars(base)


def _symbols(namespace: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        str(name): (value, getattr(value, "__code__", None))
        for name, value in list(namespace.items())
        if name not in _WRITTEN_BY_TRANSFORMERS
        and not isinstance(value, ModuleType)
        and (callable(value) or hasattr(type(value), "__get__"))
    }
