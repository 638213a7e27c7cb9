"""Operators of ``torch.library`` with many arguments, at the price of a call of the dispatcher.

``torch.library.custom_op`` goes through the schema again in Python, an argument at a time and all of them for each, in
every forward that autograd sees and in every call that writes to an argument: for the 19 to 25 arguments of a linear
cross entropy that takes the host longer than its launches. The registrations here are the ones beneath it, with the
same meaning to autograd, fake tensors and ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from liger_kernels.ops._runtime import backward_once

_NAMESPACE = "liger_kernels"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


class Operator:
    """``torch.ops.liger_kernels.<name>``, which runs ``function`` on every device; called like a function.

    Arguments have no defaults and are given by position. What the operator writes to, its schema says.
    """

    def __init__(self, name: str, schema: str, function: Callable[..., Any]):
        self._name, self._init_fn = name, function
        _library.define(f"{name}{schema}", tags=torch.Tag.pt2_compliant_tag)
        # Called from a frame that Dynamo gave up on, the function would be traced.
        _library.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")
        self.overload = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """``fake``: the results in shape, dtype and stride, nothing computed."""
        torch.library.register_fake(f"{_NAMESPACE}::{self._name}", fake, lib=_library)
        return fake

    def register_autograd(
        self,
        backward: Callable[..., tuple[Any, ...]],
        setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    ) -> None:
        """``backward(ctx, *grads)`` returns a gradient or None for every argument; it is not differentiable itself.

        ``setup_context(ctx, arguments, results)`` saves what it needs, as in :class:`torch.autograd.Function`.
        """

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                results = below(*arguments)
                setup_context(ctx, arguments, results)
                return results

        def below(*arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return self.overload(*arguments)

        def call(*arguments: Any) -> Any:
            return (Differentiable.apply if torch.is_grad_enabled() else below)(*arguments)

        Differentiable.backward = staticmethod(backward_once(backward))  # type: ignore[method-assign]
        _library.impl(self._name, call, "Autograd")


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make the decorated function ``torch.ops.liger_kernels.<name>`` of ``schema``, "(Tensor x) -> Tensor"."""
    return lambda function: Operator(name, schema, function)
