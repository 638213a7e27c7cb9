"""Faults whose culprit is known, for the search for it: kernel, module and pass stand beside each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.convergence_faults import honest

# Large enough to be beyond doubt in bfloat16 on plain inputs; how small a fault is seen is another test's question.
TOO_MUCH = 1.1


class GradientTimes(torch.autograd.Function):
    """Its input; the gradient comes back ``factor`` times as large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def _argument(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """``function`` with too large a gradient for its argument ``index``."""

    @functools.wraps(function)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:index], GradientTimes.apply(args[index], TOO_MUCH), *args[index + 1 :], **kwargs)

    return wrong


def _ours(model: Any, logits: bool = False) -> None:
    import liger_kernels

    kernels = [k for k in liger_kernels.KERNELS if not (logits and k == "linear_cross_entropy")]
    liger_kernels.patch(model, kernels=kernels)


def _output(module: Any) -> None:
    """The module's output is too large, and its gradient belongs to it."""
    right = module.forward
    module.forward = lambda *args, **kwargs: right(*args, **kwargs) * TOO_MUCH


def one_norm_forward(model: Any) -> None:
    _ours(model)
    _output(model.model.layers[1].input_layernorm)


def norm_weight_gradient(model: Any) -> None:
    from liger_kernels.patching.recipes import norms

    norms.rms_norm = _argument(norms.rms_norm, 1)
    _ours(model)


def cross_entropy_gradient(model: Any) -> None:
    from liger_kernels.patching.logits import product

    product.cross_entropy = _argument(product.cross_entropy, 0)
    _ours(model, logits=True)


def raises_in_the_backward_pass(model: Any) -> None:
    _ours(model)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("no kernel for this shape")

    norm = model.model.layers[1].post_attention_layernorm
    right = norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = right(x)
        if y.requires_grad:
            y.register_hook(fail)
        return y

    norm.forward = forward


def wrapper_of_the_model(model: Any) -> None:
    """No kernel is wrong, but what was put around the model is."""
    _ours(model)
    right = model.forward

    @functools.wraps(right)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = right(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss * TOO_MUCH
        return outputs

    model.forward = forward


def one_foreign_norm(model: Any) -> None:
    honest(model)
    _output(model.model.layers[0].post_attention_layernorm)


def only_together(model: Any) -> None:
    """The norms are wrong while the MLPs are patched, too; each alone is honest."""
    honest(model)
    mlp = model.model.layers[1].mlp
    right = mlp.forward
    mlp.forward = lambda x: right(x)
    norm = model.model.norm
    normed = norm.forward
    norm.forward = lambda x: normed(x) * (TOO_MUCH if "forward" in vars(mlp) else 1)


def torchs_own_loss(model: Any) -> None:
    """Every norm of the model is honest; what all models share is not."""
    honest(model)
    right = torch.nn.functional.cross_entropy
    torch.nn.functional.cross_entropy = lambda *args, **kwargs: right(*args, **kwargs) * TOO_MUCH
