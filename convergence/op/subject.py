"""What is judged: an op, its reference, and where their inputs come from; with what a user may get wrong about them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from convergence.arms.float64 import InFloat64
from convergence.models.data import seed_generators
from convergence.op.call import Op, results_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# ``inputs(rows, columns, dtype, device)`` returns the arguments of a call.
Inputs = Callable[[int, int, torch.dtype, torch.device], Any]

# Parameters of which a layer has one for each column.
_VECTORS = ("weight", "bias", "gamma", "beta", "scale")
# Values that an op takes as they are; whatever else there is may hide a tensor.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Generator, type(None))


class Size(NamedTuple):
    """What the inputs of a call are made from."""

    rows: int
    columns: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"rows={self.rows}, columns={self.columns}, {str(self.dtype).removeprefix('torch.')}"


class Example(NamedTuple):
    """The arguments of a call, and which of them are the tensors.

    Attributes:
        leaves: the tensors, in the order of the arguments.
        names: those of their parameters.
        arguments: all arguments in place.
        keywords: all arguments by name.
    """

    leaves: list[torch.Tensor]
    names: list[str]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def bind(self, function: Op) -> Op:
        """``function`` of the tensors alone; all other arguments stay."""
        arguments, keywords = self.arguments, self.keywords
        in_place = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
        by_name = [name for name, value in keywords.items() if isinstance(value, torch.Tensor)]

        def call(*leaves: torch.Tensor) -> Any:
            given, named = list(arguments), dict(keywords)
            for i, leaf in zip(in_place, leaves[: len(in_place)], strict=True):
                given[i] = leaf
            for name, leaf in zip(by_name, leaves[len(in_place) :], strict=True):
                named[name] = leaf
            return function(*given, **named)

        return call


class Subject(NamedTuple):
    """An op that is judged.

    Attributes:
        name: what messages call it.
        inputs: makes the arguments of a call; ``own_inputs`` says whether the user wrote it.
    """

    op: Op
    reference: Op
    inputs: Inputs
    own_inputs: bool
    device: torch.device
    name: str

    def example(self, size: Size, seed: int = 0) -> Example:
        """The same arguments for the same size and seed.

        Raises:
            TypeError, ValueError: ``inputs`` raised, or returned what an op is not called with.
        """
        seed_generators(seed)
        where = f"inputs({size})"
        try:
            given = self.inputs(size.rows, size.columns, size.dtype, self.device)
        except Exception as error:
            raise ValueError(
                f"{where} raised {type(error).__name__}: {error}; "
                "it is called as inputs(rows, columns, dtype, device), with any number of rows, none too"
            ) from error
        return _example(given, size, self.reference, where)

    def check_reference(self, size: Size) -> None:
        """See that the reference computes, in the dtype and in float64, before an op is judged by it.

        Raises:
            ValueError: it does not.
        """
        example = self.example(size)
        shapes = ", ".join(f"{name}: {list(t.shape)}" for name, t in zip(example.names, example.leaves, strict=True))
        call, where = example.bind(self.reference), f"the reference, called with {size} ({shapes})"
        for dtype in (size.dtype, torch.float64):
            leaves = [t.detach().to(dtype) if t.is_floating_point() else t for t in example.leaves]
            try:
                with InFloat64() if dtype is torch.float64 else contextlib.nullcontext():
                    results = results_of(call(*leaves))
            except Exception as error:
                made = "" if self.own_inputs else "; its arguments were made by the names of its parameters"
                raise ValueError(
                    f"{where} in {dtype}, raised {type(error).__name__}: {error}{made}. Name a function that makes "
                    "arguments which it takes: --inputs my_pkg:inputs, or inputs="
                ) from error
        for result in results:
            if result is not None and result.is_floating_point() and result.dtype != torch.float64:
                raise ValueError(f"{where} in float64, returned {result.dtype}; the truth needs a result in float64")


def _example(given: Any, size: Size, reference: Op, where: str) -> Example:
    allowed = "allowed are a tuple or list of the arguments in place, or a dict of them by name"
    if isinstance(given, torch.Tensor) or not isinstance(given, (tuple, list, Mapping)):
        raise TypeError(f"{where} returned a {type(given).__name__}; {allowed}")
    arguments = () if isinstance(given, Mapping) else tuple(given)
    keywords = dict(given) if isinstance(given, Mapping) else {}
    if wrong := [key for key in keywords if not isinstance(key, str)]:
        raise TypeError(f"{where} returned a dict with the key {wrong[0]!r}; {allowed}")
    labelled = [*zip(_names(reference, len(arguments)), arguments, strict=True), *keywords.items()]
    for name, value in labelled:
        if not isinstance(value, (torch.Tensor, *_PLAIN)):
            raise TypeError(
                f"{where} returned a {type(value).__name__} for {name}; allowed are tensors and plain values, such as "
                "numbers and text. Wrap op and reference in functions of tensors that make the rest"
            )
    tensors = [(name, value) for name, value in labelled if isinstance(value, torch.Tensor)]
    if not tensors:
        raise ValueError(f"{where} returned no tensor, so there is nothing to compute from; an op takes at least one")
    floating = {t.dtype for _, t in tensors if t.is_floating_point()}
    if floating and size.dtype not in floating:
        has = ", ".join(sorted(str(dtype) for dtype in floating))
        raise ValueError(f"{where} returned tensors of {has}; at least one has to be of the dtype that it is given")
    # What an input was computed from is nobody's concern.
    leaves = [t if t.is_leaf else t.detach().requires_grad_(t.requires_grad) for _, t in tensors]
    return Example(leaves, [name for name, _ in tensors], arguments, keywords)


def _parameters(function: Op) -> list[inspect.Parameter] | None:
    """None for what does not say, as some builtins."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _names(function: Op, count: int) -> list[str]:
    """Of the first ``count`` arguments."""
    in_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in _parameters(function) or () if p.kind in in_place]
    return (names + [f"argument {i}" for i in range(len(names), count)])[:count]


