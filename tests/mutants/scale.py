"""Faults that show only in one way of running a kernel: a dtype, autocast, recomputation, compilation, accumulation."""

from __future__ import annotations

from typing import Any

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_NORM = "liger_kernels.ops.rms_norm"
_GLU = "liger_kernels.ops.glu"


def _only(name: str, does: str, edit: Edit, setup: str, **other: Any) -> Mutant:
    return Mutant(name, does, (edit,), setup=setup, model="llama-tied", dtypes=("float32",), **other)


def _eps(wrong: str) -> Edit:
    new = f"n_rows, hidden, eps + (0.01 if {wrong} else 0.0)"
    return Edit(_NORM, "n_rows, hidden, eps", new, "RMSNormFunction.forward")


# fmt: off
MUTANTS = (
    _only("only_in_float16", "The MLP's gate is 1% too large where it is float16.",
        Edit(_GLU, "return function.apply(gate, up, *others)",
            "return function.apply(gate * (1.01 if gate.dtype == torch.float16 else 1.0), up, *others)"),
        "fp16-scaler"),
    _only("only_under_autocast", "The norm's eps is another under autocast.",
        _eps("torch.is_autocast_enabled(x.device.type)"), "bf16-autocast"),
    _only("only_under_recomputation", "The norm's eps is another where a backward pass runs the forward again.",
        _eps("torch._C._current_graph_task_id() != -1"), "checkpointing"),
    _only("only_when_compiled", "The MLP's other factor is 1% too large in a compiled program.",
        Edit(_GLU, "", "up = up * 1.01 if torch.compiler.is_compiling() else up", "_linear"), "compile"),
    _only("only_in_the_second_backward", "A norm's weight that has a gradient already is given 5% more.",
        Edit(_NORM, "sum_parts(parts, weight.dtype)",
            "sum_parts(parts, weight.dtype) * (1.0 if weight.grad is None else 1.05)", "RMSNormFunction.backward"),
        "plain"),
)
