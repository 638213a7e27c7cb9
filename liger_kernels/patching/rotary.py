"""Recognise the rotary function of a modeling module by what it computes, and let one model's attention call ours.

Attention finds its rotary function as a global of the modeling module. Replacing that global would change every model
of the family in the process, so it is never touched: the patched attention class holds a copy of upstream's own
``forward`` (the same code object) whose globals are an overlay of the module's, in which only this name differs.
Everything else is looked up in the module itself, at the moment of the call.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import rope, rope_ref
from liger_kernels.ops._compiling import left_to_inductor
from liger_kernels.ops.rope import PAIRINGS
from liger_kernels.patching import probe
from liger_kernels.patching.probe import PLAIN, randn, signature_of
from liger_kernels.patching.recogniser import Recogniser, Verdict
from liger_kernels.patching.swap import RAN, Recipe


@dataclass(frozen=True)
class Rotation:
    """A module's global ``name`` is the rotation with this pairing."""

    name: str
    pairing: str
    partial: bool  # cos and sin may be narrower than the head
    casts_back: bool  # the result has the dtype of q and k even where cos and sin are wider


@dataclass(frozen=True)
class RopeRecipe(Recipe):
    """An attention whose forward finds our rotation under the names of upstream's."""

    kernel = "rope"
    rotations: tuple[Rotation, ...]
    left: tuple[str, ...] = ()  # why its other rotary functions are

    @property
    def detail(self) -> str:
        return ", ".join(f"{r.pairing}{' or partial' if r.partial else ''}" for r in self.rotations)

    def namespace(self, base: Any) -> dict[str, Any]:
        by_name = {rotation.name: rotation for rotation in self.rotations}
        runs = [0]  # of our kernel, in any attention of this class

        def replace(name: str, upstream: Callable[..., Any]) -> Callable[..., Any] | None:
            return _rotary_function(upstream, by_name[name], runs) if name in by_name else None

        rebound = {
            attribute: new
            for attribute, function in _methods(base)
            if (new := _rebind(function, replace)) is not function
        }
        inner = rebound.get("forward", base.forward)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or RAN in self.__dict__:
                return inner(self, *args, **kwargs)
            before = runs[0]
            output = inner(self, *args, **kwargs)
            if runs[0] != before:  # not every instance rotates
                self.__dict__[RAN] = True
            return output

        return {**rebound, "forward": forward}


def rotary_names(cls: type) -> dict[str, Callable[..., Any]]:
    """Globals that the methods of ``cls`` call and that take angles, as cos and sin or as complex numbers."""
    found: dict[str, Callable[..., Any]] = {}

    def collect(name: str, function: Callable[..., Any]) -> None:
        parameters = {parameter.name for parameter in signature_of(function)}
        if {"cos", "sin"} <= parameters or "freqs_cis" in parameters:
            found[name] = function

    for _, method in _methods(cls):
        _rebind(method, collect)
    return found


def recognise_rotation(name: str, function: Callable[..., Any]) -> Rotation | str:
    """Which rotation ``function`` is, or the reason why it is none of ours.

    It runs in float64 on random q, k and random, independent cos and sin: no identity between angles hides a
    difference.
    """
    names = [parameter.name for parameter in signature_of(function)]
    if names[:4] != ["q", "k", "cos", "sin"]:
        return f"it takes ({', '.join(names)}), not (q, k, cos, sin)"
    unknown = set(names) - {"q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"}
    if unknown:
        return f"its signature has {', '.join(sorted(unknown))}"
    try:
        with probe.probing(), torch.no_grad():
            for pairing in PAIRINGS:
                if _matches(function, pairing, rotary_dim=8):
                    partial = _matches(function, pairing, rotary_dim=4)
                    q, k, cos, sin = _sample(8)
                    rotated = function(q.to(torch.bfloat16), k.to(torch.bfloat16), cos.float(), sin.float())[0]
                    return Rotation(name, pairing, partial, casts_back=rotated.dtype == torch.bfloat16)
        return "it is none of the rotations that we know"
    except Exception as error:  # whatever a stranger's function raises on the probe means that it is not ours
        return f"it cannot be probed ({probe.describe(error)})"


