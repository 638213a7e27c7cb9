"""Makes Triton's interpreter faster: :func:`install` replaces functions that repeat work.

At every launch, the interpreter replaces the built-in functions of ``triton.language``, and again at every call of a
device function. Each time it searches all members of the modules. It also reads a kernel's parameters from its code at
every launch. Every look-up of a NumPy dtype builds a table. Every result gets a new description of its shape, and
shapes are compared length by length. A conversion asks 20 questions first. Arguments that are on the host are copied to
the host again, in functions that keep them in a reference cycle.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

from convergence.arms.interpreter import blocks


def install() -> None:
    """Let the interpreter of this process use the functions of this file."""
    _Semantic.binary_op_type_checking_impl = check_other_types
    _Semantic.broadcast_impl_value, _Semantic.cast = broadcast_other_shapes, cast_other_dtypes
    block_type.__init__, tensor.__init__ = init_block_type, init_tensor
    interpreter._get_np_dtype, interpreter._implicit_cvt = get_np_dtype, as_tensor
    interpreter._patch_attr = patch_attr
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter.GridExecutor._init_args_hst = copied_to_host
    interpreter.GridExecutor._restore_args_dev = copied_from_host
    interpreter.GridExecutor.__call__ = run_kernel
    blocks.install()
    # The interpreter repeats every integer sum and product in 64 bits to detect overflow. Only debug needs that.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


# Triton's original functions, which the replacements call.
_Semantic: Any = semantic.TritonSemantic
block_type, tensor = tl.core.block_type, tl.core.tensor
_patch, _run = interpreter._patch_lang, interpreter.GridExecutor.__call__
_to_host, _from_host = interpreter.GridExecutor._init_args_hst, interpreter.GridExecutor._restore_args_dev
_look_up, _convert = interpreter._get_np_dtype, interpreter._implicit_cvt
_init_type, _init_tensor = block_type.__init__, tensor.__init__
_broadcast, _check, _cast = _Semantic.broadcast_impl_value, _Semantic.binary_op_type_checking_impl, _Semantic.cast


# Launches.

# A launch patches Triton's module, and a launch in another thread would undo the patch.
_one_at_a_time = threading.RLock()
_running: list[Any] = []  # the kernel that is running, if any
_replacements: dict[tuple[Any, ...], _Replacements] = {}


def run_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``GridExecutor.__call__``."""
    with _one_at_a_time:
        if not hasattr(self.fn, "__signature__"):  # without it, every launch would read the code twice
            self.fn.__signature__ = inspect.signature(self.fn)
        _running.clear()
        try:
            return _run(self, *args, **kwargs)
        finally:
            _running.clear()


def patch_once(fn: Any) -> Any:
    """Replaces ``_patch_lang``."""
    languages = _languages_of(fn)
    if _running:  # a device function: Triton never restores its replacements
        if any(tl.core.is_builtin(language.load) for language in languages):
            _patch(fn)
        return None
    _running.append(fn)
    if languages in _replacements:
        _replacements[languages].install()
        return _replacements[languages]
    scope = _patch(fn)
    if scope is not None:  # Triton 3.4 restores nothing and returns None
        _replacements[languages] = _Replacements(scope._changes)
    return scope


class _Replacements:
    """The members of Triton's language that a launch replaces. ``changes`` are (owner, name, original), and a member
    may occur several times. ``install`` replaces all members at once, and ``restore`` restores them."""

    def __init__(self, changes: list[tuple[Any, str, Any]]) -> None:
        now: dict[Any, dict[str, Any]] = {}
        before: dict[Any, dict[str, Any]] = {}
        for owner, name, original in changes:
            now.setdefault(owner, {})[name] = getattr(owner, name)
            before.setdefault(owner, {}).setdefault(name, original)
        self.install, self.restore = functools.partial(_set_all, now), functools.partial(_set_all, before)


def _set_all(members_of: dict[Any, dict[str, Any]]) -> None:
    for owner, members in members_of.items():
        if inspect.ismodule(owner):  # a module has all of these members
            vars(owner).update(members)
            continue
        for name, member in members.items():
            if member is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, member)


@functools.lru_cache(maxsize=1024)
def _languages_of(fn: Any) -> tuple[Any, ...]:
    return tuple(value for value in fn.__globals__.values() if value is tl or value is tl.core)


def patch_builtin(owner: Any, *others: Any) -> None:
    """Replaces ``_patch_builtin``."""
    for name in _functions(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, *others)


@functools.cache
def _functions(owner: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(owner) if inspect.isfunction(member)]


