"""Functions that the recognisers of norms, gated MLPs and rotary functions share."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

# Largest relative difference between two float64 evaluations of one formula. Many upstream functions compute in float32
# for any input, so one evaluation may have a few roundoffs of float32 (6e-8 each).
SAME_FORMULA = 1e-6
# The tensor types that our kernels accept. A subclass (DTensor, FakeTensor, a quantized weight) computes by other
# rules.
PLAIN = (torch.Tensor, nn.Parameter)
# The dtypes in which a norm is probed. A call in which a tensor has another dtype runs the original norm.
PROBED = (torch.float32, torch.bfloat16, torch.float16)
# Probes make their tensors from this one, because `deepspeed.zero.Init` replaces `torch.randn`, `torch.full` and
# others.
_ANCHOR = torch.zeros(0, dtype=torch.float64, device="cpu")

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Switches FakeTensorMode, FlopCounterMode and similar modes off. Its name in torch is private.
_without_dispatch_modes = getattr(torch.utils._python_dispatch, "_disable_current_modes", contextlib.nullcontext)
# Hooks of these packages gather and move weights. A module without weights needs none of them.
INFRASTRUCTURE = ("torch.distributed.", "deepspeed.", "accelerate.")
# The hooks of every module, which torch keeps under private names. A version without one of them has no such hooks.
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(torch.nn.modules.module, f"_global{name}", {}) for name in _HOOKS
)


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Inside, a probe computes on the CPU, in the dtypes that it names, with gradients and the same random numbers.

    The caller's settings have no effect: default dtype and device, gradient and inference mode, autocast, fake tensors,
    hooks on tensors that autograd saves.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_dispatch_modes())
        with contextlib.suppress(RuntimeError):  # inside torch.func such hooks are forbidden
            # A node that saves its own result would keep itself alive for ever, so it saves an alias.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.empty(0).device.type != "cpu":  # on the CPU, the mode would slow every operation down for nothing
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # about mixed dtypes, which only a probe uses
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed the accelerators, too
        if torch.get_default_dtype() is not torch.float32:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers on the CPU."""
    return _ANCHOR.new_empty(shape, dtype=dtype).normal_()


def full(shape: tuple[int, ...], value: float) -> torch.Tensor:
    """One float32 number everywhere, on the CPU."""
    return _ANCHOR.new_full(shape, value, dtype=torch.float32)


