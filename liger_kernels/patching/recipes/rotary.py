"""Recognise the rotary functions of a modeling module, and let one model's attention call ours."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import rope
from liger_kernels.patching.lora.shared_input import foreseen_groups, shared_calls, sharing
from liger_kernels.patching.reads import Outside, reads_of
from liger_kernels.patching.recipes.rebinding import methods, rebind, replaced_by
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict
from liger_kernels.patching.recipes.rotary_call import rotary_function
from liger_kernels.patching.recipes.rotation import Rotation, recognise_rotation, roles_of
from liger_kernels.patching.swap import RAN, Calls, Recipe

# Where a patched class has what its methods were copied from.
_OUTSIDE = "_liger_kernels_outside"


@dataclass(frozen=True)
class RopeRecipe(Recipe):
    """An attention whose forward finds our rotation under the names of upstream's."""

    kernel = "rope"
    live = None
    rotations: tuple[Rotation, ...]
    left: tuple[str, ...] = ()  # why its other rotary functions are

    @property
    def detail(self) -> str:
        return ", ".join(map(str, self.rotations))

    def foreseen(self, module: Any, step: Any) -> Calls:
        config = module.config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        columns = getattr(config, "head_dim", None) or config.hidden_size // heads
        q, k = (step.tensor(step.batch, step.length, n, columns).transpose(1, 2) for n in (heads, groups))
        cos, sin = (step.tensor(1, step.length, columns, dtype=step.stream, grad=False) for _ in range(2))
        facts = self.rotations[0]
        how: dict[str, Any] = {"pairing": facts.pairing, "inverse": facts.inverse, "trailing": facts.trailing}
        rotates = functools.partial(rope, q, k, cos, sin, rotary_dim=columns, keep_dtype=facts.casts_back, **how)
        shared = shared_calls(getattr(type(module), "_liger_kernels_base").forward)  # noqa: B009
        return rotates, *foreseen_groups(module, shared, step)

    def namespace(self, base: Any) -> dict[str, Any]:
        by_name = {rotation.name: rotation for rotation in self.rotations}
        runs = [0]  # of our kernel, in any attention of this class

        def replace(name: str, upstream: Callable[..., Any]) -> Callable[..., Any] | None:
            return rotary_function(upstream, by_name[name], runs) if name in by_name else None

        rebound = {
            attribute: new
            for attribute, function in methods(base)
            if (new := rebind(function, replace)) is not function
        }
        before = {attribute: getattr(base, attribute) for attribute in rebound}
        outside = [(base, attribute, function) for attribute, function in before.items()]
        original = base.forward
        inner = rebound.get("forward", original)
        shared = shared_calls(original)

        def live(attribute: str, new: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(new)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                own = getattr(base, attribute)
                return (new if own is before[attribute] else own)(self, *args, **kwargs)

            return method

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if base.forward is not original:
                return base.forward(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                return inner(self, *args, **kwargs)
            if RAN in self.__dict__:
                return sharing(self, shared, functools.partial(inner, self, *args, **kwargs))
            ran = runs[0]
            output = sharing(self, shared, functools.partial(inner, self, *args, **kwargs))
            if runs[0] != ran:  # not every instance rotates
                self.__dict__[RAN] = True
            return output

        methods_of_both = {attribute: live(attribute, new) for attribute, new in rebound.items()}
        return {**methods_of_both, "forward": forward, _OUTSIDE: (*outside, *self._functions(base))}

    def _functions(self, base: Any) -> Outside:
        """The rotary functions as the methods of ``base`` find them, and what they use."""
        names = {rotation.name for rotation in self.rotations}
        found = reads_of([function for _, function in methods(base)], base).values
        return tuple(
            part for scope, name in found if name in names and type(scope) is dict for part in replaced_by(scope, name)
        )

    def made_of(self, base: Any) -> tuple[Any, ...]:
        functions = (*(function for _, function in methods(base)), *(value for *_, value in self._functions(base)))
        return tuple(function for function in functions if isinstance(function, types.FunctionType))

    def changed(self, module: nn.Module) -> str | None:
        for holder, name, value in getattr(type(module), _OUTSIDE):
            if (holder.get(name) if type(holder) is dict else getattr(holder, name)) is not value:
                where = holder["__name__"] if type(holder) is dict else "its class"
                return (
                    f"the {name} of {where} was replaced after patch(), and runs: call patch(model) to look at it anew"
                )
        return None


def rotary_names(cls: type) -> dict[str, Callable[..., Any]]:
    """Globals that the methods of ``cls`` call and that take angles, as cos and sin or as complex numbers."""
    found: dict[str, Callable[..., Any]] = {}

    def collect(name: str, function: Callable[..., Any]) -> None:
        if roles_of(function) is not None:
            found[name] = function

    for _, method in methods(cls):
        rebind(method, collect)
    return found


def _verdict(module: nn.Module) -> Verdict:
    verdicts = {name: recognise_rotation(name, function) for name, function in rotary_names(type(module)).items()}
    rotations = tuple(verdict for verdict in verdicts.values() if isinstance(verdict, Rotation))
    reasons = tuple(f"{name}: {verdict}" for name, verdict in verdicts.items() if isinstance(verdict, str))
    return RopeRecipe(rotations, reasons) if rotations else reasons


ROTATIONS = Recogniser(("rope",), lambda module: bool(module._modules), _verdict, key=type)
