"""Triton's interpreter, which runs kernels on a CPU: one repair, and what makes it faster.

It replaces functions of Triton's in this process, for the kernels of every package: so it belongs to the proof, and a
program that uses the kernels never does it.
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


@functools.cache
def prepare() -> None:
    """Repair and hurry the interpreter, once in a process, where ``TRITON_INTERPRET=1`` said at Triton's import that it
    is used: in another process, the compiler would run what is replaced."""
    if isinstance(tl.sum, interpreter.InterpretedFunction):
        _repair_bfloat16()
        _hurry()


def _repair_bfloat16() -> None:
    """Make Triton's interpreter convert between float32 and bfloat16 as every device does.

    Triton (3.6, 3.7) truncates where it should round to nearest: twice the error, and all of it towards zero, which
    moves gradients by parts of 1000 in one direction. The way back gets subnormal numbers wrong.
    """
    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16) and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.uint16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.from_numpy(np.array(data)).view(torch.bfloat16).to(torch.float32).numpy()
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float


class _Replacements:
    """What a launch replaces in Triton's language: (owner, name, what was there), some of it several times. All of it
    is replaced (``install``) and put back (``restore``) at once."""

    def __init__(self, changes: list[tuple[Any, str, Any]]) -> None:
        now: dict[Any, dict[str, Any]] = {}
        before: dict[Any, dict[str, Any]] = {}
        for owner, name, original in changes:
            now.setdefault(owner, {})[name] = getattr(owner, name)
            before.setdefault(owner, {}).setdefault(name, original)
        self.install, self.restore = functools.partial(_set_all, now), functools.partial(_set_all, before)


def _set_all(members_of: dict[Any, dict[str, Any]]) -> None:
    for owner, members in members_of.items():
        if inspect.ismodule(owner):  # which has all of them
            vars(owner).update(members)
            continue
        for name, member in members.items():
            if member is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, member)


def _hurry() -> None:
    """Spare Triton's interpreter repeated work. It replaces the built-in functions of ``triton.language``
    when a kernel is launched, and again at every call of a device function, each time looking for them in everything
    that the modules hold; it reads a kernel's parameters from its code at every launch; it writes a table of NumPy's
    dtypes each time it looks one up; it describes the shape of every result anew, and compares it with others length by
    length; and it copies arguments to the host that are there, in functions that keep them in a reference cycle."""
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    to_host, from_host = interpreter.GridExecutor._init_args_hst, interpreter.GridExecutor._restore_args_dev
    running: list[Any] = []  # the kernel that is launched, if one is
    replacements: dict[tuple[Any, ...], _Replacements] = {}

    @functools.lru_cache(maxsize=1024)
    def languages_of(fn: Any) -> tuple[Any, ...]:
        return tuple(value for value in fn.__globals__.values() if value is tl or value is tl.core)

    @functools.cache
    def functions(owner: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if inspect.isfunction(member)]

    def patch_builtin(owner: Any, *others: Any) -> None:
        for name in functions(owner):
            member = getattr(owner, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(owner, name, member, *others)

    def patch_once(fn: Any) -> Any:
        languages = languages_of(fn)
        if running:  # a device function: Triton takes nothing back of what is replaced for it
            if any(tl.core.is_builtin(language.load) for language in languages):
                patch(fn)
            return None
        running.append(fn)
        if languages in replacements:
            replacements[languages].install()
            return replacements[languages]
        scope = patch(fn)
        if scope is not None:  # Triton 3.4 takes nothing back, and returns None
            replacements[languages] = _Replacements(scope._changes)
        return scope

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that a builder's semantic is given

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

        scope[0].set_attr(owner, name, call) if scope else setattr(owner, name, call)  # Triton 3.4 takes nothing back

    one_at_a_time = threading.RLock()  # a launch patches Triton's own module, and another thread's would take it back

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:
            if not hasattr(self.fn, "__signature__"):  # else every launch reads it from the code, twice
                self.fn.__signature__ = inspect.signature(self.fn)
            running.clear()
            try:
                return run(self, *args, **kwargs)
            finally:
                running.clear()

    def on_host(arg: Any) -> bool:
        return arg.is_cpu if isinstance(arg, torch.Tensor) else not hasattr(arg, "base") and not isinstance(arg, tuple)

    def copied_to_host(self: Any, args: Any, kwargs: Any) -> Any:
        if all(map(on_host, args)) and all(map(on_host, kwargs.values())):
            return args, kwargs
        return to_host(self, args, kwargs)

    def copied_from_host(self: Any, args: Any, copies: Any, kwargs: Any, copied_kwargs: Any) -> None:
        if copies is not args:
            from_host(self, args, copies, kwargs, copied_kwargs)

    look_up, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    # Every result of every operation is a tensor with a type of its own: a quarter of the time went into their shapes.
    block_type, tensor, types, shapes = tl.core.block_type, tl.core.tensor, {}, {}
    lengths: dict[int, tuple[int, ...]] = {}
    init_type, init_tensor = block_type.__init__, tensor.__init__

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        of, place = element_ty, None
        if type(of) is tl.core.pointer_type:  # whose name does not say all about it
            of, place = of.element_ty, (of.address_space, of.const)
        if type(of) is not tl.core.dtype:
            init_type(self, element_ty, shape)
            return
        key = of.name, place, lengths.get(id(shape)) or lengths_of(shape)
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = dict(vars(self))
            lengths[id(self.shape)] = key[-1]  # it lives as long as this process
        vars(self).update(types[key])

    def lengths_of(shape: Any) -> tuple[int, ...]:
        return tuple(getattr(length, "value", length) for length in shape)

    def init(self: Any, handle: Any, type: Any) -> None:
        key = (lengths.get(id(type.shape)) or lengths_of(type.shape)) if type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    # Every sum and product of integers is computed again, in 64 bits, to see an overflow; without debug, nobody asks.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)

    # Operands mostly have one dtype, or are integers, or a pointer and an integer. Those of an operation that NumPy
    # computes are not repeated to one shape before: NumPy does that as it goes.
    owner: Any = semantic.TritonSemantic
    broadcast, check, cast = owner.broadcast_impl_value, owner.binary_op_type_checking_impl, owner.cast
    common: dict[tuple[int, int], Any] = {}

    def broadcast_other_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, splat(rhs, lhs.type)
        if not lhs.type.is_block():
            return splat(lhs, rhs.type), rhs
        return broadcast(self, lhs, rhs)

    def splat(x: Any, like: Any) -> Any:
        data = np.full(like.shape, x.handle.data, get_np_dtype(x.dtype))
        return tensor(interpreter.TensorHandle(data, x.dtype), like.with_element_ty(x.dtype))

    def of_common_type(self: Any, lhs: Any, rhs: Any) -> Any:
        """Both as of the shape that they have together. NumPy repeats their values when it computes."""
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)  # which live as long as this process
        if key not in common:
            common[key] = broadcast(self, lhs, rhs)[0]
        like = common[key]
        return tuple(
            x if x.shape is like.shape else tensor(x.handle, like.type.with_element_ty(x.dtype)) for x in (lhs, rhs)
        )

    def check_other_types(self: Any, lhs: Any, rhs: Any, *options: Any, **kwargs: Any) -> Any:
        # With a fourth option, which says that it divides, float16 becomes float32.
        if type(lhs) is type(rhs) is tensor and len(options) < 4 and not kwargs:
            a, b = lhs.dtype, rhs.dtype
            if a.name == b.name and type(a) is type(b) is tl.core.dtype:
                return of_common_type(self, lhs, rhs)
            integers = (a.name in ("int32", "int64")) + (b.name in ("int32", "int64"))
            if integers == 2:  # one of each
                return of_common_type(self, *(cast_other_dtypes(self, x, tl.int64) for x in (lhs, rhs)))
            if integers == 1 and options[:2] == (True, True) and tl.pointer_type in (type(a), type(b)):
                return of_common_type(self, lhs, rhs)
        return check(self, lhs, rhs, *options, **kwargs)

    owner.binary_op_type_checking_impl = check_other_types

    def cast_other_dtypes(self: Any, x: Any, dtype: Any, *options: Any, **kwargs: Any) -> Any:
        same = type(dtype) is tl.core.dtype and dtype.name == x.dtype.name
        return x if same else cast(self, x, dtype, *options, **kwargs)

    owner.broadcast_impl_value, owner.cast = broadcast_other_shapes, cast_other_dtypes
    block_type.__init__, tensor.__init__ = init_block_type, init
    interpreter._get_np_dtype = get_np_dtype
    interpreter._patch_attr = patch_attr
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter.GridExecutor._init_args_hst = copied_to_host
    interpreter.GridExecutor._restore_args_dev = copied_from_host
    interpreter.GridExecutor.__call__ = run_kernel
