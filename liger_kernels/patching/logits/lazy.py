"""Tensors that have not been computed yet, and outputs of a model that hold them.

What leaves the forward of a patched model in place of its logits is a :class:`LazyTensor`. To autograd it is an
ordinary tensor: whoever walks over an output (DDP's sink, FSDP, deepspeed, accelerate, pytree) registers hooks on it,
detaches, clones or casts it, and nothing is computed. Its value is computed when an operation needs it, or when a user
reads the entry of the output, and its gradient then goes through everything that was registered on the way.

The two readers cannot be told apart by what they call: both read ``outputs.logits``. They are told apart by the module
that the calling code belongs to. A wrong guess costs memory, or computes later; it never changes a number.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, make_dataclass
from inspect import isgetsetdescriptor
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from liger_kernels.ops.runtime.kept import keeps_graph

# Modules whose code passes an output on without using its values.
_WALKERS = ("torch.distributed.", "torch.nn.parallel.distributed", "torch.utils._pytree", "deepspeed.", "accelerate.")


_STALE = (
    "these logits were never computed, and {what} since the forward pass that they belong to, by an optimizer step for "
    "example; computing them now would give other logits. Read `outputs.logits` before the change."
)


def _is_walker(depth: int) -> bool:
    """Whether the code ``depth`` frames above the caller of this function only walks over outputs."""
    module = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return module.startswith(_WALKERS) or module == "dataclasses"


class Meaning(Protocol):
    """What a lazy tensor is. A user who reads such an entry of an output gets it without a value."""

    def after(self, lazy: LazyTensor, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``function`` without the value of ``lazy``, or ``NotImplemented``."""

    def real(self, lazy: LazyTensor) -> torch.Tensor | None:
        """The ordinary tensor that ``lazy`` stands for; None where it is its computation's value."""


@dataclass(eq=False)
class Computation:
    """How the value of a :class:`LazyTensor` comes from its inputs.

    Attributes:
        shape, dtype, device: of the value.
        compute: a function of tensors, differentiable by autograd.
        inputs: its arguments; a lazy tensor among them is computed first.
        gathered: called instead of ``compute`` where an input's memory has been freed (sharded weights); returns the
            value without gradient.
        check: raises where the value would no longer be that of the forward.
        note: called before the value is computed.
        meaning: what the value is, for operations that need no value (``gathered.py``).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    compute: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor | None, ...]
    gathered: Callable[[], torch.Tensor] | None = None
    check: Callable[[bool], None] | None = None
    note: Callable[[], None] | None = None
    meaning: Meaning | None = None

    def __post_init__(self) -> None:
        self.differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.inputs)
        self.node: Callable[[], Any] = lambda: None  # of autograd, while it lives
        self._result: tuple[torch.Tensor, list[torch.Tensor | None]] | None = None  # with its graph, and its leaves
        self._value: torch.Tensor | None = None

    def value(self, differentiable: bool = True) -> torch.Tensor:
        """The value, detached; computed once. Below autograd nothing is ``differentiable``."""
        if (node := self.node()) is not None:
            node.kept = self  # a gradient may come now
        if self._result is not None:
            return self._result[0].detach()
        if self._value is None:
            here = all(x is None or isinstance(x, LazyTensor) or is_here(x) for x in self.inputs)
            if self.check is not None:
                self.check(here)
            if self.note is not None:
                self.note()
            if here and differentiable:
                return self._run()[0].detach()
            with torch.no_grad():
                gathers = self.gathered is not None and not here
                self._value = self.gathered() if gathers else self.compute(*_leaves(self.inputs, False))  # type: ignore[misc]
        return self._value.detach()

    def _run(self) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        if self._result is None:
            with torch.set_grad_enabled(self.differentiable):
                leaves = _leaves(self.inputs, self.differentiable)
                self._result = self.compute(*leaves), leaves
        return self._result

    def gradients(self, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of ``inputs`` for that of the value."""
        if torch.is_grad_enabled():  # a second derivative: once more, connected to the inputs themselves
            inputs = [_Computed.apply(x) if isinstance(x, LazyTensor) else x for x in self.inputs]
            out, graph = self.compute(*inputs), {"create_graph": True}
        else:
            out, inputs = self._run()
            keep = keeps_graph()
            graph = {"retain_graph": keep}
            if not keep:
                self._result, self._value = None, out.detach()
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad, **graph))
        return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def _leaves(inputs: tuple[torch.Tensor | None, ...], differentiable: bool) -> list[torch.Tensor | None]:
    def leaf(x: torch.Tensor) -> torch.Tensor:
        value = x._computation.value(differentiable) if isinstance(x, LazyTensor) else x.detach()
        return value.requires_grad_(x.requires_grad) if differentiable else value

    return [None if x is None else leaf(x) for x in inputs]


