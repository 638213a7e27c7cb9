"""What a patch changed in a model, module by module, so that any part of it can be taken back and put on again.

A change is found by comparing, not by asking the patch: the class of a module, what lies in its ``__dict__`` (a forward
that was put on the instance, an attribute), its hooks and those of its parameters, and which object sits at its place.
So it works for anybody's patch of one model. What a patch changes outside of the model is not seen here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from convergence import ours

_REPORT = ("attribute", ours.REPORT_ATTRIBUTE)
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_ABSENT = object()


@dataclass(frozen=True)
class Part:
    """One module that a patch changed.

    Attributes:
        path: of the module, as ``named_modules`` has it.
        kernel: the kernel that runs there, for our own patch; the name of the module's class for another.
        restore: makes the module what it was before the patch.
        patch: makes it again what the patch made of it.
    """

    path: str
    kernel: str
    restore: Callable[[], None] = field(repr=False)
    patch: Callable[[], None] = field(repr=False)


class Changes:
    """What happens to ``model`` between this object's making and :meth:`find`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before = {path: (module, _state(module)) for path, module in model.named_modules()}
        self._parameters: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._remember_parameters()
        self.parts: list[Part] = []

    def find(self) -> list[Part]:
        """Compare the model with what it was; one or two parts for each module that changed."""
        self._remember_parameters()
        now = dict(self.model.named_modules())
        losses = (kernel for module in now.values() if (kernel := ours.kernel_of(module)) and "cross_entropy" in kernel)
        loss = next(losses, "cross_entropy")
        replaced: list[str] = []
        for path in {**self._before, **now}:
            if any(path.startswith(above + ".") for above in replaced):
                continue
            old, state = self._before.get(path, (None, {}))
            new = now.get(path)
            if new is not old:
                replaced.append(path)
                self.parts.append(self._replaced(path, old, new))
                continue
            assert old is not None
            self.parts += _changed(path, old, state, _state(old), loss)
        return self.parts

    def keep(self, parts: Collection[Part]) -> None:
        """Let the model be patched in ``parts`` and as it was in all others, with the weights that it had at first."""
        for part in self.parts:
            (part.patch if part in parts else part.restore)()
        with torch.no_grad():
            for parameter, value in self._parameters.values():
                parameter.copy_(value)

    def _remember_parameters(self) -> None:
        for parameter in self.model.parameters():
            self._parameters.setdefault(id(parameter), (parameter, parameter.detach().clone()))

    def _replaced(self, path: str, old: nn.Module | None, new: nn.Module | None) -> Part:
        parent, _, name = path.rpartition(".")

        def put(module: nn.Module | None) -> None:
            children = self.model.get_submodule(parent)._modules
            if module is None:
                children.pop(name, None)
            else:
                children[name] = module

        kernel = type(old if old is not None else new).__name__
        return Part(path, kernel, functools.partial(put, old), functools.partial(put, new))


def _state(module: nn.Module) -> dict[tuple[str, ...], Any]:
    """Everything that decides what ``module`` does, but for its submodules: values by (kind, name, ...)."""
    state: dict[tuple[str, ...], Any] = {("class",): type(module)}
    for name, value in vars(module).items():
        if name not in ("_modules", "training"):
            is_container = name == "_parameters" or name.endswith("_hooks")
            state["attribute", name] = copy.copy(value) if is_container else value
    for name, parameter in module._parameters.items():
        for hooks in _PARAMETER_HOOKS if parameter is not None else ():
            state["parameter", name, hooks] = dict(getattr(parameter, hooks) or {})
    return state


def _changed(path: str, module: nn.Module, before: dict[Any, Any], after: dict[Any, Any], loss: str) -> list[Part]:
    keys = {key for key in {**before, **after} if not _same(before.get(key, _ABSENT), after.get(key, _ABSENT))}
    kernel, name = ours.kernel_of(module), before["class",].__name__
    if kernel is None:
        groups = {name: keys - {_REPORT}}
    elif not kernel:
        # A model's forward serves the loss of its head. What somebody put on the instance is not a part of that.
        groups = {loss: keys & {("class",), _REPORT}, name: keys - {("class",), _REPORT}}
    else:
        groups = {kernel: keys}

    def put(state: dict[Any, Any], keys: set[Any]) -> Callable[[], None]:
        return functools.partial(_put, module, {key: state.get(key, _ABSENT) for key in keys})

    return [Part(path, kernel, put(before, of), put(after, of)) for kernel, of in groups.items() if of]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return a is b or (isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b)


def _put(module: nn.Module, state: dict[Any, Any]) -> None:
    for (kind, *names), value in state.items():
        if kind == "class":
            module.__class__ = value
        elif kind == "parameter":
            hooks = getattr(module._parameters[names[0]], names[1])
            if hooks is not None:
                hooks.clear()
                hooks.update({} if value is _ABSENT else value)
        elif value is _ABSENT:
            vars(module).pop(names[0], None)
        else:
            vars(module)[names[0]] = copy.copy(value) if isinstance(value, dict) else value
