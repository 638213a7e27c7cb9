"""The options of the losses: one object, made where a user calls and passed on as it is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import torch

from liger_kernels.ops.runtime.arguments import FINITE, NOT_NEGATIVE, POSITIVE, SHARE, checked, one_of

REDUCTIONS = ("mean", "sum", "none")
EXTRAS = (
    "token_accuracy",
    "predicted_tokens",
    "entropy",
    "log_probs",
    "is_top1",
    "log_sum_sq_probs",
    "mean_logits",
    "max_logits",
)
OF_DIVERGENCE = "max_abs_difference"  # which no other loss has
# What a kernel writes for each row, and in which dtype; the others come of it.
WRITTEN = {
    "log_probs": torch.float32,
    "entropy": torch.float32,
    "predicted_tokens": torch.int64,
    "log_sum_sq_probs": torch.float32,
    "mean_logits": torch.float32,
    "max_logits": torch.float32,
    OF_DIVERGENCE: torch.float32,
}

Positive = Annotated[float, POSITIVE]
Finite = Annotated[float, FINITE]
Reduction = Annotated[str, one_of(REDUCTIONS)]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class LossOptions(NamedTuple):
    """The options that every loss takes by name.

    Attributes:
        ignore_index: rows with this target have no loss and zero gradient.
        label_smoothing: eps of the formula, between 0 and 1.
        softcap: the bound of the tanh cap, or None.
        logit_scale: multiplies the logits, before the cap.
        z_loss: the factor of lse^2 (``lse_square_scale``).
        temperature: divides the logits, after the cap.
        reduction: "mean", "sum" or "none". A mean over no row (or a total weight of 0) is 0 with zero gradients, where
            PyTorch returns NaN.
        extras: names of more results from the same pass, of :data:`EXTRAS`. They carry no gradient.
    """

    ignore_index: int = -100
    label_smoothing: Annotated[float, SHARE] = 0.0
    softcap: Positive | None = None
    logit_scale: Finite = 1.0
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    temperature: Positive = 1.0
    reduction: Reduction = "mean"
    extras: tuple[str, ...] = ()

    @classmethod
    def checked(cls, given: dict[str, Any]) -> LossOptions:
        """The options as plain numbers.

        Raises:
            TypeError, ValueError: for one that does not exist, or has a wrong type or value.
        """
        check_options(given, cls._fields)
        options = _new_options(**given)
        check_names("extras", options.extras, EXTRAS)
        ignore_index, *others = options._numbers().values()
        floats = [None if value is None else float(value) for value in others]
        values: list[Any] = [ignore_index, *floats, options.reduction, tuple(options.extras)]
        return cls(*values)

    def _numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in LossOptions._fields[:-2]}

    def as_arguments(self) -> dict[str, Any]:
        """The options by name. (Not ``_asdict``, which torch 2.8's Dynamo does not trace; the same for ``_make``.)"""
        return {name: getattr(self, name) for name in LossOptions._fields}

    def as_numbers(self) -> list[float]:
        """All options but ``reduction`` and ``extras``, infinity for None: a ``float[]`` of an operator's schema."""
        return [math.inf if value is None else float(value) for value in self._numbers().values()]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float], reduction: str, extras: str) -> LossOptions:
        """The options of :meth:`as_numbers`; ``extras`` are separated by spaces."""
        ignore_index, *others = numbers
        floats = [None if number == math.inf else number for number in others]
        values: list[Any] = [int(ignore_index), *floats, reduction, tuple(extras.split())]
        return cls(*values)

    def written(self) -> list[str]:
        """What a kernel has to write for ``extras``, in the order of :data:`WRITTEN`."""
        predicts = any(name in self.extras for name in ("token_accuracy", "is_top1"))
        return [name for name in WRITTEN if name in self.extras or (predicts and name == "predicted_tokens")]


_new_options = checked(LossOptions)


def check_options(given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise a ``TypeError`` for one of ``given`` that is not ``allowed``."""
    for name in given:
        if name not in allowed:
            raise TypeError(f"{name} is no option; the options are {', '.join(allowed)}")


def check_names(name: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise for one of ``given`` that is not ``allowed``."""
    if any(one not in allowed for one in given):
        raise ValueError(f"{name} is {given!r}; it must be a tuple of names from {', '.join(map(repr, allowed))}")


def takes_options(*names: str) -> Callable[[_Function], _Function]:
    """Show the options of these ``names``, all if there is none, in the signature of a function that takes them as
    ``**options``."""

    def shown(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [p for name, p in inspect.signature(LossOptions).parameters.items() if not names or name in names]
        every = [*parameters, *(p.replace(kind=p.KEYWORD_ONLY) for p in options)]
        function.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        return function

    return shown