def is_here(x: torch.Tensor) -> bool:
    """Whether the memory of ``x`` is there: FSDP and ZeRO-3 free that of gathered weights."""
    if x.device.type == "meta" or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return True
    return x.untyped_storage().size() > 0 and x.numel() > 0


class Unchanged:
    """Raises where logits that were not computed would no longer be those of their forward.

    Sharded weights are gathered anew, and no version of them tells whether they have changed: there, an optimizer step
    of whatever model counts as a change.
    """

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self.tensors = [t for t in tensors if t is not None and not t.is_inference()]
        self.versions = [t._version for t in self.tensors]
        self.steps = _optimizer_steps() if torch.distributed.is_available() else None

    def __call__(self, here: bool) -> None:
        if here and self.versions != [t._version for t in self.tensors]:
            raise RuntimeError(_STALE.format(what="the LM head's weights (or the hidden states) were changed in place"))
        if not here and self.steps is not None and self.steps != _optimizer_steps():
            raise RuntimeError(_STALE.format(what="an optimizer changed the LM head's weights, which are sharded"))


_steps: list[int] = []


def _optimizer_steps() -> int | None:
    """How many steps all optimizers of this process have made since this was first asked; None where there is only one
    process, whose weights are not sharded."""
    if not torch.distributed.is_initialized():
        return None
    if not _steps:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _steps.append(0)

        def count_step(*_: Any) -> None:
            _steps[0] += 1

        register_optimizer_step_post_hook(count_step)
    return _steps[0]


