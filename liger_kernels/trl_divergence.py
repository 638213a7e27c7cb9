"""The divergence of trl's distillation trainer (trl 1.16 and later) on :func:`linear_divergence`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from liger_kernels.trl_function import FunctionReplacement, differences_of, evaluated

__all__ = ["DivergenceReplacement"]

_RESULTS = ("divergence", "entropy")


class DivergenceReplacement(FunctionReplacement):
    """The divergence of two heads. Its entropy has no gradient there."""

    runs, arguments = "linear_divergence", 12

    def tensors(self, *args: Any) -> tuple[Any, ...]:
        return args[:6]

    def run(self, *args: Any) -> tuple[Any, ...]:
        from liger_kernels.ops import linear_divergence

        return _as_trl_calls_it(partial(linear_divergence, summed=True), *args)  # which the trainer does next

    def differences(self, apply: Any) -> Iterator[str]:
        """Both KL divergences and a mixture, of heads of two widths, with all options and with none."""
        from liger_kernels.patching.recipes.probe import randn

        shapes = {"hidden": (6, 4), "weight": (7, 4), "bias": (7,)}
        shapes |= {"teacher_hidden": (6, 3), "teacher_weight": (7, 3), "teacher_bias": (7,)}
        heads = {name: randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
        upstream = randn(2, 6, dtype=torch.float64)
        plain = (1.0, 1.0, None, 1.0, None)
        for beta, options in ((0.0, (0.7, 1.3, 1.5, 0.8, 2.5)), (1.0, plain), (0.3, (1.4, 0.9, None, 1.2, 3.0))):
            given = {name: t for name, t in heads.items() if options is not plain or not name.endswith("bias")}
            yield from differences_of(
                _evaluated(_reference, given, beta, options, upstream),
                _evaluated(apply, given, beta, options, upstream),
            )


def _as_trl_calls_it(op: Any, *args: Any) -> tuple[Any, ...]:
    """``op`` with the arguments and results of trl's function."""
    hidden, weight, bias, *teacher, beta, temperature, logit_scale, softcap, teacher_scale, teacher_softcap = args
    teacher_hidden, teacher_weight, teacher_bias = teacher
    heads = hidden, weight, teacher_hidden, teacher_weight, beta, bias, teacher_bias
    scaling = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    of_teacher = {"teacher_softcap": teacher_softcap, "teacher_logit_scale": teacher_scale}
    out = op(*heads, **scaling, **of_teacher, outputs=_RESULTS)
    return out.divergence, out.entropy.detach()


def _reference(*args: Any) -> tuple[Any, ...]:
    from liger_kernels.ops import linear_divergence_ref

    return _as_trl_calls_it(linear_divergence_ref, *args)


def _evaluated(apply: Any, given: dict[str, Any], beta: float, options: Any, upstream: Any) -> dict[str, Any]:
    """What ``apply`` returns, and the gradients of both heads, by name."""
    names = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias")
    leaves = {name: given[name].clone().requires_grad_() if name in given else None for name in names}
    return evaluated(_RESULTS, apply(*leaves.values(), beta, *options), leaves, upstream)
