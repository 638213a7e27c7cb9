"""Changing what one object does by giving it a subclass of its own class.

A patched module stays the very object it was: same parameters, hooks, ``state_dict`` keys and class name, and it is an
instance of its old class; only its ``__class__`` is now a subclass made here. Giving the old class back undoes the
patch completely, no other instance of the class is touched, a deep copy is a patched copy of its own, and nothing is
bound to the module it was made from.

What a subclass does is described by a :class:`Recipe`, a small value that can be compared and pickled, so that a
patched model can be pickled: the subclass is made again from class and recipe when it is loaded.

Whoever kept a method of a patched module gets from it what the module does at the moment of the call: following.py.
"""

from __future__ import annotations

import copyreg
import functools
import types
from typing import Any, ClassVar

import torch
from torch import nn

from liger_kernels.patching.following import following
from liger_kernels.patching.offload import INPUTS
from liger_kernels.patching.recipes.probe import describe
from liger_kernels.patching.report import REPORT, Left, PatchReport
from liger_kernels.patching.watch import WATCH, Watch, changed

# Where a patched module keeps which open ``patched()`` blocks hold it.
BLOCKS = "_liger_kernels_blocks"
# What a replaced module has in its ``__dict__`` once its kernel has run.
RAN = "_liger_kernels_ran"
# Every module whose class was changed, and its class before.
Undo = list[tuple[nn.Module, type]]


def mark_run(module: Any) -> None:
    """The kernel of ``module`` runs. Compiled programs leave no mark."""
    if not torch.compiler.is_compiling():
        module.__dict__[RAN] = True


Calls = tuple[functools.partial[Any], ...]  # of ops


class Recipe:
    """What a patched class does differently. A subclass is a frozen dataclass: it can be hashed and pickled.

    Attributes:
        left: why some of what was found there is left, one line of the report each.
        live: the parameters and submodules that the patched forward uses as upstream's does, whatever they are at the
            call. Everything else that upstream's forward may read is watched (``watch.py``). None: nothing is,
            because the patched forward calls upstream's own.
        gives_way: whether upstream's own methods run while :func:`mode_check` says so. A class that says no sees to it
            itself.
    """

    left: tuple[str, ...] = ()
    live: tuple[str, ...] | None = ()
    gives_way: ClassVar[bool] = True

    @property
    def kernel(self) -> str:
        """The kernel that runs there, one of ``KERNELS``."""
        raise NotImplementedError

    @property
    def detail(self) -> str:
        """What was recognised, for the report."""
        raise NotImplementedError

    def made_of(self, base: Any) -> tuple[Any, ...]:
        """What :meth:`namespace` copies; where it is replaced, another class is made."""
        return ()

    def changed(self, module: nn.Module) -> str | None:
        """What of ``module`` is not as it was recognised, for the report; None where nothing is."""
        return changed(module)

    def namespace(self, base: Any) -> dict[str, Any]:
        """The attributes that the subclass of ``base`` overrides."""
        raise NotImplementedError

    def foreseen(self, module: Any, step: Any) -> Calls:
        """The calls of ops that ``module`` will make in ``step``, on tensors without memory, as far as that can be
        foreseen.

        What they launch, forward and backward, is compiled before the first step comes to it."""
        return ()


def patched_class(base: Any, recipe: Any) -> Any:
    """The subclass of ``base`` that follows ``recipe``: always the same class for the same two."""
    return _patched_class(base, recipe, recipe.made_of(base))


@functools.cache
def _patched_class(base: Any, recipe: Any, made_of: tuple[Any, ...]) -> Any:

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = super(cls, self).__reduce_ex__(protocol)
        if reduced[0] is not copyreg.__newobj__ or reduced[1] != (cls,):  # type: ignore[attr-defined]
            return reduced  # the class has its own way to be pickled
        return (_new_patched, (base, recipe), *reduced[2:])

    members = recipe.namespace(base)
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce_ex,
        "_liger_kernels_recipe": recipe,
        "_liger_kernels_base": base,
        **members,
    }
    # The name stays: save_pretrained writes it into the configuration, and weight initialisation looks for "RMSNorm".
    cls = type(base)(base.__name__, (base,), namespace)
    for name, member in members.items():
        setattr(cls, name, following(cls, base, name, member, recipe.gives_way))
    return cls


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
    if recipe.live is not None:
        module.__dict__[WATCH] = Watch.of(module)
    return True


def restore(undo: Undo) -> None:
    """Give every module its own class back."""
    for module, base in reversed(undo):
        _rebind_inside_hook(module, type(module), base)
        module.__class__ = base
        forget(module)


def forget(module: nn.Module) -> None:
    """Remove what a patch has written into the ``__dict__`` of ``module``."""
    for name in (REPORT, RAN, BLOCKS, WATCH, INPUTS):
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
