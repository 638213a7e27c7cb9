"""The cases of ``--trainer``: each trainer of the installed transformers and trl, on a tiny model."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import tempfile
from pathlib import Path

from convergence.arms.candidate import load_patch
from convergence.patches import BUILT_IN
from convergence.report.records import TRAINER, Case, Outcome
from convergence.trainers import material
from convergence.trainers.cases import CASES, DEVICE, InCase
from convergence.trainers.observe import Arm
from convergence.trainers.prove import patched_model, prove_in_trainer

OPTION = "--trainer"
DTYPE = "float32"


def select(trainers: str, models: str) -> list[tuple[str, str]]:
    """Model and trainer of every case that ``--trainer`` and ``--models`` name: "all", or a comma-separated list.

    Raises:
        ValueError: for an unknown name, with the allowed ones; or where the package datasets is not installed.
    """
    if not importlib.util.find_spec("datasets"):
        raise ValueError(f"{OPTION} needs the packages datasets and accelerate: pip install datasets accelerate trl")
    families = _named("model", models, list(material.FAMILIES))
    return [(family, trainer) for family in families for trainer in _named("trainer", trainers, list(CASES))]


def _named(what: str, names: str, allowed: list[str]) -> list[str]:
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in (*allowed, "all")]:
        raise ValueError(f"unknown {what} {unknown[0]!r}; allowed are all, {', '.join(allowed)}")
    return allowed if "all" in wanted else [name for name in allowed if name in wanted]


def case_of(trainer: str, family: str, patch: str, scope: str = "instance") -> Case:
    """The row of the proof of a trainer that trains a model of ``family`` with a patch (``module:function``)."""
    return Case(family, DTYPE, patch, TRAINER, DEVICE.type, scope=scope, setup=trainer)


def absent(case: Case) -> str:
    """Why the case cannot be had here; empty where it can."""
    missing = CASES[case.setup].missing()
    return f"this version has {missing}" if missing else ""


def prove(case: Case, timeout: float) -> Outcome:
    """The outcome of ``case`` on a model that is made for it."""
    how, arm = InCase(case.setup, _folder(case.model)), None
    if case.patch in BUILT_IN and case.scope == "instance":  # known to change one model only
        load = functools.partial(patched_model, how, load_patch(case.patch))
        arm = Arm(load=load, expects=CASES[case.setup].expects)
    return prove_in_trainer(case, how, arm, timeout)


@functools.cache
def _folder(family: str) -> Path:
    """Where the tiny model of ``family`` lies as long as this process lives."""
    folder = tempfile.mkdtemp(prefix="convergence-trainer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return material.save(family, Path(folder))
