"""Changing what one object does by giving it a subclass of its own class.

A patched module stays the very object it was: same parameters, hooks, ``state_dict`` keys and class name, and it is an
instance of its old class; only its ``__class__`` is now a subclass made here. Giving the old class back undoes the
patch completely, no other instance of the class is touched, a deep copy is a patched copy of its own, and nothing is
bound to the module it was made from.

What a subclass does is described by a :class:`Recipe`, a small value that can be compared and pickled, so that a
patched model can be pickled: the subclass is made again from class and recipe when it is loaded.

Others keep methods that they found on a patched module: a compiled program, or what accelerate wraps around a forward.
Such a method asks for the module's class at every call, so it does what the module does then, patched or not.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import types
import weakref
from typing import Any

import torch
from torch import nn

from liger_kernels.patching.probe import describe, package_of
from liger_kernels.patching.report import Left, PatchReport

# Where a patched module keeps the report of its patch. Copies and pickles of the module keep it, too.
REPORT = "_liger_kernels"
# And which open ``patched()`` blocks hold it.
BLOCKS = "_liger_kernels_blocks"
# What a replaced module has in its ``__dict__`` once its kernel has run.
RAN = "_liger_kernels_ran"
# Functions that do what the class of their module has now. Not a mark on them: `functools.wraps` would copy it.
_following: weakref.WeakSet[Any] = weakref.WeakSet()
# Every module whose class was changed, and its class before.
Undo = list[tuple[nn.Module, type]]


def mark_run(module: Any) -> None:
    """The kernel of ``module`` runs. Compiled programs leave no mark."""
    if not torch.compiler.is_compiling():
        module.__dict__[RAN] = True


class Recipe:
    """What a patched class does differently. A subclass is a frozen dataclass: it can be hashed and pickled.

    Attributes:
        left: why some of what was found there is left, one line of the report each.
    """

    left: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        """The kernel that runs there, one of ``KERNELS``."""
        raise NotImplementedError

    @property
    def detail(self) -> str:
        """What was recognised, for the report."""
        raise NotImplementedError

    def namespace(self, base: Any) -> dict[str, Any]:
        """The attributes that the subclass of ``base`` overrides."""
        raise NotImplementedError

    def foreseen(self, module: Any, step: Any) -> functools.partial[Any] | None:
        """The call of an op that ``module`` will make in ``step``, on tensors without memory, if that can be foreseen.

        What it launches, forward and backward, is compiled before the first step comes to it."""
        return None


@functools.cache
def patched_class(base: Any, recipe: Any) -> Any:
    """The subclass of ``base`` that follows ``recipe``: always the same class for the same two."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = super(cls, self).__reduce_ex__(protocol)
        if reduced[0] is not copyreg.__newobj__ or reduced[1] != (cls,):  # type: ignore[attr-defined]
            return reduced  # the class has its own way to be pickled
        return (_new_patched, (base, recipe), *reduced[2:])

    def while_patched(name: str, method: Any) -> Any:
        """``method`` for instances of the subclass; for one that was unpatched, what its class has now."""
        if not isinstance(method, types.FunctionType):
            return method

        def follow(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_forward and "forward" in self.__dict__ and not torch.compiler.is_compiling():
                _note_inner_run(self)
            if isinstance(self, cls):
                return method(self, *args, **kwargs)
            return getattr(type(self), name)(self, *args, **kwargs)

        is_forward = name == "forward"
        upstream = getattr(base, name, method)
        # Whoever asks is told the name and the signature of upstream's: a Trainer chooses columns by the signature.
        functools.update_wrapper(follow, upstream, updated=())
        del follow.__wrapped__  # type: ignore[attr-defined]  # accelerate, to remove its own wrappers, removes all
        follow.__signature__ = inspect.signature(upstream)  # type: ignore[attr-defined]
        _following.add(follow)
        return follow

    members = {"__reduce_ex__": reduce_ex, **recipe.namespace(base)}
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_liger_kernels_recipe": recipe,
        "_liger_kernels_base": base,
        **{name: while_patched(name, member) for name, member in members.items()},
    }
    # The name stays: save_pretrained writes it into the configuration, and weight initialisation looks for "RMSNorm".
    cls = type(base)(base.__name__, (base,), namespace)
    return cls


def _follows(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and function in _following


def follows_class(method: Any, module: nn.Module) -> bool:
    """Whether ``method`` is a bound method that does what the class of ``module`` does, now and later."""
    function = getattr(method, "__func__", None)
    return (function is type(module).forward or _follows(function)) and method.__self__ is module


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


def replace(path: str, module: nn.Module, recipe: Recipe, report: PatchReport, undo: Undo) -> bool:
    """Let ``module`` follow ``recipe``. If its class does not allow that, ``report`` says that it is left."""
    base: Any = type(module)
    try:
        module.__class__ = cls = patched_class(base, recipe)
    except Exception as error:  # a class may refuse to be subclassed in any way
        report.left.append(Left(path, base.__name__, f"its class cannot be subclassed ({describe(error)})"))
        return False
    cls._liger_kernels_base_forward = base.forward  # whoever replaces it after this is seen
    _rebind_inside_hook(module, base, cls)
    undo.append((module, base))
    module.__dict__[REPORT] = report
    return True


def restore(undo: Undo) -> None:
    """Give every module its own class back."""
    for module, base in reversed(undo):
        _rebind_inside_hook(module, type(module), base)
        module.__class__ = base
        forget(module)


def forget(module: nn.Module) -> None:
    """Remove what a patch has written into the ``__dict__`` of ``module``."""
    for name in (REPORT, RAN, BLOCKS):
        module.__dict__.pop(name, None)


# Where accelerate keeps what its hook runs around: the bound method that the module had.
_INSIDE_HOOK = "_old_forward"


def runs_inside_hook(module: nn.Module) -> bool:
    """Whether the forward of the instance is accelerate's (a device map, or offload), around that of its class."""
    own, inner = module.__dict__.get("forward"), module.__dict__.get(_INSIDE_HOOK)
    is_hook = getattr(getattr(own, "func", None), "__module__", None) == "accelerate.hooks"
    return is_hook and getattr(inner, "__func__", None) is type(module).forward


def _rebind_inside_hook(module: Any, before: Any, after: Any) -> None:
    """Let accelerate's hook run around the forward of the class ``after`` where it ran around that of ``before``.

    A hook that went has left the method that it ran around on the instance.
    """
    for name in (_INSIDE_HOOK, "forward"):
        if getattr(module.__dict__.get(name), "__func__", None) is before.forward:
            module.__dict__[name] = types.MethodType(after.forward, module)


def recipe_of(obj: object) -> Recipe | None:
    """The recipe that ``obj`` follows, or None when it is not patched."""
    return getattr(type(obj), "_liger_kernels_recipe", None)


def _new_patched(base: type, recipe: Recipe) -> Any:
    cls = patched_class(base, recipe)
    return cls.__new__(cls)