class _Deferred(torch.autograd.Function):
    """A lazy tensor. Its node stands in the graph of the loss, too, so it holds the computation, and with it the hidden
    states, only where there is a value: otherwise whoever has the lazy tensor does."""

    @staticmethod
    def forward(ctx: Any, computation: Computation, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.kept, computation.node = None, weakref.ref(ctx)
        return LazyTensor._new(computation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None or ctx.kept is None:  # no loss has used the value
            return (None,) * len(ctx.needs_input_grad)
        return None, *ctx.kept.gradients(grad)


class _Computed(torch.autograd.Function):
    """The value of a lazy tensor, with its gradient."""

    @staticmethod
    def forward(ctx: Any, lazy: Any) -> Any:
        return lazy._computation.value()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad


class _Reserved(torch.autograd.Function):
    """An ordinary tensor for the value of a lazy one, which gets it later; until then its memory is one element."""

    @staticmethod
    def forward(ctx: Any, lazy: Any) -> Any:
        ctx.set_materialize_grads(False)
        return torch.empty_strided(lazy.shape, (0,) * lazy.dim(), dtype=lazy.dtype, device=lazy.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return grad


@dataclass(eq=False)
class Place:
    """Where logits are that may have no value yet.

    Attributes:
        tensor: they, once they have a value.
        version: of their value, before anybody changes it in place.
    """

    tensor: torch.Tensor | None = None
    version: int = 0


def defer(computation: Computation) -> Any:
    """A lazy tensor for the value of ``computation``, connected to its inputs."""
    return _Deferred.apply(computation, *computation.inputs)


def _step(
    lazy: Any, compute: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, device: torch.device | None = None
) -> Any:
    return defer(Computation(tuple(lazy.shape), dtype, device or lazy.device, compute, (lazy,)))


class LazyTensor(torch.Tensor):
    """A tensor whose value is computed when an operation needs it; see the module's docstring."""

    _computation: Computation
    _real: torch.Tensor | None = None
    _place: Place | None = None  # where _real has been reserved

    @staticmethod
    def _new(computation: Computation) -> LazyTensor:
        c = computation
        new: Any = torch.Tensor._make_wrapper_subclass(LazyTensor, c.shape, dtype=c.dtype, device=c.device)
        new._computation = computation
        return new

    def computed(self) -> torch.Tensor:
        """The ordinary tensor that this one stands for, computed once."""
        if self._real is None:
            meaning = self._computation.meaning
            real = None if meaning is None else meaning.real(self)
            if real is not None or self._real is not None:
                if (node := self._computation.node()) is not None:
                    node.kept = self._computation  # an autograd.Function may have been given this tensor itself
                self._real = real if self._real is None else self._real
                return self._real
            with torch.set_grad_enabled(self.requires_grad or torch.is_grad_enabled()):
                self._real = _Computed.apply(self)
        elif self._place is not None and self._place.tensor is None:
            self._real.data = self._computation.value()
            self._place.tensor, self._place.version = self._real, self._real._version
        return self._real

    def reserved(self) -> tuple[torch.Tensor, Place | None]:
        """What :meth:`computed` will return, as a tensor that a graph can have before it has a value, and its place."""
        if self._real is None:
            with torch.enable_grad():
                self._real, self._place = _Reserved.apply(self), Place()
        elif self._place is None:
            self._place = Place(self._real, self._real._version)
        return self._real, self._place

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.computed())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.computed().__deepcopy__(memo)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _OF_THE_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                if function in _OF_A_LEAF and args[0]._real is not None and not args[0].requires_grad:
                    args = (args[0]._real, *args[1:])
                return function(*args, **kwargs)
        lazy = args[0] if args else None
        lazy = lazy[0] if function is torch.stack and lazy else lazy
        if isinstance(lazy, LazyTensor) and (meaning := lazy._computation.meaning) is not None:
            found = meaning.after(lazy, function, args, kwargs)
            if found is not NotImplemented:
                return found
        if function in _PASSED_ON and isinstance(args[0], LazyTensor) and (function is _T.view_as or _is_walker(1)):
            passed = _PASSED_ON[function](*args, **kwargs)
            if passed is not None:
                return passed
        return function(*_real_arguments(args), **_real_arguments(kwargs))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What comes here comes from C++, below autograd: a function that returns its own input, or the like."""
        if (
            function in _SAME
            and isinstance(args[0], LazyTensor)
            and all([*size] == [*args[0].shape] for size in args[1:])
        ):
            return LazyTensor._new(args[0]._computation)

        def value(x: Any) -> Any:
            return x._computation.value(differentiable=False) if isinstance(x, LazyTensor) else x

        return function(*tree_map(value, args), **tree_map(value, kwargs or {}))


def _real_arguments(arguments: Any) -> Any:
    return tree_map(lambda x: x.computed() if isinstance(x, LazyTensor) else x, arguments)


def _moved(lazy: Any, *args: Any, **kwargs: Any) -> Any:
    """``lazy.to(dtype)``, or to a device as accelerate's hooks ask for it; None where it is asked for anything else."""
    kwargs.pop("non_blocking", None)
    to = args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if not args and len(kwargs) == 1 else None
    if isinstance(to, torch.dtype):
        return lazy if to == lazy.dtype else _step(lazy, lambda x: x.to(to), to)
    if not isinstance(to, (torch.device, str, int)):
        return None
    device = torch.empty(0, device=to).device  # with its index
    return lazy if device == lazy.device else _step(lazy, lambda x: x.to(device), lazy.dtype, device)


def _viewed(lazy: Any, other: Any) -> Any:
    """What autograd asks for where a function returns its own input."""
    return _step(lazy, lambda x: x.view_as(x), lazy.dtype) if other is lazy else None


_T = torch.Tensor
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}
_PASSED_ON: dict[Any, Callable[..., Any]] = {
    _T.detach: lambda lazy: LazyTensor._new(lazy._computation),
    _T.clone: lambda lazy: _step(lazy, torch.clone, lazy.dtype),
    _T.view_as: _viewed,
    _T.to: _moved,
    _T.float: lambda lazy: _moved(lazy, torch.float32),
    _T.half: lambda lazy: _moved(lazy, torch.float16),
    _T.bfloat16: lambda lazy: _moved(lazy, torch.bfloat16),
}
# What is known of a tensor, or registered on it, without its value.
_VALUES = ("data", "real", "imag", "T", "mT", "H", "mH")
_OF_THE_FORM = {
    *(v.__get__ for name, v in vars(torch._C.TensorBase).items() if isgetsetdescriptor(v) and name not in _VALUES),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.is_floating_point, _T.is_complex, _T.element_size),
    *(_T.is_contiguous, _T.get_device, _T.__len__, _T.__hash__, _T.is_inference, _T.register_hook, _T.retain_grad),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference),
}  # fmt: skip
# Where a user made a leaf of a tensor without a graph (``x.detach().requires_grad = True``), its value is the leaf.
_OF_A_LEAF = {vars(torch._C.TensorBase)[name].__get__ for name in ("requires_grad", "grad", "is_leaf")}


