"""The one place where the proof uses this package. Without the package, the proof judges patches of others.

Nothing is imported before it is needed: a patch may be the first to import the package, or a fault in it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

INSTALLED = importlib.util.find_spec("liger_kernels") is not None
# Imported before a patch of others is, so that what these modules change in torch is not counted as the patch's.
MODULES = ("liger_kernels.ops", "liger_kernels.patching", "liger_kernels.integrations") if INSTALLED else ()
# What the patch remembers about a model; it comes and goes with the patch of the model's own class.
REPORT_ATTRIBUTE = "_liger_kernels"


def status(model: Any) -> Any:
    """The package's report on ``model``; None where the package has not patched it."""
    if not INSTALLED:
        return None
    import liger_kernels

    return liger_kernels.status(model)


def reports() -> tuple[type, ...]:
    """The classes that such a report is made of."""
    if not INSTALLED:
        return ()
    from liger_kernels.patching.report import Left, PatchReport, Replacement

    return PatchReport, Replacement, Left


# All that this file takes from the package. Another commit of the package may lack some of it.
_TAKEN = {
    "liger_kernels": ("patch", "status", "KERNELS"),
    "liger_kernels.ops": ("launches", "observe_logits_grad"),
    "liger_kernels.ops.loss.schedules.slab_plan": ("SlabSizes",),
    "liger_kernels.ops.runtime.tiling": ("tiled",),
    "liger_kernels.patching.logits.model": ("ModelRecipe",),
    "liger_kernels.patching.report": ("PatchReport", "Replacement", "Left"),
    "liger_kernels.patching.swap": ("recipe_of",),
}


def lacks() -> list[str]:
    """What the installed package does not have of all that the proof takes from it, by dotted names."""
    found = []
    for module, names in _TAKEN.items() if INSTALLED else ():
        try:
            taken = importlib.import_module(module)
        except ModuleNotFoundError:
            found.append(module)
        else:
            found += [f"{module}.{name}" for name in names if not hasattr(taken, name)]
    return found


def kernels() -> list[str]:
    """The kernels that the package's patch has."""
    if not INSTALLED:
        return []
    import liger_kernels

    return list(liger_kernels.KERNELS)


def fuses_head(model: Any) -> bool:
    report = status(model)
    return report is not None and report.fuses_head


def launches() -> dict[str, int]:
    """How often each of the package's kernels was launched in this process."""
    if not INSTALLED:
        return {}
    from liger_kernels.ops import launches

    return launches()


def launched_since(before: dict[str, int]) -> dict[str, int]:
    """How often each of them was launched since :func:`launches` returned ``before``."""
    return {name: n - before.get(name, 0) for name, n in launches().items() if n > before.get(name, 0)}


# What is launched under another name than a report has.
_LAUNCHED = {"swiglu": "glu", "geglu": "glu", "experts": "packed_glu", "linear_cross_entropy": "cross_entropy"}


def is_launched(kernel: str, launches: Iterable[str]) -> bool:
    """Whether a ``kernel`` that a report names is among those that were launched."""
    return any(_LAUNCHED.get(kernel, kernel) in name for name in launches)


def kernel_of(module: nn.Module) -> str | None:
    """The kernel that the package's patch lets run in ``module``; empty for a model, which only asks its head for the
    loss; None where the package has changed nothing."""
    if not INSTALLED:
        return None
    from liger_kernels.patching.logits.model import ModelRecipe
    from liger_kernels.patching.swap import recipe_of

    recipe = recipe_of(module)
    if recipe is None:
        return None
    return "" if isinstance(recipe, ModelRecipe) else recipe.kernel


@contextlib.contextmanager
def head_in_chunks(model: Any, tokens: int) -> Iterator[None]:
    """Inside, the fused head of ``model`` takes ``tokens`` rows in several chunks with a partial last one, as on real
    batches: 63 rows are 4 * 13 + 11. With the schedule that slices the vocabulary, it takes several slabs. Where some
    targets are ignored it takes no other rows, however few that spares."""
    if not fuses_head(model):
        yield
        return
    from liger_kernels.ops.loss.schedules.slab_plan import SlabSizes
    from liger_kernels.ops.runtime.tiling import tiled

    chunk, slab = tokens // 5 + 1, model.get_output_embeddings().weight.shape[0] // 5 + 1
    with tiled(
        schedule=lambda choose, n, *_: ("fast" if n <= chunk else "balanced", chunk),
        slabs=lambda choose, n, hidden_size: SlabSizes(slab, slab, worth=2 * n * slab + 1),
        counted_rows=lambda choose, n, counted: counted,
    ):
        yield


def observe_logits_grad(observer: Callable[[int, torch.Tensor], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, the fused head hands ``observer`` each chunk's first row and gradient of the logits. Chunks that begin at
    the same row are summands."""
    from liger_kernels.ops import observe_logits_grad

    return observe_logits_grad(observer)


@contextlib.contextmanager
def trls_head(patched: bool) -> Iterator[Callable[[], int]]:
    """Inside, trl's head (trl 1.15 and later) runs on the package's kernels for a ``patched`` model, and on trl's own
    for any other; a function of how many calls ran on the package's."""
    if not INSTALLED:
        yield lambda: 0
        return
    from liger_kernels import trl_head

    trl_head.uninstall()
    if patched:
        trl_head.install()
    replacements = [trl_head.current(module) for module in (trl_head.LOG_PROBS, trl_head.DIVERGENCE)]
    try:
        yield lambda: sum(0 if replacement is None else replacement.ours for replacement in replacements)
    finally:
        trl_head.install()


def trls_head_differences() -> list[str]:
    """Why parts of trl's head stay on trl's own kernels: in what the package's are another function."""
    if not INSTALLED:
        return []
    from liger_kernels import trl_head

    found = [trl_head.current(module) for module in (trl_head.LOG_PROBS, trl_head.DIVERGENCE)]
    return [one.difference for one in found if one is not None and one.difference]
