"""What a patch of one model must leave as it was: the state of its process, by which every other model computes, too.

:class:`ProcessState` reads it before a patch is imported, and again after the training. Whatever the training itself
needs is put back by then, so what differs is the patch's. Random numbers are another matter, because a step draws some:
they are compared around the call of the patch alone.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Replaced there, a function or class is another one for everybody. What is added is nobody else's.
_NAMESPACES = (
    "torch",
    "torch.Tensor",
    "torch.autograd",
    "torch.autograd.Function",
    "torch.nn",
    "torch.nn.Module",
    "torch.nn.functional",
    "torch.utils.checkpoint",
    "transformers",
    "transformers.PreTrainedModel",
)
_HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global") and name.endswith("_hooks")]
_STANDARD = (str, int, float, bool, type(None), torch.dtype, torch.device)


def _backends() -> dict[str, Any]:
    """The switches of torch's backends."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found: dict[str, Any] = {
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
    }
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        found[f"torch.backends.cuda.matmul.{name}"] = getattr(cuda.matmul, name, None)
    for name in ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"):
        enabled: Callable[[], bool] | None = getattr(cuda, name, None)
        found[f"torch.backends.cuda.{name}()"] = None if enabled is None else enabled()
    return found


def _settings() -> dict[str, Any]:
    """Plain values, by what they are in words."""
    hooks = vars(nn.modules.module)
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "whether algorithms are deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "the number of threads": torch.get_num_threads(),
        "whether gradients are on": torch.is_grad_enabled(),
        "whether anomalies are looked for": torch.is_anomaly_enabled(),
        "autocast": tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ),
        "modes of operations": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "the working directory": os.getcwd(),
        "hooks of all modules": tuple((name, len(hooks[name])) for name in _HOOKS if hooks[name]),
        **_backends(),
    }


def _symbols(namespace: str) -> Mapping[str, Any]:
    """The functions and classes of ``namespace``, as far as it has been imported."""
    parts = namespace.split(".")
    found: Any = sys.modules.get(parts[0])
    for part in parts[1:]:
        found = None if found is None else getattr(found, part, None)
    if found is None:
        return {}
    return {name: value for name, value in list(vars(found).items()) if callable(value)}


class ProcessState:
    """The state of this process as it is now; :meth:`changes` says in words what is another one later."""

    def __init__(self) -> None:
        self._settings = _settings()
        self._environment = dict(os.environ)
        self._symbols = {namespace: _symbols(namespace) for namespace in _NAMESPACES}

    def changes(self) -> list[str]:
        now = _settings()
        found = [
            f"{name} ({_shown(self._settings[name])} before, {_shown(value)} now)"
            for name, value in now.items()
            if value != self._settings[name]
        ]
        names = {*self._environment, *os.environ}
        found += [
            f"the variable {name}" for name in sorted(names) if self._environment.get(name) != os.environ.get(name)
        ]
        for namespace, before in self._symbols.items():
            after = _symbols(namespace)
            found += [f"{namespace}.{name}" for name, value in sorted(before.items()) if after.get(name) is not value]
        return found


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, _STANDARD) else repr(value)


def _random() -> list[Any]:
    """The state of every generator that belongs to all."""
    numpy = sys.modules.get("numpy")
    states = [torch.get_rng_state().tolist(), random.getstate()]
    if torch.cuda.is_initialized():
        states += [state.tolist() for state in torch.cuda.get_rng_state_all()]
    if numpy is not None:
        _, key, *rest = numpy.random.get_state()
        states.append((key.tolist(), rest))
    return states


def drawing(patch: Callable[[nn.Module], Any], drawn: list[str]) -> Callable[[nn.Module], Any]:
    """``patch``, and after a call of it in ``drawn`` whether it drew or set random numbers that belong to all."""

    @functools.wraps(patch)
    def watched(model: nn.Module) -> Any:
        before = _random()
        try:
            return patch(model)
        finally:
            if _random() != before and not drawn:
                drawn.append("random numbers, which the patch drew or set")

    return watched