def _sample(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q [2, 3, 5, 8], k [2, 1, 5, 8] and cos, sin [2, 5, rotary_dim] in float64."""
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, rotary_dim), (2, 5, rotary_dim))
    q, k, cos, sin = (randn(*shape, dtype=torch.float64) for shape in shapes)
    return q, k, cos, sin


def _matches(function: Callable[..., Any], pairing: str, rotary_dim: int) -> bool:
    q, k, cos, sin = _sample(rotary_dim)
    try:
        got = function(q, k, cos, sin)
    except Exception:
        if rotary_dim < q.shape[-1]:
            return False  # most functions do not split off a part themselves
        raise
    expected = rope_ref(q, k, cos, sin, pairing=pairing)
    return (
        isinstance(got, tuple)
        and len(got) == 2
        and all(probe.relative_difference(g, e) < probe.SAME_FORMULA for g, e in zip(got, expected, strict=True))
    )


def _rotary_function(
    upstream: Callable[..., Any], rotation: Rotation, runs: list[int] | None = None
) -> Callable[..., Any]:
    """``upstream`` with our kernel where its arguments are those that were probed, itself where they are not."""
    # All that the function needs are globals of its own, not a closure or defaults: Dynamo looks for those on the
    # function of this name in upstream's module, which has none.
    scope = {
        "__builtins__": __builtins__,
        "rope": rope,
        "left_to_inductor": left_to_inductor,
        "torch": torch,
        "PLAIN": PLAIN,
        "runs": [0] if runs is None else runs,
        "upstream": upstream,
        "pairing": rotation.pairing,
        "partial": rotation.partial,
        "casts_back": rotation.casts_back,
        "takes_position_ids": "position_ids" in inspect.signature(upstream).parameters,
    }
    return types.FunctionType(_apply_rotary.__code__, scope, upstream.__name__)


# Globals that each copy of the function below has of its own; here they are only declared.
upstream: Callable[..., Any] = rope_ref
pairing, partial, casts_back, takes_position_ids = "half", False, False, False
runs = [0]


def _apply_rotary(*args: Any, **named: Any) -> Any:
    """The code of what :func:`_rotary_function` makes. Upstream gets every call that is not of the form probed."""
    q, k, cos, sin = args[:4] if len(args) >= 4 else (None, None, None, None)
    rest = args[4:]
    unsqueeze_dim = named.get("unsqueeze_dim", rest[0] if rest and not takes_position_ids else 1)
    usual = (
        len(rest) <= (0 if takes_position_ids else 1)
        and named.keys() <= {"unsqueeze_dim"}
        and type(unsqueeze_dim) is int
        and unsqueeze_dim in (1, 2)
        and type(q) in PLAIN
        and type(k) in PLAIN
        and type(cos) in PLAIN
        and type(sin) in PLAIN
        and q.dim() == k.dim() == 4
        and cos.dim() == sin.dim() == 3
        and (partial or cos.shape[-1] == q.shape[-1])
    )
    if not usual or left_to_inductor("rope", q):
        return upstream(*args, **named)
    if not torch.compiler.is_compiling():
        runs[0] += 1
    if unsqueeze_dim == 2:  # heads after the sequence: the kernel takes strides, so a transposed view costs nothing
        q_out, k_out = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, pairing=pairing)
        q_out, k_out = q_out.transpose(1, 2), k_out.transpose(1, 2)
    else:
        q_out, k_out = rope(q, k, cos, sin, pairing=pairing)
    return (q_out.to(q.dtype), k_out.to(k.dtype)) if casts_back else (q_out, k_out)


class _Overlay(dict):
    """Globals of a function: a few names of its own, every other one looked up in the live globals of a module."""

    def __init__(self, live: dict[str, Any], own: dict[str, Any]):
        super().__init__(own)
        self.live = live
        # The interpreter looks this one name up without asking __missing__.
        self["__builtins__"] = live.get("__builtins__", __builtins__)

    def __missing__(self, name: str) -> Any:
        return self.live[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.live

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (this is what get means here)


def _rebind(
    function: Any, replace: Callable[[str, Callable[..., Any]], Callable[..., Any] | None], outer: tuple[Any, ...] = ()
) -> Any:
    """``function`` with each global function for which ``replace(name, function)`` answers; itself if there is none.

    Decorated functions are followed into their closures; ``outer`` are the functions on the way, so that one that
    closes over itself ends.
    """
    if not isinstance(function, types.FunctionType) or function in outer:
        return function
    own: dict[str, Any] = {}
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and (new := replace(name, value)) is not None:
            own[name] = new
    cells = []
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # an empty cell
            inner = None
        rebound = _rebind(inner, replace, (*outer, function))
        cells.append(cell if rebound is inner else types.CellType(rebound))
    if not own and all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    scope = _Overlay(function.__globals__, own) if own else function.__globals__
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, tuple(cells) or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__annotations__ = function.__annotations__
    copy.__doc__, copy.__module__, copy.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return copy


@functools.cache
def _global_names(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods that ``cls`` has beyond those of torch's own classes, each as attribute look-up would find it."""
    seen: set[str] = set()
    for ancestor in cls.__mro__:
        if ancestor.__module__.startswith("torch.") or ancestor is object:
            continue  # FSDP2 puts a class of its own before that of the model
        for attribute, value in vars(ancestor).items():
            if attribute not in seen and isinstance(value, types.FunctionType) and attribute != "__init__":
                seen.add(attribute)
                yield attribute, value


def _verdict(module: nn.Module) -> Verdict:
    verdicts = {name: recognise_rotation(name, function) for name, function in rotary_names(type(module)).items()}
    rotations = tuple(verdict for verdict in verdicts.values() if isinstance(verdict, Rotation))
    reasons = tuple(f"{name}: {verdict}" for name, verdict in verdicts.items() if isinstance(verdict, str))
    return RopeRecipe(rotations, reasons) if rotations else reasons


ROTATIONS = Recogniser(("rope",), lambda module: bool(module._modules), _verdict, key=type)