def _read_entry(output: Any, name: str, value: Any) -> Any:
    """``value``, which is the entry ``name``; for a user computed, and the attribute and the item with it. Called by
    what the user calls."""
    own = output.__dict__
    if (
        type(value) is not LazyTensor
        or value._computation.meaning is not None
        or "_liger_kernels_filling" in own
        or _is_walker(2)
    ):
        return value
    computed = value.computed()
    if own.get(name) is value:
        own[name] = computed
    if OrderedDict.get(output, name) is value:
        OrderedDict.__setitem__(output, name, computed)
    return computed


def _lazy_field(base: Any, name: str) -> property:
    """The attribute ``name`` of a subclass of the output class ``base``, which may be a lazy tensor."""
    default = base.__dataclass_fields__[name].default

    def get(self: Any) -> Any:
        if name not in self.__dict__ and default is MISSING:
            raise AttributeError(f"{base.__name__!r} object has no attribute {name!r}")
        return _read_entry(self, name, self.__dict__.get(name, default))

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(f"{base.__name__!r} object has no attribute {name!r}")
        del self.__dict__[name]

    return property(get, write, delete)


@functools.cache
def lazy_output(base: Any, names: tuple[str, ...], accuracy: bool = False) -> type:
    """The subclass of the output class ``base`` whose entries ``names`` may be lazy tensors, and which has another
    entry ``token_accuracy`` where ``accuracy`` says so.

    A user who reads such an entry by attribute, key or position gets an ordinary tensor, computed at that moment:
    an optimizer step afterwards does not change it. Everything else is as ``base`` has it, which keeps an entry twice:
    as an attribute and as an item.
    """
    parent: Any = make_dataclass(base.__name__, [("token_accuracy", Any, None)], bases=(base,)) if accuracy else base

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_liger_kernels_filling"] = True  # upstream's checks read every field
        try:
            parent.__init__(self, *args, **kwargs)
        finally:
            del self.__dict__["_liger_kernels_filling"]

    def getitem(self: Any, key: Any) -> Any:
        if isinstance(key, str):
            return _read_entry(self, key, base.__getitem__(self, key))
        keys = tuple(self.keys())[key]
        return self[keys] if isinstance(keys, str) else tuple(self[k] for k in keys)

    def get_item(self: Any, key: Any, default: Any = None) -> Any:
        return _read_entry(self, key, OrderedDict.get(self, key, default))

    def popitem(self: Any, last: bool = True) -> Any:
        key, value = OrderedDict.popitem(self, last)
        return key, _read_entry(self, key, value)

    def reduce(self: Any) -> Any:
        own = self.__dict__  # without computing; a field that was deleted has its default, or raises
        values = tuple([own[f.name] if f.name in own else getattr(self, f.name) for f in fields(self)])
        return _load_output, (base, names, accuracy, values), *OrderedDict.__reduce__(self)[2:]

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__init__": init,
        "__getitem__": getitem,
        "get": get_item,
        "popitem": popitem,
        "__reduce__": reduce,
        **{name: _lazy_field(base, name) for name in names},
    }
    return type(base.__name__, (parent,), namespace)


def _load_output(base: type, names: tuple[str, ...], accuracy: bool, values: tuple[Any, ...]) -> Any:
    return lazy_output(base, names, accuracy)(*values)