def _required(function: Op) -> list[str] | None:
    """The parameters that a call must give; None where the signature does not say, or takes anything."""
    parameters = _parameters(function)
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if parameters is None or any(p.kind in anything for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty]


def check_signatures(op: Op, reference: Op) -> None:
    """See that both are called in the same way; one of them may have more options.

    Raises:
        TypeError: one of them is not callable, or both have other required parameters.
    """
    for what, function in (("op", op), ("reference", reference)):
        if not callable(function):
            raise TypeError(f"the {what} is a {type(function).__name__}; it takes a function of tensors")
    required, its = _required(op), _required(reference)
    if required is not None and its is not None and required != its:
        raise TypeError(
            f"the op is called with ({', '.join(required)}) and the reference with ({', '.join(its)}); both have to "
            "take the same required parameters in the same order. Wrap one of them in a function that does"
        )


def inputs_by_name(reference: Op) -> Inputs:
    """Normal numbers for every required parameter: [columns] for a weight or bias, [rows, columns] for another one.

    Raises:
        ValueError: the signature does not say what there is, or there is no such parameter.
    """
    names = _required(reference)
    if not names:
        raise ValueError(
            "the signature of the reference names no required parameter, so nobody knows what it is called with; name "
            "a function that makes its arguments: --inputs my_pkg:inputs, or inputs="
        )
    return functools.partial(_by_name, names)


def _by_name(names: Sequence[str], rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    shapes = {name: (columns,) if name in _VECTORS else (rows, columns) for name in names}
    # Drawn on the CPU, so that every device gets the same ones.
    return {name: torch.randn(shape).to(device, dtype).requires_grad_() for name, shape in shapes.items()}


def checked_dtypes(dtypes: Any) -> tuple[torch.dtype, ...]:
    """The dtypes that ``dtypes`` names, as text, dtypes of torch or several of them.

    Raises:
        ValueError: one is unknown, or there is none.
    """
    given = [dtypes] if isinstance(dtypes, (str, torch.dtype)) else list(dtypes)
    names = [part.strip() for one in given for part in str(one).removeprefix("torch.").split(",")]
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"dtypes: {name!r} is unknown; allowed are {', '.join(DTYPES)}. The truth is in float64")
    if not names:
        raise ValueError(f"dtypes names none; allowed are {', '.join(DTYPES)}")
    return tuple(dict.fromkeys(DTYPES[name] for name in names))
