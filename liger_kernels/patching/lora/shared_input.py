"""LoRA layers that an attention calls with one and the same tensor run as one op.

Which they are stands in the attention's forward: one block of statements calls several projections of ``self`` with the
same name, and assigns nothing to it in between. At the call of the first one the op computes all of them. The others
find their results there, if they are called with that very tensor. So whatever is around a module's call, its hooks
among them, stays as it is. What is learned at a first forward would not do: the recomputation of activation
checkpointing has to save what its forward saved.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import adapted_linears
from liger_kernels.ops.lora.adapted_linears import adapted_linears_of_checked
from liger_kernels.ops.runtime.anchor import saves_first
from liger_kernels.patching.lora.projection import adapted, foreseen_projection, has_adapters
from liger_kernels.patching.swap import Calls, mark_run

_here = threading.local()  # a recomputation runs in a thread of autograd


@functools.lru_cache(maxsize=1024)
def shared_calls(forward: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    """The names of submodules that ``forward`` surely calls one after the other with the same tensor, in that order."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source
        return ()
    return tuple(names for block in _blocks(tree) for names in _shared_in(block))


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _shared_in(block: list[ast.stmt]) -> Iterator[tuple[str, ...]]:
    """Of the statements of one ``block``, those that always run one after the other."""
    found: dict[str, list[str]] = {}
    for statement in block:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)) or _may_not_run(statement):
            changed = _stored(statement)
            leaves = any(isinstance(node, (ast.Return, ast.Break, ast.Continue)) for node in ast.walk(statement))
            for name in [*found] if leaves else changed & {*found}:
                yield from _several(found.pop(name))
            continue
        for node in ast.walk(statement):
            call = _projection(node)
            if call is not None:
                found.setdefault(call[1], []).append(call[0])
        for name in _stored(statement) & {*found}:
            yield from _several(found.pop(name))
    for names in found.values():
        yield from _several(names)


def _stored(statement: ast.stmt) -> set[str]:
    """The names to which ``statement`` assigns."""
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in names if not isinstance(node.ctx, ast.Load)}


def _may_not_run(statement: ast.stmt) -> bool:
    """Whether a part of it may be left out."""
    conditional = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.NamedExpr)
    return any(isinstance(node, conditional) for node in ast.walk(statement))


def _projection(node: ast.AST) -> tuple[str, str] | None:
    """The submodule and the argument of ``self.submodule(argument)``."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    (argument,), function = node.args, node.func
    if not isinstance(argument, ast.Name) or not isinstance(function, ast.Attribute):
        return None
    if not isinstance(function.value, ast.Name) or function.value.id != "self":
        return None
    return function.attr, argument.id


def _several(names: list[str]) -> Iterator[tuple[str, ...]]:
    if 1 < len(names) == len({*names}):
        yield tuple(names)


class SharedInput:
    """The results that LoRA layers of one module wait for, during one of its forwards."""

    def __init__(self, groups: list[list[Any]]):
        self.groups = {id(group[0]): group for group in groups}
        self.ready: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def result(self, module: Any, x: torch.Tensor) -> torch.Tensor | None:
        """That of ``module``, where one op computes it with its siblings'."""
        ready = self.ready.pop(id(module), None)
        if ready is not None and ready[0] is x and ready[1] == x._version:
            mark_run(module)
            return ready[2]
        group = self.groups.get(id(module))
        found = None if group is None else adapted(group, x)
        if group is None or found is None:
            return None
        y, *others = adapted_linears_of_checked(x, found, first=False)
        for sibling, result in zip(group[1:], others, strict=True):
            self.ready[id(sibling)] = x, x._version, result
        return y


def groups_of(parent: nn.Module, shared: tuple[tuple[str, ...], ...]) -> list[list[Any]]:
    """The LoRA layers of ``parent`` by the groups of names in ``shared``."""
    groups = ([module for name in names if has_adapters(module := parent._modules.get(name))] for names in shared)
    return [group for group in groups if len(group) > 1]


def foreseen_groups(parent: nn.Module, shared: tuple[tuple[str, ...], ...], step: Any) -> Calls:
    """The calls of the op that the LoRA layers of ``parent`` will make together, on tensors without memory."""
    calls = []
    for group in groups_of(parent, shared):
        x = step.tensor(step.batch, step.length, group[0].in_features)
        calls.append(functools.partial(adapted_linears, x, tuple(foreseen_projection(one, step) for one in group)))
    return tuple(calls)


def sharing(parent: nn.Module, shared: tuple[tuple[str, ...], ...], forward: Callable[[], Any]) -> Any:
    """``forward()`` of ``parent``, whose LoRA layers of each group of names in ``shared`` run together."""
    if not any(map(has_adapters, parent._modules.values())):
        return forward()
    outer = getattr(_here, "scope", None)
    _here.scope = SharedInput(groups_of(parent, shared))
    try:
        return forward()
    finally:
        _here.scope = outer


def own_product(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The result of a LoRA layer whose weight the op multiplies by itself; None where its base has to be called."""
    scope: SharedInput | None = getattr(_here, "scope", None)
    if scope is not None and (result := scope.result(module, x)) is not None:
        return result
    found = adapted((module,), x)
    if found is None:
        return None
    (y,) = adapted_linears_of_checked(x, found, first=scope is None and saves_first())
    return y