def patch_attr(owner: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
    """Replaces ``_patch_attr``."""
    function = getattr(member, "__wrapped__", member)  # skips the check for a builder's semantic

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope[0].set_attr(owner, name, call) if scope else setattr(owner, name, call)  # Triton 3.4 restores nothing


# Arguments: each becomes a tensor of the kernel's, and most are tensors on the host and small integers.


def as_tensor(arg: Any) -> Any:
    """Replaces ``_implicit_cvt``, whose first call imports all of Gluon."""
    if type(arg) is int and -(2**31) <= arg < 2**31:
        return tensor(interpreter.TensorHandle(np.array([arg], np.int32), tl.int32), tl.int32)
    if isinstance(arg, torch.Tensor) and (of := _pointer_to(arg.dtype)) is not None:
        return tensor(interpreter.TensorHandle(np.array([arg.data_ptr()], np.uint64), of), of)
    return _convert(arg)


@functools.cache
def _pointer_to(dtype: torch.dtype) -> Any:
    of = tl.int1 if dtype == torch.bool else getattr(tl, str(dtype).removeprefix("torch."), None)
    return None if of is None else tl.pointer_type(of)


def copied_to_host(self: Any, args: Any, kwargs: Any) -> Any:
    """Replaces ``GridExecutor._init_args_hst``."""
    if all(map(_on_host, args)) and all(map(_on_host, kwargs.values())):
        return args, kwargs
    return _to_host(self, args, kwargs)


def copied_from_host(self: Any, args: Any, copies: Any, kwargs: Any, copied_kwargs: Any) -> None:
    """Replaces ``GridExecutor._restore_args_dev``."""
    if copies is not args:
        _from_host(self, args, copies, kwargs, copied_kwargs)


def _on_host(arg: Any) -> bool:
    return arg.is_cpu if isinstance(arg, torch.Tensor) else not hasattr(arg, "base") and not isinstance(arg, tuple)


# Every result of an operation is a tensor with a new type, and the types' shapes took a quarter of the time. These
# tables keep objects until the process ends, so an ``id`` never gets a second meaning.

_known: dict[str, Any] = {}
_types: dict[Any, dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_lengths: dict[int, tuple[int, ...]] = {}  # by the id of a shape


def get_np_dtype(dtype: Any) -> Any:
    """Replaces ``_get_np_dtype``."""
    name = dtype.scalar.name
    if name not in _known:
        _known[name] = _look_up(dtype)
    return _known[name]


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Replaces ``block_type.__init__``."""
    of, place = element_ty, None
    if type(of) is tl.core.pointer_type:  # a pointer's name does not describe it completely
        of, place = of.element_ty, (of.address_space, of.const)
    if type(of) is not tl.core.dtype:
        _init_type(self, element_ty, shape)
        return
    key = of.name, place, _lengths.get(id(shape)) or _lengths_of(shape)
    if key not in _types:
        _init_type(self, element_ty, shape)
        _types[key] = dict(vars(self))
        _lengths[id(self.shape)] = key[-1]
    vars(self).update(_types[key])


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Replaces ``tensor.__init__``."""
    key = (_lengths.get(id(type.shape)) or _lengths_of(type.shape)) if type.is_block() else ()
    if key not in _shapes:
        _init_tensor(self, handle, type)
        _shapes[key] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shapes[key]


def _lengths_of(shape: Any) -> tuple[int, ...]:
    return tuple(getattr(length, "value", length) for length in shape)


# Most operands have one dtype, are integers, or are a pointer and an integer. Operands of NumPy's operations are not
# expanded to one shape first, because NumPy broadcasts.

_common: dict[tuple[int, int], Any] = {}  # by the ids of two shapes: a tensor of their common shape


def check_other_types(self: Any, lhs: Any, rhs: Any, *options: Any, **kwargs: Any) -> Any:
    """Replaces ``binary_op_type_checking_impl``."""
    # A fourth option marks a division, for which float16 becomes float32.
    if type(lhs) is type(rhs) is tensor and len(options) < 4 and not kwargs:
        a, b = lhs.dtype, rhs.dtype
        if a.name == b.name and type(a) is type(b) is tl.core.dtype:
            return _of_common_type(self, lhs, rhs)
        integers = (a.name in ("int32", "int64")) + (b.name in ("int32", "int64"))
        if integers == 2:  # one of each
            return _of_common_type(self, *(cast_other_dtypes(self, x, tl.int64) for x in (lhs, rhs)))
        if integers == 1 and options[:2] == (True, True) and tl.pointer_type in (type(a), type(b)):
            return _of_common_type(self, lhs, rhs)
    return _check(self, lhs, rhs, *options, **kwargs)


def _of_common_type(self: Any, lhs: Any, rhs: Any) -> Any:
    """Both operands, with the type of their common shape. The data stay small, because NumPy broadcasts."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    key = id(lhs.shape), id(rhs.shape)
    if key not in _common:
        _common[key] = _broadcast(self, lhs, rhs)[0]
    like = _common[key]
    return tuple(
        x if x.shape is like.shape else tensor(x.handle, like.type.with_element_ty(x.dtype)) for x in (lhs, rhs)
    )


def broadcast_other_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
    """Replaces ``broadcast_impl_value``."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    if not rhs.type.is_block():
        return lhs, _splat(rhs, lhs.type)
    if not lhs.type.is_block():
        return _splat(lhs, rhs.type), rhs
    return _broadcast(self, lhs, rhs)


def _splat(x: Any, like: Any) -> Any:
    data = np.full(like.shape, x.handle.data, get_np_dtype(x.dtype))
    return tensor(interpreter.TensorHandle(data, x.dtype), like.with_element_ty(x.dtype))


def cast_other_dtypes(self: Any, x: Any, dtype: Any, *options: Any, **kwargs: Any) -> Any:
    """Replaces ``cast``."""
    if type(dtype) is not tl.core.dtype or type(x.dtype) is not tl.core.dtype:
        return _cast(self, x, dtype, *options, **kwargs)
    if dtype.name == x.dtype.name:
        return x
    if (x.dtype.name, dtype.name) not in _CONVERTED or any(options) or kwargs:
        return _cast(self, x, dtype, *options, **kwargs)
    of = x.type.with_element_ty(dtype) if x.type.is_block() else dtype
    return tensor(self.builder.cast_impl(x.handle, dtype), of)


_PAIRS = (("fp32", "bf16"), ("fp32", "fp16"), ("int32", "int64"))
# For these, Triton calls the builder's ``cast_impl`` after it asked for everything that others need.
_CONVERTED = {*_PAIRS, *(pair[::-1] for pair in _PAIRS), ("int32", "fp32"), ("int64", "fp32")}
