"""The subject of a judgement: an op, its reference and their inputs. Mistakes of the user raise errors here."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from convergence.arms.float64 import InFloat64
from convergence.models.data import seed_generators
from convergence.op.call import Op, results_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# ``inputs(rows, columns, dtype, device)`` returns the arguments of a call.
Inputs = Callable[[int, int, torch.dtype, torch.device], Any]

# Names of parameters of shape [columns].
_VECTORS = ("weight", "bias", "gamma", "beta", "scale")
# Values that are passed to an op as they are. An object of another type may contain a tensor.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Generator, type(None))


class Size(NamedTuple):
    """The size from which the inputs of a call are made."""

    rows: int
    columns: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"rows={self.rows}, columns={self.columns}, {str(self.dtype).removeprefix('torch.')}"


class Example(NamedTuple):
    """The arguments of a call, and the tensors among them.

    Attributes:
        leaves: the tensors, in the order of the arguments.
        names: the parameter names of the leaves.
        arguments: all positional arguments.
        keywords: all keyword arguments.
    """

    leaves: list[torch.Tensor]
    names: list[str]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def bind(self, function: Op) -> Op:
        """``function`` as a function of the tensors alone; all other arguments are fixed."""
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
        name: the op's name in messages.
        inputs: makes the arguments of a call.
        own_inputs: whether the user wrote ``inputs``.
    """

    op: Op
    reference: Op
    inputs: Inputs
    own_inputs: bool
    device: torch.device
    name: str

    def example(self, size: Size, seed: int = 0) -> Example:
        """The arguments for a size and a seed; equal seeds give equal arguments.

        Raises:
            TypeError, ValueError: ``inputs`` raised, or returned something that cannot be arguments of an op.
        """
        seed_generators(seed)
        where = f"inputs({size})"
        try:
            given = self.inputs(size.rows, size.columns, size.dtype, self.device)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{where} raised {type(error).__name__}: {error}; "
                "it is called as inputs(rows, columns, dtype, device), with any number of rows, none too"
            ) from error
        return _example(given, size, self.reference, where)

    def check_reference(self, size: Size) -> None:
        """Check that the reference runs in the dtype of ``size`` and in float64, before it judges an op.

        Raises:
            ValueError: the reference raised, or did not return float64 in float64.
        """
        example = self.example(size)
        shapes = ", ".join(f"{name}: {list(t.shape)}" for name, t in zip(example.names, example.leaves, strict=True))
        call, where = example.bind(self.reference), f"the reference, called with {size} ({shapes})"
        for dtype in (size.dtype, torch.float64):
            leaves = [t.detach().to(dtype) if t.is_floating_point() else t for t in example.leaves]
            try:
                with InFloat64() if dtype is torch.float64 else contextlib.nullcontext():
                    results = results_of(call(*leaves))
            except (Exception, SystemExit) as error:
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
    for (name, one), (again, other) in itertools.combinations(tensors, 2):
        if one is other:
            raise ValueError(
                f"{where} returned the same tensor for {name} and {again}; every input has a gradient of its own. "
                "Return another tensor for one of them, such as a clone"
            )
    # An input's earlier graph must not get gradients.
    leaves = [t if t.is_leaf else t.detach().requires_grad_(t.requires_grad) for _, t in tensors]
    return Example(leaves, [name for name, _ in tensors], arguments, keywords)


def _parameters(function: Op) -> list[inspect.Parameter] | None:
    """The parameters of ``function``; None if it has no signature, as some builtins."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _names(function: Op, count: int) -> list[str]:
    """The names of the first ``count`` arguments."""
    in_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in _parameters(function) or () if p.kind in in_place]
    return (names + [f"argument {i}" for i in range(len(names), count)])[:count]


def _required(function: Op) -> list[str] | None:
    """The parameters that a call must give; None if there is no signature, or it takes any arguments."""
    parameters = _parameters(function)
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if parameters is None or any(p.kind in anything for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty]


def check_signatures(op: Op, reference: Op) -> None:
    """Check that both have the same required parameters. One of them may have more options.

    Raises:
        TypeError: one of them is not callable, or the required parameters differ.
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
    """Inputs of normal numbers: [columns] for a weight or bias, [rows, columns] for any other required parameter.

    Raises:
        ValueError: the signature names no required parameter.
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
    # Drawn on the CPU, so that every device gets the same numbers.
    return {name: torch.randn(shape).to(device, dtype).requires_grad_() for name, shape in shapes.items()}


def checked_dtypes(dtypes: Any) -> tuple[torch.dtype, ...]:
    """The dtypes in ``dtypes``: text, a dtype of torch, or several of them.

    Raises:
        TypeError: ``dtypes`` is neither text nor dtypes.
        ValueError: a dtype is unknown, or there is none.
    """
    if not isinstance(dtypes, (str, torch.dtype, Iterable)):
        raise TypeError(f"dtypes is {dtypes!r}; allowed are {', '.join(DTYPES)}, or a list of them")
    given = [dtypes] if isinstance(dtypes, (str, torch.dtype)) else list(dtypes)
    names = [part.strip() for one in given for part in str(one).removeprefix("torch.").split(",")]
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"dtypes: {name!r} is unknown; allowed are {', '.join(DTYPES)}. The truth is in float64")
    if not names:
        raise ValueError(f"dtypes names none; allowed are {', '.join(DTYPES)}")
    return tuple(dict.fromkeys(DTYPES[name] for name in names))
