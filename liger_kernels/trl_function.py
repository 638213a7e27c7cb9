"""A function of trl's that runs on an op of ours: replaced on its class, probed at its first call, and left alone for
every call that our kernels do not take."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# The probe's numbers are of order 1. trl's functions sum float64 inputs in float32, too.
SAME = 1e-5


class FunctionReplacement:
    """Stands in for the ``apply`` of trl's function. A subclass says which, and what of ours it runs.

    Attributes:
        function: trl's class.
        own: the ``apply`` that it had.
        difference: why trl's function is left alone; empty if it computes what ours does, None before the probe.
        ours: how many calls ran our op.
        theirs: how many ran trl's function, for ``reason``, that of the last one.
    """

    runs = ""  # the name of our op
    arguments = 0  # of trl's apply, by position

    def __init__(self, function: Any) -> None:
        self.function = function
        self.own = function.apply
        self.difference: str | None = None
        self.ours = self.theirs = 0
        self.reason = ""
        self._ended = False

        # Dynamo traces trl's forward where it can. Where it cannot, it would go on to trace this, probe and all.
        @torch.compiler.disable
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass has a forward of its own, and somebody may have kept this function for longer than it is asked
            if cls is not function or self._ended:
                return self.own.__func__(cls, *args, **kwargs)
            return self(*args, **kwargs)

        self._before = vars(function).get("apply")
        self._apply: Any = classmethod(apply)
        function.apply = self._apply

    def tensors(self, *args: Any) -> tuple[Any, ...]:
        """Those of the arguments that are tensors or None."""
        raise NotImplementedError

    def run(self, *args: Any) -> tuple[Any, ...]:
        """Our op with the arguments and results of trl's function."""
        raise NotImplementedError

    def differences(self, apply: Any) -> Iterator[str]:
        """How ``apply`` differs from our reference on a probe."""
        raise NotImplementedError

    def undo(self) -> None:
        """Give the class its own ``apply`` back, unless somebody else has replaced it since. Kept, ours runs it."""
        self._ended = True
        if vars(self.function).get("apply") is not self._apply:
            return
        if self._before is None:
            del self.function.apply
        else:
            self.function.apply = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = f"it got {len(args) + len(kwargs)} arguments, not {self.arguments}"
        if len(args) == self.arguments and not kwargs:
            reason = _why_not(self.tensors(*args)) or self.probed()
        if not reason:
            try:
                found = self.run(*args)
                self.ours += 1
                return found
            except (TypeError, ValueError) as error:  # what ours refuses, such as two dtypes
                reason = " ".join(str(error).split())
        self.theirs += 1
        self.reason = reason
        return self.own(*args, **kwargs)

    def probed(self) -> str:
        """:attr:`difference`, after the probe."""
        if self.difference is None:
            self.difference = self._difference()
        return self.difference

    def _difference(self) -> str:
        """How trl's function differs from our reference; empty if it does not."""
        from liger_kernels.patching.recipes.probe import describe, probing

        try:
            takes = len(inspect.signature(self.function.forward).parameters) - 1  # without ctx
            if takes != self.arguments:
                return f"its forward takes {takes} arguments, not {self.arguments}"
            with probing():
                return next(self.differences(self.own), "")
        except Exception as error:  # whatever a function that has changed raises
            return describe(error)

    def __str__(self) -> str:
        if self.probed():
            return f"off, trl's function is left alone: {self.difference}"
        left = f", {self.theirs} ran trl's function, the last one because {self.reason}" if self.theirs else ""
        return f"on, {self.ours} calls ran {self.runs}{left}"


def _why_not(tensors: Iterable[Any]) -> str:
    """Why our kernels do not take these tensors; empty if they do, unless our op refuses them."""
    from liger_kernels.ops.runtime.dispatch import use_triton
    from liger_kernels.patching.recipes.probe import PLAIN

    given = [t for t in tensors if t is not None]
    for t in given:
        if type(t) not in PLAIN:
            return f"a tensor is a {type(t).__name__}"
        if hasattr(t, "ds_id"):
            return "ZeRO-3 shards the weight, and trl's backward gathers it again"
    for t in given:  # our reference would hold all logits, trl's function holds a chunk
        if t.is_floating_point() and not use_triton(t, opaque=True):
            return f"no kernel takes {t.dtype} on {t.device.type}"
    return ""


def differences_of(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """How the results of trl's function differ from ours, by name."""
    for name, expected in ours.items():
        found = theirs[name]
        if found is None or expected is None:
            if found is not expected:
                yield f"{name} is {'missing' if found is None else 'there unasked'}"
        elif found.shape != expected.shape:
            yield f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        elif found.requires_grad != expected.requires_grad:
            yield f"{name} has {'a' if found.requires_grad else 'no'} gradient"
        elif not (off := float((found.double() - expected.double()).abs().max())) <= SAME:
            yield f"{name} is off by {off:.1g}"


def evaluated(names: tuple[str, ...], results: Any, leaves: dict[str, Any], upstream: Any) -> dict[str, Any]:
    """The ``results`` of these ``names``, and the gradients of ``leaves``, by name."""
    found = dict(zip(names, results, strict=True))
    outputs = [(t, g) for t, g in zip(found.values(), upstream, strict=False) if t is not None and t.requires_grad]
    torch.autograd.backward([t for t, _ in outputs], [g.to(t.dtype) for t, g in outputs])
    return found | {f"the gradient of {name}": None if t is None else t.grad for name, t in leaves.items()}
