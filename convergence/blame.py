"""Who did it: names step, tensor, kernel, module and pass of a failed verdict. It explains a verdict, and changes none.

*First*: the earliest step in which a quantity that failed leaves the noise, and the earliest of these quantities in the
order in which a step computes them: the loss, the gradient of the logits, that of the hidden states entering the head,
then the parameters' gradients in the order in which autograd delivers them. A cause comes before what it causes,
whichever is the larger.

*Who*: the patch is applied once more, and everything that it changed in the model is taken back but for one kernel,
then but for one module of the guilty one. Only steps in which the failure shows are trained again, against the
references that the verdict had. A kernel is blamed when it alone shows the failure and all others without it do not.

*Pass*: forward when the loss at the initial weights is off, or the module's output on the baseline's own inputs;
backward otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from convergence import ours, tolerance
from convergence.candidate import load_patch
from convergence.changes import Changes, Part
from convergence.compare import BY_ELEMENT, Pair, Verdict, compare
from convergence.float64 import InFloat64
from convergence.records import Blame
from convergence.train import train
from convergence.trajectory import ADAMW, DECODING, HIDDEN, INITIAL, LOGITS, SGD, TARGET_LOGIT, Run, Trajectory, build

# A step that shows the failure by this factor is enough for every re-run. What shows by less might be hidden by the
# noise of a re-run, because another choice of kernels rounds differently; then more steps are trained again.
CLEAR = 2.0
RELATIVE = "gain against the others"  # also fails for a tensor that is right, when most others are not
RAISED = ("candidate", "raised")
_NOT_A_TENSOR = ("baseline", "candidate", "other models", "transformers")

Key = tuple[str, str]  # quantity and statistic of a failure


def blame(
    patch: str, run: Run, pairs: Sequence[Pair], failed: Collection[Key], candidate: Trajectory | None
) -> list[Blame]:
    """Rows that say who made a verdict fail: one per guilty module, or one with the reason why nobody is named.

    Args:
        patch: ``module:function``; it is applied once, in this process, to a model of its own.
        run: the candidate's, without the patch.
        pairs: what the candidate was judged against.
        failed: quantity and statistic of every failure.
        candidate: what was judged; None where it raised.
    """
    keys = {key for key in failed if key[0] not in _NOT_A_TENSOR or key == RAISED}
    if not keys:
        return []
    model = build(run if run.construct is None else dataclasses.replace(run, patch=load_patch(patch)))
    changes = Changes(model)
    if run.construct is None:
        try:
            load_patch(patch)(model)
        except Exception as error:
            return [_row("before training", "", note=f"the patch itself raised {type(error).__name__}")]
    changes.find()
    search = _Search(dataclasses.replace(run, construct=None), pairs, changes, keys)
    return search.rows(candidate)


def _row(step: str, tensor: str, kernel: str = "", module: str = "", which: str = "", note: str = "") -> Blame:
    return {"kernel": kernel, "module": module, "pass": which, "step": step, "tensor": tensor, "note": note}


@dataclass(frozen=True)
class _Shown:
    """How a run shows the failure: the worst share of its bound among the statistics that failed, and what it is."""

    share: float
    words: str

    @property
    def fails(self) -> bool:
        return not self.share <= 1

    def __str__(self) -> str:
        return f"{'different' if self.fails else 'equal'} ({self.words})"


@dataclass
class _Rerun:
    """One training with a part of the patch: how it shows the failure, and whether the forward pass does."""

    shown: _Shown
    forward: bool


class _Search:
    """One patched model, of which any part can be run."""

    def __init__(self, run: Run, pairs: Sequence[Pair], changes: Changes, keys: set[Key]) -> None:
        self.run, self.pairs, self.changes, self.keys = run, pairs, changes, keys
        self.model = changes.model
        self.foreign = ours.status(self.model) is None
        self.only: frozenset[str] | None = None
        self.clearest = run.steps[0].name

    def rows(self, candidate: Trajectory | None) -> list[Blame]:
        step, tensor = ("", "") if candidate is None else self.first(candidate)
        everything = self.choose_steps(candidate)
        if not everything.fails:
            return [_row(step, tensor, note=f"trained again, the same patch is {everything}")]
        if not self.changes.parts:
            note = "the patch changed no module of this model, only what all models share: none can be tried alone"
            return [_row(step, tensor, note=note)]
        nothing = self.rerun([]).shown
        if nothing.fails:
            note = f"outside of every module that was patched: with all of them as they were, still {nothing}"
            return [_row(step, tensor, note=note)]
        kernels = list(dict.fromkeys(part.kernel for part in self.changes.parts))
        alone = {kernel: self.rerun(self.of(kernel)).shown for kernel in kernels}
        suspects = sorted((k for k in kernels if alone[k].fails), key=lambda k: -alone[k].share)
        if not suspects:
            needed = " and ".join(self.together(kernels))
            return [_row(step, tensor, needed, note=f"no kernel alone reproduces it; together they are {everything}")]
        rows: list[Blame] = []
        guilty: list[str] = []
        for kernel in suspects:
            guilty.append(kernel)
            without = self.rerun([part for part in self.changes.parts if part.kernel not in guilty]).shown
            note = f"{kernel} alone: {alone[kernel]}; all but {' and '.join(guilty)}: {without}"
            rows += [_row(step, tensor, kernel, module, which, note) for module, which in self.modules(kernel)]
            if not without.fails:
                break
        return rows

    def of(self, kernel: str) -> list[Part]:
        return [part for part in self.changes.parts if part.kernel == kernel]

    # What is trained again.

    def choose_steps(self, candidate: Trajectory | None) -> _Shown:
        """Settle on the fewest steps that show the failure clearly, and return how they show it."""
        names = [*(step.name for step in self.run.steps), DECODING]
        scopes: list[frozenset[str] | None] = [frozenset(names), None]
        if candidate is not None:
            shares = {name: self.share(candidate, {name}) for name in names}
            names.sort(key=lambda name: -shares[name])
            # A module cannot be called again after decoding: its cache has moved on.
            self.clearest = next(name for name in names if name != DECODING)
            fewest = next((n for n in range(1, len(names)) if self.share(candidate, names[:n]) >= CLEAR), None)
            scopes = [frozenset(names[:fewest]), *scopes] if fewest else scopes
        best, chosen = _Shown(0.0, "nothing failed"), None
        for self.only in scopes:
            if self.only is None and best.fails:
                break
            shown = self.rerun(self.changes.parts).shown
            if shown.share > best.share:
                best, chosen = shown, self.only
            if shown.share >= CLEAR:
                break
        self.only = chosen
        return best

    def share(self, candidate: Trajectory, names: Collection[str]) -> float:
        steps = {f"{INITIAL}: {name}" for name in names}
        return self.shown(self.judge(candidate, lambda label: _step(label) in steps)).share

    def rerun(self, parts: Collection[Part]) -> _Rerun:
        """Train with only ``parts`` patched."""
        self.changes.keep(parts)
        try:
            trajectory = self.train(self.only)
        except Exception as error:
            in_backward = any(frame.name == "backward" for frame in traceback.extract_tb(error.__traceback__))
            return _Rerun(_Shown(math.inf, f"{type(error).__name__}"), not in_backward)
        verdict = self.judge(trajectory, self.is_trained)
        at_first = self.judge(trajectory, lambda label: self.is_trained(label) and label.startswith(INITIAL))
        off, off_at_first = (
            {row[0] for row in found.failures if (row[0], row[2]) in self.keys} for found in (verdict, at_first)
        )
        return _Rerun(
            self.shown(verdict), any(map(_is_forward, off_at_first)) or all(map(_is_forward, off or ["gradient"]))
        )

    def train(self, only: frozenset[str] | None) -> Trajectory:
        return train(dataclasses.replace(self.run, only=only), self.model)

    def is_trained(self, label: str) -> bool:
        return self.only is None or _step(label) in {f"{INITIAL}: {name}" for name in self.only}

    def judge(self, trajectory: Trajectory, chosen: Callable[[str], bool]) -> Verdict:
        """The verdict on what happened in ``chosen`` steps, warnings aside: no step is known to have given them."""
        pairs = [(_limited(truth, chosen), _limited(arm, chosen)) for truth, arm in self.pairs]
        return compare(pairs, _limited(trajectory, chosen), self.run.dtype, self.foreign)

    def shown(self, verdict: Verdict) -> _Shown:
        numbers = {(s.quantity, s.statistic): s for s in verdict.statistics}
        worst = _Shown(0.0, "nothing to compare")
        for key in sorted(self.keys & numbers.keys(), key=lambda key: key[1] == RELATIVE):
            s = numbers[key]
            share = math.inf if math.isnan(s.value) else s.value / s.bound
            if share > worst.share and not (worst.fails and s.statistic == RELATIVE):
                worst = _Shown(share, f"{s.statistic} {s.value:.3g} of {s.bound:.3g} in {s.quantity}")
        for quantity, _, statistic, value, _ in verdict.failures:
            if (quantity, statistic) in self.keys - numbers.keys():
                return _Shown(math.inf, f"{quantity}: {statistic}: {value}")
        return worst

    # Where it comes in.

    def first(self, candidate: Trajectory) -> tuple[str, str]:
        """The first step, and the first tensor in it, of what failed.

        A single step is judged by few samples of noise. So only what fails over a whole phase is looked for in its
        steps, and a step is named only for such a tensor.
        """
        arrival = self.arrival()

        def failing(keys: set[Key], chosen: Callable[[str], bool]) -> set[Key]:
            failures = {(row[0], row[2]) for row in self.judge(candidate, chosen).failures} & keys
            return {key for key in failures if key[1] != RELATIVE} or failures

        def earliest(keys: set[Key]) -> str:
            return min((quantity for quantity, _ in keys), key=lambda quantity: _order(quantity, arrival))

        for phase in (INITIAL, SGD, ADAMW):
            failed = failing(self.keys, lambda label: label.startswith(phase + ":"))  # noqa: B023  (called at once)
            for step in self.steps(phase) if failed else ():
                off = failing(failed, lambda label: _step(label) == step)  # noqa: B023
                if off:
                    return step, earliest(off)
            if failed:
                return f"{phase}: in the mean of its steps", earliest(failed)
        return "in the mean of all steps", earliest(self.keys)

    def steps(self, phase: str) -> list[str]:
        """The steps of ``phase`` in the order in which they are run, as the failures name them."""
        labels = [label for quantity in self.pairs[0][0].values.values() for label in quantity]
        found = dict.fromkeys(_step(label) for label in labels if label.startswith(phase + ":"))
        last = [step for step in (f"{phase}: end", f"{phase}: evaluation") if step in found]
        return [step for step in found if step not in last] + last

    def arrival(self) -> dict[str, int]:
        """The parameters' names, numbered in the order in which an unpatched backward pass finishes their gradients."""
        self.changes.keep([])
        order: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            for name, parameter in self.model.named_parameters():

                def arrived(_: torch.Tensor, name: str = name) -> None:
                    order.setdefault(name, len(order))

                stack.callback(parameter.register_post_accumulate_grad_hook(arrived).remove)
            self.train(frozenset({self.run.steps[0].name}))
        return order

    # Which kernels, which modules, which pass.

    def together(self, kernels: list[str]) -> list[str]:
        """The kernels that are left when one after the other is taken away as long as the failure stays."""
        needed = list(kernels)
        for kernel in kernels:
            fewer = [k for k in needed if k != kernel]
            if self.rerun([part for part in self.changes.parts if part.kernel in fewer]).shown.fails:
                needed = fewer
        return needed

    def modules(self, kernel: str) -> list[tuple[str, str]]:
        """The guilty modules of ``kernel``, each with the pass; one entry that stands for all, where all are guilty."""
        parts = self.of(kernel)
        paths = list(dict.fromkeys(part.path for part in parts))
        if "cross_entropy" in kernel or paths == [""]:  # a head and its model are one; a model's output is its loss
            return [(next(filter(None, paths), "the model itself"), _pass(self.loss_is_off(parts)))]
        runs = {path: self.rerun([part for part in parts if part.path == path]) for path in paths}
        found = [path for path in paths if runs[path].shown.fails]
        if not found:
            return [(f"no single one of {len(paths)}, only together", _pass(self.rerun(parts).forward))]
        off = self.outputs_off([part for part in parts if part.path in found])
        which = {path: _pass(runs[path].forward or path in off) for path in found}
        if len(found) == len(paths) > 1:
            return [(f"all {len(paths)} ({paths[0]}, ...)", _pass("forward" in which.values()))]
        others = self.rerun([part for part in parts if part.path not in found]).shown
        if others.fails:
            names = ", ".join(found)
            return [(f"{names} and others of {len(paths)}", _pass("forward" in which.values()))]
        return list(which.items())

    def loss_is_off(self, parts: Collection[Part]) -> bool:
        """Whether ``parts`` make the loss wrong. The steps that show a failure best may show it in gradients only."""
        if self.rerun(parts).forward:
            return True
        chosen, self.only = self.only, frozenset([*(step.name for step in self.run.steps), DECODING])
        forward = self.only != chosen and self.rerun(parts).forward
        self.only = chosen
        return forward

    def outputs_off(self, parts: Collection[Part]) -> set[str]:
        """The paths of those modules whose output, on what an unpatched model feeds them, is off."""
        self.changes.keep([])
        off: set[str] = set()
        busy = False

        def watch(part: Part) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                nonlocal busy
                if busy or part.path in off:
                    return
                busy = True
                with torch.no_grad():
                    with InFloat64():
                        truth = copy.deepcopy(module).double()(*tree_map(_wide, args), **tree_map(_wide, kwargs))
                    part.patch()
                    ours = self.model.get_submodule(part.path)(*tree_map(_copy, args), **tree_map(_copy, kwargs))
                    part.restore()
                if _is_off(_tensors(ours), _tensors(output), _tensors(truth), self.run.dtype):
                    off.add(part.path)
                busy = False

            return hook

        with contextlib.ExitStack() as stack:
            for part in parts:
                module = self.model.get_submodule(part.path)
                stack.callback(module.register_forward_hook(watch(part), with_kwargs=True).remove)
            self.train(frozenset({self.clearest}))
        return off


