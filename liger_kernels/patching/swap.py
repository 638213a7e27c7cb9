"""Changes the behaviour of one object by giving it a subclass of its class.

A patched module stays the same object, with the same parameters, hooks, ``state_dict`` keys and class name. Only its
``__class__`` is now a subclass of the old class. Setting the old class again undoes the patch completely. Other
instances of the class are not affected. A deep copy is patched, too, and independent of the original.

A :class:`Recipe` describes the subclass. It is a small value that can be compared and pickled. So a patched model can
be pickled: loading makes the subclass again from class and recipe.

A method that a caller kept follows the module: it does what the module does at the time of the call (following.py).
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

# The attribute of a patched module with the open ``patched()`` blocks that hold it.
BLOCKS = "_liger_kernels_blocks"
# The entry of a replaced module's ``__dict__`` that says that its kernel has run.
RAN = "_liger_kernels_ran"
# Every module whose class was changed, and its old class.
Undo = list[tuple[nn.Module, type]]


def mark_run(module: Any) -> None:
    """Note that the kernel of ``module`` runs. Compiled programs note nothing."""
    if not torch.compiler.is_compiling():
        module.__dict__[RAN] = True


Calls = tuple[functools.partial[Any], ...]  # of ops


class Recipe:
    """Describes what a patched class does differently. A subclass of Recipe is a frozen dataclass, so it can be hashed
    and pickled.

    Attributes:
        left: reasons why parts of the module are not replaced, one line of the report each.
        live: the parameters and submodules that the patched forward reads at each call, as upstream's forward does.
            Every other value that upstream's forward may read is watched (``watch.py``). With None nothing is watched,
            because the patched forward calls upstream's forward.
        gives_way: whether upstream's methods run while :func:`mode_check` says so. A class with False handles that case
            itself.
    """

    left: tuple[str, ...] = ()
    live: tuple[str, ...] | None = ()
    gives_way: ClassVar[bool] = True

    @property
    def kernel(self) -> str:
        """The kernel of the module, one of ``KERNELS``."""
        raise NotImplementedError

    @property
    def detail(self) -> str:
        """The recognised formula, for the report."""
        raise NotImplementedError

    def made_of(self, base: Any) -> tuple[Any, ...]:
        """The functions that :meth:`namespace` copies. If one of them is replaced, another class is made."""
        return ()

    def changed(self, module: nn.Module) -> str | None:
        """A report's text on what changed in ``module`` since recognition; None if nothing changed."""
        return changed(module)

    def namespace(self, base: Any) -> dict[str, Any]:
        """The attributes that the subclass of ``base`` overrides."""
        raise NotImplementedError

    def foreseen(self, module: Any, step: Any) -> Calls:
        """The foreseeable calls of ops that ``module`` will make in ``step``, on tensors without memory.

        The kernels of these calls, forward and backward, are compiled before the first step needs them."""
        return ()


def patched_class(base: Any, recipe: Any) -> Any:
    """The subclass of ``base`` that follows ``recipe``. Equal arguments always give the same class."""
    return _patched_class(base, recipe, recipe.made_of(base))


@functools.cache
def _patched_class(base: Any, recipe: Any, made_of: tuple[Any, ...]) -> Any:

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = super(cls, self).__reduce_ex__(protocol)
        if reduced[0] is not copyreg.__newobj__ or reduced[1] != (cls,):  # type: ignore[attr-defined]
            return reduced  # the class pickles its objects differently
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
    # The class name must stay: save_pretrained writes it into the configuration, and weight initialisation looks for
    # "RMSNorm".
    cls = type(base)(base.__name__, (base,), namespace)
    for name, member in members.items():
        setattr(cls, name, following(cls, base, name, member, recipe.gives_way))
    return cls


def replace(path: str, module: nn.Module, recipe: Recipe, report: PatchReport, undo: Undo) -> bool:
    """Make ``module`` follow ``recipe``. If its class does not allow that, ``report`` lists the module as left."""
    base: Any = type(module)
    try:
        module.__class__ = cls = patched_class(base, recipe)
    except Exception as error:  # a class may refuse to be subclassed in any way
        report.left.append(Left(path, base.__name__, f"its class cannot be subclassed ({describe(error)})"))
        return False
    cls._liger_kernels_base_forward = base.forward  # a later replacement of base.forward shows
    _rebind_inside_hook(module, base, cls)
    undo.append((module, base))
    module.__dict__[REPORT] = report
    if recipe.live is not None:
        module.__dict__[WATCH] = Watch.of(module)
    return True


def restore(undo: Undo) -> None:
    """Give every module its old class again."""
    for module, base in reversed(undo):
        _rebind_inside_hook(module, type(module), base)
        module.__class__ = base
        forget(module)


def forget(module: nn.Module) -> None:
    """Remove everything that a patch wrote into the ``__dict__`` of ``module``."""
    for name in (REPORT, RAN, BLOCKS, WATCH, INPUTS):
        module.__dict__.pop(name, None)


# The attribute where accelerate keeps the module's original bound forward, which its hook calls.
_INSIDE_HOOK = "_old_forward"


def runs_inside_hook(module: nn.Module) -> bool:
    """Whether the instance's forward is accelerate's hook (a device map, or offload) around the class's forward."""
    own, inner = module.__dict__.get("forward"), module.__dict__.get(_INSIDE_HOOK)
    is_hook = getattr(getattr(own, "func", None), "__module__", None) == "accelerate.hooks"
    return is_hook and getattr(inner, "__func__", None) is type(module).forward


def _rebind_inside_hook(module: Any, before: Any, after: Any) -> None:
    """Let accelerate's hook call the forward of the class ``after`` instead of the forward of ``before``.

    A removed hook leaves the original bound method on the instance, so this is replaced, too.
    """
    for name in (_INSIDE_HOOK, "forward"):
        if getattr(module.__dict__.get(name), "__func__", None) is before.forward:
            module.__dict__[name] = types.MethodType(after.forward, module)


def recipe_of(obj: object) -> Recipe | None:
    """The recipe that ``obj`` follows, or None if it is not patched."""
    return getattr(type(obj), "_liger_kernels_recipe", None)


def _new_patched(base: type, recipe: Recipe) -> Any:
    cls = patched_class(base, recipe)
    return cls.__new__(cls)
