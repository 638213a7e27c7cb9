"""Trains with parts of a patch again, to see which of them shows a failure."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from convergence.arms.float64 import InFloat64
from convergence.arms.quantities import INITIAL, Moment
from convergence.arms.train import train
from convergence.arms.trajectory import Run, Trajectory
from convergence.blame.changes import Changes, Part
from convergence.blame.failing import Failure, Shown
from convergence.judge import tolerance

Only = frozenset[str] | None  # the names of the steps that are trained again, at the initial weights; None: everything


@dataclass(frozen=True)
class Rerun:
    """One training with a part of the patch: how it shows the failure, and whether the forward pass does."""

    shown: Shown
    forward: bool


@dataclass(frozen=True)
class Reruns:
    """One patched model, of which any part can be run."""

    run: Run
    changes: Changes
    failure: Failure

    def rerun(self, parts: Collection[Part], only: Only) -> Rerun:
        """Train with only ``parts`` patched."""
        self.changes.keep(parts)
        try:
            trajectory = self.train(only)
        except Exception as error:
            in_backward = any(frame.name == "backward" for frame in traceback.extract_tb(error.__traceback__))
            return Rerun(Shown(math.inf, f"{type(error).__name__}"), not in_backward)

        def trained(at: Moment) -> bool:
            return only is None or (at.phase == INITIAL and at.step in only)

        verdict = self.failure.judge(trajectory, trained)
        at_first = self.failure.judge(trajectory, lambda at: trained(at) and at.phase == INITIAL)
        return Rerun(self.failure.shown(verdict), self.failure.is_forward(verdict, at_first))

    def train(self, only: Only) -> Trajectory:
        return train(dataclasses.replace(self.run, only=only), self.changes.model)

    def arrival(self) -> dict[str, int]:
        """The parameters' names, numbered in the order in which an unpatched backward pass finishes their gradients."""
        self.changes.keep([])
        order: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            for name, parameter in self.changes.model.named_parameters():

                def arrived(_: torch.Tensor, name: str = name) -> None:
                    order.setdefault(name, len(order))

                stack.callback(parameter.register_post_accumulate_grad_hook(arrived).remove)
            self.train(frozenset({self.run.steps[0].name}))
        return order

    def outputs_off(self, parts: Collection[Part], clearest: str) -> set[str]:
        """The paths of the modules whose output is off, on what an unpatched model feeds them in step ``clearest``."""
        self.changes.keep([])
        off: set[str] = set()
        busy = False

        def watch(part: Part, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal busy
            if busy or part.path in off:
                return
            busy = True
            with torch.no_grad():
                with InFloat64():
                    truth = copy.deepcopy(module).double()(*tree_map(_wide, args), **tree_map(_wide, kwargs))
                part.patch()
                patched = self.changes.model.get_submodule(part.path)
                ours = patched(*tree_map(_copy, args), **tree_map(_copy, kwargs))
                part.restore()
            if _is_off(_tensors(ours), _tensors(output), _tensors(truth), self.run.dtype):
                off.add(part.path)
            busy = False

        with contextlib.ExitStack() as stack:
            for part in parts:
                module = self.changes.model.get_submodule(part.path)
                hook = functools.partial(watch, part)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            self.train(frozenset({clearest}))
        return off


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _wide(value: Any) -> Any:
    value = _copy(value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _tensors(output: Any) -> list[torch.Tensor]:
    """The floating tensors of what a module returned."""
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return [leaf.detach() for leaf in leaves]


def _is_off(
    ours: list[torch.Tensor], torchs: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype
) -> bool:
    """Whether any of our outputs is farther from the truth than PyTorch's own may be, or is scaled."""
    if not len(ours) == len(torchs) == len(truth):
        return True
    for own, baseline, exact in zip(ours, torchs, truth, strict=True):
        try:
            tolerance.three_way(own, baseline, exact, dtype, "output")
        except AssertionError:
            return True
        if not bool(exact.any()):
            continue
        error = tolerance.rms(baseline.double() - exact) / tolerance.rms(exact)
        rows = exact.numel() / exact.shape[-1]  # roundings within a row may hang together
        bound = abs(_gain(baseline, exact)) + tolerance.gain_bound(error / rows**0.5, dtype, steps=1)
        if abs(_gain(own, exact)) > bound:
            return True
    return False


def _gain(value: torch.Tensor, truth: torch.Tensor) -> float:
    """By which fraction ``value`` is a larger ``truth``."""
    return float(((value.double() - truth) * truth).sum() / truth.square().sum())