def _pass(forward: bool) -> str:
    return "forward" if forward else "backward"


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


def _step(label: str) -> str:
    """The step of a label, which may name a micro batch of it."""
    return label.partition(", batch ")[0]


def _limited(trajectory: Trajectory, chosen: Callable[[str], bool]) -> Trajectory:
    """What ``trajectory`` showed in ``chosen`` steps; text that it generated belongs to SGD's evaluation."""
    values = {
        quantity: kept
        for quantity, by_step in trajectory.values.items()
        if (kept := {label: value for label, value in by_step.items() if chosen(label)})
    }

    def of(texts: list[str]) -> list[str]:
        return [text for text in texts if chosen(text.rpartition(": ")[0])]

    result = Trajectory(values, complaints=of(trajectory.complaints), notes=of(trajectory.notes))
    if chosen(f"{SGD}: evaluation"):
        result.generated, result.scores = trajectory.generated, trajectory.scores
    return result


def _is_forward(quantity: str) -> bool:
    """Whether a forward pass alone computes ``quantity``."""
    return quantity in ("loss", "generated tokens") or quantity.startswith("logits")


def _order(quantity: str, arrival: dict[str, int]) -> tuple[int, int]:
    """When a step computes ``quantity``: the forward pass, then the backward pass from the loss on, then the rest."""
    head = (LOGITS, BY_ELEMENT, TARGET_LOGIT, HIDDEN)
    if _is_forward(quantity):
        return 0, 0
    if quantity in head:
        return 1, head.index(quantity)
    name = quantity.removeprefix("gradient of ")
    return (2, arrival[name]) if name in arrival else (3, arrival.get(quantity.rpartition(" ")[2], -1))
