"""What is watched while an arm trains: hidden states, activations that must stay, warnings of transformers."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from convergence.arms.float64 import InFloat64
from convergence.arms.large import is_large
from convergence.arms.lifetimes import Lifetimes
from convergence.arms.quantities import (
    HIDDEN_GRADIENT,
    HIDDEN_STATES,
    Moment,
    Quantity,
    Remark,
)
from convergence.arms.trajectory import Run, Trajectory


@contextlib.contextmanager
def observed_arm(run: Run) -> Iterator[Trajectory]:
    """What the arm shows that trains inside, in a truth's arithmetic where it is one; in the end, on the CPU."""
    result = Trajectory()
    with logged_warnings(result.warnings), InFloat64() if run.dtype is torch.float64 else contextlib.nullcontext():
        yield result
        result.to_cpu()


@contextlib.contextmanager
def observed_hidden_states(
    model: nn.Module, result: Trajectory, at: Moment, lifetimes: Lifetimes | None = None
) -> Iterator[None]:
    """Inside, what enters each layer and the norm after the last one is observed in one forward: without gradients its
    values, else what arrives there in the backward pass. What is large is not kept: no row of it could be judged."""

    def enter(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if lifetimes is not None:
            lifetimes.watch(f"what entered {path}", hidden)
        if not isinstance(hidden, torch.Tensor) or is_large(hidden):
            return
        if hidden.requires_grad:
            gradient = Quantity(HIDDEN_GRADIENT, path)
            hidden.register_hook(lambda grad: result.record(gradient, at, grad))
        elif not torch.is_grad_enabled():
            result.record(Quantity(HIDDEN_STATES, path), at, hidden)

    with contextlib.ExitStack() as stack:
        for path, module in _stacked(model):
            hook = functools.partial(enter, path)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _stacked(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of every stack that is in no other (of experts, say), and the norms next to it."""
    stacks: list[str] = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        own = [name for name, child in children.items() if isinstance(child, nn.ModuleList)]
        if not own or any(path.startswith(f"{stack}.") for stack in stacks):
            continue
        stacks += [f"{path}.{name}" if path else name for name in own]
        for name, child in children.items():
            found = child.named_children() if name in own else [("", child)] if _is_norm(child) else []
            for number, layer in found:
                yield ".".join(filter(None, (path, name, number))), layer


def _is_norm(module: nn.Module) -> bool:
    weights = list(module.parameters(recurse=False))
    return bool(weights) and all(weight.ndim == 1 for weight in weights)


@contextlib.contextmanager
def kept_activations(model: Any, head: Collection[nn.Module], result: Trajectory, at: Moment) -> Iterator[None]:
    """Inside, what every innermost module returns must stay as it was, but for the modules of the ``head``. Autograd's
    own check does not see a kernel that writes: it bumps no version."""
    kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def keep(path: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            kept.append((path, output.detach(), output.detach().clone()))

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if not module._modules and module not in head:
                stack.callback(module.register_forward_hook(functools.partial(keep, path)).remove)
        yield
    changed = torch.stack([differ(now, before) for _, now, before in kept]).tolist() if kept else []
    for path in dict.fromkeys(path for (path, *_), differs in zip(kept, changed, strict=True) if differs):
        result.complaints.append(Remark(at, f"the output of {path} changed after it had been returned"))


def differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether both hold other bits anywhere, a NaN's included: a tensor, so that nobody waits for it here."""
    return (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).any()


@contextlib.contextmanager
def logged_warnings(found: list[str], *packages: str) -> Iterator[None]:
    """Collects what transformers, or the given packages, warn of: in many broken set-ups it warns and goes on."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in packages or ("transformers",)]
    for logger in loggers:
        logger.addHandler(handler)
    # What is warned of once in a process is warned of once in every arm: arms of other processes are compared with it.
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
