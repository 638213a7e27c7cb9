"""The methods of a patched class, which others may keep: a compiled program, or what accelerate wraps around a forward.

Each asks for the class of its module at every call, and so does what the module does then, patched or not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_kernels.patching.recipes.probe import package_of
from liger_kernels.patching.report import REPORT

# The functions that were made here. Not a mark on them: `functools.wraps` would copy it.
_following: weakref.WeakSet[Any] = weakref.WeakSet()


def following(cls: Any, base: Any, name: str, method: Any, gives_way: bool) -> Any:
    """What the subclass ``cls`` of ``base`` has under ``name``: ``method`` for its instances, and for a module that was
    unpatched what its class has now. Whatever is no function stays as it is.

    With ``gives_way``, that of ``base`` runs where :func:`mode_check` says so.
    """
    if not isinstance(method, types.FunctionType):
        return method

    def follow(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_forward and "forward" in self.__dict__ and not is_compiling():
            note(self)
        # Torch 2.11 with Python 3.12 asks a module of a compiled program for its class again only where an entry of its
        # ``__dict__`` that the program read has changed: unpatch removes this one.
        if not isinstance(self, cls) or (is_compiling() and getattr(self, report, None) is None):
            return getattr(type(self), name)(self, *args, **kwargs)
        if gives_way and wants_upstream():
            return getattr(base, name)(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    is_forward, is_compiling, report = name == "forward", torch.compiler.is_compiling, REPORT
    note, wants_upstream = _note_inner_run, mode_check()
    upstream = getattr(base, name, method)
    if isinstance(upstream, types.FunctionType):  # torch.jit.script compiles its source, and looks names up here
        follow = types.FunctionType(follow.__code__, upstream.__globals__, closure=follow.__closure__)
    # Whoever asks is told the name and the signature of upstream's: a Trainer chooses columns by the signature.
    functools.update_wrapper(follow, upstream, updated=())
    follow.__signature__ = inspect.signature(upstream)  # type: ignore[attr-defined]
    if not gives_way:
        del follow.__wrapped__  # type: ignore[attr-defined]  # of a model, accelerate removes all wrappers
    _following.add(follow)
    return follow


@functools.cache
def mode_check() -> Callable[[], bool]:
    """A function that says whether something runs that takes operations of torch and no kernel: torch.jit.trace, a
    transform of torch.func, make_fx. It runs at every call of a patched module; in a compiled program it is a constant.
    """
    tracing, transform = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
    modes, mode, proxies = (
        torch._C._len_torch_dispatch_stack,
        torch._C._get_dispatch_mode,
        torch._C._TorchDispatchModeKey.PROXY,
    )

    @torch.compiler.assume_constant_result
    def wants_upstream() -> bool:
        return tracing() is not None or transform() is not None or (modes() > 0 and mode(proxies) is not None)

    check: Callable[[], bool] = wants_upstream
    return check


def _follows(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and function in _following


def follows_class(method: Any, module: nn.Module) -> bool:
    """Whether ``method`` is a bound method that does what the class of ``module`` does, now and later."""
    function = getattr(method, "__func__", None)
    return (function is type(module).forward or _follows(function)) and method.__self__ is module


def is_kept(value: Any, module: nn.Module) -> bool:
    """Whether ``value``, on the instance, is a method of the patched class of ``module`` that somebody kept there."""
    return isinstance(value, types.MethodType) and value.__self__ is module and _follows(value.__func__)


def who_replaced(module: nn.Module) -> str:
    """The package whose code the forward on the instance of ``module`` is, or "somebody"."""

    def is_of_the_class(function: Any) -> bool:
        return _follows(function) or any(vars(cls).get("forward") is function for cls in type(module).__mro__)

    return package_of(module.__dict__["forward"], is_of_the_class) or "somebody"


# The forward that an instance carries, where that of a patched class has run inside it.
_around: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _note_inner_run(module: nn.Module) -> None:
    own = module.__dict__["forward"]
    if not runs_inside(module):
        with contextlib.suppress(TypeError):  # an object that cannot be referred to
            _around[module] = weakref.ref(own)


def runs_inside(module: nn.Module) -> bool:
    """Whether the forward of a patched class has run inside the one that the instance of ``module`` carries now.

    Compiled programs leave no note.
    """
    noted = _around.get(module)
    return noted is not None and noted() is module.__dict__.get("forward")
