"""Explains a failed verdict: names the step, tensor, kernel, module and pass that caused it. Blame never changes a
verdict.

*First*: the earliest step in which a failed quantity leaves the noise, and the earliest such quantity in the step. A
step computes the loss, then the gradient of the logits, then the gradient of the hidden states entering the head. The
parameters' gradients follow in autograd's order. A cause precedes its effects, even if an effect is larger.

*Who*: the patch is applied once more, and all its changes in the model are undone except one kernel's. For a guilty
kernel, all changes are undone except one module's. Only steps that show the failure are trained again, against the
verdict's references. A kernel is blamed if it alone shows the failure and all other kernels together do not.

*Pass*: forward if the loss at the initial weights is wrong, or the module's output for the baseline's inputs. Otherwise
backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from convergence import ours
from convergence.arms.candidate import load_patch
from convergence.arms.quantities import DECODING, EVALUATION, INITIAL, Finding
from convergence.arms.trajectory import Run, Trajectory, build, patched_by
from convergence.blame.changes import Changes, Part
from convergence.blame.failing import Failure, Key, Shown
from convergence.blame.rerun import Only, Reruns
from convergence.judge.compare import Pair
from convergence.report.records import Blame

# A step that shows the failure by this factor is enough for every re-run. A smaller failure might vanish in a re-run's
# noise, because another choice of kernels rounds differently. Then more steps are trained again.
CLEAR = 2.0
RAISED = ("candidate", Finding.RAISED)
_NOT_A_TENSOR = ("baseline", "candidate", "other models", "state_dict", "transformers", "what a step made")


def blame(
    patch: str, run: Run, pairs: Sequence[Pair], failed: Collection[Key], candidate: Trajectory | None
) -> list[Blame]:
    """The causes of a failed verdict: one row per guilty module, or one row with the reason why none is named.

    Args:
        patch: ``module:function``. It is applied once, in this process, to a new model.
        run: the candidate's run, without the patch.
        pairs: the references of the candidate's verdict.
        failed: quantity and finding of every failure.
        candidate: the judged trajectory; None if the candidate raised.
    """
    keys = searched(failed)
    if not keys:
        return []
    model = build(run if run.construct is None else dataclasses.replace(run, patch=load_patch(patch)))
    changes = Changes(model)
    if run.construct is None:
        try:
            made = patched_by(model, load_patch(patch)(model))
        except Exception as error:
            return [_row("before training", "", note=f"the patch itself raised {type(error).__name__}")]
        if made is not model:
            return [_row("before training", "", note="the patch returned another model: no part of it can be left out")]
    changes.find()
    failure = Failure(keys, pairs, run.dtype, foreign=ours.status(model) is None)
    reruns = Reruns(dataclasses.replace(run, construct=None), changes, failure)
    step, tensor = ("", "") if candidate is None else failure.first(candidate, reruns.arrival())
    names = [*(step.name for step in run.steps), EVALUATION, DECODING]
    if candidate is not None:  # steps that show the failure most clearly come first
        shares = {name: _share(failure, candidate, [name]) for name in names}
        names.sort(key=lambda name: -shares[name])
    everything, only = _choose_steps(reruns, names, candidate)
    return _Bisection(reruns, only, everything, names, step, tensor).rows()


def searched(failed: Collection[Key]) -> frozenset[Key]:
    """The keys of ``failed`` whose cause can be searched among the parts of a patch."""
    return frozenset(key for key in failed if key[0] not in _NOT_A_TENSOR or key == RAISED)


def _row(step: str, tensor: str, kernel: str = "", module: str = "", which: str = "", note: str = "") -> Blame:
    return {"kernel": kernel, "module": module, "pass": which, "step": step, "tensor": tensor, "note": note}


def _share(failure: Failure, candidate: Trajectory, names: Collection[str]) -> float:
    """How clearly the steps in ``names``, at the initial weights, show the failure in ``candidate``."""
    return failure.shown(failure.judge(candidate, lambda at: at.phase == INITIAL and at.step in names)).share


def _choose_steps(reruns: Reruns, names: list[str], candidate: Trajectory | None) -> tuple[Shown, Only]:
    """How the whole patch shows the failure, and the fewest steps among ``names`` that show it clearly."""
    few = 1  # most patches that raise do so in the first step
    if candidate is not None:
        clear = (n for n in range(1, len(names)) if _share(reruns.failure, candidate, names[:n]) >= CLEAR)
        few = next(clear, len(names))
    best, chosen = Shown(0.0, "nothing failed"), None
    scopes: list[Only] = [frozenset(names[:few]), frozenset(names), None]
    for only in dict.fromkeys(scopes):
        if only is None and best.fails:
            break
        shown = reruns.rerun(reruns.changes.parts, only).shown
        if shown.share > best.share:
            best, chosen = shown, only
        if shown.share >= CLEAR:
            break
    return best, chosen


@dataclasses.dataclass(frozen=True)
class _Bisection:
    """Searches the guilty kernels, modules and pass.

    Attributes:
        only: the steps to train again.
        everything: how the whole patch shows the failure in these steps.
        names: the names of all steps at the initial weights. The first step shows the failure most clearly.
        step, tensor: the first difference, for the rows.
    """

    reruns: Reruns
    only: Only
    everything: Shown
    names: list[str]
    step: str
    tensor: str

    @property
    def parts(self) -> list[Part]:
        return self.reruns.changes.parts

    def rerun(self, kernels: Collection[str]) -> Shown:
        return self.reruns.rerun([part for part in self.parts if part.kernel in kernels], self.only).shown

    def nobody(self, note: str, kernel: str = "") -> list[Blame]:
        return [_row(self.step, self.tensor, kernel, note=note)]

    def rows(self) -> list[Blame]:
        if not self.everything.fails:
            return self.nobody(f"trained again, the same patch is {self.everything}")
        if not self.parts:
            return self.nobody(
                "the patch changed no module of this model, only what all models share: none can be tried alone"
            )
        kernels = list(dict.fromkeys(part.kernel for part in self.parts))
        nothing = self.rerun([])
        if nothing.fails:
            return self.nobody(
                f"outside of every module that was patched: with all of them as they were, still {nothing}"
            )
        alone = {kernel: self.rerun([kernel]) for kernel in kernels}
        suspects = sorted((k for k in kernels if alone[k].fails), key=lambda k: -alone[k].share)
        if not suspects:
            note = f"no kernel alone reproduces it; together they are {self.everything}"
            return self.nobody(note, " and ".join(self.together(kernels)))
        rows: list[Blame] = []
        guilty: list[str] = []
        for kernel in suspects:
            guilty.append(kernel)
            without = self.rerun([other for other in kernels if other not in guilty])
            note = f"{kernel} alone: {alone[kernel]}; all but {' and '.join(guilty)}: {without}"
            rows += [_row(self.step, self.tensor, kernel, *found, note) for found in self.modules(kernel)]
            if not without.fails:
                break
        return rows

    def together(self, kernels: list[str]) -> list[str]:
        """Remove one kernel after another while the failure stays, and return the remaining kernels."""
        needed = list(kernels)
        for kernel in kernels:
            fewer = [k for k in needed if k != kernel]
            if self.rerun(fewer).fails:
                needed = fewer
        return needed

    def modules(self, kernel: str) -> list[tuple[str, str]]:
        """The guilty modules of ``kernel``, each with the pass. If all modules are guilty, one entry stands for all."""
        parts = [part for part in self.parts if part.kernel == kernel]
        paths = list(dict.fromkeys(part.path for part in parts))
        if "cross_entropy" in kernel or paths == [""]:  # one module, whose output is the loss
            return [(next(filter(None, paths), "the model itself"), _pass(self.loss_is_off(parts)))]
        runs = {path: self.reruns.rerun([part for part in parts if part.path == path], self.only) for path in paths}
        found = [path for path in paths if runs[path].shown.fails]
        if not found:
            together = self.reruns.rerun(parts, self.only)
            return [(f"no single one of {len(paths)}, only together", _pass(together.forward))]
        # A module cannot be called again after decoding, because its cache has changed.
        clearest = next(name for name in self.names if name != DECODING)
        off = self.reruns.outputs_off([part for part in parts if part.path in found], clearest)
        forward = {path: runs[path].forward or path in off for path in found}
        if len(found) == len(paths) > 1:
            return [(f"all {len(paths)} ({paths[0]}, ...)", _pass(any(forward.values())))]
        others = self.reruns.rerun([part for part in parts if part.path not in found], self.only).shown
        if others.fails:
            return [(f"{', '.join(found)} and others of {len(paths)}", _pass(any(forward.values())))]
        return [(path, _pass(forward[path])) for path in found]

    def loss_is_off(self, parts: Collection[Part]) -> bool:
        """Whether ``parts`` make the loss wrong. The steps that show a failure best may only show it in gradients, so
        all steps are tried, too."""
        all_steps = frozenset(self.names)
        if self.reruns.rerun(parts, self.only).forward:
            return True
        return self.only != all_steps and self.reruns.rerun(parts, all_steps).forward


def _pass(forward: bool) -> str:
    return "forward" if forward else "backward"
