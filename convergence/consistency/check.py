"""``check_consistency``: judges one model and patch, and reports how much a patch widens each figure."""

from __future__ import annotations

import os
from typing import Any

from convergence.arms import isolate
from convergence.arms.candidate import check_patch
from convergence.arms.quantities import CONSISTENCY
from convergence.case import absent, prove
from convergence.consistency.rollout import check_engine
from convergence.models.checkpoint import Checkpoint
from convergence.models.checkpoint_check import check
from convergence.models.models import DTYPES, MODELS
from convergence.op.check import checked_device, prepare
from convergence.patches import BUILT_IN
from convergence.report import report
from convergence.report.records import Case, Record

_OF_A_CHECKPOINT = ("layers", "rows", "length", "text", "rollout")


def check_consistency(
    model: str = "llama-tied",
    patch: str = BUILT_IN[0],
    *,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    timeout: float = isolate.TIMEOUT,
    **of_a_checkpoint: Any,
) -> Record:
    """Assert that ``patch`` keeps the log-probabilities of trainer and rollout as near to each other, and to float64,
    as in the unpatched model.

    Args:
        model: the name of a mini model, or the path of a checkpoint: a folder with config.json and safetensors, or a
            GGUF file.
        patch: the judged patch: a function of a model, as ``module:function``. It runs in a separate process, unless it
            is one of this package's patches.
        dtype: the dtype of the weights: float32, bfloat16 or float16. By default float32, or the checkpoint's dtype.
        device: cpu or cuda; by default cuda if there is a GPU. On a CPU, Triton's kernels run in its interpreter, if
            ``TRITON_INTERPRET=1`` was set when Triton was imported.
        seed: of weights and text.
        timeout: the seconds that the patch may run in its process.
        of_a_checkpoint: ``layers``, the number of layers to keep; ``rows`` and ``length`` of the text; ``text``, a
            file; and ``rollout``, an engine whose log-probabilities are also compared: vllm, sglang, or
            ``module:function``.

    Returns:
        The record, with every figure in ``differences`` and every judged number in ``statistics``.

    Raises:
        AssertionError: the patched model is different, or the patch cannot run; the message has the figures.
        TypeError, ValueError: an argument is wrong, or the checkpoint cannot be used.
    """
    where = checked_device(device).type
    case = _case(model, patch, dtype, where, seed, of_a_checkpoint)
    if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise ValueError(f"timeout is {timeout!r}; it takes a number of seconds above 0")
    prepare(checked_device(device))
    if patch not in BUILT_IN:
        isolate.call(check_patch, patch, timeout=timeout)
    if reason := absent(case):
        raise ValueError(f"model {model!r}: {reason}")
    record = Record.of(case, prove(case, timeout, blames=False))
    if record.verdict != "equal":
        raise AssertionError(f"\n{report.failure(record)}")
    return record


def _case(model: str, patch: str, dtype: str | None, device: str, seed: int, of_a_checkpoint: dict[str, Any]) -> Case:
    """The case of these arguments, after their checks."""
    for name, value in (("model", model), ("patch", patch)):
        if not isinstance(value, str):
            allowed = "a mini model's name or a path" if name == "model" else "a name, module:function"
            raise TypeError(f"{name} is a {type(value).__name__}; it takes {allowed}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it takes a whole number from 0 on")
    if unknown := of_a_checkpoint.keys() - {*_OF_A_CHECKPOINT}:
        raise TypeError(f"unknown argument {min(unknown)!r}; allowed are {', '.join(_OF_A_CHECKPOINT)}")
    for name, value in of_a_checkpoint.items():
        kind: type = str if name in ("text", "rollout") else int
        if type(value) is not kind:
            raise TypeError(f"{name} is {value!r}; it takes {'text' if kind is str else 'a whole number'}")
    if model in MODELS:
        if of_a_checkpoint:
            raise ValueError(f"{min(of_a_checkpoint)} is for a checkpoint, and {model!r} is a mini model")
        return Case(model, dtype or "float32", patch, CONSISTENCY, device, seed)
    if not os.path.exists(model):
        raise ValueError(f"model {model!r}: there is no such file; allowed are a checkpoint and {', '.join(MODELS)}")
    row = Checkpoint(os.path.abspath(model), **of_a_checkpoint)
    if row.rollout:
        check_engine(row.rollout)
    check(row, [dtype] if dtype else [], device)
    judged = dtype or row.default_dtype()
    check(row, [judged], device)
    return Case(row.name, judged, patch, CONSISTENCY, device, seed)