def random_linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias in float64.

    The projection is not built by ``nn.Linear.__init__``. ``from_pretrained`` switches initialisation off and sends
    parameters to the meta device. ``deepspeed.zero.Init`` shards every module that ``__init__`` builds.
    """
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.__dict__.update(in_features=inputs, out_features=outputs)
    weight = randn(outputs, inputs, dtype=torch.float64) / inputs**0.5
    linear._parameters.update(weight=nn.Parameter(weight), bias=None)
    return _unhooked(linear)


def shallow_copy(module: nn.Module) -> Any:
    """A module of the same class with containers of its own, which hold the same parameters, submodules and hooks."""
    clone: Any = object.__new__(type(module))
    for name, value in module.__dict__.items():
        clone.__dict__[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    return clone


def bare_copy(module: nn.Module, **members: Any) -> nn.Module:
    """A shallow copy of ``module`` without hooks. ``members`` replace its parameters and submodules of the same names.

    The copy shares nothing that probing could change: containers of parameters and hooks, buffers and submodules are
    copies, too. The copy is in training mode, so that dropout shows, except inside :func:`evaluating`.
    """
    clone = shallow_copy(module)
    state = clone.__dict__
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules"):
            state[name] = dict(value)
        elif name.endswith("_hooks") and isinstance(value, dict):
            state[name] = OrderedDict()
    state["training"] = not _evaluation[0]
    for name, buffer in module._buffers.items():
        # A probe computes on the CPU. A buffer on the meta device stays there.
        state["_buffers"][name] = buffer if buffer is None or buffer.is_meta else buffer.detach().to("cpu", copy=True)
    children = state["_modules"]
    for name, child in children.items():
        if name not in members and child is not None and not isinstance(child, torch.jit.ScriptModule):
            children[name] = bare_copy(child)
    for name, value in members.items():
        state["_parameters" if isinstance(value, nn.Parameter) else "_modules"][name] = value
    return _unhooked(clone)


_evaluation = [False]


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """Inside, copies that a probe makes are in evaluation mode."""
    before, _evaluation[0] = _evaluation[0], True
    try:
        yield
    finally:
        _evaluation[0] = before


def _unhooked(module: Any) -> Any:
    """Make a call of ``module`` run only its ``forward``: no global module hooks, no compiled program."""
    module.__dict__["_compiled_call_impl"] = module.forward
    return module


def has_hooks(module: nn.Module) -> bool:
    """Whether ``module`` has a hook or an instance ``forward``, which may watch or change its inputs and outputs."""
    first, second, third, fourth = _HOOKS  # no loop: this runs at every call of an MLP
    state = module.__dict__
    return bool(state.get(first) or state.get(second) or state.get(third) or state.get(fourth) or "forward" in state)


def is_watched(module: nn.Module) -> bool:
    """Whether ``module`` has hooks that no sharding package installed. Deepspeed installs some on every module."""
    if not has_hooks(module):
        return False
    return "forward" in module.__dict__ or any_user_hook(module.__dict__.get(name, {}) for name in _HOOKS)


def any_user_hook(kinds: Iterable[dict[int, Any]]) -> bool:
    """Whether one of these hooks does more than gather, shard or move weights around a call."""
    return any(not module_of(hook).startswith(INFRASTRUCTURE) for hooks in kinds for hook in hooks.values())


# Decorators of these packages add a mode or a check. The author of the code is the author of the decorated function.
_DECORATORS = ("torch.", "functools", "contextlib", "transformers.utils.")


def module_of(function: Any, until: Callable[[Any], bool] = lambda function: False) -> str:
    """The name of the module in which the code of ``function`` was written; empty where nothing tells.

    Names that ``functools.wraps`` copied from another function do not count. Partials, bound methods and the usual
    decorators are followed to the function inside. The walk stops where ``until`` returns True for that function.
    """
    module = ""
    for _ in range(9):
        inner = next((w for name in ("func", "__func__") if (w := getattr(function, name, None)) is not None), None)
        if inner is None:
            module = _defining_module(function)
            if not module.startswith(_DECORATORS) or module.startswith("torch.distributed."):
                break
            inner = getattr(function, "__wrapped__", None) or getattr(function, "_torchdynamo_orig_callable", None)
        if inner is None or until(getattr(inner, "__func__", inner)):
            break
        function = inner
    return module


def _defining_module(function: Any) -> str:
    own: Any = getattr(function, "__module__", None)  # a class or a function in C has no other sign of its module
    if hasattr(function, "__globals__"):
        own = function.__globals__.get("__name__") if hasattr(function, "__wrapped__") else own
    elif not isinstance(function, type) and type(function).__module__ != "builtins":  # an object that can be called
        own = type(function).__module__
    return own or ""


def package_of(function: Any, until: Callable[[Any], bool] = lambda function: False) -> str:
    """The package that ``function`` comes from, as :func:`module_of` finds it."""
    return module_of(function, until).partition(".")[0]


def with_origin(reason: str, cls: type) -> str:
    """``reason``, with the package that wrote the forward, if another package defines the class."""
    definer = next((c for c in cls.__mro__ if "forward" in vars(c)), cls)
    package = package_of(vars(definer).get("forward"))
    return reason if package in ("", definer.__module__.partition(".")[0]) else f"its forward is {package}'s: {reason}"


def has_global_hooks() -> bool:
    """Whether a global hook watches every module of the process."""
    first, second, third, fourth = _GLOBAL_HOOKS
    return bool(first or second or third or fourth)


def true_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The whole shape of a parameter, even while the parameter is sharded; None if the shape is unknown."""
    whole = getattr(tensor, "ds_shape", None)  # deepspeed, ZeRO-3
    if whole is not None:
        return tuple(whole)
    # A DTensor's shape is the whole shape. FSDP1 leaves flat or empty views and marks them.
    if not tensor.numel() or getattr(tensor, "_fsdp_flattened", False):
        return None
    return tuple(tensor.shape)


def true_shapes(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """:func:`true_shape` of each parameter of ``module`` itself, by name."""
    return {name: true_shape(parameter) for name, parameter in module._parameters.items() if parameter is not None}


def parameter_of(module: nn.Module, name: str) -> Any:
    """A faster ``getattr(module, name)``, which takes half a microsecond for a parameter."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found  # sharded by FSDP1, or computed by a parametrisation


def fits(vector: Any, x: torch.Tensor, mixed: bool) -> bool:
    """Whether a parameter is one plain vector for the rows of ``x``. If the parameter is sharded, it is gathered now.

    Unless ``mixed``, the parameter must have the dtype of ``x``.
    """
    return (
        type(vector) in PLAIN
        and vector.dim() == 1
        and vector.numel() == x.shape[-1]
        and (vector.dtype == x.dtype or (mixed and vector.dtype in PROBED))
    )


def takes_one_tensor(function: Callable[..., Any]) -> bool:
    """Whether a ``forward`` has exactly one parameter besides ``self``.

    The signature is part of the formula. A norm that also takes a gate is no RMSNorm, even if it computes one without
    the gate.
    """
    return takes_tensors(function, 1)


def takes_tensors(function: Callable[..., Any], count: int) -> bool:
    """Whether a ``forward`` has exactly ``count`` parameters besides ``self``, all of which can be passed by
    position."""
    parameters = signature_of(function)[1:]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(parameters) == count and all(parameter.kind in by_position for parameter in parameters)


def signature_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of ``function``, or an empty list if its signature cannot be read."""
    try:
        return list(inspect.signature(function).parameters.values())
    except Exception:  # whatever a stranger's __signature__ raises
        return []


def parameter_names(forward: Callable[..., Any]) -> list[str]:
    """The names of a ``forward``'s parameters besides ``self``."""
    return [parameter.name for parameter in signature_of(forward)[1:]]


def relative_difference(a: Any, b: torch.Tensor) -> float:
    """Largest difference of ``a`` from ``b``, divided by the largest element of ``b``; infinite if shapes differ or a
    number is not finite."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return float("inf")
    difference = (a.double() - b.double()).abs().max() / b.double().abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def describe(error: BaseException) -> str:
    """One line that says what went wrong, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:100]}"
